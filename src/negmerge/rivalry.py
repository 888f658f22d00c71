"""Rivals in a run: trained like pool members, tuned all with the same number of tries."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.criteria import Criterion, Row
from negmerge.data.draws import seed_of
from negmerge.errors import FileError, OptionError, ValueRangeError
from negmerge.executors import Advance
from negmerge.files import write_file
from negmerge.hyperparameters import HyperParameters
from negmerge.models.classifiers import final_linear
from negmerge.pool import Job, run_job
from negmerge.recipe import Method, Recipe
from negmerge.rivals import Rival, Task, rivals
from negmerge.rivals.registry import PARTS, VERSION
from negmerge.scenario import Problem, identity
from negmerge.training import VERSION as LOOP
from negmerge.training import Trained

INHERITED = ("batch", "augment", "precision")
"""Of the original's training: the published protocol uses the same for training and unlearning."""


@dataclass(frozen=True)
class RivalJob(Job):
    """A training by a rival's function.

    method, options: which one, and its own options.
    tried: the values that were picked for it out of the search range; None if it is the only try.
    """

    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, float] | None = None

    def perform(self, problem: Problem, network: nn.Module, advance: Advance) -> Trained:
        task = Task(
            network,
            self.feeds(problem),
            self.settings,
            self.seed,
            self.state,
            self.save_every,
            advance,
        )
        return rivals.get(self.method).run(task, self.options)

    def samples(self, problem: Problem) -> int:
        sizes = {part: len(feed) for part, feed in self.feeds(problem).items()}
        return rivals.get(self.method).samples(sizes, self.settings)

    def metadata(self, network: nn.Module) -> dict[str, Any]:
        outputs = final_linear(network)[1].out_features
        return super().metadata(network) | {
            "method": self.method,
            "options": self.options,
            "outputs": outputs,
        }

    def failure(self) -> str | None:
        """Why it has no model, if it diverged."""
        try:
            record = self.cost()
        except FileError:  # there is none, or it is damaged
            return None
        return record.get("failure") if record.get("id") == self.id else None

    def done(self) -> bool:
        return super().done() or self.failure() is not None


def make_rival_job(
    problem: Problem,
    title: str,
    rival: Rival,
    given: Mapping[str, Any],
    settings: HyperParameters | None,
    out: Callable[[str], Path],
    states: Path,
    start: tuple[Path, str],
    tried: dict[str, float] | None = None,
    save_every: float = 15.0,
) -> RivalJob:
    """A rival's training with its id and seed.

    given: settings and options by name. settings: what the others are, if not the published ones.
    out: from the id to the model file. start: the original's file and its id.
    """
    settings, options = rival.resolve(given, settings)
    content = [rival.name, options, settings.model_dump(mode="json"), start[1]]
    seed = seed_of("rival", problem.seed, identity(problem.identity, content))
    name = identity(problem.identity, content, seed, LOOP, VERSION)
    return RivalJob(
        name,
        title,
        PARTS[rival.used(options)],
        settings,
        seed,
        start[0],
        out(name),
        states / identity(name, title),  # two methods may have one training
        save_every=save_every,
        method=rival.name,
        options=options,
        tried=tried,
    )


def run_rival(problem: Problem, job: RivalJob, advance: Advance) -> None:
    """Train; a try that diverges is on record and the others go on, but a single one must not."""
    begun = time.monotonic()
    try:
        run_job(problem, job, advance)
    except ValueRangeError as error:
        if job.tried is None:
            raise
        cost = {"samples": 0, "seconds": time.monotonic() - begun}
        record = {"id": job.id, "title": job.title, "failure": str(error)} | cost
        job.record.parent.mkdir(parents=True, exist_ok=True)
        write_file(job.record, json.dumps(record, indent=1).encode())
        job.state.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- tuning


def check_rival(method: Method) -> None:
    """Whether a recipe's rival has options that it takes, and something to tune if it is tuned."""
    rival = rivals.get(method.name)
    if method.name == "retrain":
        raise OptionError("method 'retrain': it is the reference of every run; leave it out")
    rival.resolve(method.options)
    if method.tune and not rival.ranges(method.options):
        raise OptionError(
            f"method {method.title!r}: nothing is left to tune, its options fix "
            f"{' and '.join(rival.search)}; leave one out, or tune"
        )


