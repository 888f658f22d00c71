"""Attacks on answers: AUC, its interval, TPR at a low FPR, PrivLeak, and the figure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from negmerge.errors import NegMergeError
from negmerge.evaluation.attacks.answers import BINS
from negmerge.evaluation.attacks.ranks import auc, best_threshold, privacy_leakage, tpr
from negmerge.evaluation.metrics import metrics
from negmerge.evaluation.metrics.accuracy import interval
from negmerge.evaluation.observations import Observations

# Few different numbers, so that many are equal.
numbers = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=25).map(np.array)


@given(numbers, numbers)
def test_the_auc_is_the_share_of_pairs(members, others):
    pairs = np.sign(members[:, None] - others)
    found = auc(members, others)
    assert found.value == pytest.approx(100 * (pairs + 1).mean() / 2)
    label = np.repeat([1, 0], [len(members), len(others)])
    theirs = roc_auc_score(label, np.concatenate([members, others]))
    assert found.value == pytest.approx(100 * theirs)
    assert 0 <= found.low <= found.value <= found.high <= 100
    assert found.low < found.high
    swapped = auc(others, members)
    assert swapped.value == pytest.approx(100 - found.value)


@given(numbers, numbers)
def test_only_the_order_counts(members, others):
    assert auc(np.exp(members), np.exp(others)) == auc(members, others)


def test_delong_by_hand():
    """Members 3, 1 against 2, 0: shares below 1 and 1/2, shares above 1/2 and 1."""
    found = auc(np.array([3.0, 1.0]), np.array([2.0, 0.0]))
    half = 100 * 1.959963984540054 * (0.125 / 2 + 0.125 / 2) ** 0.5
    assert found.value == 75.0
    assert (found.low, found.high) == pytest.approx((75 - half, 100.0))


def test_where_no_variance_is_left_the_interval_is_that_of_disjoint_pairs():
    found = auc(np.arange(30.0) + 100, np.arange(12.0))
    assert (found.value, found.low, found.high) == (100.0, *interval(100.0, 12))
    assert auc(np.zeros(5), np.zeros(9)).low == interval(50.0, 5)[0]


def test_the_interval_covers_the_true_auc():
    """Normal scores of means 1 and 0 have the AUC Φ(1/√2) = 76.02 %."""
    rng = np.random.default_rng(0)
    found = [auc(rng.normal(1, 1, 60), rng.normal(0, 1, 90)) for _ in range(1000)]
    assert 0.925 < np.mean([one.low <= 76.02 <= one.high for one in found]) < 0.97


@given(st.integers(0, 2**32 - 1), st.integers(1000, 1300), st.sampled_from([1, 3, 8]))
def test_the_tpr_is_the_largest_on_the_curve_at_one_percent(seed, size, digits):
    rng = np.random.default_rng(seed)
    members, others = rng.normal(1, 1, 200).round(digits), rng.normal(0, 1, size).round(digits)
    label = np.repeat([1, 0], [200, size])
    fpr, found, _ = roc_curve(label, np.concatenate([members, others]), drop_intermediate=False)
    assert tpr(members, others).value == pytest.approx(100 * found[fpr <= 0.01].max())


def test_one_percent_of_few_non_members_is_not_resolved():
    assert tpr(np.ones(5), np.zeros(999)) is None
    assert tpr(np.ones(5), np.zeros(1000)).value == 100.0


@given(numbers, numbers)
def test_the_threshold_errs_least(members, others):
    def errors(threshold: float) -> float:
        return (members <= threshold).mean() + (others > threshold).mean()

    best = errors(best_threshold(members, others))
    assert best == pytest.approx(min(errors(t) for t in np.arange(-4, 5)))


@given(st.floats(0, 1), st.floats(0, 0.99))
def test_privacy_leakage_is_that_of_muse(found, reference):
    theirs = ((1 - found) - (1 - reference)) / (1 - reference + 1e-10) * 100
    assert privacy_leakage(found, reference) == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert privacy_leakage(reference, reference) == 0.0


@pytest.mark.parametrize("pair", [(0.5, 1.0), (1.2, 0.5), (0.5, -0.1), (float("nan"), 0.5)])
def test_what_is_no_auc_is_told(pair):
    with pytest.raises(NegMergeError, match="PrivLeak: got the AUC"):
        privacy_leakage(*pair)


def test_attacks_without_numbers_are_told():
    with pytest.raises(NegMergeError, match="the numbers of non-members are missing"):
        auc(np.ones(2), np.empty(0))
    with pytest.raises(NegMergeError, match="the numbers of members are NaN"):
        auc(np.array([np.nan]), np.ones(2))


def observed(**columns) -> Observations:
    own = {name: np.array(column, np.float64) for name, column in columns.items()}
    return Observations(own | {"tokens": np.ones(len(next(iter(own.values()))), int)})


def test_a_small_loss_and_likely_tokens_mean_member():
    found = {
        "forget": observed(loss=[0.1, 0.2], mink=[-0.1, -0.3]),
        "holdout": observed(loss=[0.15, 3.0], mink=[-2.0, -4.0]),
    }
    assert metrics.get("auc_loss").value(found).value == 75.0
    assert metrics.get("auc_mink").value(found).value == 100.0
    assert metrics.get("tpr_loss").value(found) is None


@pytest.mark.parametrize("name", ["loss", "mink"])
@given(seed=st.integers(0, 1000), constant=st.booleans())
def test_the_figure_counts_every_sample_and_shades_the_side_of_members(name, seed, constant):
    rng = np.random.default_rng(seed)
    far = 0.0 if constant else 1.0
    sign = 1 if name == "loss" else -1
    found = {
        "forget": observed(**{name: sign * far * rng.exponential(1, 17)}),
        "holdout": observed(**{name: sign * far * (2 + rng.exponential(5, 23))}),
    }
    rows = metrics.get(f"auc_{name}").histogram.bins(found)
    for part, size in (("forget", 17), ("holdout", 23)):
        own = [row for row in rows if row["set"] == part]
        assert len(own) == BINS
        assert sum(row["count"] for row in own) == size
        assert all(a["high"] == b["low"] for a, b in pairwise(own))
        shaded = [row["member"] for row in own]
        assert shaded == sorted(shaded, reverse=name == "loss"), "one side of a threshold"
        assert constant or 0 < sum(shaded) < BINS
