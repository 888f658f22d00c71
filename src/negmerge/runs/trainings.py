"""The step that trains a model: the original, the retrained model or a pool member.

The key of a training is a hash of everything that the weights depend on. A model file with that key
is the result of the training, whichever run made it. A training in progress keeps its state in a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from negmerge.checkpoints.remote import local_model
from negmerge.errors import NegMergeError, OptionError
from negmerge.runs.records import Cost, Done
from negmerge.runs.steps import Advance, ModelStep, StoredModel
from negmerge.scenarios.base import Scenario, TrainingOptions, TrainingSet, identity
from negmerge.scenarios.settings import scenarios
from negmerge.support.files import file_digest
from negmerge.support.remote.urls import Place
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import VERSION as LOOP
from negmerge.training.loop import Trained
from negmerge.training.seeds import seed_of
from negmerge.training.weights import save_model


class Start(NamedTuple):
    """The weights that a training starts from, and their key."""

    weights: Path
    key: str


@dataclass(frozen=True)
class Checkpoint(StoredModel):
    """The model after an epoch of a training that goes on.

    Args:
        training: the key of the training.
        settings: those of the training.
        epoch: counted from 1.
    """

    key: str
    title: str
    training: str
    settings: HyperParameters
    epoch: int
    out: Path

    def write(self, network: nn.Module, trained: Trained) -> None:
        """Write what the training has cost until now, then the model."""
        metadata: dict[str, Any] = {"id": self.key, "title": self.title, "epoch": self.epoch}
        metadata |= {"training": self.training, "settings": self.settings.content()}
        self.write_cost(metadata | vars(trained))
        save_model(self.out, network, metadata)

    def is_intact(self) -> bool:
        """Whether the model is there, with the hash of its record if that has one already."""
        cost = self.find_cost()
        return cost is not None and cost.sha256 in (None, file_digest(self.out))


@dataclass(frozen=True)
class Training(ModelStep):
    """A training.

    Args:
        on: the names of the sets to train on.
        start: the weights to start from, a path or a URL; None for fresh weights.
        state: the file that keeps the training while it runs.
        trains: False if the result is a copy of `start`.
        save_every: the least seconds between two saves of the state; see `StateSaver`.
        checkpoints: the models that it makes before its end.
    """

    key: str
    title: str
    on: tuple[TrainingSet, ...]
    settings: HyperParameters
    seed: int
    start: Place | None
    out: Path
    state: Path
    trains: bool = True
    save_every: float = 15.0
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def models(self) -> tuple[Member, ...]:
        """The checkpoints, and the model at the end."""
        return (*self.checkpoints, self)

    @property
    def training(self) -> str:
        """The key of the training that made the model, as checkpoints have it."""
        return self.key

    def in_folder(self, old: Path, new: Path) -> Training:
        moved = [replace(own, out=new / own.out.relative_to(old)) for own in self.checkpoints]
        return replace(self, out=new / self.out.relative_to(old), checkpoints=tuple(moved))

    def samples(self, scenario: Scenario) -> int:
        """Return the number of samples that a training with these settings processes."""
        return sum(scenario.work(name, self.settings) for name in self.on)

    def size(self, scenario: Scenario) -> int:
        """Return the number of samples to process; 0 if the weights are given."""
        return self.samples(scenario) if self.trains else 0

    def train(self, scenario: Scenario, network: nn.Module, advance: Advance) -> Trained:
        (name,) = self.on
        options = TrainingOptions(state=self.state, save_every=self.save_every, advance=advance)
        missing = {own.epoch: own.write for own in self.checkpoints if not own.is_intact()}
        if missing:
            options["checkpoints"] = missing
        found = scenario.train(network, name, self.settings, self.seed, **options)
        if any(own.find_cost() is None for own in self.checkpoints):
            raise OptionError(
                f"pool.checkpoints: the training of scenario {scenario.settings.kind} does not "
                "write checkpoints; leave them out"
            )
        return found

    def metadata(self, network: nn.Module) -> dict[str, Any]:
        return {"id": self.key, "title": self.title, "settings": self.settings.content()}

    def run(self, scenario: Scenario, advance: Advance) -> Done[Cost]:
        """Train, or continue a training; write the cost, then the model; remove the state."""
        start = None if self.start is None else local_model(self.start)
        network = scenario.model(start, self.seed)
        trained = Trained(0, 0.0, 0.0)
        if self.trains:
            try:
                trained = self.train(scenario, network, advance)
            except NegMergeError as error:
                raise type(error)(f"{self.title}: {error}") from None
        metadata = self.metadata(network)
        self.write_cost(metadata | vars(trained))
        save_model(self.out, network, metadata)
        self.state.unlink(missing_ok=True)
        return Done(self.read_cost(), trained.seconds)


Member = Training | Checkpoint
"""A member of a pool: the model at the end of a training, or after an epoch of it."""


def make_training(
    scenario: Scenario,
    title: str,
    on: TrainingSet,
    settings: HyperParameters,
    out: Callable[[str], Path],
    states: Path,
    start: Start | None = None,
    save_every: float = 15.0,
    repetition: int = 0,
    checkpoints: Sequence[int] = (),
) -> Training:
    """Return a training with its key and seed.

    Args:
        scenario, title, on, settings, save_every: as in `Training`.
        out: returns the model file for a key.
        states: the folder for the states of trainings in progress.
        start: the weights to start from; None for fresh weights.
        repetition: the same training with another number has other random numbers.
        checkpoints: the epochs after which a checkpoint is written. The key does not depend on
            them, as the training does not.
    """
    start_key = None if start is None else start.key
    again = [repetition] if repetition else []
    depends = [scenario.identity, on, settings.content(), start_key, *again]
    drawn = identity(scenario.identity, on, settings.random_content(), start_key, *again)
    seed = seed_of("training", scenario.seed, drawn)
    versions = [*scenarios.versions(scenario.settings.kind), *scenario.plugin_versions]
    key = identity(*depends, *versions, seed, LOOP)
    weights = None if start is None else start.weights
    files = (weights, out(key), states / key)
    early: list[Checkpoint] = []
    for epoch in checkpoints:
        own = identity("checkpoint", key, epoch)
        name = f"{title}, epoch {epoch}"
        early.append(Checkpoint(own, name, key, settings, epoch, out(own)))
    how = {"save_every": save_every, "checkpoints": tuple(early)}
    return Training(key, title, (on,), settings, seed, *files, **how)