def picks(rival: Rival, options: Mapping[str, Any], count: int) -> list[dict[str, float]]:
    """What each try of a tuned rival takes from its ranges.

    One range is walked from end to end. Of two, each value of either is taken once, far apart from
    its neighbours: the number of tries is the same for all rivals.

    >>> picks(rivals.get("finetune"), {}, 3)
    [{'lr': 0.001}, {'lr': 0.01}, {'lr': 0.1}]
    >>> [p["keep"] for p in picks(rivals.get("salun"), {}, 5)]
    [0.1, 0.5, 0.9, 0.3, 0.7]
    """
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for place, (name, where) in enumerate(rival.ranges(options).items()):
        points = where.points(count)
        order = [*range(0, count, place + 1), *(k for k in range(count) if k % (place + 1))]
        for own, k in zip(found, order, strict=True):
            own[name] = points[k]
    return found


def plan_rivals(
    problem: Problem,
    recipe: Recipe,
    out: Callable[[str, str], Path],
    states: Path,
    start: tuple[Path, str],
) -> dict[str, list[RivalJob]]:
    """The trainings of every rival of a recipe, by its title: one, or as many as there are tries.

    out: from title and id to the model file. start: the original's file and its id.
    """
    plans: dict[str, list[RivalJob]] = {}
    for method in recipe.methods:
        if method.name not in rivals:
            continue
        rival = rivals.get(method.name)
        inherited = {name: getattr(recipe.train, name) for name in INHERITED}
        settings = rival.settings.model_copy(update=inherited)
        tries: Sequence[dict[str, float] | None] = [None]
        if method.tune:
            tries = picks(rival, method.options, recipe.search.tries)
        plans[method.title] = [
            make_rival_job(
                problem,
                method.title if tried is None else f"{method.title}, try {k} of {len(tries)}",
                rival,
                method.options | (tried or {}),
                settings,
                lambda name, title=method.title: out(title, name),
                states,
                start,
                tried,
                recipe.save_every,
            )
            for k, tried in enumerate(tries, 1)
        ]
    return plans


@dataclass(frozen=True)
class Contender:
    """A rival that was trained.

    jobs: its trainings. job: the one that is taken. tried: what was tried and how it did; empty if
        it was not tuned. seconds: of measuring them. allowed: whether the criterion allows it.
    """

    jobs: list[RivalJob]
    job: RivalJob
    tried: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    allowed: bool = True

    def samples(self) -> int:
        """How many samples all its trainings processed."""
        return sum(job.cost()["samples"] for job in self.jobs)

    def row(self, criterion: Criterion, looked: bool) -> dict[str, Any]:
        """Its line in the scores, but for what only the run knows.

        looked: whether the data that chooses is the data that is reported.
        """
        rival = rivals.get(self.job.method)
        training = sum(job.cost()["seconds"] for job in self.jobs)
        return {
            "splits": rival.used(self.job.options),
            "scale": None,
            "sparsity": None,
            "seconds": training + self.seconds,
            "seconds_search": training + self.seconds - self.job.cost()["seconds"],
            "samples_processed": self.samples(),
            "evaluations": len(self.tried),
            "criterion": criterion.name if self.tried else None,
            "looked": looked and bool(self.tried),
            "edge": False,
            "options": self.job.options,
            "settings": self.job.settings.model_dump(mode="json", include=set(rival.accepts)),
            "tried": self.tried,
        }


def best_try(
    jobs: list[RivalJob],
    rows: Sequence[Row | None],
    zero: Row,
    criterion: Criterion,
    reference: Mapping[str, Any] | None,
) -> Contender:
    """The try that the criterion likes best, of equals the first.

    rows: what was measured of each try; None where there is no usable model. zero: of the original.
    Where the criterion allows none, the one that keeps most of the retain set is taken.
    """
    losses = [None if row is None else criterion.loss(row, zero, reference) for row in rows]
    tried: list[dict[str, Any]] = []
    for job, row, loss in zip(jobs, rows, losses, strict=True):
        cost = job.cost()
        measured = {k: v for k, v in (row or {}).items() if k != "seconds"}
        entry = {"options": job.tried, "loss": loss} | measured
        entry |= {"samples": cost["samples"], "seconds": cost["seconds"]}
        if row is None:
            entry["failure"] = job.failure() or "its outputs are not finite"
        tried.append(entry)
    usable = [k for k, row in enumerate(rows) if row is not None]
    allowed = [k for k in usable if losses[k] is not None]
    if not usable:
        raise ValueRangeError(
            f"{jobs[0].method}: all {len(jobs)} tries diverged; give it a smaller lr in its options"
        )
    if allowed:
        best = min(allowed, key=lambda k: losses[k])  # pyright: ignore
    else:
        best = max(usable, key=lambda k: rows[k]["acc_retain"])  # pyright: ignore
    seconds = sum(row["seconds"] for row in rows if row is not None)
    return Contender(jobs, jobs[best], tried, seconds, bool(allowed))
