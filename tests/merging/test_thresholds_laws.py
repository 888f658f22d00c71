"""The threshold of TIES and localize is the exact k-th magnitude, in at most two passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negmerge.checkpoints.header import TensorInfo
from negmerge.merging import thresholds
from negmerge.merging.first_pass import Changes
from negmerge.merging.thresholds import Threshold


class Stored(Changes):
    """Changes in memory, which count the passes over all elements."""

    def __init__(self, rows: np.ndarray, mean: bool, step: int) -> None:
        info = TensorInfo("w", "F64", (rows.shape[1],), 0, 0)
        super().__init__([info], 1 if mean else len(rows) - 1, mean)
        self.rows, self.step, self.passes = rows, step, 0

    def each(self, run, work=None):
        if work is not None:
            self.passes += sum(s.size for s in work) == self.elements
            yield from (run(self.rows[:, s.start : s.stop].copy(), s.size) for s in work)
            return
        self.passes += 1
        for start in range(0, self.elements, self.step):
            part = np.ascontiguousarray(self.rows[:, start : start + self.step])
            yield run(part, part.shape[1])


def by_sorting(rows: np.ndarray, mean: bool, density: float) -> list[float]:
    deltas = rows[1:].astype(np.float64) - rows[0]
    total = np.zeros(rows.shape[1])
    for delta in deltas:
        total += delta
    values = abs(total / len(deltas))[None] if mean else abs(deltas)
    size = values.shape[1]
    k = int(density * size)
    return [0.0 if k >= size else np.sort(own)[size - k - 1] for own in values]


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "few values": lambda rng, shape: rng.integers(-3, 4, shape) / 8,
    "one value": lambda rng, shape: np.full(shape, 0.25),
    "mostly zero": lambda rng, shape: (rng.random(shape) < 0.01) * rng.standard_normal(shape),
    "many sizes": lambda rng, shape: 2.0 ** rng.integers(-1000, 1000, shape),
    "sorted": lambda rng, shape: np.sort(rng.standard_normal(shape)),  # the sample is right
    "subnormal": lambda rng, shape: rng.integers(0, 50, shape) * 5e-324,
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(DISTRIBUTIONS)),
    st.integers(0, 10**6),
    st.sampled_from([1e-5, 0.001, 0.1, 0.2, 0.5, 0.999, 1.0]),
    st.booleans(),
    st.sampled_from([1, 300, 10**6]),
    st.sampled_from([0, 10**6]),
)
def test_the_threshold_is_that_of_sorting(name, seed, density, mean, most, small):
    """With any room: nothing is collected, little is, or everything."""
    rng = np.random.default_rng(seed)
    rows = np.concatenate([np.zeros((1, 20000)), DISTRIBUTIONS[name](rng, (3, 20000))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "MOST", most)
        patch.setattr(thresholds, "SMALL", small)
        changes = Stored(rows, mean, 3000)
        found = Threshold(density, of="mean" if mean else "members").find(changes)
    assert found.tolist() == by_sorting(rows, mean, density)


@pytest.mark.parametrize("name", ["normal", "few values", "one value", "mostly zero", "sorted"])
@pytest.mark.parametrize("most", [3 * 4096, 10**7])
def test_two_passes_are_enough(name, most, monkeypatch):
    monkeypatch.setattr(thresholds, "SMALL", 0)
    monkeypatch.setattr(thresholds, "MOST", most)
    rng = np.random.default_rng(5)
    rows = np.concatenate([np.zeros((1, 10**6)), DISTRIBUTIONS[name](rng, (3, 10**6))])
    changes = Stored(rows, False, 1 << 16)
    assert Threshold(0.2).find(changes).tolist() == by_sorting(rows, False, 0.2)
    assert changes.passes <= 2


def test_a_sample_that_misleads_costs_passes_but_not_exactness(monkeypatch):
    """All sampled strips are larger, or smaller, than the others."""
    monkeypatch.setattr(thresholds, "SMALL", 0)
    rng = np.random.default_rng(6)
    strips = 1024
    for factor in (1e3, 1e-3):
        values = rng.standard_normal((2, strips, thresholds.STRIP))
        values[:, :: strips // 256] *= factor
        rows = np.concatenate([np.zeros((1, values[0].size)), values.reshape(2, -1)])
        changes = Stored(rows, False, 1 << 16)
        assert Threshold(0.2).find(changes).tolist() == by_sorting(rows, False, 0.2)
