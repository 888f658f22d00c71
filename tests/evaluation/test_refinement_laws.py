"""The search `refine`: to the limit or to the optimum, in few evaluations, whatever τ's length."""

from __future__ import annotations

from math import exp, inf, isnan, log10
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

import negmerge as nm
from negmerge.errors import OptionError, ValueRangeError
from negmerge.evaluation.criteria import Criterion, choose, criteria, keep_share, kept
from negmerge.evaluation.limits import metrics_of, share_limit
from negmerge.evaluation.refinement import (
    RESOLUTION,
    TOLERANCE,
    readable,
    refine_to_limit,
    refine_to_optimum,
)
from negmerge.evaluation.scales import COARSE_EVALUATIONS, LARGEST, MOST_EVALUATIONS
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Curve, read_rows, search_scale
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import load_recipe
from negmerge.vectors.module import unit_scale

REFINE = nm.Search()
places = st.floats(-1.5, 1.5).map(lambda power: 10**power)
"""A λ that may be far from the first one, either way."""
exponents = st.floats(0.6, 4.0)
percents = st.floats(0, 100)


class Model:
    """A model that is known by functions of λ; it counts its measurements."""

    single_pass = False

    def __init__(self, half_width=0.0, until=inf, **metrics) -> None:
        self.metrics, self.half_width, self.until = metrics, half_width, until
        self.asked: list[float] = []

    def at(self, scale: float, advance) -> Scores:
        self.asked.append(scale)
        if scale > self.until:
            raise ValueRangeError("the outputs of the model are NaN")
        values = {name: float(metric(scale)) for name, metric in self.metrics.items()}
        half = self.half_width
        return Scores({**values}, {k: (v - half, v + half) for k, v in values.items()})


def searched(model: Model, criterion: Criterion, search=REFINE, unit=None, reference=None, **more):
    """The rows of a search, and the choice from them."""
    rows = search_scale(Curve(model, 1, **more), search, criterion, reference, unit)
    assert len(model.asked) == len({*model.asked}) <= search.evaluations
    assert model.asked[0] == 0 if model.asked else True
    return rows, choose(rows, criterion, reference, search.tolerance)


# --------------------------------------------------------------------------------------- to a limit


def saturated(place: float, exponent: float, lost_at_most: float):
    """A retain accuracy that reaches 95 % at a λ, and loses at most so much."""
    ratio = lost_at_most / 5 - 1

    def retain(scale: float) -> float:
        lost = (scale / place) ** exponent
        return 100 - lost_at_most * lost / (ratio + lost)

    return retain


@given(places, exponents, st.floats(20, 100))
def test_a_falling_metric_is_used_to_its_limit(place, exponent, lost_at_most):
    """The oracle is a dense grid: no allowed λ of it forgets much more."""
    retain = saturated(place, exponent, lost_at_most)
    model = Model(forget=lambda scale: retain(2 * scale), retain=retain)
    rows, found = searched(model, criterion := keep_share(0.95))
    chosen = next(row for row in rows if row["scale"] == found.scale)
    assert 95 - 1e-9 <= chosen["retain"] <= 95 + 5 * TOLERANCE + 1e-9
    assert found.left == pytest.approx((chosen["retain"] - 95) / 5)
    assert found.left <= TOLERANCE
    assert found.largest
    assert not found.edge
    dense = [place * 10 ** (k / 500) for k in range(-500, 500)]
    best = min(retain(2 * scale) for scale in dense if retain(scale) >= 95)
    nearly = max(scale for scale in dense if retain(scale) >= 95 + 5 * TOLERANCE)
    assert best - 0.1 <= chosen["forget"] <= retain(2 * nearly)
    assert criterion.limit is not None


@given(places, st.floats(0.5, 4.0))
def test_a_perplexity_that_grows_without_bound_is_used_to_its_limit(place, rate):
    grown = (1 / 0.95 - 1) / (exp(rate) - 1)
    model = Model(
        forget=lambda scale: -scale,
        retain=lambda scale: 10 * (1 + grown * (exp(min(rate * scale / place, 300)) - 1)),
    )
    rows, found = searched(model, keep_share(0.95, ["retain"]))
    chosen = next(row for row in rows if row["scale"] == found.scale)
    limit = 10 / 0.95
    assert limit - TOLERANCE * (limit - 10) - 1e-9 <= chosen["retain"] <= limit + 1e-9


