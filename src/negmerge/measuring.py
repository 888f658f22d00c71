"""The measurements of a run as work for an executor: a λ sweep, and the scores of one model."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from negmerge.criteria import Row, criteria
from negmerge.errors import ValueRangeError
from negmerge.evaluation.predictions import predict_all
from negmerge.evaluation.scores import score
from negmerge.executors import Advance
from negmerge.files import write_file
from negmerge.merge.engine import merge
from negmerge.recipe import Search
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


def run_sweep(problem: Problem, job: Sweep, advance: Advance) -> float:
    """Run a sweep and write its rows; the seconds it took."""
    begun = time.perf_counter()
    if job.member is None:
        tau = TaskVector.load(job.vector)
    else:
        tau = merge(job.base, [job.vector], "uniform", buffers=job.member)
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
    with ExitStack() as stack:
        if job.patch is not None:
            stack.enter_context(TaskVector.load(job.patch).applied(model, -job.scale))
        scores = score(predict_all(model, feeds, advance))
    write_file(job.out, json.dumps(scores).encode())
    return scores


def run_measurement(problem: Problem, job: Evaluation, advance: Advance) -> Row | None:
    """What a criterion looks at, on the data that chooses; None if the outputs are not finite."""
    feeds = problem.scoring_feeds("choose")
    if job.out.exists():
        advance(sum(len(feed) for feed in feeds.values()))
        return json.loads(job.out.read_bytes())
    begun = time.perf_counter()
    try:
        row = measure(problem.network(job.model), feeds, advance)
        row["seconds"] = time.perf_counter() - begun
    except ValueRangeError:
        row = None
    write_file(job.out, json.dumps(row).encode())
    return row
