"""A finished run of a scenario that is not about images, made by hand: errors of a regression.

Forgetting shows in a higher error on the forget set, keeping in a lower one on the retain set; the
numbers have no unit, some have no interval, one metric is registered by nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file

import negmerge as nm
from negmerge.errors import OptionError
from negmerge.evaluation.criteria import Criterion, Reference, kept
from negmerge.evaluation.criteria import Row as SweepRow
from negmerge.evaluation.metrics import Histogram, Measured, Metric, Observed, metrics
from negmerge.evaluation.search import write_rows
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from negmerge.scenarios.settings import Panel, ScenarioSettings, scenarios

FORGET, RETAIN, SURPRISE = "deviation_forget", "deviation_retain", "surprise"


def _value(found: Observed) -> Measured:
    raise NotImplementedError


METRICS = [
    Metric(FORGET, "squared error on the forget set", "forget error", "higher", ("forget",),
           ("error",), _value, unit=""),
    Metric(RETAIN, "squared error on the retain set", "retain error", "lower", ("retain",),
           ("error",), _value, unit=""),
    Metric(SURPRISE, "surprise at the forget set", "surprise", "reference", ("forget",),
           ("likelihood",), _value, unit="nats",
           histogram=Histogram("surprise.csv", "Surprise", "Samples by how likely they are.",
                               lambda found: [], axis="negative log-likelihood")),
]  # fmt: skip


def _loss(row: SweepRow, zero: SweepRow, reference: Reference) -> float | None:
    enough = kept(row, zero, RETAIN, 0.5, lower=True)
    return 1 / row[FORGET] if enough else None


def _aim(metric: str, zero: SweepRow, reference: Reference) -> tuple[float, str] | None:
    return (2 * zero[RETAIN], "at most twice the original's") if metric == RETAIN else None


CRITERION = Criterion(
    "keep_error", "largest forget error with at most twice the original's retain error", _loss,
    _aim, (FORGET, RETAIN), "retain", limits=True,
)  # fmt: skip


class RegressionSettings(ScenarioSettings):
    """A network that predicts house prices forgets some houses."""

    kind = "regression"
    summary = "a regression forgets records"
    forget_metric = FORGET
    retain_metric = RETAIN
    panels: ClassVar[tuple[Panel, ...]] = (Panel("examples", "Examples of what is predicted"),)

    @property
    def default_criterion(self) -> str:
        return CRITERION.name

    def criterion(self, name: str) -> Criterion:
        if name != CRITERION.name:
            raise OptionError(f"criterion {name}: wanted {CRITERION.name}")
        return CRITERION


@contextmanager
def registered(wanted: Sequence[Metric] = METRICS) -> Iterator[None]:
    """The scenario and its metrics are there for the block."""
    scenarios.register("regression", RegressionSettings)
    for metric in wanted:
        metrics.register(metric.name, metric)
    try:
        yield
    finally:
        scenarios.remove("regression")
        for metric in wanted:
            metrics.remove(metric.name)


def errors(forget: float, retain: float, **more: float) -> dict:
    """The row of a model; the error on the retain set has no interval."""
    found = {FORGET: forget, RETAIN: retain, SURPRISE: 2.5, "own_number": 123456.7}
    bounds = {FORGET: [0.9 * forget, 1.2 * forget]}
    return found | {"intervals": bounds, "samples": {"forget": 50, "retain": 400}} | more


def method(title: str, scale: float | None, forget: float, retain: float) -> dict:
    return errors(forget, retain, seconds=2.0, samples_processed=300) | {
        "method": title, "splits": "forget", "scale": scale, "sparsity": None,
        "cost_ratio": None, "evaluations": 3, "looked": False, "edge": False, "avg_gap": None,
        "criterion": None if scale is None else CRITERION.name,
    }  # fmt: skip


def make_run(folder: Path) -> Run:
    """A finished run: weights, patches, sweeps, scores, what the page shows, the manifest."""
    run = Run(folder)
    for name in ("patches", "sweeps", "report/data"):
        (folder / name).mkdir(parents=True)
    run.recipe.write_text(
        "title: House prices\nseed: 3\nscenario: regression\npool: {grid: {epochs: [1, 2, 3]}}\n"
        "methods: [consensus, uniform, finetune]\n"
    )
    rng = np.random.default_rng(0)
    base = {f"layers.{k}.weight": rng.standard_normal((6, 6), np.float32) for k in range(3)}
    save_file(base, run.base)
    pool = []
    for k, id in enumerate(("aa", "bb", "cc"), 1):
        run.member(id).parent.mkdir(parents=True)
        drawn = {n: 0.1 * rng.standard_normal(v.shape, np.float32) for n, v in base.items()}
        save_file({name: base[name] + drawn[name] for name in base}, run.member(id))
        alone = {FORGET: 0.02 * k, RETAIN: 0.0011 * k, "scale": 0.5}
        pool.append({"id": id, "samples": 50, "seconds": 1.0, "settings": {"epochs": k}} | alone)
    members = [run.member(one["id"]) for one in pool]
    for title in ("consensus", "uniform"):
        nm.merge(run.base, members, title, out=run.patch(title))
        rows = [(0.0, 0.002, 0.001), (0.5, 0.05, 0.0012), (1.0, 0.9, 0.004)]
        swept = [{"scale": s, FORGET: f, RETAIN: r, "own_number": 1.0} for s, f, r in rows]
        write_rows(run.sweep(title), swept)
    scores = {
        "title": "House prices",
        "seed": 3,
        "original": errors(0.002, 0.001, seconds=9.0),
        "retrain": errors(0.06, 0.0011, seconds=8.0) | {"avg_gap": None},
        "methods": [
            method("consensus", 0.5, 0.05, 0.0012),
            method("uniform", 0.5, 0.08, 0.0013),
            method("finetune", None, 0.004, 0.0),
        ],
        "splits": {
            "data": "houses",
            "sizes": {"forget": 50, "retain": 400},
            "chosen_on": {"forget": 25, "retain": 100},
        },
        "pool": pool,
        "warnings": [],
    }
    scores["methods"][1][SURPRISE] = None
    RunResult.model_validate(scores)
    (folder / "scores.json").write_text(json.dumps(scores))
    bins = [
        f"{model},{one},{low},{low + 2.0},{count},{int(low > 0)}"
        for model in ("original", "retrained", "consensus")
        for one in ("forget", "retain")
        for low, count in ((-2.0, 10), (0.0, 30), (2.0, 0))
    ]
    (run.data / "surprise.csv").write_text("\n".join(["model,set,low,high,count,member", *bins]))
    cell = {"caption": "three rooms: 210,000", "alt": "a house with three rooms"}
    panel = {"text": "Three houses.", "columns": ["original"], "rows": [{"cells": [cell]}]}
    (run.data / "examples.json").write_text(json.dumps(panel))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    listed = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    manifest = {"format": "negmerge-run/1", "problem": "x", "result": "y", "files": listed}
    run.manifest.write_text(json.dumps(manifest | {"versions": {"python": "3"}}))
    return run
