"""What every metric must hold to; a new one is tested the moment it is registered."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negmerge.errors import OptionError
from negmerge.evaluation.metrics import (
    Measured,
    Metric,
    Observed,
    metric_of,
    metrics,
    observable,
)
from negmerge.evaluation.metrics.accuracy import accuracy, interval
from negmerge.evaluation.observations import Columns, Observations
from negmerge.evaluation.scores import Scores, avg_gap, gap_metrics, score
from negmerge.evaluation.search import read_rows
from negmerge.reports.page import report
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import finished, unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Quiet

PAPERS = ("acc_retain", "acc_forget", "acc_test", "mia")
CLASSES = 4
IMAGES = ("correct", "confidence", "loss", "label", "logits")
TEXTS = (
    "loss", "tokens", "right", "matched_from", "mink", "rouge", "truth_ratio", "probability",
)  # fmt: skip
every = pytest.mark.parametrize("name", list(metrics))


def observed(count: int, seed: int) -> Observations:
    """Every column that a classifier is observed by, of random logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, CLASSES)).astype(np.float32)
    label = rng.integers(0, CLASSES, count)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    confidence = np.take_along_axis(shares, label[:, None], 1)[:, 0]
    correct = logits.argmax(1) == label
    columns = {"logits": logits, "label": label, "confidence": confidence, "correct": correct}
    loss = -np.log(np.maximum(confidence, 1e-30))
    return Observations(columns | {"loss": loss} | answers(count, rng))


def answers(count: int, rng: np.random.Generator) -> Columns:
    """The other columns that a language model is observed by; some records lack some."""
    tokens = rng.integers(1, 12, count)
    right = rng.integers(0, tokens + 1)
    ratios = np.where(rng.random(count) < 0.3, np.nan, rng.lognormal(0, 1, count))
    return {
        "tokens": tokens,
        "right": right,
        "matched_from": np.where(right == tokens, 0, rng.integers(1, tokens + 1)),
        "mink": -rng.exponential(2, count),
        "rouge": np.where(rng.random(count) < 0.1, np.nan, rng.random(count)),
        "probability": rng.random(count),
        "truth_ratio": ratios,
    }


@every
def test_a_metric_says_what_it_is(name: str):
    metric = metrics.get(name)
    assert metric.name == name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "a column of CSV, a field of JSON"
    for words in (metric.label, metric.short):
        assert words.strip() == words != ""
        assert "\n" not in words
    assert metric.heading == f"{metric.short} {metric.unit}".rstrip()
    assert metric.better in ("lower", "higher", "reference")
    assert metric.sets
    assert metric.columns
    assert len({*metric.sets}) == len(metric.sets)
    if metric.unit:
        assert metric.text(12.5).endswith(metric.unit)
    if metric.histogram is not None:
        assert Path(metric.histogram.file).name == metric.histogram.file
        assert metric.histogram.file.endswith(".csv")
        assert metric.histogram.title
        assert metric.histogram.text
        assert metric.histogram.axis


def sizes_of(found: Observed) -> dict[str, int]:
    return {part: len(own) for part, own in found.items()}


@every
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_a_value_lies_in_its_interval(name: str, seed: int, sizes: list[int]):
    metric = metrics.get(name)
    found = {
        part: observed(size, seed + k)
        for k, (part, size) in enumerate(zip(metric.sets, sizes, strict=False))
    }
    measured = metric.value(found)
    if measured is None:
        assert score(found, [metric]) == Scores({name: None}, samples=sizes_of(found))
        return
    assert all(isfinite(x) for x in (measured.low, measured.value, measured.high))
    assert measured.low <= measured.value <= measured.high
    assert 1 <= measured.n <= max(len(own) for own in found.values())
    if metric.unit == "%":
        assert measured.low >= 0
        assert measured.high <= 100
    assert metric.value(found) == measured, "the same observations, the same number"
    scores = score(found, [metric])
    assert scores.values == {name: measured.value}
    assert scores.intervals == {name: (measured.low, measured.high)}


