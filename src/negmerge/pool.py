"""Trainings by content: the original, the retrained model, and the pool of fine-tuned members.

A job's id is a hash of everything its weights depend on; a file that carries the id is the result,
whoever made it and whenever. A job in progress keeps its state in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.data.draws import seed_of
from negmerge.data.feeds import Feed
from negmerge.errors import FileError, NegMergeError
from negmerge.executors import Advance
from negmerge.files import file_digest, write_file
from negmerge.hyperparameters import HyperParameters
from negmerge.models.weights import metadata_of, save_model
from negmerge.records import Cost, read_record
from negmerge.scenario import Part, Problem, identity
from negmerge.training import VERSION, Trained, train


@dataclass(frozen=True)
class Job:
    """One training.

    title: for people. parts: the data it sees. start: weights to start from; fresh ones if None.
    out: the model file; beside it goes a `.json` with what the training cost.
    state: the file that keeps the training while it runs.
    steps: False if the weights it starts from are the result. save_every: seconds.
    """

    id: str
    title: str
    parts: tuple[Part, ...]
    settings: HyperParameters
    seed: int
    start: Path | None
    out: Path
    state: Path
    steps: bool = True
    save_every: float = 15.0

    @property
    def record(self) -> Path:
        return self.out.with_suffix(".json")

    def done(self) -> bool:
        """Whether the result is there: a whole file with this id, and its record."""
        if not (self.out.exists() and self.record.exists()):
            return False
        try:
            made = metadata_of(self.out).get("id") == self.id
            return made and self.cost()["id"] == self.id
        except (FileError, ValueError, KeyError):
            return False

    def given(self, weights: Path | None, content: object = None) -> Job:
        """The same model from a file instead, or as the problem has it: nothing is left to train.

        content: what the problem's own depends on.
        """
        name = (
            identity("own", content) if weights is None else identity("file", file_digest(weights))
        )
        return replace(self, id=name, start=weights, steps=False)

    def cost(self) -> dict[str, Any]:
        """What the training cost."""
        return read_record(self.record, Cost, "remove it and run again")

    def feeds(self, problem: Problem) -> dict[str, Feed]:
        """The data it sees, and no other."""
        return {part: problem.training_feed(part) for part in self.parts}

    def perform(self, problem: Problem, network: nn.Module, advance: Advance) -> Trained:
        """Train the network in place."""
        (feed,) = self.feeds(problem).values()
        return train(
            network,
            feed,
            self.settings,
            self.seed,
            state=self.state,
            save_every=self.save_every,
            advance=advance,
        )

    def samples(self, problem: Problem) -> int:
        """How many samples a training by these settings processes."""
        return self.settings.epochs * sum(map(len, self.feeds(problem).values()))

    def metadata(self, network: nn.Module) -> dict[str, Any]:
        """What the model file says of itself."""
        settings = self.settings.model_dump(mode="json")
        return {"id": self.id, "title": self.title, "settings": settings}


def make_job(
    problem: Problem,
    title: str,
    part: Part,
    settings: HyperParameters,
    out: Callable[[str], Path],
    states: Path,
    start: tuple[Path, str] | None = None,
    save_every: float = 15.0,
) -> Job:
    """A training with its id and seed.

    out: from the id to the model file. start: a file of weights and its id.
    """
    content = settings.model_dump(mode="json")
    depends = [problem.identity, part, content, None if start is None else start[1]]
    seed = seed_of("training", problem.seed, identity(*depends))
    name = identity(*depends, seed, VERSION)
    weights = None if start is None else start[0]
    files = (weights, out(name), states / name)
    return Job(name, title, (part,), settings, seed, *files, save_every=save_every)


def run_job(problem: Problem, job: Job, advance: Advance) -> None:
    """Train, or go on training; the record and then the model appear, and the state goes."""
    network = problem.network(job.start, job.seed)
    cost = Trained(0, 0.0, 0.0)
    if job.steps:
        try:
            cost = job.perform(problem, network, advance)
        except NegMergeError as error:
            raise type(error)(f"{job.title}: {error}") from None
    about = job.metadata(network)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(job.record, json.dumps(about | vars(cost), indent=1).encode())
    save_model(job.out, network, about)
    job.state.unlink(missing_ok=True)
