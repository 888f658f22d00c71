"""How much memory a step of a training needs, and which settings would make it fit.

Weights, gradients and moments are counted. Activations are measured by real forward and backward
passes of a few samples; they grow in proportion to the samples of a part of a batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from negmerge.errors import OptionError
from negmerge.training.execution import autocast, checkpointed
from negmerge.training.feeds import Feed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective, deterministic
from negmerge.training.samples import tensors_of, to_device

SAMPLES = 8
"""The largest number of samples that activations are measured with."""
MOMENTS = {"adamw": 2, "sgd": 1}
"""Tensors of an optimiser for each weight; SGD without momentum has none."""


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step, in bytes.

    Args:
        weights: weights and buffers.
        trainable: the weights that are trained; gradients and moments have the same size.
        moments: the number of moments.
        constant: the part of the activations that does not depend on the number of samples.
        per_sample: the activations of one sample.
    """

    weights: int
    trainable: int
    moments: int
    constant: float
    per_sample: float

    def need(self, batch: int, accumulate: int = 1) -> float:
        """Return the bytes of a step with a batch that is cut into parts.

        >>> StepMemory(100, 10, 2, 0, 5.0).need(8), StepMemory(100, 10, 2, 0, 5.0).need(8, 2)
        (170.0, 150.0)
        """
        activations = self.constant + ceil(batch / accumulate) * self.per_sample
        # An optimiser may need a copy of the gradients, when the activations are freed.
        return self.weights + self.trainable * (1 + self.moments) + max(activations, self.trainable)

    def smallest_split(self, batch: int, limit: float) -> int | None:
        """Return the smallest `accumulate` with which a step fits; None if there is none.

        >>> StepMemory(100, 10, 2, 0, 5.0).smallest_split(batch=8, limit=150)
        2
        """
        splits = (k for k in range(1, batch + 1) if self.need(batch, k) <= limit)
        return next(splits, None)


class PeakMemory(TorchDispatchMode):
    """Measures the most bytes of tensors that were made in the block and alive at one time.

    It sees the results of torch's operations on any device, and not the memory within one.

    >>> with PeakMemory() as memory:
    ...     x = torch.zeros(1000); x = x + 1; x = x + 1
    >>> memory.peak
    8000
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _is_plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_plain(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.storages:
                    self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        size = storage.nbytes()
        self.storages.add(storage)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.alive -= size


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def measure_step(
    model: nn.Module, feed: Feed, settings: HyperParameters, objective: Objective
) -> StepMemory:
    """Measure the memory of a step of a training, with few samples; the model is not changed.

    Args:
        model: on the device of the training.
    """
    most = min(SAMPLES, settings.batch, len(feed))
    few = max(most // 2, min(settings.batch, 2))  # BatchNorm cannot train on a single sample
    most = max(most, few + 1)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    model.train()
    try:
        for weight in trained:  # as with all parts of a batch after the first
            weight.grad = torch.zeros_like(weight)
        with deterministic(), checkpointed(model) if settings.checkpointing else nullcontext():
            _activations(model, feed, settings, objective, few)  # libraries allocate on first use
            low, high = (
                _activations(model, feed, settings, objective, count) for count in (few, most)
            )
    finally:
        model.train(was_training)
        for name, value in buffers.items():
            model.get_buffer(name).copy_(value)
        for weight in trained:
            weight.grad = None
    per_sample = (high - low) / (most - few)
    moments = MOMENTS[settings.optimizer]
    return StepMemory(
        weights=sum(tensor.nbytes for tensor in _kept_tensors(model)),
        trainable=sum(weight.nbytes for weight in trained),
        moments=moments if settings.optimizer == "adamw" or settings.momentum else 0,
        constant=high - most * per_sample,
        per_sample=per_sample,
    )


def _kept_tensors(model: nn.Module) -> list[Tensor]:
    """Return weights, buffers and all other tensors that are attributes of modules."""
    values = tree_leaves([vars(module) for module in model.modules()])
    return list({id(value): value for value in values if isinstance(value, Tensor)}.values())


def _activations(
    model: nn.Module, feed: Feed, settings: HyperParameters, objective: Objective, count: int
) -> int:
    """Return the largest memory during a forward and a backward pass of some samples."""
    device = next(model.parameters()).device
    picked = np.arange(count) % len(feed)
    inputs, targets = feed.test_batch(picked)
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with PeakMemory() as tracked:
        batch = (to_device(inputs, device), targets.to(device))
        with autocast(settings, device):
            loss = objective(model, batch, 0)
        loss.backward()
    if not on_gpu:
        return tracked.peak + sum(t.nbytes for t in (*tensors_of(inputs), targets))
    torch.cuda.synchronize(device)
    return max(tracked.peak, torch.cuda.max_memory_allocated(device) - before)


def check_step(
    where: str,
    model: nn.Module,
    feed: Feed,
    settings: HyperParameters,
    objective: Objective,
    limit: float,
) -> None:
    """Raise an error if a step of a training does not fit; it names settings that do.

    Args:
        where: the place of the settings in the recipe.
        model: on the device of the training.
        limit: the bytes that are free for the training.
    """
    try:
        found = measure_step(model, feed, settings, objective)
    except torch.OutOfMemoryError:
        raise OptionError(
            f"{where}: not even a step of a few samples fits, the GPU has {_gigabytes(limit)} "
            f"free; set {where}.checkpointing=true, or use a smaller model or another GPU"
        ) from None
    batch = min(settings.batch, len(feed))
    need = found.need(batch, settings.accumulate)
    if need <= limit:
        return
    refusal = f"{where}: a step needs {_gigabytes(need)}, the GPU has {_gigabytes(limit)} free"
    split, fields = found.smallest_split(batch, limit), dict[str, object]()
    if split is None:
        # The network may have no checkpointing.
        with suppress(OptionError, torch.OutOfMemoryError):
            twice = settings.model_copy(update={"checkpointing": True})
            found = measure_step(model, feed, twice, objective)
            split, fields["checkpointing"] = found.smallest_split(batch, limit), "true"
    if split is None:
        raise OptionError(
            f"{refusal}, and no accumulate makes it fit; use a smaller model, or a GPU with more "
            "memory"
        )
    if split != settings.accumulate:
        fields["accumulate"] = split
    sets = " and ".join(f"{where}.{name}={value}" for name, value in fields.items())
    raise OptionError(f"{refusal}; set {sets} ({_gigabytes(found.need(batch, split))})")


def _gigabytes(size: float) -> str:
    """Return a size as text.

    >>> _gigabytes(31.24e9), _gigabytes(4_200_000)
    ('31.2 GB', '0.0042 GB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
