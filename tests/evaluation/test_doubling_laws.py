"""The search by doubling: it finds the edge of what is allowed, in few evaluations."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import negmerge as nm
from negmerge.errors import OptionError
from negmerge.evaluation.bisection import TOLERANCE, doubling
from negmerge.evaluation.criteria import choose, keep_share
from negmerge.evaluation.scales import FIRST, LARGEST, MOST_EVALUATIONS
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Curve, search_scale
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import load_recipe

SCALES = nm.Search(strategy="doubling").grid()


def asked_for(allowed, best=-inf, forgets=lambda scale: 100.0 - scale, scales=SCALES, **more):
    """The λ that the search asks for, in its order."""
    asked: list[float] = []

    def loss(scale: float) -> float | None:
        asked.append(scale)
        return forgets(scale) if allowed(scale) else None

    doubling(loss, scales, best, **more)
    assert len(asked) == len({*asked}), "no λ is measured twice"
    return asked


@given(st.floats(0, 2 * LARGEST))
def test_the_edge_is_found_within_the_tolerance(edge):
    asked = asked_for(lambda scale: scale <= edge)
    assert asked[:2] == [0.0, FIRST]
    assert len(asked) <= MOST_EVALUATIONS
    low = max(scale for scale in asked if scale <= edge)
    above = [scale for scale in asked if scale > edge]
    if edge >= LARGEST:
        assert asked == [*SCALES]
    else:
        high = min(above)
        # Beyond 16 the evaluations end first: after three halvings of an octave, or two.
        tolerance = TOLERANCE if edge < 16 else 1 / 4
        assert high - low <= tolerance * max(high, FIRST)
        assert max(asked) <= max(2 * edge, FIRST), "no λ is tried far beyond the edge"


def test_the_first_scale_may_be_too_large_already():
    asked = asked_for(lambda scale: scale == 0)
    assert asked == [0.0, 0.25, 0.125, 0.0625, 0.03125, 0.015625]


def test_everything_may_be_allowed_up_to_the_limit():
    search = nm.Search(strategy="doubling", limit=5.0)
    assert asked_for(lambda scale: True, scales=search.grid()) == [0, 0.25, 0.5, 1, 2, 4, 5]
    assert nm.Search(strategy="doubling", limit=0.1).grid() == (0.0, 0.1)


@given(st.floats(0.01, 60), st.integers(2, 12))
def test_the_number_of_evaluations_is_limited(edge, most):
    assert len(asked_for(lambda scale: scale <= edge, evaluations=most)) <= most


@given(st.floats(0.01, 15), st.floats(0.01, 15))
def test_a_loss_that_cannot_be_smaller_ends_the_doubling(edge, forgotten):
    """Then the smallest λ that reaches it is wanted."""
    asked = asked_for(
        lambda scale: scale <= edge,
        best=0.0,
        forgets=lambda scale: max(1 - scale / forgotten, 0.0),
    )
    end = min(edge, forgotten)
    assert max(asked) <= max(2 * end, FIRST)
    low, high = (
        max(s for s in asked if s < forgotten and s <= edge),
        min(s for s in asked if s >= forgotten or s > edge),
    )
    assert high - low <= TOLERANCE * max(high, FIRST)


def test_an_original_that_knows_nothing_is_measured_once():
    assert asked_for(lambda scale: True, best=0.0, forgets=lambda scale: 0.0) == [0.0]


# ------------------------------------------------------------------------------ as part of a search


class Falling:
    """A model that forgets and loses the more, the larger λ is."""

    def __init__(self, single_pass: bool = False) -> None:
        self.single_pass, self.count = single_pass, 0

    def at(self, scale: float, advance) -> Scores:
        self.count += 1
        return Scores({"forget": 100.0 - scale, "retain": 100.0 - scale**2})


@pytest.mark.parametrize("single_pass", [False, True])
def test_the_sweep_has_every_measurement_and_the_choice_is_at_the_edge(single_pass, tmp_path):
    model, criterion = Falling(single_pass), keep_share(0.95)  # allowed up to √5 = 2.236
    search = nm.Search(strategy="doubling")
    rows = search_scale(Curve(model, 1, tmp_path / "part.csv"), search, criterion)
    found = choose(rows, criterion)
    assert model.count == len(rows) <= search.passes() == MOST_EVALUATIONS
    assert 2.236 * (1 - TOLERANCE) <= found.scale <= 2.237
    assert not found.edge
    again = Falling(single_pass)
    assert search_scale(Curve(again, 1, tmp_path / "part.csv"), search, criterion) == rows
    assert again.count == 0, "a sweep goes on where it stopped"


def test_a_limit_that_is_still_allowed_is_told():
    search, criterion = nm.Search(strategy="doubling", limit=2.0), keep_share(0.95)
    found = choose(search_scale(Curve(Falling(), 1), search, criterion), criterion)
    assert (found.scale, found.edge) == (2.0, True)


def test_what_is_only_shown_is_measured_at_the_doubled_scales():
    search, criterion = nm.Search(strategy="doubling").coarse(), keep_share(0.95)
    model = Falling()
    rows = search_scale(Curve(model, 1), search, criterion)
    assert choose(rows, criterion).scale == 2.0
    assert {row["scale"] for row in rows} <= {*SCALES}
    assert model.count < len(SCALES)


def test_what_does_not_go_with_doubling_is_told():
    with pytest.raises(ValidationError, match="the strategy doubling chooses the λ"):
        nm.Search(strategy="doubling", scales=(0.0, 1.0))
    with pytest.raises(OptionError, match="doubling: wanted keep_retain, got match_holdout"):
        check_methods(load_recipe("demo", ["search.strategy=doubling"]))
    check_methods(load_recipe("demo", ["search={strategy: doubling, criterion: keep_retain}"]))
