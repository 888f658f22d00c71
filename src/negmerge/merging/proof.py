"""The check of a compiled loop: on a small fixed pool it must give the same bits as numpy."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import aligned_buffer
from negmerge.checkpoints.dtypes import narrow, widen
from negmerge.checkpoints.fingerprint import checksum, padded_size
from negmerge.errors import OptionError
from negmerge.merging.first_pass import changes_of
from negmerge.merging.folds import STRIP
from negmerge.merging.loop import NO_FILES, NOT_FINITE
from negmerge.merging.rows import FORMATS, temporary_file
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
    """Return a base and its members, a row each: numbers of all sizes, agreement, ties, zeros.

    Members agree in few elements of the first strip, in most of the second, in some of the others:
    loops choose how to compute a strip by the number of its elements that are not zero.
    """
    rng = np.random.default_rng(0)
    base = rng.standard_normal(ELEMENTS)
    own = np.repeat([4.0, 0.2, 0.7], [STRIP, STRIP, ELEMENTS - 2 * STRIP])
    deltas = 0.1 * (rng.standard_normal(ELEMENTS) + own * rng.standard_normal((N, ELEMENTS)))
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
        _plain(rule, packs, pool(np.dtype(np.float32))[:, :STRIP], np.float32, None)

    def proof(code: Callable[..., int], dtypes: Sequence[Any]) -> bool:
        rows, out = pool(dtypes[1]), dtypes[9]
        # Where one result is not finite, no other is compared: repeat without the huge numbers.
        filled = rows[:, :4000]
        moderate = np.delete(filled, HUGE, axis=1)
        with np.errstate(all="ignore"), _stored(rows) as stored:
            return all(
                _compiled(rule, packs, code, models, out, source)
                == _plain(rule, packs, models, out, source)
                for models, source in [(filled, None), (moderate, None), *stored]
            )

    return proof


@dataclass(frozen=True)
class Stored:
    """A pool in a file: the numbers of each model as stored, one model after the other.

    Args:
        kind: the 16-bit format of the numbers, or 0 (as `loop.segment_loop` takes it).
    """

    file: int
    numbers: Array
    kind: int


@contextmanager
def _stored(rows: Array) -> Iterator[list[tuple[Array, Stored]]]:
    """Yield pools and their files: the rows as they are, and rounded to each 16-bit format.

    There are none if no file can be written.
    """
    pools = {0: rows}
    if rows.dtype == np.float32:
        moderate = np.delete(rows, HUGE, axis=1).astype(np.float64)
        for kind, dtype in FORMATS.items():
            pools[kind] = np.stack([narrow(row, dtype) for row in moderate]).view(np.uint16)
    found: list[tuple[Array, Stored]] = []
    with ExitStack() as stack:
        for kind, numbers in pools.items():
            file = stack.enter_context(temporary_file(numbers.tobytes()))
            if file is not None:
                models = np.stack([_widened(row, kind) for row in numbers])
                found.append((models, Stored(file, numbers, kind)))
        yield found


def _widened(numbers: Array, kind: int) -> Array:
    if kind == 0:
        return numbers
    return widen(numbers.view(np.uint8), FORMATS[kind]).astype(np.float32)


def _numbers(rule: Rule) -> tuple[Array, tuple[float, ...], float]:
    """Return the limits, the constants and the divisor."""
    return Numbers(rule, N, {"": np.full(N, FOUND)} if rule.first_pass() else {}).of("")


def _compiled(
    rule: Rule,
    packs: bool,
    code: Callable[..., int],
    pool: Array,
    kind: Any,
    source: Stored | None,
) -> tuple[Any, ...]:
    size = pool.shape[1]
    checksums, tally = np.zeros(N + 1, np.uint64), np.zeros(len(rule.tallies), np.int64)
    mask = np.zeros(-(-size // STRIP) * STRIP // 64 if packs else 0, np.uint64)
    out = np.zeros(size + 1, kind)
    files: tuple[Any, ...] = NO_FILES
    if source is None:
        rows = np.zeros((N + 1, TILE), pool.dtype)
        rows[:, :size] = pool
    else:
        stored = source.numbers
        raw = aligned_buffer((N + 1) * TILE * stored.itemsize).reshape(N + 1, -1)
        offsets = np.arange(N + 1) * stored[0].nbytes
        files = np.full(N + 1, source.file, np.int32), offsets, raw, source.kind
        rows = np.empty((N + 1, STRIP), pool.dtype) if source.kind else raw.view(pool.dtype)
    memory = new_memory(rule, pool.dtype)
    given = (0, size, checksums, _numbers(rule), memory, tally, mask, out, 0)
    nonzero = code(files, rows.reshape(N + 1, -1, STRIP), *given)
    if nonzero == NOT_FINITE:
        return (nonzero,)
    written = out[:nonzero] if packs else out[:size]
    return nonzero, mask.tobytes(), written.tobytes(), checksums.tolist(), tally.tolist()


def _plain(
    rule: Rule, packs: bool, pool: Array, kind: Any, source: Stored | None
) -> tuple[Any, ...]:
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
    checksums = [0] * (N + 1) if source is None else [_checksum(row) for row in source.numbers]
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
