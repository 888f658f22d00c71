"""The folds: all members of a strip, folded into the statistics of a rule.

Rows are row 0 the base and row k member k, cut into strips that stay in the cache together with the
statistics: `rows[k, s]` is strip s of member k. Each fold keeps, per element, sums in float64 in
the order of the rows, and returns whether all it saw are finite numbers.

Folds are plain functions that numba inlines into one loop (`loop.py`). They are written for short
compilation too: one body for each loop, no slices, members taken five at a time to spare loads and
stores, with a harmless row in place of members that are not there.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Most of this is compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

from negmerge.jit import compiled, twin

STRIP = 2048
Array = NDArray[Any]
State = tuple[Array, ...]


@register_jitable
def finite(values: Array) -> bool:
    """Whether all of a strip are finite."""
    wild = np.int64(0)
    for i in range(STRIP):
        wild |= np.int64(0) if abs(values[i]) < np.inf else np.int64(1)
    return wild == 0


@register_jitable
def add_total(rows: Array, s: int, total: Array) -> None:
    """total = Σ θₖ − θ₀, one member after the other; the base's own difference adds nothing."""
    n = rows.shape[0] - 1
    base = rows[0, s]
    for i in range(STRIP):
        total[i] = 0.0
    for k in range(1, n + 1, 5):
        m0 = rows[k, s]
        m1 = rows[k + 1 if k + 1 <= n else 0, s]
        m2 = rows[k + 2 if k + 2 <= n else 0, s]
        m3 = rows[k + 3 if k + 3 <= n else 0, s]
        m4 = rows[k + 4 if k + 4 <= n else 0, s]
        for i in range(STRIP):
            b = np.float64(base[i])
            t = total[i] + (np.float64(m0[i]) - b)
            t = t + (np.float64(m1[i]) - b)
            t = t + (np.float64(m2[i]) - b)
            t = t + (np.float64(m3[i]) - b)
            total[i] = t + (np.float64(m4[i]) - b)


@register_jitable
def add_votes(rows: Array, s: int, positive: Array, negative: Array) -> None:
    """Count the members above and below the base, compared as stored."""
    n = rows.shape[0] - 1
    base = rows[0, s]
    one, none = np.int32(1), np.int32(0)
    for i in range(STRIP):
        positive[i] = none
        negative[i] = none
    for k in range(1, n + 1, 2):
        m0 = rows[k, s]
        m1 = rows[k + 1 if k + 1 <= n else 0, s]
        for i in range(STRIP):
            b, p, q = base[i], positive[i], negative[i]
            p += one if m0[i] > b else none
            q += one if m0[i] < b else none
            p += one if m1[i] > b else none
            q += one if m1[i] < b else none
            positive[i], negative[i] = p, q


@register_jitable
def add_extent(rows: Array, s: int, edges: Array) -> bool:
    """The lowest and the highest member, compared as stored, into edges[0] and edges[1].

    Returns whether all numbers, and all differences from the base, are finite: comparisons alone
    would not tell. The sums in edges[2] prove it at the price of one addition; sums that overflow
    prove nothing, and the differences themselves are looked at.
    """
    n = rows.shape[0] - 1
    base, low, high, proof = rows[0, s], edges[0], edges[1], edges[2]
    for i in range(STRIP):
        low[i] = np.inf
        high[i] = -np.inf
        proof[i] = base[i]
    for k in range(1, n + 1, 5):
        # The last member again instead of one that is not there: it changes nothing.
        m0, m1, m2 = rows[k, s], rows[min(k + 1, n), s], rows[min(k + 2, n), s]
        m3, m4 = rows[min(k + 3, n), s], rows[min(k + 4, n), s]
        for i in range(STRIP):
            x, y, z = low[i], high[i], proof[i]
            m = m0[i]
            x, y, z = m if m < x else x, m if m > y else y, z + m
            m = m1[i]
            x, y, z = m if m < x else x, m if m > y else y, z + m
            m = m2[i]
            x, y, z = m if m < x else x, m if m > y else y, z + m
            m = m3[i]
            x, y, z = m if m < x else x, m if m > y else y, z + m
            m = m4[i]
            x, y, z = m if m < x else x, m if m > y else y, z + m
            low[i], high[i], proof[i] = x, y, z
    for i in range(STRIP):
        proof[i] += high[i] - low[i]
    if finite(proof):
        return True
    for k in range(1, n + 1):
        for i in range(STRIP):
            if not abs(np.float64(rows[k, s, i]) - np.float64(base[i])) < np.inf:
                return False
    return True


