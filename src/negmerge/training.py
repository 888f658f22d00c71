"""The only training loop; what is minimised is an argument.

Every random number follows from (seed, epoch, step or sample), the learning rate from the step
alone; so the state on disk is weights, optimiser moments and the position, and a killed training
goes on bit for bit where it was last saved.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from negmerge.data.draws import seed_of
from negmerge.data.feeds import Batch, Feed, epoch_of, passes_of, steps_of
from negmerge.data.samples import to_device
from negmerge.data.transforms import own_random_state, seed_torch
from negmerge.errors import FileError, ValueRangeError, shown
from negmerge.hyperparameters import HyperParameters
from negmerge.models.classifiers import channels_last
from negmerge.models.outputs import logits_of
from negmerge.models.weights import load_tensors, save_tensors
from negmerge.reading import parse_json

# cuBLAS repeats its sums only with a workspace of its own; read when a GPU is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ANEW = "remove it and run again: this training begins anew"
VERSION = 2
"""Of this loop: raised when the same settings give other weights, so that nothing old is reused."""

Objective = Callable[[nn.Module, Batch, int], Tensor]
"""From the model, a batch and the epoch, counted from 0, to the loss."""


@dataclass(frozen=True)
class Trained:
    """What a training cost: samples processed, seconds of work, the mean loss of the last epoch."""

    samples: int
    seconds: float
    loss: float


def cross_entropy(settings: HyperParameters) -> Objective:
    """The usual loss, with the label smoothing of the settings."""

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
    advance: Callable[[int], None] = lambda count: None,
) -> Trained:
    """Train a model in place.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.data.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.randn(8, 2), torch.arange(8) % 2))
    >>> train(nn.Linear(2, 2), feed, HyperParameters(epochs=3, batch=4), seed=0).samples
    24

    feed: where batches come from. settings, seed: decide everything that is random.
    objective: (model, batch, epoch) → loss; cross-entropy if not given.
    mask: by name of the weight, which elements may change; the others keep their bits.
    state: a file that keeps a training in progress; if it is there, the training goes on from it.
    save_every: seconds between two saves.
    advance: told the number of samples of each step.
    """
    objective = objective or cross_entropy(settings)
    device = next(model.parameters()).device
    channels_last(model).train()
    optimizer = make_optimizer(model, settings)
    steps = sum(steps_of(size, settings.batch) for size in passes_of(feed))
    total = steps * settings.epochs
    place = Position()
    if state is not None and state.exists():
        place = load_state(state, model, optimizer)
        advance(place.samples)
    held = Held(model, mask or {})
    begun = saved = time.monotonic()
    spent = place.seconds
    with deterministic():
        for epoch in range(place.step // steps, settings.epochs):
            batches = epoch_of(feed, settings, seed, epoch)
            for step in range(place.step % steps, steps):
                rate = settings.rate(place.step, total)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                picked = batches[step]
                inputs, targets = feed.train_batch(
                    picked, seed_of("augment", seed, epoch), settings.augment
                )
                seed_torch(seed_of("step", seed, place.step))  # dropout, stochastic depth
                with torch.autocast(
                    device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"
                ):
                    batch = (to_device(inputs, device), targets.to(device))
                    loss = objective(model, batch, epoch)
                optimizer.zero_grad()
                loss.backward()
                held.mask_gradients()
                if settings.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimizer.step()
                held.restore()
                place.took(step, steps, len(picked), float(loss.detach()))
                advance(len(picked))
                if state is not None and time.monotonic() - saved > save_every:
                    place.seconds = spent + time.monotonic() - begun
                    save_state(state, model, optimizer, place)
                    saved = time.monotonic()
    check_finite(model)
    return Trained(place.samples, spent + time.monotonic() - begun, place.loss_sum / steps)


@dataclass
class Position:
    """How far a training is."""

    step: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    """Of the current epoch."""
    seconds: float = 0.0

    def took(self, step: int, steps: int, samples: int, loss: float) -> None:
        """Count a step; a loss that is not finite ends the training."""
        if not abs(loss) < float("inf"):
            raise ValueRangeError(
                f"training diverged: the loss is {loss} at step {self.step}; "
                "use a smaller learning rate"
            )
        self.loss_sum = loss if step == 0 else self.loss_sum + loss
        self.step += 1
        self.samples += samples


class Held:
    """The elements outside a mask, which stay as they are whatever the optimiser does to them.

    Without a gradient they would still be moved, by weight decay and by momentum.
    """

    def __init__(self, model: nn.Module, mask: Mapping[str, Tensor]) -> None:
        weights = dict(model.named_parameters())
        self.weights = [(weights[name], free) for name, free in mask.items()]
        self.before = [weight.detach().clone() for weight, _ in self.weights]

    def mask_gradients(self) -> None:
        """Zero their gradients, so that clipping does not count them."""
        for weight, free in self.weights:
            if weight.grad is not None:
                weight.grad *= free

    def restore(self) -> None:
        """Give them back their bits."""
        with torch.no_grad():
            for (weight, free), before in zip(self.weights, self.before, strict=True):
                weight.copy_(torch.where(free, weight, before))


def make_optimizer(model: nn.Module, settings: HyperParameters) -> torch.optim.Optimizer:
    """SGD or AdamW over the weights that require a gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(weights, settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        weights, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Only algorithms that repeat, for the block; torch's random state is given back after it.

    On a CPU all of them have one; on a GPU a few do not (such as the gradient of adaptive pooling),
    and torch warns instead of failing. Filling memory before it is written, which torch adds to
    find its own bugs, is left out: it costs a tenth of a step.
    """
    memory: Any = torch.utils.deterministic  # its switch is not declared
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = False
    try:
        with own_random_state():
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill


def check_finite(model: nn.Module) -> None:
    """Refuse a model that diverged without the loss showing it."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueRangeError(
                f"training diverged: {name!r} is not finite; use a smaller learning rate"
            )


# ------------------------------------------------------------------------------ a training on disk


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, place: Position
) -> None:
    """Write weights, moments and position, atomically."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        for kind, value in moments.items():
            if value is not None:
                tensors[f"optimizer.{index}.{kind}"] = torch.as_tensor(value)
    save_tensors(path, tensors, {"position": json.dumps(vars(place))})


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Take up a training where it was saved."""
    tensors, metadata = load_tensors(path)
    position = parse_json(metadata.get("position", ""), path, "position")
    usual = vars(Position())
    if {k: type(v) for k, v in position.items()} != {k: type(v) for k, v in usual.items()}:
        raise FileError(f"{path}: is damaged: position is {shown(position)}; {ANEW}")
    own = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    moments: dict[int, dict[str, Any]] = {}
    whole = optimizer.state_dict()
    try:
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, kind = key.split(".", 2)
                moments.setdefault(int(index), {})[kind] = value
        model.load_state_dict(own)
        optimizer.load_state_dict({"state": moments, "param_groups": whole["param_groups"]})
    except (RuntimeError, ValueError) as error:  # other names or shapes
        why = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: is damaged: {why}; {ANEW}") from None
    return Position(**position)
