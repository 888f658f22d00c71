"""The measurements of a run as work for an executor: a λ sweep, and the scores of one model."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from negmerge.evaluation.predictions import predict
from negmerge.evaluation.scores import score
from negmerge.executors import Advance
from negmerge.files import write_file
from negmerge.recipe import Search
from negmerge.scenario import Problem
from negmerge.search import criteria, search_scale, write_rows
from negmerge.task_vector import TaskVector


@dataclass(frozen=True)
class Sweep:
    """A λ sweep to run.

    vector: a patch, or a pool member if `member`; then τ is its own task vector.
    search, criterion, reference: which λ are tried, and when there are enough.
    out: the CSV to write. partial: keeps the rows while it runs.
    """

    id: str
    title: str
    base: Path
    vector: Path
    member: bool
    search: Search
    criterion: str
    reference: dict[str, Any] | None
    out: Path
    partial: Path


def run_sweep(problem: Problem, job: Sweep, advance: Advance) -> float:
    """Run a sweep and write its rows; the seconds it took."""
    begun = time.perf_counter()
    open_vector = partial(TaskVector.between, job.base) if job.member else TaskVector.load
    tau = open_vector(job.vector)
    model = problem.network(job.base)
    feeds = problem.scoring_feeds("choose")
    rows = search_scale(
        model,
        tau,
        job.search,
        criteria.get(job.criterion),
        job.reference,
        feeds,
        partial=job.partial,
        advance=advance,
    )
    write_rows(job.out, rows)
    job.partial.unlink(missing_ok=True)
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Evaluation:
    """A model to score: a file, less λ times a patch; kept at `out` until the run is finished."""

    model: Path
    out: Path
    patch: Path | None = None
    scale: float = 0.0


def run_evaluation(problem: Problem, job: Evaluation, advance: Advance) -> dict[str, Any]:
    """Score a model on the reported data."""
    feeds = problem.scoring_feeds("report")
    if job.out.exists():
        advance(sum(len(feed) for feed in feeds.values()))
        return json.loads(job.out.read_bytes())
    model = problem.network(job.model)
    tau = None if job.patch is None else TaskVector.load(job.patch)
    if tau is None:
        found = {name: predict(model, feed, advance) for name, feed in feeds.items()}
    else:
        with tau.applied(model, -job.scale):
            found = {name: predict(model, feed, advance) for name, feed in feeds.items()}
    scores = score(found)
    write_file(job.out, json.dumps(scores).encode())
    return scores