@given(places, exponents, st.integers(20, 400))
def test_a_metric_of_few_samples_is_used_to_the_last_step_that_is_found(place, exponent, samples):
    smooth = saturated(place, exponent, 60)

    def retain(scale: float) -> float:
        return 100 * (smooth(scale) * samples // 100) / samples

    rows, found = searched(Model(forget=lambda scale: -scale, retain=retain), keep_share(0.95))
    above = [row["scale"] for row in rows if row["scale"] > found.scale]
    assert found.left is not None
    if found.left > TOLERANCE:
        used_up = len(rows) == MOST_EVALUATIONS
        assert min(above) - found.scale <= (0.2 if used_up else RESOLUTION) * min(above)


@given(st.floats(0.01, 1e3), st.sampled_from([-1.0, 0.0, 1.0]))
def test_a_curve_without_end_is_searched_to_the_largest_λ(largest, slope):
    """The largest λ need not have four digits, and it is measured itself, never a larger one."""
    asked: list[float] = []

    def loss(scale: float) -> float:
        asked.append(scale)
        return 100 + slope * scale / largest

    refine_to_optimum(loss, min(0.1, largest), largest)
    assert max(asked) <= largest
    assert len(asked) <= MOST_EVALUATIONS
    if slope < 0:
        assert max(asked) == largest
    asked.clear()
    refine_to_limit(lambda scale: loss(scale) / 100, min(0.1, largest), largest)
    assert max(asked) <= largest


@given(places)
def test_without_a_known_limit_λ_is_found_by_bisection(place):
    def loss(row, zero, reference):
        return -row["forget"] if row["scale"] <= place else None

    reads = ("forget",)
    plain = Criterion("own", "", loss, lambda *_: None, reads, "retain", limits=True, best=-inf)
    model = Model(forget=lambda scale: scale)
    _, found = searched(model, plain)
    assert found.left is None
    assert 0.97 * place <= found.scale <= place


@given(st.lists(st.tuples(percents, percents), min_size=1, max_size=40), st.floats(0.1, 1.0))
def test_any_curve_is_searched_in_few_evaluations_and_the_best_row_is_chosen(points, keep):
    """No curve, however it jumps, is an error or costs more."""

    def place(scale: float) -> int:
        return 0 if scale == 0 else 1 + int(100 * abs(log10(scale))) % (len(points) - 1)

    points = [points[0], *points]
    model = Model(
        forget=lambda scale: points[place(scale)][0], retain=lambda scale: points[place(scale)][1]
    )
    rows, found = searched(model, keep_share(keep))
    zero = rows[0]
    allowed = [row for row in rows if kept(row, zero, "retain", keep)]
    lowest = min(row["forget"] for row in allowed)
    assert found.loss == lowest
    assert found.scale == next(row["scale"] for row in allowed if row["forget"] == lowest)


@given(places, places)
def test_the_smallest_λ_that_forgets_everything_is_looked_for(edge, forgotten):
    keeps = criteria.get("keep_retain")
    model = Model(
        acc_forget=lambda scale: max(90 * (1 - scale / forgotten), 0.0),
        acc_retain=lambda scale: 100 - 5 * (scale / edge) ** 2,
    )
    rows, found = searched(model, keeps)
    if forgotten <= 0.9 * edge:
        assert found.loss == 0
        assert forgotten <= found.scale <= 1.3 * forgotten
        assert not found.edge
    if forgotten > edge:
        assert found.left is not None
        assert found.left <= TOLERANCE
    assert all(row["scale"] <= 4 * max(edge, 0.25) for row in rows)


def test_an_original_that_knows_nothing_is_measured_once():
    model = Model(acc_forget=lambda scale: 0.0, acc_retain=lambda scale: 90.0)
    rows, found = searched(model, criteria.get("keep_retain"))
    assert (len(rows), found.scale) == (1, 0.0)


def test_everything_may_be_allowed_up_to_the_limit():
    model = Model(forget=lambda scale: -scale, retain=lambda scale: 90.0)
    _, found = searched(model, keep_share(0.95))
    assert (found.scale, found.edge) == (LARGEST, True)
    _, found = searched(
        Model(forget=lambda scale: -scale, retain=lambda scale: 90.0),
        keep_share(0.95),
        nm.Search(limit=3.0),
    )
    assert (found.scale, found.edge) == (3.0, True)


def test_nothing_may_be_lost():
    """The original has nothing on the retain set: there is no share of it to use."""
    model = Model(forget=lambda scale: -scale, retain=lambda scale: 0.0)
    assert searched(model, keep_share(0.95))[1].left is None
    model = Model(forget=lambda scale: -scale, retain=lambda scale: 9.0 if scale < 0.1 else 8.0)
    _, found = searched(model, keep_share(1.0))
    assert 0.09 < found.scale < 0.1
    assert found.left is None


def test_a_search_by_hand():
    """lost = (λ/3)³: from one point, λ is expected at √(0.975 · 216) · 0.5 = 7.3, which is more
    than 4 times as much; from two the exponent is 3, and λ is expected at 3 · 0.975^(1/3)."""
    asked: list[float] = []

    def left(scale: float) -> float:
        asked.append(scale)
        return 1 - (scale / 3) ** 3

    refine_to_limit(left, 0.5)
    assert asked == [0.5, 2.0, readable(3 * 0.975 ** (1 / 3))] == [0.5, 2.0, 2.975]
    asked.clear()
    refine_to_limit(left, 30.0)  # 999 times too much is lost at 30: a sixteenth of λ is tried
    assert asked[:2] == [30.0, 1.875]


# ----------------------------------------------------------------------------------- to an optimum


@given(places, st.floats(0.7, 3.0), st.integers(0, 2000))
def test_a_target_is_met(place, exponent, samples):
    """The oracle is a dense grid."""

    def forget(scale: float) -> float:
        x = (scale / place) ** exponent
        value = 100 - 90 * x / (5.4 + x)
        return value if samples < 100 else 100 * round(value * samples / 100) / samples

    model = Model(acc_forget=forget, acc_holdout=lambda scale: 86.0 if scale == 0 else 50.0)
    _, found = searched(model, criteria.get("match_holdout"))
    dense = [place * 10 ** (k / 300) for k in range(-600, 300)]
    best = min(abs(forget(scale) - 86) for scale in dense)
    assert found.loss <= best + 14 * TOLERANCE + 1.5
    assert not found.edge


def test_most_targets_are_met_within_the_tolerance():
    """The law above allows for curves that are flat and then steep; they are few."""
    missed = 0
    for k in range(200):
        place, exponent = 10 ** (3 * k / 200 - 1.5), 0.7 + 2.3 * (k * 7 % 200) / 200
        losses: dict[float, float] = {}

        def loss(scale: float) -> float:
            x = (scale / place) ** exponent  # noqa: B023 (called at once)
            return losses.setdefault(scale, abs(14 - 90 * x / (5.4 + x)))  # noqa: B023

        refine_to_optimum(loss, 0.25)
        assert len(losses) <= MOST_EVALUATIONS
        missed += min(losses.values()) > TOLERANCE * 14
    assert missed <= 10


@given(places, st.floats(1.5, 4.0))
def test_a_smooth_minimum_is_found(place, width):
    losses: dict[float, float] = {}

    def loss(scale: float) -> float:
        away = (log10(scale + place / 30) - log10(place)) * width
        return losses.setdefault(scale, 3 + away**2)

    refine_to_optimum(loss, 0.25)
    assert min(losses.values()) <= 3.05
    assert len(losses) <= MOST_EVALUATIONS


@given(st.lists(percents, min_size=1, max_size=40), st.floats(0, 100))
def test_any_curve_has_an_optimum_in_few_evaluations(values, target):
    def forget(scale: float) -> float:
        if scale == 0:
            return 100.0
        return values[int(100 * abs(log10(scale))) % len(values)]

    model = Model(acc_forget=forget, acc_holdout=lambda scale: target)
    rows, found = searched(model, criteria.get("match_holdout"))
    assert found.loss == min(abs(row["acc_forget"] - target) for row in rows)


def test_a_first_step_that_is_worse_by_chance_does_not_end_the_search():
    model = Model(
        acc_forget=lambda scale: 100.5 if 0 < scale < 0.3 else 100 - 10 * scale,
        acc_holdout=lambda scale: 80.0,
    )
    _, found = searched(model, criteria.get("match_holdout"))
    assert found.scale == pytest.approx(2.0, abs=0.2)


def test_an_optimum_at_the_largest_λ_is_told():
    model = Model(acc_forget=lambda scale: 100 - scale, acc_holdout=lambda scale: 10.0)
    _, found = searched(model, criteria.get("match_holdout"), nm.Search(limit=5.0))
    assert (found.scale, found.edge) == (5.0, True)


# --------------------------------------------------------------------------------- units, and files


@pytest.mark.parametrize("name", ["keep_retain", "match_holdout"])
@given(places, st.floats(0.01, 100))
def test_a_longer_vector_gets_a_smaller_λ_and_nothing_else_changes(name, place, factor):
    def measured(own: float) -> tuple[list[dict[str, float]], float]:
        model = Model(
            acc_forget=lambda scale: 100 - 60 * (scale * own / place) ** 1.3,
            acc_retain=lambda scale: 100 - 9 * (scale * own / place) ** 2,
            acc_holdout=lambda scale: 80.0,
        )
        rows, found = searched(model, criteria.get(name), unit=10 / own)
        return rows, found.scale

    (rows, scale), (others, other) = measured(1.0), measured(factor)
    assert len(rows) == len(others)
    assert other * factor == pytest.approx(scale, rel=5e-3)
    for row, same in zip(rows, others, strict=True):
        assert row["acc_retain"] == pytest.approx(same["acc_retain"], rel=2e-2, abs=0.5)


def test_the_unit_of_λ_is_the_length_of_the_weights_that_change():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 1))
    base = {name: t.numpy().copy() for name, t in model.state_dict().items()}
    tuned = dict(base)
    tuned["0.weight"] = base["0.weight"] + np.array([[3, 0], [0, 4]], np.float32)
    tuned["1.running_mean"] = base["1.running_mean"] + 100
    length = float(np.linalg.norm(base["0.weight"].astype(np.float64)))
    for buffers in ("keep", "merge"):
        tau = nm.merge(base, [tuned], buffers=buffers)
        assert unit_scale(tau, model) == pytest.approx(length / 5)
        assert unit_scale(-2 * tau, model) == pytest.approx(length / 10)
    assert unit_scale(0 * tau, model) is None
    with torch.no_grad():
        model[0].weight.zero_()
    assert unit_scale(tau, model) is None


