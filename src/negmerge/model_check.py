"""Whether a module and its datasets are a classifier and its data, tried before any work.

One batch of each set runs through a copy of the module. Every misfit is one line that says where it
is, what was found and what is wanted.
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

from negmerge.data.feeds import DatasetFeed
from negmerge.data.samples import Inputs, check_range, to_device
from negmerge.data.transforms import own_random_state
from negmerge.errors import OptionError, shown, told
from negmerge.models.outputs import logits_of

SAMPLES = 4
"""Of each set that run through the model."""


def count_classes(
    model: nn.Module, feeds: Mapping[str, DatasetFeed], trained: Collection[str]
) -> int:
    """How many classes a model has, if it and its data fit.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.zeros(4).long()))
    >>> count_classes(nn.Linear(2, 3), {"forget": feed}, ["forget"])
    3

    Args:
        model: left as it is, its random numbers too.
        feeds: by name, the sets it must take.
        trained: the names of those it will be trained on.
    """
    network = _copied(model)
    counts: dict[str, int] = {}
    with own_random_state():
        for name, feed in feeds.items():
            if not len(feed):
                raise OptionError(f"{feed.where}: the set is empty; wanted at least one sample")
            inputs, labels = feed.test_batch(np.arange(min(len(feed), SAMPLES)))
            with torch.inference_mode():
                logits = _answer(network.eval(), inputs, len(labels), feed.where)
            counts[name] = logits.shape[1]
            check_range(labels, 0, counts[name], feed.where)
            if name in trained:
                _train(network.train(), inputs, labels, feed.where)
    first, *others = counts.items()
    for name, classes in others:
        if classes != first[1]:
            raise OptionError(
                f"splits: the model has {first[1]} outputs for {first[0]} and {classes} for "
                f"{name}; wanted as many for every set"
            )
    return first[1]


def check_weights(model: nn.Module) -> None:
    """Refuse a model without values, or with nothing to train."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise OptionError(
                f"model: {shown(name)} has no values yet; run a batch through the model, or load "
                "its weights, before"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            "model: no parameter requires a gradient, so that nothing can be trained; call "
            "requires_grad_() on the layers that may change"
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise OptionError(
            f"model: cannot be copied: {told(error)}; wanted a module that copy.deepcopy takes"
        ) from error


def _answer(network: nn.Module, inputs: Inputs, size: int, where: str) -> Tensor:
    device = next(network.parameters()).device
    with _taken(inputs, network.training, where):
        said = logits_of(network, to_device(inputs, device))
    _check_answer(said, size, where)
    return said


@contextmanager
def _taken(inputs: Inputs, training: bool, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the module is anybody's code
        mode = "training" if training else "evaluation"
        raise OptionError(
            f"{where}: the model refuses a batch of {_described(inputs)} in {mode}: {told(error)}; "
            "wanted inputs that the model takes"
        ) from error


def _check_answer(said: Any, size: int, where: str) -> None:
    if not isinstance(said, Tensor):
        found = f"a {type(said).__name__}"
        if isinstance(said, tuple | list):
            found += f" of {len(said)}"
        elif isinstance(said, Mapping):
            found += f" with {', '.join(map(str, said))}"
        raise OptionError(
            f"{where}: the model returns {found}; wanted a tensor of {size} × classes, or an "
            "object with it as .logits; wrap the model in a module that returns the logits"
        )
    shape = tuple(said.shape)
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
    if not said.is_floating_point():
        raise OptionError(f"{where}: the model returns {said.dtype}; wanted floating point logits")
    if bad := int((~said.isfinite().all(1)).sum()):
        raise OptionError(
            f"{where}: the model's outputs are NaN or infinite for {bad} of {size} samples; wanted "
            "finite logits; check the weights and the inputs"
        )


def _train(network: nn.Module, inputs: Inputs, labels: Tensor, where: str) -> None:
    logits = _answer(network, inputs, len(labels), where)
    if not logits.requires_grad:
        raise OptionError(
            f"{where}: the model's outputs do not depend on a parameter that requires a gradient; "
            "wanted a forward without no_grad() or detach()"
        )
    with _taken(inputs, True, where):
        nn.functional.cross_entropy(logits.float(), labels.to(logits.device)).backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise OptionError(
                f"model: the gradient of {shown(name)} is sparse; wanted sparse=False in the layer"
            )


def _described(inputs: Inputs) -> str:
    """What a batch consists of, for a message."""
    if isinstance(inputs, Tensor):
        return f"{inputs.dtype} of shape {tuple(inputs.shape)}"
    return ", ".join(f"{shown(name)} {_described(tensor)}" for name, tensor in inputs.items())
