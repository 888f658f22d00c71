"""The state of a training in progress: its file, and when and how it is saved.

Saving has two parts. The copy of weights and moments to memory is made by the training thread,
between two steps; the copy is written to the disk by another thread while the training goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from negmerge.errors import FileError, NegMergeError, quoted
from negmerge.support.reading import parse_json
from negmerge.training.weights import load_tensors, metadata_of, save_tensors

REMEDY = "remove the file and run again: this training starts from the beginning"
SHARE = 0.01
"""The largest share of the time of a training that goes into saving."""
ASSUMED_SPEED = 500e6
"""Bytes per second at which a state is assumed to be saved, until the first save is measured."""


@dataclass
class Position:
    """The progress of a training."""

    step: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    """The sum of the losses of the current epoch."""
    seconds: float = 0.0


class StateSaver:
    """Saves a training in progress to one file, in the background.

    As a context manager it waits at the end until the file is complete. An error of the disk is
    raised by the next method that is called.

    Args:
        path: the file; None: nothing is saved.
        every: the least number of seconds between two saves, and before the first one. They are
            rarer if saving would take more than `SHARE` of the time. 0: after every step.
    """

    def __init__(
        self, path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, every: float
    ) -> None:
        self.path, self.model, self.optimizer, self.every = path, model, optimizer, every
        self.cost: float | None = None
        """Seconds of the last save, copying and writing; before the first one, an assumption."""
        self.saved = time.monotonic()
        self.thread = ThreadPoolExecutor(1, "saves the state of a training")
        self.writing: Future[None] | None = None

    def __enter__(self) -> StateSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the file; after an error of the training, an error of the disk is not raised."""
        self.thread.shutdown(wait=True)
        with suppress(*(() if kind is None else (NegMergeError,))):
            self._finish_writing()

    def due(self) -> bool:
        """Whether the state is to be saved now: the interval is over and no save is under way."""
        if self.path is None:
            return False
        if self.every <= 0:
            return True
        if self.writing is not None:
            if not self.writing.done():
                return False
            self._finish_writing()
        waited = time.monotonic() - self.saved
        if waited < self.every:
            return False
        if self.cost is None:
            size = sum(t.nbytes for t in named_state(self.model, self.optimizer).values())
            self.cost = size / ASSUMED_SPEED
        return waited >= self.cost / SHARE

    def save(self, place: Position) -> None:
        """Copy the state now, and write it in the background."""
        assert self.path is not None
        self._finish_writing()
        begun = time.monotonic()
        tensors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in named_state(self.model, self.optimizer).items()
        }
        metadata = {"position": json.dumps(vars(place))}
        self.writing = self.thread.submit(self._write, self.path, tensors, metadata, begun)
        self.saved = time.monotonic()

    def _write(
        self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], begun: float
    ) -> None:
        save_tensors(path, tensors, metadata)
        self.cost = time.monotonic() - begun

    def _finish_writing(self) -> None:
        """Wait for the save that is under way; raise its error."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the weights, the buffers and the moments by their names in the file."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        for kind, value in moments.items():
            if value is not None:
                tensors[f"optimizer.{index}.{kind}"] = torch.as_tensor(value)
    return tensors


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Load weights and moments, and return the position."""
    tensors, metadata = load_tensors(path)
    place = _position(path, metadata)
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Any]] = {}
    try:
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            if part == "model":
                weights[name] = value
            elif part == "optimizer":
                index, kind = name.split(".", 1)
                moments.setdefault(int(index), {})[kind] = value
        model.load_state_dict(weights)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
    except (RuntimeError, ValueError) as error:  # other names or shapes
        why = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: is damaged: {why}; {REMEDY}") from None
    return place


def read_position(path: Path) -> Position:
    """Return the position alone."""
    return _position(path, metadata_of(path))


def _position(path: Path, metadata: Mapping[str, str]) -> Position:
    position = parse_json(metadata.get("position", ""), path, "position")
    types = {k: type(v) for k, v in vars(Position()).items()}
    if {k: type(v) for k, v in position.items()} != types:
        raise FileError(f"{path}: is damaged: position is {quoted(position)}; {REMEDY}")
    return Position(**position)
