"""Calling a classifier with one tensor or with named tensors, and getting logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


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
