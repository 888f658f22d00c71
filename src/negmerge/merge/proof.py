"""What a rule's compiled loop must give on a small fixed pool: the same rule in plain numpy."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoint import aligned
from negmerge.errors import OptionError
from negmerge.fingerprint import BLOCK, KEYS, checksum, padded
from negmerge.jit import Proof
from negmerge.merge import kernels
from negmerge.merge.kernels import STRIP
from negmerge.merge.loop import NOT_FINITE, scratch
from negmerge.merge.rules import Rule
from negmerge.merge.statistics import statistic

Array = NDArray[Any]
N = 7
ELEMENTS = 5000
TILE = 2 * STRIP
"""Two tiles, the second of them not full."""
THRESHOLD = 0.05
"""In place of what the engine would find for a rule that trims."""


@cache
def pool(kind: np.dtype[Any]) -> Array:
    """A base and its members, a row each: numbers of all sizes, agreement, ties, zeros."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(ELEMENTS)
    deltas = 0.1 * (rng.standard_normal(ELEMENTS) + 0.7 * rng.standard_normal((N, ELEMENTS)))
    deltas[:, :20] = 0.0
    base[20:60], deltas[:, 20:40] = 1.0, np.array([[0.25, -0.25] * 3 + [0.0]]).T
    deltas[:, 40:60] = 0.5
    base[60:80] *= 1e-40
    deltas[:, 60:80] *= 1e-40
    base[80:90], deltas[:, 80:90] = -0.0, 0.0
    deltas[:, 90:100] *= 1e30
    return np.concatenate([base[None], base + deltas]).astype(kind)


def proof_of(rule: Rule, packs: bool) -> Proof:
    """Whether a loop (`loop.segment_kernel`) merges as the rule says, from rows and from a file.

    Raises if the rule's finish does not work at all: what the compiler says of it is hard to read.

    packs: whether only the values that are not zero are kept, with a mask.
    """
    with np.errstate(all="ignore"):
        _plain(rule, packs, pool(np.dtype(np.float32))[:, :STRIP], np.float32, False)

    def proof(code: Callable[..., int], dtypes: Sequence[Any]) -> bool:
        rows, out = pool(dtypes[4]), dtypes[18]
        filled = rows[:, :4000]
        with np.errstate(all="ignore"), scratch(rows.tobytes()) as file:
            return (
                _compiled(rule, packs, code, filled, out, None)
                == _plain(rule, packs, filled, out, reads=False)
            ) and (
                file is None
                or _compiled(rule, packs, code, rows, out, file)
                == _plain(rule, packs, rows, out, reads=True)
            )

    return proof


def _numbers(rule: Rule) -> tuple[Array, tuple[float, ...], float]:
    """Limits, constants and the divisor."""
    limits = np.full(N, THRESHOLD) if rule.trimmed == "members" else np.array(rule.limits())
    found = {"members": (1.0,), "mean": (THRESHOLD,), "": ()}[rule.trimmed]
    return limits, rule.constants(N) + found, rule.divisor(N)


def _compiled(
    rule: Rule, packs: bool, code: Callable[..., int], pool: Array, kind: Any, file: int | None
) -> tuple[Any, ...]:
    fold, finish = rule.streamed()
    limits, constants, divisor = _numbers(rule)
    size, width = pool.shape[1], pool.itemsize
    state = kernels.new_state(fold)
    values = state[0] if finish is None else np.empty(STRIP)
    sums, ballot = np.zeros(N + 1, np.uint64), np.zeros(2, np.int64)
    mask = np.zeros(-(-size // STRIP) * STRIP // 64 if packs else 0, np.uint64)
    out = np.zeros(size + 1, kind)
    raw = aligned((N + 1) * TILE * width).reshape(N + 1, -1)
    rows = raw.view(pool.dtype)
    if file is not None:
        places = np.full(N + 1, file, np.int32), np.arange(N + 1) * pool[0].nbytes
        words = raw.view(np.uint64).reshape(N + 1, -1, BLOCK // 8)
    else:
        rows[:, :size], rows[:, size:] = pool, 0
        places = np.empty(0, np.int32), np.empty(0, np.int64)
        raw, words = np.empty((0, 0), np.uint8), np.empty((0, 0, BLOCK // 8), np.uint64)
    nonzero = code(
        *places,
        raw,
        words,
        rows.reshape(N + 1, -1, STRIP),
        0,
        size,
        KEYS,
        sums,
        limits,
        constants,
        divisor,
        state,
        values,
        np.empty(STRIP, np.uint8),
        np.empty((3, STRIP), pool.dtype),
        ballot,
        mask,
        out,
        0,
    )
    if nonzero == NOT_FINITE:
        return (nonzero,)
    kept = out[:nonzero] if packs else out[:size]
    return nonzero, mask.tobytes(), kept.tobytes(), sums.tolist(), ballot.tolist()


def _plain(rule: Rule, packs: bool, pool: Array, kind: Any, reads: bool) -> tuple[Any, ...]:
    fold, finish = rule.parts()
    limits, constants, divisor = _numbers(rule)
    deltas = pool[1:].astype(np.float64) - pool[0].astype(np.float64)
    state = [statistic(name, deltas, limits) for name in kernels.STATISTICS[fold]]
    try:
        values = (finish(constants, *state) / divisor + 0.0).astype(kind)
    except Exception as error:  # it may be anybody's
        raise OptionError(
            f"rule {rule.name!r}: its finish does not work on whole arrays "
            f"({type(error).__name__}: {error}); write it with operators only (docs/extend.md)"
        ) from error
    if not np.isfinite(values).all():
        return (NOT_FINITE,)
    ballot = [0, 0]
    if fold is kernels.fold_split:
        elected = state[1] + state[2]
        cancelled = (elected == 0) & (state[3] > 0)
        ballot = [int(np.sign(elected).sum()), int(cancelled.sum())]
    sums = [_checksum(row) if reads else 0 for row in pool]
    nonzero = int(np.count_nonzero(values))
    if not packs:
        return nonzero, b"", values.tobytes(), sums, ballot
    bits = np.zeros(-(-values.size // STRIP) * STRIP, bool)
    bits[: values.size] = values != 0
    mask = np.packbits(bits, bitorder="little").tobytes()
    return nonzero, mask, values[values != 0].tobytes(), sums, ballot


def _checksum(row: Array) -> int:
    raw = np.zeros(padded(row.nbytes), np.uint8)
    raw[: row.nbytes] = np.ascontiguousarray(row).view(np.uint8)
    return checksum(raw.view(np.uint64), 0, KEYS)
