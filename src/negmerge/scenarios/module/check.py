"""Checks that a module and its datasets are a classifier and its data, before any work.

One batch of each set runs through a copy of the module. Every error names the place, what was found
and what is wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from negmerge.errors import OptionError, one_line, quoted
from negmerge.training.feeds import DatasetFeed
from negmerge.training.outputs import logits_of
from negmerge.training.samples import Inputs, check_range, to_device
from negmerge.training.seeds import fork_random_state

SAMPLES = 4
"""The number of samples of each set that run through the model."""


def count_classes(
    model: nn.Module, feeds: Mapping[str, DatasetFeed], trained: Collection[str]
) -> int:
    """Return the number of classes of a model; raise if the model and its data do not fit.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.zeros(4).long()))
    >>> count_classes(nn.Linear(2, 3), {"forget": feed}, ["forget"])
    3

    Args:
        model: the model; neither it nor the state of random numbers changes.
        feeds: the sets, by name.
        trained: the names of the sets that the model will be trained on.
    """
    try:
        network = copy.deepcopy(model)
    except Exception as error:
        raise OptionError(
            f"model: cannot be copied: {one_line(error)}; wanted a module that copy.deepcopy takes"
        ) from error
    counts: dict[str, int] = {}
    with fork_random_state():
        for name, feed in feeds.items():
            if not len(feed):
                raise OptionError(f"{feed.where}: the set is empty; wanted at least one sample")
            inputs, labels = feed.test_batch(np.arange(min(len(feed), SAMPLES)))
            with torch.inference_mode():
                logits = _logits(network.eval(), inputs, len(labels), feed.where)
            counts[name] = logits.shape[1]
            check_range(labels, 0, counts[name], feed.where)
            if name in trained:
                _check_training(network.train(), inputs, labels, feed.where)
    first, *others = counts.items()
    for name, classes in others:
        if classes != first[1]:
            raise OptionError(
                f"splits: the model has {first[1]} outputs for {first[0]} and {classes} for "
                f"{name}; wanted the same number for every set"
            )
    return first[1]


def check_weights(model: nn.Module) -> None:
    """Raise if a model has parameters without values, or no trainable parameters."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise OptionError(
                f"model: {quoted(name)} has no values yet; run a batch through the model, or load "
                "its weights"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            "model: no parameter requires a gradient, so that nothing can be trained; call "
            "requires_grad_() on the layers that may change"
        )


@contextmanager
def _refusals(inputs: Inputs, training: bool, where: str) -> Iterator[None]:
    """Report any exception of the model as an `OptionError`."""
    try:
        yield
    except Exception as error:
        mode = "training" if training else "evaluation"
        raise OptionError(
            f"{where}: the model refuses a batch of {_described(inputs)} in {mode}: "
            f"{one_line(error)}; wanted inputs that the model takes"
        ) from error


def _logits(network: nn.Module, inputs: Inputs, size: int, where: str) -> Tensor:
    """Return the logits of a batch; raise if the output of the network is anything else."""
    with _refusals(inputs, network.training, where):
        output: Any = logits_of(network, to_device(inputs, next(network.parameters()).device))
    if not isinstance(output, Tensor):
        found = f"a {type(output).__name__}"
        if isinstance(output, tuple | list):
            found += f" of {len(output)}"
        elif isinstance(output, Mapping):
            found += f" with {', '.join(map(str, output))}"
        raise OptionError(
            f"{where}: the model returns {found}; wanted a tensor of {size} × classes, or an "
            "object with it as .logits; wrap the model in a module that returns the logits"
        )
    shape = tuple(output.shape)
    if len(shape) != 2 or shape[0] != size:
        raise OptionError(
            f"{where}: the model returns a tensor of shape {shape} for {size} samples; wanted "
            f"({size}, classes): one number for each sample and class"
        )
    if shape[1] < 2:
        raise OptionError(
            f"{where}: the model returns one output for each sample; wanted one for each class, at "
            "least 2 (regression and single-output models are not supported)"
        )
    if not output.is_floating_point():
        raise OptionError(
            f"{where}: the model returns {output.dtype}; wanted floating point logits"
        )
    if bad := int((~output.isfinite().all(1)).sum()):
        raise OptionError(
            f"{where}: the model's outputs are NaN or infinite for {bad} of {size} samples; wanted "
            "finite logits; check the weights and the inputs"
        )
    return output


def _check_training(network: nn.Module, inputs: Inputs, labels: Tensor, where: str) -> None:
    """Raise if the loss of a batch has no gradient, or a sparse one."""
    logits = _logits(network, inputs, len(labels), where)
    if not logits.requires_grad:
        raise OptionError(
            f"{where}: the model's outputs do not depend on a parameter that requires a gradient; "
            "wanted a forward without no_grad() or detach()"
        )
    with _refusals(inputs, True, where):
        nn.functional.cross_entropy(logits.float(), labels.to(logits.device)).backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise OptionError(
                f"model: the gradient of {quoted(name)} is sparse; wanted sparse=False in the layer"
            )


def _described(inputs: Inputs) -> str:
    """The types and shapes of a batch."""
    if isinstance(inputs, Tensor):
        return f"{inputs.dtype} of shape {tuple(inputs.shape)}"
    return ", ".join(f"{quoted(name)} {_described(tensor)}" for name, tensor in inputs.items())