@every
def test_a_metric_needs_no_more_than_the_columns_it_names(name: str):
    metric = metrics.get(name)
    whole = {part: observed(30, k) for k, part in enumerate(metric.sets)}
    cut = {
        part: Observations({column: own[column] for column in metric.columns})
        for part, own in whole.items()
    }
    assert metric.value(cut) == metric.value(whole)


@every
def test_without_its_sets_a_metric_is_not_measured(name: str):
    metric = metrics.get(name)
    found = {part: observed(5, 0) for part in metric.sets[1:]}
    scores = score(found, [metric])
    assert scores.values == ({name: None} if metric.reported else {})
    assert scores.intervals == {}
    assert scores.row() == {}


def test_the_papers_gap_is_the_mean_over_its_four():
    own = [metric.name for metric in observable(IMAGES) if not metrics.source(metric.name)]
    assert sorted(name for name in own if metrics.get(name).in_gap) == sorted(PAPERS)
    reference = {"acc_retain": 90.0, "acc_forget": 80.0, "acc_test": 70.0, "mia": 20.0}
    ours = {"acc_retain": 91.0, "acc_forget": 78.0, "acc_test": 74.0, "mia": 28.0}
    assert avg_gap(ours | {"acc_holdout": 3.0}, reference | {"acc_holdout": 99.0}) == 15 / 4
    missing = reference | {"mia": None}
    assert gap_metrics(missing) == ["acc_retain", "acc_forget", "acc_test"]
    assert avg_gap(ours, missing) == 7 / 3


def test_the_metrics_of_a_scenario_are_those_its_columns_serve():
    own = {m.name for m in observable(IMAGES) if not metrics.source(m.name)}
    assert own == {*PAPERS, "acc_holdout"}, "images have a loss, too, and no metric of answers"
    texts = {m.name for m in observable(TEXTS) if not metrics.source(m.name)}
    assert own | texts == {name for name in metrics if not metrics.source(name)}
    assert not own & texts
    gap = {name for name in texts if metrics.get(name).in_gap}
    assert gap == {"exact_forget", "exact_retain", "auc_loss"}
    assert [m.name for m in observable(("correct",), ("acc_test", "acc_retain"))][:2] == [
        "acc_test",
        "acc_retain",
    ]
    assert "mia" not in {m.name for m in observable(("correct",))}
    assert observable(()) == []


def test_a_metric_that_nothing_registered_has_a_name_and_no_number():
    metric = metric_of("own_number")
    assert (metric.label, metric.unit, metric.better) == ("own number", "", "higher")
    assert metric_of("own_number", forgotten=True).better == "lower"
    with pytest.raises(OptionError, match="metric 'own_number': is not registered"):
        metric.value({})


# ---------------------------------------------------------------------------------- adding a metric


def calibration_error(found: Observed) -> Measured:
    """How far what is claimed is from what is true, in ten bins of what is claimed."""
    own = found["retain"]
    sure, right = own["confidence"].astype(np.float64), own["correct"].astype(np.float64)
    bins = np.minimum((10 * sure).astype(int), 9)
    value = sum(abs((sure - right)[bins == k].sum()) for k in range(10)) / len(own)
    return Measured(100 * value, *interval(100 * value, len(own)), len(own))


CALIBRATION = Metric(
    "calibration_retain",
    "calibration error on the retain set",
    "retain ECE",
    "lower",
    ("retain",),
    ("confidence", "correct"),
    calibration_error,
)
TINY = [
    "data.limit={train: 120, test: 40}",
    "train={epochs: 2, batch: 16, lr: 0.05}",
    "pool={grid: {epochs: [1, 2]}, settings: {batch: 8, lr: 0.05}}",
    "methods=[consensus, uniform]",
    "search={count: 3, samples: 20}",
]


@contextmanager
def registered(metric: Metric) -> Iterator[None]:
    metrics.register(metric.name, metric)
    try:
        yield
    finally:
        metrics.remove(metric.name)


def run_in(folder: Path) -> Run:
    """A small run in this process, whether it was begun before or not."""
    recipe = load_recipe("demo", TINY)
    scenario, store = recipe.make_scenario(), Run(folder)
    with store.locked():
        unlearn(Context(recipe, scenario, store, InProcess(scenario), Quiet()))
    return Run(folder)


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Run:
    return run_in(tmp_path_factory.mktemp("before") / "run")


