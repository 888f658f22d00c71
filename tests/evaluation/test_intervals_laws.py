"""Intervals of shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from negmerge.evaluation.metrics.accuracy import interval


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_share_also_at_the_ends(counts):
    correct, n = counts
    low, high = interval(100 * correct / n, n)
    assert 0 <= low <= 100 * correct / n <= high <= 100