@given(st.integers(1, 11))
def test_a_search_goes_on_where_it_stopped(tmp_path_factory, stop):
    folder, criterion = tmp_path_factory.mktemp("sweep"), keep_share(0.95)

    def model() -> Model:
        return Model(until=50, forget=lambda scale: -scale, retain=lambda s: 100 - 0.01 * s)

    whole, _ = searched(first := model(), criterion, partial=folder / "whole.csv")
    assert any(isnan(row["retain"]) for row in whole), "the largest λ are broken"

    class Stopped(Exception):
        pass

    interrupted = model()
    measure = interrupted.at

    def at(scale: float, advance):
        if len(interrupted.asked) == stop:
            raise Stopped
        return measure(scale, advance)

    interrupted.at = at
    curve = Curve(interrupted, 1, folder / "part.csv")
    try:
        search_scale(curve, REFINE, criterion)
    except Stopped:
        rest = model()
        rows = search_scale(Curve(rest, 1, folder / "part.csv"), REFINE, criterion)
        assert [*interrupted.asked, *rest.asked] == first.asked
        assert repr(rows) == repr(whole)
    else:
        assert stop >= len(first.asked)
    assert repr(read_rows(folder / "whole.csv")) == repr(
        [{row["scale"]: row for row in whole}[scale] for scale in first.asked]
    )


