"""Compiled functions compute what a few lines of numpy compute."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from negmerge.checkpoints.checksum import add_checksums
from negmerge.checkpoints.dtypes import widen as widened
from negmerge.checkpoints.fingerprint import checksum
from negmerge.merging.dissent import count_dissent
from negmerge.merging.magnitudes import gather
from negmerge.merging.rows import BFLOAT16, FLOAT16, widen
from negmerge.vectors.compiled_addition import SLACK, find_positions, loops_for

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("kind", "dtype", "infinite"), [(BFLOAT16, "BF16", 0x7F80), (FLOAT16, "F16", 0x7C00)]
)
def test_every_16_bit_number_is_widened_exactly(kind: int, dtype: str, infinite: int):
    every = np.arange(1 << 16, dtype=np.uint16)
    words = every[(every & 0x7FFF) <= infinite]  # all but NaN
    raw = words[: words.size // 2 * 2].view(np.uint8).reshape(2, -1)
    rows = np.zeros((2, 1, raw.shape[1] // 2), np.float32)
    widen(raw, kind, 0, rows.shape[1], rows)
    wanted = widened(raw.reshape(-1), dtype).astype(np.float32)
    assert rows.tobytes() == wanted.tobytes()


def test_checksums_of_rows():
    words = RNG.integers(0, 2**64, (3, 5, 512), np.uint64)
    sums = np.array([3, 2**64 - 1, 0], np.uint64)
    found = [checksum(row[1:4].reshape(-1), 7) for row in words]
    wanted = [(before + own) % 2**64 for before, own in zip(sums.tolist(), found, strict=True)]
    add_checksums(words.reshape(3, -1).view(np.uint8), 1, 4, 7, sums)
    assert sums.tolist() == wanted


def test_the_only_dissenter():
    rows, counts = RNG.integers(0, 4, (5, 300)).astype(np.float32), np.arange(6)
    wanted = counts.copy()
    for votes in (rows[1:, :290] > rows[0, :290], rows[1:, :290] < rows[0, :290]):
        wanted[:4] += ((votes.sum(0) == 3) & ~votes).sum(1)
    signs = np.sign(rows[1:, :290] - rows[0, :290])
    for one, two in combinations(signs, 2):
        wanted[4:] += (one * two > 0).sum(), (one * two != 0).sum()
    count_dissent(rows, 290, counts)
    assert counts.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_a_part_of_a_row_is_widened_to_some_strips(kind: int):
    numbers = RNG.standard_normal((3, 4000)).astype(np.float16)
    raw, rows = numbers.view(np.uint8), np.full((3, 4, 100), 7.0, np.float32)
    widen(raw, kind, 300, 2, rows)
    dtype = {BFLOAT16: "BF16", FLOAT16: "F16"}[kind]
    wanted = [widened(row[600:1000], dtype).astype(np.float32).tobytes() for row in raw]
    assert [row[:2].tobytes() for row in rows] == wanted
    assert (rows[:, 2:] == 7).all()


@pytest.mark.parametrize("mean", [False, True])
def test_magnitudes_between_bounds(mean: bool):
    rows = (RNG.integers(-300, 300, (4, 5000)) / 64).astype(np.float32)
    deltas = rows[1:].astype(np.float64) - rows[0]
    total = np.zeros(5000)
    for delta in deltas:
        total += delta
    values = abs(total / 3)[None] if mean else abs(deltas)
    width = len(values)
    low, high = np.full(width, 0.5), np.full(width, 1.0)
    wanted = np.arange(width) != 1
    counts, sizes = np.zeros((width, 3), np.int64), np.zeros(width, np.int64)
    between = np.zeros((width, 4990))
    gather(rows, mean, 4990, wanted, low, high, counts, between, sizes)
    for g, own in enumerate(values[:, :4990]):
        if not wanted[g]:
            assert not counts[g].any()
            assert not sizes[g]
            continue
        assert counts[g].tolist() == [(own > 1).sum(), (own == 1).sum(), (own == 0.5).sum()]
        kept = own[(own > 0.5) & (own < 1.0)]
        assert between[g, : sizes[g]].tobytes() == kept.tobytes()


@pytest.mark.parametrize(("factor", "scale"), [(1.0, -0.45), (1e37, 1e3)])
def test_values_are_added_where_they_are_not_zero(factor: float, scale: float):
    base = RNG.standard_normal(2000).astype(np.float32)
    base[:4] = [0.0, -0.0, 1e30, -1e-42]
    values = (RNG.standard_normal(2000) * factor).astype(np.float32)
    values[::3] = 0
    values[1::7] *= np.float32(1e-12)  # too small to change the base
    where = np.flatnonzero(values)
    wanted = base.copy()
    with np.errstate(over="ignore"):
        wanted[where] = base[where].astype(np.float64) + scale * values[where].astype(np.float64)
    changed = np.count_nonzero(wanted.view(np.uint32) != base.view(np.uint32))
    finite = bool(np.isfinite(wanted).all())
    positions = np.zeros(values.size + SLACK, np.uint32)
    count = find_positions(np.packbits(values != 0, bitorder="little"), positions)
    assert positions[:count].tolist() == where.tolist()
    loops, words = loops_for("F32", "F32", "F32"), values.view(np.uint32)
    sparse, dense = base.copy().view(np.uint32), base.copy().view(np.uint32)
    assert loops.add_at(sparse, sparse, positions, words[where], scale) == (changed, finite)
    assert loops.add_all(dense, dense, words, scale) == (changed, finite)
    assert sparse.tobytes() == dense.tobytes() == wanted.tobytes()
