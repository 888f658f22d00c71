"""Calling a classifier with one tensor or with named tensors, and getting logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from negmerge.errors import MismatchError, quoted
from negmerge.training.layers import final_linear

IGNORED = -100
"""The target where nothing is to be predicted, as torch's cross-entropy has it."""


def logits_of(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the logits of a batch: the output of the model, or its attribute `logits`.

    >>> import torch
    >>> logits_of(nn.Linear(2, 3), {"input": torch.zeros(5, 2)}).shape
    torch.Size([5, 3])

    Args:
        model: the classifier; models of Hugging Face have outputs with `logits`.
        inputs: a tensor, or tensors by the names of the model's arguments.
    """
    output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return getattr(output, "logits", output)


def predictions_of(model: nn.Module, batch: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of a classifier, samples × 1 × classes, and the labels, samples × 1."""
    inputs, labels = batch
    return logits_of(model, inputs)[:, None], labels[:, None]


def last_features(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the input of the last linear layer of a classifier for a batch.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> last_features(network, torch.zeros(4, 2)).shape
    torch.Size([4, 5])
    """
    name, layer = final_linear(model)
    seen: list[tuple[Any, Any]] = []
    handle = layer.register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
    try:
        logits = logits_of(model, inputs)
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0][1].shape != logits.shape or not seen[0][1].equal(logits):
        raise MismatchError(
            f"{type(model).__name__}: the outputs of its last linear layer {quoted(name)} are not "
            "the logits; wanted a last layer that computes them"
        )
    return seen[0][0]