def test_a_λ_that_breaks_the_model_is_too_large_and_not_the_edge():
    model = Model(until=2.0, forget=lambda scale: -scale, retain=lambda scale: 100.0)
    rows, found = searched(model, keep_share(0.95))
    assert 1.9 < found.scale <= 2
    assert not found.edge
    assert isnan(rows[-1]["retain"])
    model = Model(until=-1.0, forget=lambda scale: -scale, retain=lambda scale: 100.0)
    with pytest.raises(ValueRangeError, match="λ = 0: the outputs of the model are NaN"):
        searched(model, keep_share(0.95))
    model = Model(until=0.1, forget=lambda scale: -scale, retain=lambda scale: 100.0)
    with pytest.raises(ValueRangeError, match=r"λ = 0\.5: the outputs of the model are NaN"):
        search_scale(Curve(model, 1), nm.Search(stop=1.0, count=3), keep_share(0.95))


def test_a_sweep_of_single_broken_numbers_is_none(tmp_path: Path):
    (tmp_path / "sweep.csv").write_text("scale,a,b\n0.0,1.0,2.0\n0.5,nan,2.0\n")
    with pytest.raises(nm.NegMergeError, match="wanted a column `scale` and finite numbers"):
        read_rows(tmp_path / "sweep.csv")


