"""The statistics of studies: golden values, and laws against plain formulas."""

from __future__ import annotations

from itertools import combinations, product
from math import erf, inf, isfinite, lgamma, log, sqrt
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from negmerge.studies.statistics import (
    MOST_PAIRS,
    detectable,
    differences,
    holm,
    mean_of,
    paired_test,
    pairs_needed,
    power_of,
)

QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The 97.5 % quantiles of the t distribution for 1 to 10 degrees of freedom, from a table."""
NUMBERS = st.integers(-100, 100).map(lambda k: k / 10)


# ------------------------------------------------------------------------------------------- golden


def test_the_sleep_of_students():
    """Student's data of 1908, as R's `t.test` and `wilcox.test` print them."""
    extra = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    test = paired_test(extra)
    assert test.mean.mean == pytest.approx(1.58)
    assert test.t_p == pytest.approx(0.002833, abs=1e-6)
    assert (test.mean.low, test.mean.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert test.wilcoxon_p == 2 / 2**9  # nine that are not zero, all of one sign


def test_darwins_plants():
    """Crossed less self-fertilised, in eighths of an inch (Fisher, The Design of Experiments)."""
    eighths = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    test = paired_test(eighths)
    assert test.mean.mean == pytest.approx(20.93, abs=0.01)
    assert test.t_p == pytest.approx(0.0497, abs=1e-4)
    assert test.wilcoxon_p == pytest.approx(0.04126, abs=1e-4)


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_numbers_of_pairs_of_cohens_effects(effect: float, pairs: int):
    """Small, medium and large, two-sided 5 %, power 80 %: what G*Power prints for matched pairs."""
    assert pairs_needed(effect, 1.0) == pairs
    assert power_of(effect, pairs) >= 0.8 > power_of(effect, pairs - 1)


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []


# -------------------------------------------------------------------------------------------- edges


def test_one_pair_has_no_interval_and_no_test():
    test = paired_test([3.0])
    assert (test.mean.n, test.mean.mean) == (1, 3.0)
    rest = (test.mean.std, test.mean.low, test.mean.high, test.t_p, test.wilcoxon_p)
    assert rest == (None,) * 5


def test_differences_that_are_all_zero():
    test = paired_test([0.0] * 5)
    assert (test.t_p, test.wilcoxon_p, detectable(0.0, 5)) == (1.0, 1.0, 0.0)
    assert (test.mean.low, test.mean.high) == (0.0, 0.0)
    assert pairs_needed(0.0, 0.0) is None


def test_differences_that_are_all_equal():
    test = paired_test([0.1] * 7)  # whose mean is rounded
    assert (test.t_p, test.mean.std, test.mean.low) == (0.0, 0.0, pytest.approx(0.1))
    assert pairs_needed(0.1, 0.0) == 2


def test_a_difference_that_no_number_of_seeds_would_decide():
    assert pairs_needed(1e-4, 1.0) is None
    assert power_of(0.02, MOST_PAIRS) < 0.8


@pytest.mark.parametrize("effect", [3.0, 1e2, 1e4, 1e8, inf])
@pytest.mark.parametrize("level", [0.05, 0.05 / 1000])
def test_huge_effects_need_few_pairs(effect: float, level: float):
    found = pairs_needed(effect, 1.0, level)
    assert found is not None
    assert found <= (5 if level == 0.05 else 15)


def test_rounding_makes_neither_differences_nor_ranks():
    ours, theirs = [89.4, 88.3, 12.1], [88.3, 87.2, 12.1 + 1e-14]
    found = differences(ours, theirs)
    assert found[0] == found[1]
    assert found[2] == 0
    assert differences([0.0], [0.0]).tolist() == [0.0]


# --------------------------------------------------------------------------------------------- laws


@given(st.lists(NUMBERS, min_size=2, max_size=11))
def test_the_mean_and_its_interval(values: list[float]):
    found = mean_of(values)
    half = QUANTILES[len(values) - 2] * stdev(values) / sqrt(len(values))
    assert found.mean == pytest.approx(mean(values), abs=1e-9)
    assert found.std == pytest.approx(stdev(values), abs=1e-9)
    assert found.low == pytest.approx(mean(values) - half, abs=1e-3)
    assert found.high == pytest.approx(mean(values) + half, abs=1e-3)


@given(st.lists(NUMBERS, min_size=2, max_size=11))
def test_the_interval_leaves_zero_out_where_the_t_test_is_below_5_percent(values: list[float]):
    test = paired_test(values)
    assert test.t_p is not None
    assume(abs(test.t_p - 0.05) > 1e-9)
    assert test.mean.low is not None
    assert test.mean.high is not None
    outside = test.mean.low > 0 or test.mean.high < 0
    assert outside == (test.t_p < 0.05)


def naive_signed_rank(values: list[float]) -> float:
    """The p-value by all assignments of signs, with the mean ranks of ties."""
    found = [value for value in values if value]
    if not found:
        return 1.0
    sizes = sorted(abs(value) for value in found)
    ranks = [
        mean(place for place, size in enumerate(sizes, 1) if size == abs(value)) for value in found
    ]
    seen = sum(rank for rank, value in zip(ranks, found, strict=True) if value > 0)
    middle, count = sum(ranks) / 2, 0
    for signs in product((False, True), repeat=len(found)):
        total = sum(rank for rank, up in zip(ranks, signs, strict=True) if up)
        count += abs(total - middle) >= abs(seen - middle) - 1e-9
    return count / 2 ** len(found)


@settings(max_examples=30)
@given(st.lists(st.integers(-6, 6).map(float), min_size=2, max_size=8))
def test_the_signed_rank_test_is_exact_with_ties_and_zeros(values: list[float]):
    assert paired_test(values).wilcoxon_p == pytest.approx(naive_signed_rank(values))


@settings(max_examples=30)
@given(st.lists(NUMBERS, min_size=2, max_size=8, unique_by=abs))
def test_the_signed_rank_test_is_exact_without_ties(values: list[float]):
    assert paired_test(values).wilcoxon_p == pytest.approx(naive_signed_rank(values))


@settings(max_examples=30)
@given(st.integers(10, 50), st.integers(0, 1000))
def test_the_signed_rank_test_is_that_of_scipy_without_ties(count: int, seed: int):
    values = np.random.default_rng(seed).normal(0.2, 1.0, count)
    found = wilcoxon(values, method="exact").pvalue
    assert paired_test(values).wilcoxon_p == pytest.approx(found)


@settings(max_examples=30)
@given(st.integers(45, 60), st.integers(0, 1000))
def test_many_tied_differences_are_tested_without_a_warning(count: int, seed: int):
    values = np.random.default_rng(seed).integers(-3, 4, count).astype(float)
    found = paired_test(values).wilcoxon_p
    assert found is not None
    assert 0 <= found <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holms_correction_is_the_closure_of_bonferronis(values: list[float]):
    """A hypothesis is as doubtful as the most doubtful set of hypotheses that it is in."""
    places = range(len(values))
    sets = [s for size in range(1, len(values) + 1) for s in combinations(places, size)]
    for place, corrected in enumerate(holm(values)):
        among = (min(1.0, len(s) * min(values[k] for k in s)) for s in sets if place in s)
        assert corrected == pytest.approx(max(among))


def naive_power(effect: float, n: int) -> float:
    """The power by integration over the sample deviation, whose square is chi-squared."""
    freedom, centre = n - 1, effect * sqrt(n)
    limit = QUANTILES[n - 2]
    grid = np.linspace(1e-6, 1 + 12 / sqrt(freedom), 20_001)  # deviation, in true deviations
    scale = log(2) + freedom / 2 * log(freedom / 2) - lgamma(freedom / 2)
    density = np.exp(scale + (freedom - 1) * np.log(grid) - freedom * grid**2 / 2)
    normal = np.vectorize(lambda x: (1 + erf(x / sqrt(2))) / 2)
    found = normal(centre - limit * grid) + normal(-centre - limit * grid)
    return float(np.trapezoid(density * found, grid))


@pytest.mark.parametrize("n", [2, 3, 6, 11])
@pytest.mark.parametrize("effect", [0.1, 1.0, 2.5])
def test_the_power_is_that_of_the_integral(effect: float, n: int):
    assert power_of(effect, n) == pytest.approx(naive_power(effect, n), abs=2e-4)


@given(st.floats(0.01, 100), st.integers(2, 40))
def test_the_detectable_difference_is_found_with_80_percent(std: float, n: int):
    assert power_of(detectable(std, n) / std, n) == pytest.approx(0.8, abs=1e-6)


@settings(max_examples=30)
@given(st.floats(0.1, 3), st.sampled_from([0.05, 0.01]))
def test_one_pair_less_than_needed_is_too_few(effect: float, level: float):
    found = pairs_needed(effect, 1.0, level)
    assert found is not None
    assert power_of(effect, found, level) >= 0.8
    assert found == 2 or power_of(effect, found - 1, level) < 0.8
    assert found == pairs_needed(-effect, 1.0, level)


def test_simulated_studies_find_the_detectable_difference():
    drawn = np.random.default_rng(0).normal(detectable(1.0, 8), 1.0, (4000, 8))
    found = [(paired.mean() / (paired.std(ddof=1) / sqrt(8))) for paired in drawn]
    share = sum(abs(t) > QUANTILES[6] for t in found) / len(found)
    assert share == pytest.approx(0.8, abs=3 * sqrt(0.8 * 0.2 / 4000))


@pytest.mark.parametrize("unit", [5e-324, 1e-310, 1e-290, 1e150, 1e290])
def test_very_small_and_large_numbers_give_numbers(unit: float):
    found = paired_test(differences([2 * unit, 5 * unit, 4 * unit], [unit, unit, unit]))
    numbers = (found.mean.mean, found.mean.std, found.t_p, found.wilcoxon_p)
    assert all(map(isfinite, (*numbers, detectable(found.mean.std, 3))))
    assert found.wilcoxon_p >= 0.25
