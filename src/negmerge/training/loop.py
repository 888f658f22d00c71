"""The training loop, with the loss as an argument.

All random numbers follow from (seed, epoch, step or sample), the learning rate from the step. The
state on disk is therefore weights, optimiser moments and the position, and a training that is
killed resumes with the same bits from the last saved state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.support.progress import Advance, tell
from negmerge.training.execution import autocast, execution
from negmerge.training.feeds import Batch, Feed, passes_of, steps_of
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import channels_last
from negmerge.training.outputs import logits_of
from negmerge.training.prefetch import training_batches
from negmerge.training.samples import parts_of, to_device
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch
from negmerge.training.states import Position, StateSaver, load_state, read_position

# cuBLAS is deterministic only with this setting; it is read when a GPU is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

VERSION = 2
"""Part of the ids of trainings; to be raised when the same settings give other weights."""
READ_EVERY = 50
"""The number of steps after which losses are read from the device."""

Objective = Callable[[nn.Module, Batch, int], Tensor]
"""Returns the loss for a model, a batch and an epoch (counted from 0)."""
WriteCheckpoint = Callable[[nn.Module, "Trained"], None]
"""Writes the weights of a model after an epoch; gets what the training has done until then."""


@dataclass(frozen=True)
class Trained:
    """Samples processed, seconds of work, and the mean loss of the last epoch of a training."""

    samples: int
    seconds: float
    loss: float


def cross_entropy(settings: HyperParameters) -> Objective:
    """Return the cross-entropy loss, with the label smoothing of the settings."""

    def objective(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(
            logits_of(model, inputs).float(), targets, label_smoothing=settings.label_smoothing
        )

    return objective


def train(
    model: nn.Module,
    feed: Feed,
    settings: HyperParameters,
    seed: int,
    *,
    objective: Objective | None = None,
    mask: Mapping[str, Tensor] | None = None,
    state: Path | None = None,
    save_every: float = 15.0,
    advance: Advance = lambda count: None,
    checkpoints: Mapping[int, WriteCheckpoint] | None = None,
) -> Trained:
    """Train a model in place.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.randn(8, 2), torch.arange(8) % 2))
    >>> train(nn.Linear(2, 2), feed, HyperParameters(epochs=3, batch=4), seed=0).samples
    24

    Args:
        seed: determines all random numbers.
        objective: (model, batch, epoch) → loss; cross-entropy if not given.
        mask: by name of a weight, the elements that may change; all others keep their bits.
        state: the file for the state of the training; if it exists, the training resumes from it.
        save_every: the least seconds between two saves; 0: after every step (see `StateSaver`).
        advance: called with the number of samples of each step, and told epochs and losses.
        checkpoints: the functions that are called after some epochs, by the number of the epoch,
            counted from 1. Those that an earlier process has called are not among them: a state
            after such an epoch is not used, and the training starts from the beginning.
    """
    objective = objective or cross_entropy(settings)
    device = next(model.parameters()).device
    channels_last(model).train()
    optimizer = make_optimizer(model, settings)
    steps = sum(steps_of(size, settings.batch) for size in passes_of(feed))
    total, each = steps * settings.epochs, getattr(feed, "each", 1)
    # BatchNorm cannot train on a single sample: the last batch has none if the others have none.
    least = 2 if settings.batch >= 2 * settings.accumulate else 1
    place, unread, to_write = Position(), list[tuple[int, Tensor]](), dict(checkpoints or {})
    first = steps * min(to_write, default=settings.epochs + 1)
    if state is not None and state.exists() and read_position(state).step < first:
        place = load_state(state, model, optimizer)
        advance(place.samples)
    weights = dict(model.named_parameters())
    masked = [(weights[k], free, weights[k].detach().clone()) for k, free in (mask or {}).items()]
    begun, spent = time.monotonic(), place.seconds
    saver = StateSaver(state, model, optimizer, save_every)
    with (
        deterministic(),
        execution(model, settings),
        training_batches(feed, settings, seed, place.step, device) as batches,
        saver,
    ):
        for epoch in range(place.step // steps, settings.epochs):
            for step in range(place.step % steps, steps):
                if step == 0:
                    place.loss_sum = 0.0
                rate = settings.rate(place.step, total)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                inputs, targets = next(batches)
                seed_torch(seed_of("step", seed, place.step))  # dropout, stochastic depth
                optimizer.zero_grad()
                for part, share in parts_of((inputs, targets), settings.accumulate, least):
                    with autocast(settings, device):
                        batch = (to_device(part[0], device), part[1].to(device))
                        loss = objective(model, batch, epoch)
                    if share < 1:  # the gradients of the parts add up to that of the mean loss
                        loss = share * loss
                    loss.backward()
                    unread.append((place.step, loss.detach().reshape(())))
                for weight, free, _ in masked:  # the others must not count in the clipping
                    if weight.grad is not None:
                        weight.grad *= free
                if settings.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimizer.step()
                with torch.no_grad():  # weight decay and momentum change them without a gradient
                    for weight, free, before in masked:
                        weight.copy_(torch.where(free, weight, before))
                place.step += 1
                place.samples += each * len(targets)
                advance(each * len(targets))
                due = saver.due()
                if due or place.step % READ_EVERY == 0 or step == steps - 1:
                    place.loss_sum = add_losses(place.loss_sum, unread)
                if step == steps - 1:
                    loss_of_epoch = place.loss_sum / steps
                    tell(advance, epoch=epoch + 1, epochs=settings.epochs, loss=loss_of_epoch)
                    if epoch + 1 in to_write:  # before a state that is after this epoch is saved
                        check_finite(model)
                        seconds = spent + time.monotonic() - begun
                        to_write[epoch + 1](model, Trained(place.samples, seconds, loss_of_epoch))
                if due:
                    place.seconds = spent + time.monotonic() - begun
                    saver.save(place)
    check_finite(model)
    return Trained(place.samples, spent + time.monotonic() - begun, place.loss_sum / steps)


def add_losses(total: float, unread: list[tuple[int, Tensor]]) -> float:
    """Return a sum plus the losses of the last steps; raise an error if one is not finite.

    To read a number, the training thread waits until a GPU has computed it; the losses of many
    steps are therefore read at once.

    Args:
        unread: the number of a step and its loss, or that of a part of it; emptied.
    """
    losses: dict[int, float] = {}
    values = torch.stack([loss for _, loss in unread]).tolist()
    for (step, _), value in zip(unread, values, strict=True):
        losses[step] = losses.get(step, 0.0) + value
    unread.clear()
    for step, loss in losses.items():
        if not isfinite(loss):
            raise ValueRangeError(
                f"training diverged: the loss is {loss} at step {step}; use a smaller learning rate"
            )
        total += loss
    return total


def make_optimizer(model: nn.Module, settings: HyperParameters) -> torch.optim.Optimizer:
    """Return SGD or AdamW for the weights that require a gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "adamw":
        fused = bool(weights) and all(p.is_cuda for p in weights)  # one kernel for all weights
        return torch.optim.AdamW(
            weights, settings.lr, weight_decay=settings.weight_decay, fused=fused or None
        )
    return torch.optim.SGD(
        weights, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms within the block, and restore torch's random state after it.

    On a GPU a few operations (such as the gradient of adaptive pooling) have no deterministic
    algorithm; torch warns of them. Torch's filling of uninitialised memory is switched off: it is
    of no use here and takes a tenth of a step.
    """
    memory: Any = torch.utils.deterministic  # the type stubs lack `fill_uninitialized_memory`
    with fork_random_state(), ExitStack() as stack:
        mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        stack.callback(torch.set_deterministic_debug_mode, mode)
        stack.callback(setattr, memory, "fill_uninitialized_memory", fill)
        torch.set_deterministic_debug_mode("warn")
        memory.fill_uninitialized_memory = False
        yield


def check_finite(model: nn.Module) -> None:
    """Raise an error if weights or buffers are not finite although the loss was."""
    for name, tensor in model.state_dict().items():
        # A sum is finite only if all elements are, and takes a tenth of the time.
        if tensor.is_floating_point() and not (tensor.sum().isfinite() or tensor.isfinite().all()):
            raise ValueRangeError(
                f"training diverged: {name!r} is not finite; use a smaller learning rate"
            )