@register_jitable
def widen_extent(rows: Array, s: int, edges: Array, low: Array, high: Array) -> None:
    """The extent as differences from the base."""
    base = rows[0, s]
    for i in range(STRIP):
        low[i] = np.float64(edges[0, i]) - np.float64(base[i])
        high[i] = np.float64(edges[1, i]) - np.float64(base[i])


@intrinsic
def bits_of(typing: Any, flags: Any, first: Any) -> Any:
    """64 bytes from `first` on as one word: a bit for each that is not zero, low bit first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        many = ir.VectorType(ir.IntType(8), 64)
        place = builder.bitcast(builder.gep(array.data, [args[1]]), many.as_pointer())
        found = builder.icmp_unsigned("!=", builder.load(place, align=1), ir.Constant(many, None))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(flags, types.intp), generate


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """The number of the lowest set bit of a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


Fold = Callable[..., bool]
# Every fold takes: rows, the strip, limits, the statistics to write, room (a strip of flags and
# three strips of the rows' own format), and the ballot (ties only).


@register_jitable
def fold_total(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total)"""
    add_total(rows, s, state[0])
    return finite(state[0])


@register_jitable
def fold_unanimous(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(agreed): the total where all members share a sign, else zero; flags tell where.

    Only those few are summed.
    """
    agreed = state[0]
    base, low, high = rows[0, s], edges[0], edges[1]
    sound = add_extent(rows, s, edges)
    for i in range(STRIP):
        flags[i] = (low[i] > base[i]) | (high[i] < base[i])
        agreed[i] = 0.0
    for first in range(0, STRIP, 64):
        rest = bits_of(flags, first)
        while rest:
            i = np.uint64(first) + lowest_bit(rest)
            b, t = np.float64(base[i]), 0.0
            for k in range(1, rows.shape[0]):
                t += np.float64(rows[k, s, i]) - b
            agreed[i] = t
            rest &= rest - np.uint64(1)
    return sound


@register_jitable
def fold_votes(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total, positive, negative)"""
    add_total(rows, s, state[0])
    add_votes(rows, s, state[1], state[2])
    return finite(state[0])


@register_jitable
def fold_extent(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total, low, high)"""
    add_total(rows, s, state[0])
    sound = add_extent(rows, s, edges)
    widen_extent(rows, s, edges, state[1], state[2])
    return sound