@pytest.fixture(scope="module")
def after(tmp_path_factory) -> Run:
    with registered(CALIBRATION):
        return run_in(tmp_path_factory.mktemp("after") / "run")


def test_an_added_metric_is_in_the_scores_of_every_model(before: Run, after: Run):
    tree = json.loads(after.scores.read_text())
    rows = [tree["original"], tree["retrain"], *tree["methods"], *tree["pool"]]
    for row in rows:
        low, high = row["intervals"]["calibration_retain"]
        assert 0 <= low <= row["calibration_retain"] <= high <= 100
    assert len({row["calibration_retain"] for row in rows}) > 1
    typed = after.result
    assert typed.first.value("calibration_retain") == tree["methods"][0]["calibration_retain"]
    assert before.result.first.value("calibration_retain") is None


def test_an_added_metric_is_in_every_sweep(before: Run, after: Run):
    sweeps = sorted(path.name for path in (after.folder / "sweeps").iterdir())
    assert sweeps == sorted(path.name for path in (before.folder / "sweeps").iterdir())
    for name in sweeps:
        ours, theirs = (read_rows(run.folder / "sweeps" / name) for run in (after, before))
        assert ours[0].keys() - theirs[0].keys() == {"calibration_retain"}
        assert [{k: row[k] for k in theirs[0]} for row in ours] == theirs


def test_an_added_metric_changes_no_other_number(before: Run, after: Run):
    for ours, theirs in zip(after.result.methods, before.result.methods, strict=True):
        assert ours.avg_gap == theirs.avg_gap is not None
        assert (ours.scale, ours.criterion) == (theirs.scale, theirs.criterion)
        extra = {"calibration_retain": ours.value("calibration_retain")}
        assert ours.metrics == theirs.metrics | extra
        assert ours.intervals.keys() - theirs.intervals.keys() == {"calibration_retain"}
    for name in ("unlearned/model.safetensors", "base.safetensors"):
        assert (after.folder / name).read_bytes() == (before.folder / name).read_bytes()


def test_a_metric_that_is_added_later_is_measured_and_nothing_is_trained_again(
    before: Run, after: Run, tmp_path: Path, monkeypatch
):
    shutil.copytree(before.folder, tmp_path / "run")
    monkeypatch.setattr("negmerge.scenarios.data.train", None)
    recipe = load_recipe("demo", TINY)
    assert finished(Run(tmp_path / "run"), recipe, recipe.make_scenario())
    with registered(CALIBRATION):
        assert not finished(Run(tmp_path / "run"), recipe, recipe.make_scenario())
        again = run_in(tmp_path / "run")
        assert finished(again, recipe, recipe.make_scenario())
    assert again.read_manifest().result == after.read_manifest().result


def test_an_added_metric_is_on_the_page(after: Run):
    with registered(CALIBRATION):
        page = report(after).read_text(encoding="utf-8")
    assert "damaged" not in page
    assert "retain ECE %" in page
    assert "calibration error on the retain set" in page


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", range(3))
def test_a_metric_that_is_not_finite_is_told_by_its_name(bad: float, where: int):
    numbers = [1.0, 0.5, 1.5]
    numbers[where] = bad
    metric = replace(CALIBRATION, value=lambda found: Measured(*numbers, 3))
    with pytest.raises(OptionError, match=r"metric calibration_retain: got .*; wanted finite num"):
        score({"retain": observed(3, 0)}, [metric])


def test_scores_say_what_was_measured_and_of_how_many():
    found = {"retain": observed(8, 0), "forget": observed(5, 1)}
    scores = score(found, observable(("correct", "confidence"), PAPERS))
    assert scores.values["acc_retain"] == accuracy(found["retain"])
    assert scores.values["acc_test"] is scores.values["mia"] is None
    assert "acc_holdout" not in scores.values
    assert scores.samples == {"retain": 8, "forget": 5}
    assert isinstance(scores, Scores)
    assert list(scores.row()) == ["acc_retain", "acc_forget"]
