"""The check of a compiled loop: on a small fixed pool it must give the same bits as numpy."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import aligned_buffer
from negmerge.checkpoints.fingerprint import checksum, padded_size
from negmerge.errors import OptionError
from negmerge.merging.first_pass import changes_of
from negmerge.merging.folds import STRIP
from negmerge.merging.loop import NO_FILES, NOT_FINITE
from negmerge.merging.rows import temporary_file
from negmerge.merging.rule import Numbers, Rule, new_memory
from negmerge.support.jit import Check

Array = NDArray[Any]
N = 7
ELEMENTS = 5000
TILE = 2 * STRIP
"""The elements make two tiles, the second of them not full."""
HUGE = slice(90, 100)
FOUND = 0.05
"""Replaces the numbers of a first pass."""


@cache
def pool(kind: np.dtype[Any]) -> Array:
    """Return a base and its members, a row each: numbers of all sizes, agreement, ties, zeros."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(ELEMENTS)
    deltas = 0.1 * (rng.standard_normal(ELEMENTS) + 0.7 * rng.standard_normal((N, ELEMENTS)))
    deltas[:, :20] = 0.0
    base[20:60], deltas[:, 20:40] = 1.0, np.array([[0.25, -0.25] * 3 + [0.0]]).T
    deltas[:, 40:60] = 0.5
    base[60:80] *= 1e-40
    deltas[:, 60:80] *= 1e-40
    base[80:90], deltas[:, 80:90] = -0.0, 0.0
    deltas[:, HUGE] *= 1e30
    return np.concatenate([base[None], base + deltas]).astype(kind)


def proof_of(rule: Rule, packs: bool) -> Check:
    """Return a function that checks whether a loop (`loop.segment_loop`) computes a rule.

    Raise if the finish of the rule fails on numpy arrays: errors of the compiler are hard to read.
    """
    with np.errstate(all="ignore"):
        _plain(rule, packs, pool(np.dtype(np.float32))[:, :STRIP], np.float32, False)

    def proof(code: Callable[..., int], dtypes: Sequence[Any]) -> bool:
        rows, out = pool(dtypes[1]), dtypes[9]
        # Where one result is not finite, no other is compared: repeat without the huge numbers.
        filled = rows[:, :4000]
        moderate = np.delete(filled, HUGE, axis=1)
        with np.errstate(all="ignore"), temporary_file(rows.tobytes()) as file:
            cases = [(filled, None), (moderate, None), *([] if file is None else [(rows, file)])]
            return all(
                _compiled(rule, packs, code, models, out, source)
                == _plain(rule, packs, models, out, reads=source is not None)
                for models, source in cases
            )

    return proof


def _numbers(rule: Rule) -> tuple[Array, tuple[float, ...], float]:
    """Return the limits, the constants and the divisor."""
    return Numbers(rule, N, {"": np.full(N, FOUND)} if rule.first_pass() else {}).of("")


def _compiled(
    rule: Rule, packs: bool, code: Callable[..., int], pool: Array, kind: Any, file: int | None
) -> tuple[Any, ...]:
    size = pool.shape[1]
    checksums, tally = np.zeros(N + 1, np.uint64), np.zeros(len(rule.tallies), np.int64)
    mask = np.zeros(-(-size // STRIP) * STRIP // 64 if packs else 0, np.uint64)
    out = np.zeros(size + 1, kind)
    raw = aligned_buffer((N + 1) * TILE * pool.itemsize).reshape(N + 1, -1)
    rows = raw.view(pool.dtype)
    files: tuple[Array, ...] = NO_FILES
    if file is not None:
        files = np.full(N + 1, file, np.int32), np.arange(N + 1) * pool[0].nbytes, raw
    else:
        rows[:, :size], rows[:, size:] = pool, 0
    memory = new_memory(rule, pool.dtype)
    given = (0, size, checksums, _numbers(rule), memory, tally, mask, out, 0)
    nonzero = code(files, rows.reshape(N + 1, -1, STRIP), *given)
    if nonzero == NOT_FINITE:
        return (nonzero,)
    written = out[:nonzero] if packs else out[:size]
    return nonzero, mask.tobytes(), written.tobytes(), checksums.tolist(), tally.tolist()


def _plain(rule: Rule, packs: bool, pool: Array, kind: Any, reads: bool) -> tuple[Any, ...]:
    statistics, finish = rule.parts()
    limits, constants, divisor = _numbers(rule)
    deltas = changes_of(pool, pool.shape[1])
    state = [statistic.over(deltas, limits) for statistic in statistics]
    try:
        values = (finish(constants, *state) / divisor + 0.0).astype(kind)
    except Exception as error:  # a plug-in may raise anything
        raise OptionError(
            f"rule {rule.name!r}: finish fails on numpy arrays "
            f"({type(error).__name__}: {error}); write it with operators and where (docs/extend.md)"
        ) from error
    if not np.isfinite(values).all():
        return (NOT_FINITE,)
    tally = [int(np.sum(tally(constants, *state))) for tally in rule.tallies]
    checksums = [_checksum(row) if reads else 0 for row in pool]
    nonzero = int(np.count_nonzero(values))
    if not packs:
        return nonzero, b"", values.tobytes(), checksums, tally
    bits = np.zeros(-(-values.size // STRIP) * STRIP, bool)
    bits[: values.size] = values != 0
    mask = np.packbits(bits, bitorder="little").tobytes()
    return nonzero, mask, values[values != 0].tobytes(), checksums, tally


def _checksum(row: Array) -> int:
    raw = np.zeros(padded_size(row.nbytes), np.uint8)
    raw[: row.nbytes] = np.ascontiguousarray(row).view(np.uint8)
    return checksum(raw.view(np.uint64), 0)
