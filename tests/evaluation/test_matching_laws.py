"""Interpolation along λ to a forget level: laws, a naive oracle, and values computed by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.evaluation.matching import (
    EVALUATIONS,
    Level,
    at_level,
    crossing,
    matched_gap,
    refine,
    why_missing,
)

LEVEL = Level("acc_forget", 60.0)
values = st.integers(0, 40).map(lambda k: k * 2.5)


def rows_of(forget: list[float], retain: list[float] | None = None, step: float = 0.25):
    retain = [99.0 - k for k in range(len(forget))] if retain is None else retain
    return [
        {"scale": step * k, "acc_forget": f, "acc_retain": r}
        for k, (f, r) in enumerate(zip(forget, retain, strict=True))
    ]


@st.composite
def sweeps(draw: st.DrawFn):
    forget = draw(st.lists(values, min_size=1, max_size=8))
    retain = draw(st.lists(values, min_size=len(forget), max_size=len(forget)))
    return rows_of(forget, retain)


def naive(rows, level: float, lower: bool) -> dict[str, Fraction] | None:
    """Walk along the line through the points in exact numbers, to the first place at the level."""
    side = 1 if lower else -1
    if side * (Fraction(rows[0]["acc_forget"]) - Fraction(level)) < 0:
        return None
    for k, here in enumerate(rows):
        if here["acc_forget"] == level:
            return {name: Fraction(value) for name, value in here.items()}
        if k + 1 == len(rows):
            return None
        a, b = Fraction(here["acc_forget"]), Fraction(rows[k + 1]["acc_forget"])
        if min(a, b) < level < max(a, b):
            t = (Fraction(level) - a) / (b - a)
            return {
                name: Fraction(value) + t * (Fraction(rows[k + 1][name]) - Fraction(value))
                for name, value in here.items()
            }
    return None


@given(sweeps(), values, st.booleans())
def test_it_is_the_first_place_at_the_level(rows, value, lower):
    found = at_level(rows, Level("acc_forget", value, lower))
    wanted = naive(rows, value, lower)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found == pytest.approx({name: float(own) for name, own in wanted.items()})
        assert found["acc_forget"] == value


@given(sweeps(), values, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows, value, random):
    level, mixed = Level("acc_forget", value), list(rows)
    random.shuffle(mixed)
    assert at_level(mixed, level) == at_level(rows, level)


@given(sweeps(), values)
def test_nothing_is_extrapolated(rows, value):
    level = Level("acc_forget", value)
    pair, found = crossing(rows, level), at_level(rows, level)
    if found is None or pair is None:
        assert found is pair is None
        return
    for name in ("scale", "acc_retain"):
        low, high = sorted(row[name] for row in pair)
        assert low - 1e-9 <= found[name] <= high + 1e-9
    assert all(level.excess(row) > 0 for row in rows if row["scale"] < pair[0]["scale"])


@given(sweeps(), values)
def test_forgetting_that_raises_a_metric_is_the_mirror_image(rows, value):
    mirrored = [row | {"acc_forget": -row["acc_forget"]} for row in rows]
    one = at_level(rows, Level("acc_forget", value))
    two = at_level(mirrored, Level("acc_forget", -value, lower=False))
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert two == one | {"acc_forget": -value}


def test_values_by_hand():
    # Between λ = 0.25 (80 %) and 0.5 (40 %) the level 60 % is half-way; it is reached again later.
    rows = rows_of([100.0, 80.0, 40.0, 90.0, 10.0], [99.0, 98.0, 90.0, 50.0, 10.0])
    assert at_level(rows, LEVEL) == {"scale": 0.375, "acc_forget": 60.0, "acc_retain": 94.0}
    # A quarter of the way from 90 % to 50 %.
    near = at_level(rows_of([90.0, 50.0], [80.0, 60.0]), Level("acc_forget", 80.0))
    assert near == {"scale": 0.0625, "acc_forget": 80.0, "acc_retain": 75.0}


def test_a_measured_level_is_taken_as_it_is_also_twice_in_a_row():
    rows = rows_of([100.0, 60.0, 60.0, 30.0], [99.0, 97.0, 96.0, 80.0])
    assert at_level(rows, LEVEL) == rows[1]
    assert at_level(rows_of([60.0, 30.0]), LEVEL) == {
        "scale": 0.0, "acc_forget": 60.0, "acc_retain": 99.0,
    }  # fmt: skip


def test_what_is_missing_has_a_reason():
    above, below = rows_of([100.0, 80.0, 75.0, 77.0]), rows_of([50.0, 80.0, 20.0])
    assert at_level(above, LEVEL) is at_level(below, LEVEL) is None
    assert why_missing(above, LEVEL) == (
        "the level 60.00 % was not reached up to λ = 0.75; nearest: forget 75.00 % at λ = 0.5"
    )
    assert why_missing(below, LEVEL) == (
        "the original has forget 50.00 % and so is beyond the level 60.00 %"
    )
    assert why_missing([{"scale": 0.0, "other": 1.0}], LEVEL) == "the sweep of λ has no acc_forget"


@given(sweeps(), values)
def test_more_rows_stay_where_the_first_ones_crossed(rows, value):
    level, asked = Level("acc_forget", value), list[float]()
    before = crossing(rows, level)

    def measure(scale: float):
        asked.append(scale)
        last = max(row["acc_forget"] for row in rows)
        return {"scale": scale, "acc_forget": last - 10 * scale, "acc_retain": 50.0}

    found = refine(rows, level, measure)
    assert len(asked) == len(set(asked)) <= EVALUATIONS
    assert [row for row in found if row["scale"] not in asked] == rows
    assert found == sorted(found, key=lambda row: row["scale"])
    if before is not None:
        assert all(before[0]["scale"] < scale < before[1]["scale"] for scale in asked)
        after = crossing(found, level)
        assert after is not None
        assert before[0]["scale"] <= after[0]["scale"] <= after[1]["scale"] <= before[1]["scale"]


@given(st.floats(0.5, 4), st.floats(5, 60))
def test_two_more_rows_are_nearly_the_smooth_curve(power, drop):
    """On a smooth curve the refined interpolation is far better than that of a coarse sweep."""

    def measure(scale: float):
        return {
            "scale": scale,
            "acc_forget": 100 - drop * scale**power,
            "acc_retain": 99 - 20 * scale**2,
        }

    level = Level("acc_forget", 100 - drop / 2)
    rows = refine([measure(0.0), measure(1.0)], level, measure)
    found = at_level(rows, level)
    assert found is not None
    assert found["scale"] == pytest.approx(0.5 ** (1 / power), abs=0.05)


def test_a_level_beyond_the_sweep_is_looked_for_at_doubled_scales():
    asked: list[float] = []

    def measure(scale: float):
        asked.append(scale)
        return {"scale": scale, "acc_forget": 100 - 10 * scale}

    rows = refine([measure(0.0), measure(1.0)], Level("acc_forget", 80.0), measure)
    assert asked == [0.0, 1.0, 2.0]
    assert at_level(rows, Level("acc_forget", 80.0)) == {"scale": 2.0, "acc_forget": 80.0}
    asked.clear()
    far = refine([measure(0.0), measure(1.0)], Level("acc_forget", -1000.0), measure)
    assert at_level(far, Level("acc_forget", -1000.0)) is None
    assert asked[2:] == [2.0, 4.0, 8.0, 16.0]


def test_a_broken_model_ends_the_looking():
    rows = rows_of([100.0, 80.0])
    assert refine(rows, LEVEL, lambda scale: None) == rows
    beyond = rows_of([50.0, 40.0])
    assert refine(beyond, LEVEL, lambda scale: pytest.fail("measured")) == beyond


def test_the_gap_is_of_the_other_metrics_on_the_same_samples():
    row = {"scale": 0.5, "acc_forget": 60.0, "acc_retain": 95.0, "acc_holdout": 70.0, "own": 5.0}
    reference = {"acc_forget": 10.0, "acc_retain": 98.0, "acc_holdout": 71.0, "own": 900.0}
    assert matched_gap(row, reference, "acc_forget") == (3.0 + 1.0) / 2
    assert matched_gap(row, {}, "acc_forget") is None
    assert matched_gap(row, {"acc_forget": 10.0}, "acc_forget") is None