# --------------------------------------------------------------------------------------- confidence


@given(places, st.floats(0.1, 4.5))
def test_with_confidence_the_end_of_the_interval_keeps_the_limit(place, half):
    def model() -> Model:
        return Model(half, forget=lambda s: -s, retain=lambda s: 100 - 5 * (s / place) ** 2)

    criterion = keep_share(0.95)
    rows, sure = searched(model(), criterion, bounded=criterion.limit)
    _, plain = searched(model(), criterion)
    chosen = next(row for row in rows if row["scale"] == sure.scale)
    assert rows[0]["retain.low"] == rows[0]["retain"] == 100
    assert chosen["retain.low"] == pytest.approx(chosen["retain"] - half)
    assert 95 - 1e-9 <= chosen["retain.low"] <= 95 + 5 * TOLERANCE + 1e-9
    assert sure.scale <= plain.scale
    assert metrics_of(chosen).keys() == {"scale", "forget", "retain"}


def test_with_confidence_few_samples_allow_only_the_original():
    model = Model(6.0, forget=lambda scale: -scale, retain=lambda scale: 100 - scale)
    criterion = keep_share(0.95)
    _, found = searched(model, criterion, bounded=criterion.limit)
    assert (found.scale, found.edge) == (0.0, False)


def test_confidence_of_a_metric_where_lower_is_better():
    limit = share_limit("loss", 0.5, lower=True)
    scores = Scores({"loss": 1.5}, {"loss": (1.2, 2.2)})
    assert limit.bound_of(scores) == {"loss.high": 2.2}
    assert limit.allows({"loss": 1.5}, {"loss": 1.0})
    assert not limit.allows({"loss": 1.5, "loss.high": 2.2}, {"loss": 1.0})
    with pytest.raises(OptionError, match=r"search.confidence: loss has no interval"):
        limit.bound_of(Scores({"loss": 1.5}))


# ----------------------------------------------------------------------------------------- settings


def test_what_says_a_grid_has_a_grid():
    assert nm.Search().strategy == nm.Search(limit=4.0, samples=9).strategy == "refine"
    assert nm.Search(scales=None).strategy == "refine"
    for given_field in ({"stop": 2.0}, {"count": 5}, {"scales": (0.0, 1.0)}):
        assert nm.Search(**given_field).strategy == "grid"
        assert nm.Search.model_validate(given_field).strategy == "grid"
    assert nm.Search(stop=2.0, strategy="refine").strategy == "refine"
    assert load_recipe("demo").search.strategy == "refine"
    assert load_recipe("demo", ["search.count=5"]).search.strategy == "grid"
    assert load_recipe("cifar10_resnet18").search.strategy == "grid"
    assert load_recipe("text_records").search.strategy == "refine"
    again = nm.Search.model_validate(nm.Search(stop=2.0).model_dump())
    assert again == nm.Search(stop=2.0)


def test_new_fields_are_recorded_only_if_they_are_set():
    plain = load_recipe("demo").dump()
    assert "strategy: refine" in plain
    assert "confidence" not in plain
    assert "evaluations" not in plain
    dumped = load_recipe("demo", ["search={confidence: 0.95, evaluations: 8}"]).dump()
    assert "confidence: 0.95" in dumped
    assert "evaluations: 8" in dumped


def test_what_is_only_shown_is_measured_less_often():
    coarse = REFINE.coarse()
    assert coarse.passes() == COARSE_EVALUATIONS < REFINE.passes() == MOST_EVALUATIONS
    model = Model(forget=lambda scale: -scale, retain=lambda scale: 100 - 7 * scale**1.7)
    searched(model, keep_share(0.95), coarse)


def test_what_does_not_go_with_refine_is_told():
    with pytest.raises(ValidationError, match="the strategy refine chooses the λ to try"):
        nm.Search(strategy="refine", scales=(0.0, 1.0))
    with pytest.raises(ValidationError, match=r"confidence: got 0.9, and the intervals"):
        nm.Search(confidence=0.9)
    with pytest.raises(ValidationError, match="less than or equal to 12"):
        nm.Search(evaluations=13)
    with pytest.raises(OptionError, match=r"search.confidence: is for a criterion that limits a"):
        check_methods(load_recipe("demo", ["search.confidence=0.95"]))
    check_methods(load_recipe("demo", ["search={confidence: 0.95, criterion: keep_retain}"]))
