"""The measurements of a run as work for an executor: a λ sweep, and the scores of one model."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from torch import nn

from negmerge.criteria import Row, criteria
from negmerge.data.feeds import Feed, Remembered
from negmerge.errors import ValueRangeError
from negmerge.evaluation.histograms import attack_bins
from negmerge.evaluation.predictions import predict, predict_all
from negmerge.evaluation.scores import cross_entropy, score
from negmerge.executors import Advance
from negmerge.files import write_file
from negmerge.merge.engine import merge
from negmerge.merge.select import Greedy
from negmerge.models.clip import reader
from negmerge.recipe import Search
from negmerge.records import Measured, Pair, read_record
from negmerge.scenario import Problem
from negmerge.search import measure, search_scale, write_rows
from negmerge.task_vector import TaskVector


@dataclass(frozen=True)
class Sweep:
    """A λ sweep to run.

    vector: a patch, or a pool member if `member` says what becomes of its buffers; then τ is its
        own task vector.
    search, criterion, reference: which λ are tried, and when there are enough.
    out: the CSV to write. partial: keeps the rows until the run is finished.
    """

    id: str
    title: str
    base: Path
    vector: Path
    member: Literal["keep", "merge"] | None
    search: Search
    criterion: str
    reference: dict[str, Any] | None
    out: Path
    partial: Path


def run_sweep(problem: Problem, job: Sweep, advance: Advance) -> tuple[float, int]:
    """Run a sweep and write its rows; the seconds and the evaluations it took."""
    begun = time.perf_counter()
    tau = vector_of(job.base, job.vector, job.member)
    model = problem.network(job.base)
    feeds = problem.scoring_feeds("choose")
    ray = search_scale(
        model,
        tau,
        job.search,
        criteria.get(job.criterion),
        job.reference,
        feeds,
        partial=job.partial,
        advance=advance,
    )
    write_rows(job.out, ray.walked())
    return time.perf_counter() - begun, ray.evaluations


def vector_of(base: Path, vector: Path, member: Literal["keep", "merge"] | None) -> TaskVector:
    """τ of a patch, or of a member alone if `member` says what becomes of its buffers."""
    if member is None:
        return TaskVector.load(vector)
    return merge(base, [vector], "uniform", buffers=member)


@dataclass(frozen=True)
class Evaluation:
    """A model to score: a file, less λ times a patch; kept at `out` until the run is finished.

    member: as in a sweep, if the patch is a pool member.
    """

    model: Path
    out: Path
    patch: Path | None = None
    scale: float = 0.0
    member: Literal["keep", "merge"] | None = None


def run_evaluation(problem: Problem, job: Evaluation, advance: Advance) -> dict[str, Any]:
    """Score a model on the reported data; `bins` has the histograms that its page shows."""
    feeds = problem.scoring_feeds("report")
    if job.out.exists():
        advance(sum(len(feed) for feed in feeds.values()))
        return measured_before(job.out, Measured)
    model = problem.network(job.model)
    with ExitStack() as stack:
        if job.patch is not None:
            tau = vector_of(job.model, job.patch, job.member)
            stack.enter_context(tau.applied(model, -job.scale))
        found = predict_all(model, feeds, advance)
    scores = score(found) | {"bins": attack_bins(found)}
    write_file(job.out, json.dumps(scores).encode())
    return scores


def run_measurement(problem: Problem, job: Evaluation, advance: Advance) -> Row | None:
    """What a criterion looks at, on the data that chooses; None if the outputs are not finite."""
    feeds = problem.scoring_feeds("choose")
    if job.out.exists():
        advance(sum(len(feed) for feed in feeds.values()))
        return measured_before(job.out, Row | None)
    begun = time.perf_counter()
    try:
        row = measure(problem.network(job.model), feeds, advance)
        row["seconds"] = time.perf_counter() - begun
    except ValueRangeError:
        row = None
    write_file(job.out, json.dumps(row).encode())
    return row


def measured_before(path: Path, kind: Any) -> Any:
    """What was measured before the run was stopped."""
    remedy = "remove it and run again: it is measured again"
    return read_record(path, kind, remedy, infinite=True)


@dataclass(frozen=True)
class MeanLoss:
    """The loss of θ − λ·mean(τ) of some members, on a set where λ is chosen.

    name: the set. scale: λ; below zero τ is added. out: keeps the loss until the run is finished.
    """

    base: Path
    members: tuple[Path, ...]
    buffers: Literal["keep", "merge"]
    name: str
    scale: float
    out: Path

    def measure(self, model: nn.Module, feed: Feed, advance: Advance) -> float:
        """The cross-entropy; infinite for a model whose outputs are not finite."""
        tau = merge(self.base, self.members, "uniform", buffers=self.buffers)
        try:
            with tau.applied(model, -self.scale):
                return cross_entropy(predict(reader(model, self.name), feed, advance))
        except ValueRangeError:
            return inf


def run_mean_loss(problem: Problem, job: MeanLoss, advance: Advance) -> tuple[float, float]:
    """The loss of one mean, and the seconds it took."""
    feed = problem.scoring_feeds("choose")[job.name]
    if job.out.exists():
        advance(len(feed))
        return tuple(measured_before(job.out, Pair))
    begun = time.perf_counter()
    loss = job.measure(problem.network(job.base), feed, advance)
    found = (loss, time.perf_counter() - begun)
    write_file(job.out, json.dumps(found).encode())
    return found


@dataclass(frozen=True)
class Walk:
    """Members that join the mean one by one.

    alone: the jobs that ranked them. losses: what those found. partial: keeps what was tried.
    """

    greedy: Greedy
    alone: tuple[MeanLoss, ...]
    losses: tuple[float, ...]
    partial: Path


def run_walk(problem: Problem, job: Walk, advance: Advance) -> tuple[list[int], float]:
    """The places of the members that are kept, and the seconds it took."""
    first = job.alone[0]
    feed = Remembered(problem.scoring_feeds("choose")[first.name])
    model = problem.network(first.base)
    known: dict[str, float] = {}
    if job.partial.exists():
        known = measured_before(job.partial, dict[str, float])
    begun = time.perf_counter() - known.get("seconds", 0.0)

    def score(places: list[int]) -> float:
        key = " ".join(map(str, places))
        if key in known:
            advance(len(feed))
        else:
            members = tuple(job.alone[k].members[0] for k in places)
            known[key] = replace(first, members=members).measure(model, feed, advance)
            known["seconds"] = time.perf_counter() - begun
            write_file(job.partial, json.dumps(known).encode())
        return known[key]

    kept, _ = job.greedy.walk(job.losses, score)
    return kept, time.perf_counter() - begun
