"""λ: a sweep measures θ − λτ and leaves no trace; a choice is a pure function of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import nn
from torch.utils.data import TensorDataset

import negmerge as nm
from negmerge.errors import NegMergeError, ValueRangeError
from negmerge.evaluation.criteria import choose, criteria
from negmerge.evaluation.metrics import observable
from negmerge.evaluation.metrics.accuracy import accuracy, interval
from negmerge.evaluation.observations import Columns, Observations
from negmerge.evaluation.passes import classification_columns, observe_all, observe_set
from negmerge.evaluation.scores import Scores, avg_gap, score
from negmerge.evaluation.search import Curve, InPlace, read_rows, write_rows
from negmerge.training.feeds import DatasetFeed
from negmerge.training.weights import load_model, save_model

COLUMNS = ("correct", "confidence")
PAPERS = ("acc_retain", "acc_forget", "acc_test", "mia")
percent = st.floats(0, 100)
rows_of = st.lists(
    st.fixed_dictionaries({"acc_retain": percent, "acc_forget": percent, "acc_holdout": percent}),
    min_size=1,
    max_size=12,
).map(lambda rows: [{"scale": k / 10, **row} for k, row in enumerate(rows)])


@given(rows_of)
def test_match_holdout_by_brute_force(rows):
    found = choose(reversed(rows), criteria.get("match_holdout"))
    target = rows[0]["acc_holdout"]
    nearest = min(abs(row["acc_forget"] - target) for row in rows)
    first = next(row for row in rows if abs(row["acc_forget"] - target) == nearest)
    assert found.scale == first["scale"]
    assert found.edge == (abs(rows[-1]["acc_forget"] - target) == nearest > 0)


@given(rows_of)
def test_keep_retain_by_brute_force(rows):
    found = choose(rows, criteria.get("keep_retain"))
    allowed = [r for r in rows if r["acc_retain"] >= 0.95 * rows[0]["acc_retain"] - 1e-9]
    lowest = min(r["acc_forget"] for r in allowed)
    assert found.scale == next(r["scale"] for r in allowed if r["acc_forget"] == lowest)
    assert found.edge == (rows[-1] in allowed and lowest > 0)  # larger λ may forget more


@given(st.integers(1, 250).map(lambda n: 20 * n))
def test_exactly_95_percent_is_enough(right):
    zero = {"scale": 0.0, "acc_retain": 100 * right / 5000, "acc_forget": 50.0}
    kept = {"scale": 1.0, "acc_retain": 100 * (right * 19 // 20) / 5000, "acc_forget": 40.0}
    assert choose([zero, kept], criteria.get("keep_retain")).scale == 1.0
    less = kept | {"acc_retain": 100 * (right * 19 // 20 - 1) / 5000}
    assert choose([zero, less], criteria.get("keep_retain")).scale == 0.0


@given(rows_of, st.tuples(percent, percent, percent, percent))
def test_oracle_by_brute_force(rows, reference):
    rows = [{**row, "acc_test": row["acc_holdout"], "mia": row["acc_retain"]} for row in rows]
    retrain = dict(zip(PAPERS, reference, strict=True))
    found = choose(rows, criteria.get("oracle"), retrain)
    assert found.loss == min(avg_gap(row, retrain) for row in rows)
    assert found.edge == (avg_gap(rows[-1], retrain) == found.loss > 0)


def test_a_destroyed_model_does_not_match():
    """At chance, forget and held-out accuracy agree; that is not forgetting."""
    rows = [
        {"scale": 0.0, "acc_retain": 100.0, "acc_forget": 100.0, "acc_holdout": 90.0},
        {"scale": 0.5, "acc_retain": 97.0, "acc_forget": 88.0, "acc_holdout": 86.0},
        {"scale": 1.0, "acc_retain": 10.0, "acc_forget": 10.0, "acc_holdout": 10.0},
    ]
    assert choose(rows, criteria.get("match_holdout")).scale == 0.5


def test_a_sweep_without_the_original_is_refused():
    with pytest.raises(NegMergeError, match="begin at λ = 0"):
        choose([{"scale": 0.5, "acc_forget": 1.0}], criteria.get("keep_retain"))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_are_wilsons(counts):
    k, n = counts
    theirs = binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert interval(100 * k / n, n) == pytest.approx([100 * theirs.low, 100 * theirs.high])


# ------------------------------------------------------------------------------------------- sweeps


def observe(model: nn.Module, name: str, batch) -> Columns:
    return classification_columns(model(batch[0]), batch[1], COLUMNS)


def observations(model: nn.Module, feeds) -> dict[str, Observations]:
    return observe_all(observe, model, feeds)


def sweep(model, tau, scales, feeds, **options):
    def measure(own: nn.Module, advance) -> Scores:
        return score(observe_all(observe, own, feeds, advance), observable(COLUMNS, PAPERS))

    size = sum(len(feed) for feed in feeds.values())
    curve = Curve(InPlace(model, tau, measure), size, **options)
    return [curve.at(scale) for scale in scales]


def make_problem(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    save_model(tmp_path / "base.safetensors", model, {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    save_model(tmp_path / "tuned.safetensors", model, {})
    load_model(tmp_path / "base.safetensors", model)
    tau = nm.merge(tmp_path / "base.safetensors", [tmp_path / "tuned.safetensors"])
    feeds = {
        name: DatasetFeed(TensorDataset(torch.randn(40, 6), torch.arange(40) % 3))
        for name in ("retain", "forget", "test")
    }
    return model, tau, feeds


def test_a_sweep_is_apply_and_evaluate_and_leaves_no_trace(tmp_path: Path):
    model, tau, feeds = make_problem(tmp_path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    scales = (0.0, 0.3, 1.0)
    rows = sweep(model, tau, scales, feeds)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for scale, row in zip(scales, rows, strict=True):
        out = tmp_path / f"{scale}.safetensors"
        nm.apply(tmp_path / "base.safetensors", -scale * tau, out)
        load_model(out, model)
        expected = score(observations(model, feeds), observable(COLUMNS, PAPERS))
        assert list(row) == ["scale", *PAPERS]
        assert row == {"scale": scale} | {m: expected.values[m] for m in PAPERS}


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path):
    model, tau, feeds = make_problem(tmp_path)
    scales = (0.0, 0.25, 0.5, 0.75)
    whole = sweep(model, tau, scales, feeds)
    partial = tmp_path / "partial.csv"
    counted = 0

    class Stop(Exception):
        pass

    def stop(count: int) -> None:
        nonlocal counted
        counted += count
        if counted > 250:
            raise Stop

    with pytest.raises(Stop):
        sweep(model, tau, scales, feeds, partial=partial, advance=stop)
    assert len(read_rows(partial)) == 2
    seen: list[int] = []
    again = sweep(model, tau, scales, feeds, partial=partial, advance=seen.append)
    assert again == whole
    assert sum(seen) == 4 * 120
    write_rows(tmp_path / "whole.csv", whole)
    assert (tmp_path / "whole.csv").read_bytes() == partial.read_bytes()


def test_outputs_that_are_not_finite_are_an_error_not_forgetting(tmp_path: Path):
    model, tau, feeds = make_problem(tmp_path)
    with torch.no_grad():
        model[1].running_var.fill_(-1.0)  # what subtracting BatchNorm statistics can do
    with pytest.raises(ValueRangeError, match=r"λ = 0.5: .*NaN or infinite.*not unlearned"):
        sweep(model, tau, (0.5,), feeds)


def test_observations_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    feed = DatasetFeed(TensorDataset(logits, torch.tensor([0, 0, 1])))
    found = observe_set(observe, nn.Identity(), "forget", feed)
    assert found["correct"].tolist() == [True, False, False]
    e = np.exp
    expected = [1 / (1 + e(-2.0)), 1 / (1 + e(3.0)), 1 / (1 + e(1.0))]
    assert found["confidence"] == pytest.approx(expected)
    assert accuracy(found) == pytest.approx(100 / 3)
