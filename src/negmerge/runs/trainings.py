"""The step that trains a model: the original, the retrained model or a pool member.

The key of a training is a hash of everything that the weights depend on. A model file with that key
is the result of the training, whichever run made it. A training in progress keeps its state in a
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from negmerge.checkpoints.remote import local_model
from negmerge.errors import FileError, NegMergeError
from negmerge.runs.records import Cost, Done
from negmerge.runs.steps import Advance, ModelStep
from negmerge.scenarios.base import Scenario, TrainingSet, identity
from negmerge.scenarios.settings import scenarios
from negmerge.support.files import write_file
from negmerge.support.remote.urls import Place
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import VERSION as LOOP
from negmerge.training.loop import Trained
from negmerge.training.seeds import seed_of
from negmerge.training.weights import metadata_of, save_model


class Start(NamedTuple):
    """The weights that a training starts from, and their key."""

    weights: Path
    key: str


@dataclass(frozen=True)
class Training(ModelStep):
    """A training.

    Args:
        on: the names of the sets to train on.
        start: the weights to start from, a path or a URL; None for fresh weights.
        state: the file that keeps the training while it runs.
        trains: False if the result is a copy of `start`.
        save_every: the least seconds between two saves of the state; see `StateSaver`.
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

    def find_cost(self) -> Cost | None:
        try:
            cost = self.read_cost()
            same = metadata_of(self.out).get("id") == self.key
        except (FileError, ValueError):  # there is none, or it is damaged
            return None
        return cost if same and cost.id == self.key else None

    def samples(self, scenario: Scenario) -> int:
        """Return the number of samples that a training with these settings processes."""
        return sum(scenario.work(name, self.settings) for name in self.on)

    def size(self, scenario: Scenario) -> int:
        """Return the number of samples to process; 0 if the weights are given."""
        return self.samples(scenario) if self.trains else 0

    def train(self, scenario: Scenario, network: nn.Module, advance: Advance) -> Trained:
        (name,) = self.on
        return scenario.train(
            network,
            name,
            self.settings,
            self.seed,
            state=self.state,
            save_every=self.save_every,
            advance=advance,
        )

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

    def write_cost(self, cost: Mapping[str, Any]) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.cost_file, json.dumps(cost, indent=1).encode())


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
) -> Training:
    """Return a training with its key and seed.

    Args:
        scenario, title, on, settings, save_every: as in `Training`.
        out: returns the model file for a key.
        states: the folder for the states of trainings in progress.
        start: the weights to start from; None for fresh weights.
        repetition: the same training with another number has other random numbers.
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
    return Training(key, title, (on,), settings, seed, *files, save_every=save_every)