@register_jitable
def fold_reach(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(low, high)"""
    sound = add_extent(rows, s, edges)
    widen_extent(rows, s, edges, state[0], state[1])
    return sound


@register_jitable
def fold_farthest(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(farthest): of the extent the end farther from the base; of a tie the positive one"""
    sound = add_extent(rows, s, edges)
    base, low, high, farthest = rows[0, s], edges[0], edges[1], state[0]
    for i in range(STRIP):
        b = np.float64(base[i])
        down, up = np.float64(low[i]) - b, np.float64(high[i]) - b
        farthest[i] = up if up >= -down else down
    return sound


@register_jitable
def fold_spread(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total, positive, negative, low, high, nearest): of a tie the positive one"""
    add_total(rows, s, state[0])
    add_votes(rows, s, state[1], state[2])
    sound = add_extent(rows, s, edges)
    widen_extent(rows, s, edges, state[3], state[4])
    nearest = state[5]
    for i in range(STRIP):
        nearest[i] = np.inf
    for k in range(1, rows.shape[0]):
        for i in range(STRIP):
            delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
            closer = abs(delta) < abs(nearest[i]) or (delta == -nearest[i] and delta > 0)
            nearest[i] = delta if closer else nearest[i]
    return sound


@register_jitable
def fold_split(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total, gain, loss, gains, losses): trimmed deltas, summed and counted by sign.

    ballot: the sum of elected signs, and how many elements cancel exactly.
    """
    total, gain, loss, gains, losses = state
    add_total(rows, s, total)
    for i in range(STRIP):
        gain[i] = 0.0
        loss[i] = 0.0
        gains[i] = 0
        losses[i] = 0
    for k in range(1, rows.shape[0]):
        member, base = rows[k, s], rows[0, s]
        least = max(limits[k - 1], 5e-324)  # a change of zero has no sign, whatever the threshold
        for i in range(STRIP):
            delta = np.float64(member[i]) - np.float64(base[i])
            up = delta >= least
            down = -delta >= least
            gain[i] += delta if up else 0.0
            loss[i] += delta if down else 0.0
            gains[i] += np.int32(1) if up else np.int32(0)
            losses[i] += np.int32(1) if down else np.int32(0)
    for i in range(STRIP):
        elected = gain[i] + loss[i]
        ballot[0] += np.int64(elected > 0) - np.int64(elected < 0)
        ballot[1] += np.int64(elected == 0 and gains[i] > 0)
    return finite(total)


@register_jitable
def fold_active(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array, ballot: Array
) -> bool:
    """(total, active): members whose own change is large beside its distance from the mean.

    limits[0] is the factor λ of |τₖ| ≥ λ·|τ̄ − τₖ|.
    """
    total, active = state
    add_total(rows, s, total)
    n = rows.shape[0] - 1
    for i in range(STRIP):
        active[i] = 0
    for k in range(1, rows.shape[0]):
        for i in range(STRIP):
            delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
            distance = abs(total[i] / n - delta)
            active[i] += np.int32(1) if abs(delta) >= limits[0] * distance else np.int32(0)
    return finite(total)


STATISTICS: dict[Fold, tuple[str, ...]] = {
    fold_total: ("total",),
    fold_unanimous: ("agreed",),
    fold_votes: ("total", "positive", "negative"),
    fold_extent: ("total", "low", "high"),
    fold_reach: ("low", "high"),
    fold_farthest: ("farthest",),
    fold_spread: ("total", "positive", "negative", "low", "high", "nearest"),
    fold_split: ("total", "gain", "loss", "gains", "losses"),
    fold_active: ("total", "active"),
}
COUNTS = ("positive", "negative", "gains", "losses", "active")


def new_state(fold: Fold) -> State:
    """Fresh arrays for a fold's statistics, one strip long.

    >>> [a.dtype.name for a in new_state(fold_votes)]
    ['float64', 'int32', 'int32']
    """
    return tuple(np.zeros(STRIP, "i4" if name in COUNTS else "f8") for name in STATISTICS[fold])


def _count_dissent(rows: Array, count: int, counts: Array) -> None:
    """`count_dissent` in numpy."""
    for votes in (rows[1:, :count] > rows[0, :count], rows[1:, :count] < rows[0, :count]):
        alone = votes.sum(0) == len(votes) - 1
        counts += (alone & ~votes).sum(1)


def _members(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    yield rng.integers(0, 4, (5, 300)).astype(dtypes[0]), 290, np.arange(4)


@compiled(twin(_count_dissent, _members))
def count_dissent(rows: Array, count: int, counts: Array) -> None:
    """Add, for each member, the elements where it alone keeps the others from agreeing."""
    n = rows.shape[0] - 1
    for i in range(count):
        base = rows[0, i]
        positive = negative = not_up = not_down = 0
        for k in range(1, n + 1):
            if rows[k, i] > base:
                positive += 1
            else:
                not_up = k
            if rows[k, i] < base:
                negative += 1
            else:
                not_down = k
        if positive == n - 1:
            counts[not_up - 1] += 1
        if negative == n - 1:
            counts[not_down - 1] += 1
