"""Factors of groups by coordinate steps, on curves whose best factors are known."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.evaluation.factors import MOST_LOSSES, Losses, tune_factors

positive = st.floats(0.05, 5.0)
groups = st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=4)


def quadratic(forget: dict[str, float], retain: dict[str, float], calls: list | None = None):
    """Losses that grow with the square of the factors, each group for itself."""

    def measure(factors, scale):
        if calls is not None:
            calls.append((tuple(factors.values()), scale))
        parts = {name: (scale * factor) ** 2 for name, factor in factors.items()}
        return Losses(
            1.0 + sum(forget[name] * part for name, part in parts.items()),
            0.5 + sum(retain[name] * part for name, part in parts.items()),
        )

    return measure


def cost(factors: dict[str, float], forget: dict[str, float], retain: dict[str, float]) -> float:
    """The retain loss for a unit of forgetting."""
    sums = [sum(one[name] * factors[name] ** 2 for name in factors) for one in (retain, forget)]
    return sums[0] / sums[1]


def test_a_group_that_only_harms_is_left_out_and_one_that_only_forgets_is_raised():
    forget = {"good": 1.0, "bad": 0.01, "both": 1.0}
    retain = {"good": 0.01, "bad": 1.0, "both": 1.0}
    found = tune_factors(dict.fromkeys(forget, 1.0), 0.7, quadratic(forget, retain))
    assert found["bad"] == 0.0
    assert found["good"] > found["both"]


@given(groups, positive)
def test_no_choice_is_worse_than_tau_and_the_budget_is_kept(found, scale):
    names = [f"g{k}" for k in range(len(found))]
    forget, retain, lengths = (
        dict(zip(names, column, strict=True)) for column in zip(*found, strict=True)
    )
    calls: list = []
    factors = tune_factors(lengths, scale, quadratic(forget, retain, calls))
    plain = dict.fromkeys(names, 1.0)
    assert cost(factors, forget, retain) <= cost(plain, forget, retain) * (1 + 1e-9)
    assert 2 <= len(calls) <= MOST_LOSSES
    assert calls[:2] == [(tuple(plain.values()), 0.0), (tuple(plain.values()), scale)]
    assert {*factors.values()} <= {0.0, 0.25, 0.5, 1.0, 2.0, 4.0}


def test_choices_are_compared_at_the_level_and_not_at_one_scale():
    """At one λ half of a group always harms less; at the level it must forget as much."""
    forget, retain = {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}
    assert tune_factors({"a": 1.0, "b": 1.0}, 1.0, quadratic(forget, retain)) == {"a": 1, "b": 1}


def test_a_gain_of_less_than_a_hundredth_is_no_reason_to_change():
    forget, retain = {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.005}
    assert tune_factors({"a": 1.0, "b": 1.0}, 1.0, quadratic(forget, retain)) == {"a": 1, "b": 1}


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_without_forgetting_nothing_is_changed(scale: float):
    calls: list = []
    measure = quadratic({"a": -1.0}, {"a": 1.0}, calls)
    assert tune_factors({"a": 1.0}, scale, measure) == {"a": 1.0}
    assert len(calls) <= 2


def test_a_choice_whose_model_is_broken_is_not_taken():
    good = quadratic({"a": 1.0, "b": 0.01}, {"a": 0.1, "b": 1.0})

    def measure(factors, scale):
        return None if factors["b"] < 1 or factors["a"] > 1 else good(factors, scale)

    assert tune_factors({"a": 1.0, "b": 1.0}, 1.0, measure) == {"a": 1.0, "b": 1.0}


def test_the_first_scale_of_a_choice_gives_a_change_of_the_same_length():
    calls: list = []
    measure = quadratic({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, calls)
    tune_factors({"a": 3.0, "b": 1.0}, 1.0, measure)
    (factors, scale) = calls[2]
    assert factors == (0.5, 1.0)
    assert scale == pytest.approx(sqrt(4.0 / (0.25 * 3 + 1)))
