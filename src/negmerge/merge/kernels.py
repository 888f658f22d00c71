"""The fused loops: fold all members of a tile into a rule's state, finish it, pack the result.

A tile is a block of rows, row 0 the base and row k member k, for the same range of one tensor. It
is walked in strips that stay in the cache together with the state. Each fold below keeps, per
element, sums in float64 in the order of the rows; its first statistic is not finite where an input
is not, which is how NaN and infinity are found.

Folds and finishes are plain functions that numba inlines into one loop (`segment_kernel`).
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Most of this is compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload, register_jitable
from numpy.typing import NDArray

from negmerge.fingerprint import checksum, finalised

STRIP = 2048
NOT_FINITE, NOT_READ = -1, -2
BFLOAT16, FLOAT16 = 1, 2
Array = NDArray[Any]
State = tuple[Array, ...]


@register_jitable
def add_total(rows: Array, a: int, e: int, total: Array) -> None:
    """total += θₖ − θ₀ for every member, five at a time to spare loads and stores."""
    base = rows[0, a:e]
    for i in range(e - a):
        total[i] = 0.0
    k = 1
    while k + 4 < rows.shape[0]:
        m0, m1, m2 = rows[k, a:e], rows[k + 1, a:e], rows[k + 2, a:e]
        m3, m4 = rows[k + 3, a:e], rows[k + 4, a:e]
        for i in range(e - a):
            b = np.float64(base[i])
            t = total[i] + (np.float64(m0[i]) - b)
            t = t + (np.float64(m1[i]) - b)
            t = t + (np.float64(m2[i]) - b)
            t = t + (np.float64(m3[i]) - b)
            total[i] = t + (np.float64(m4[i]) - b)
        k += 5
    while k < rows.shape[0]:
        m0 = rows[k, a:e]
        for i in range(e - a):
            total[i] += np.float64(m0[i]) - np.float64(base[i])
        k += 1


@register_jitable
def add_votes(rows: Array, a: int, e: int, positive: Array, negative: Array) -> None:
    """Count the members above and below the base, compared as stored."""
    base = rows[0, a:e]
    one, none = np.int32(1), np.int32(0)
    for i in range(e - a):
        positive[i] = none
        negative[i] = none
    k = 1
    while k + 4 < rows.shape[0]:
        m0, m1, m2 = rows[k, a:e], rows[k + 1, a:e], rows[k + 2, a:e]
        m3, m4 = rows[k + 3, a:e], rows[k + 4, a:e]
        for i in range(e - a):
            b, p, q = base[i], positive[i], negative[i]
            p += one if m0[i] > b else none
            q += one if m0[i] < b else none
            p += one if m1[i] > b else none
            q += one if m1[i] < b else none
            p += one if m2[i] > b else none
            q += one if m2[i] < b else none
            p += one if m3[i] > b else none
            q += one if m3[i] < b else none
            p += one if m4[i] > b else none
            q += one if m4[i] < b else none
            positive[i], negative[i] = p, q
        k += 5
    while k < rows.shape[0]:
        m0 = rows[k, a:e]
        for i in range(e - a):
            positive[i] += one if m0[i] > base[i] else none
            negative[i] += one if m0[i] < base[i] else none
        k += 1


@register_jitable
def add_extent(rows: Array, a: int, e: int, low: Array, high: Array, defect: Array) -> None:
    """The lowest and the highest member, compared as stored, as differences from the base.

    defect: 0, or NaN where a member is not a finite number; comparisons alone would not tell.
    """
    base = rows[0, a:e]
    least, most, spoilt = rows[1, a:e].copy(), rows[1, a:e].copy(), rows[1, a:e] - rows[1, a:e]
    last = rows.shape[0] - 1
    for k in range(2, last + 1, 5):
        # The last member again instead of one that is not there: it changes nothing.
        m0, m1, m2 = rows[k, a:e], rows[min(k + 1, last), a:e], rows[min(k + 2, last), a:e]
        m3, m4 = rows[min(k + 3, last), a:e], rows[min(k + 4, last), a:e]
        for i in range(e - a):
            x, y, z = least[i], most[i], spoilt[i]
            m = m0[i]
            x, y, z = m if m < x else x, m if m > y else y, z + (m - m)
            m = m1[i]
            x, y, z = m if m < x else x, m if m > y else y, z + (m - m)
            m = m2[i]
            x, y, z = m if m < x else x, m if m > y else y, z + (m - m)
            m = m3[i]
            x, y, z = m if m < x else x, m if m > y else y, z + (m - m)
            m = m4[i]
            x, y, z = m if m < x else x, m if m > y else y, z + (m - m)
            least[i], most[i], spoilt[i] = x, y, z
    for i in range(e - a):
        low[i] = np.float64(least[i]) - np.float64(base[i])
        high[i] = np.float64(most[i]) - np.float64(base[i])
        defect[i] = spoilt[i]


@register_jitable
def fold_total(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total)"""
    add_total(rows, a, e, state[0])


@register_jitable
def fold_votes(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total, positive, negative)"""
    add_total(rows, a, e, state[0])
    add_votes(rows, a, e, state[1], state[2])


@register_jitable
def fold_extent(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total, low, high)"""
    add_extent(rows, a, e, state[1], state[2], state[0])
    add_total(rows, a, e, state[0])


@register_jitable
def fold_reach(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(defect, low, high)"""
    add_extent(rows, a, e, state[1], state[2], state[0])


@register_jitable
def fold_spread(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total, positive, negative, low, high, nearest): of a tie the positive one"""
    add_total(rows, a, e, state[0])
    add_votes(rows, a, e, state[1], state[2])
    nearest = state[5]
    add_extent(rows, a, e, state[3], state[4], nearest)
    for i in range(e - a):
        nearest[i] = np.inf
    for k in range(1, rows.shape[0]):
        for i in range(e - a):
            delta = np.float64(rows[k, a + i]) - np.float64(rows[0, a + i])
            closer = abs(delta) < abs(nearest[i]) or (delta == -nearest[i] and delta > 0)
            nearest[i] = delta if closer else nearest[i]


@register_jitable
def fold_split(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total, gain, loss, gains, losses): trimmed deltas, summed and counted by sign.

    ballot: the sum of elected signs, and how many elements cancel exactly.
    """
    total, gain, loss, gains, losses = state
    add_total(rows, a, e, total)
    for i in range(e - a):
        gain[i] = 0.0
        loss[i] = 0.0
        gains[i] = 0
        losses[i] = 0
    for k in range(1, rows.shape[0]):
        member, base = rows[k, a:e], rows[0, a:e]
        least = max(limits[k - 1], 5e-324)  # a change of zero has no sign, whatever the threshold
        for i in range(e - a):
            delta = np.float64(member[i]) - np.float64(base[i])
            up = delta >= least
            down = -delta >= least
            gain[i] += delta if up else 0.0
            loss[i] += delta if down else 0.0
            gains[i] += np.int32(1) if up else np.int32(0)
            losses[i] += np.int32(1) if down else np.int32(0)
    for i in range(e - a):
        elected = gain[i] + loss[i]
        ballot[0] += np.int64(elected > 0) - np.int64(elected < 0)
        ballot[1] += np.int64(elected == 0 and gains[i] > 0)


@register_jitable
def fold_active(rows: Array, a: int, e: int, limits: Array, state: State, ballot: Array) -> None:
    """(total, active): members whose own change is large beside its distance from the mean.

    limits[0] is the factor λ of |τₖ| ≥ λ·|τ̄ − τₖ|.
    """
    total, active = state
    add_total(rows, a, e, total)
    n = rows.shape[0] - 1
    for i in range(e - a):
        active[i] = 0
    for k in range(1, rows.shape[0]):
        for i in range(e - a):
            delta = np.float64(rows[k, a + i]) - np.float64(rows[0, a + i])
            distance = abs(total[i] / n - delta)
            active[i] += np.int32(1) if abs(delta) >= limits[0] * distance else np.int32(0)


STATISTICS: dict[Callable[..., None], tuple[str, ...]] = {
    fold_total: ("total",),
    fold_votes: ("total", "positive", "negative"),
    fold_extent: ("total", "low", "high"),
    fold_reach: ("defect", "low", "high"),
    fold_spread: ("total", "positive", "negative", "low", "high", "nearest"),
    fold_split: ("total", "gain", "loss", "gains", "losses"),
    fold_active: ("total", "active"),
}
COUNTS = ("positive", "negative", "gains", "losses", "active")


def new_state(fold: Callable[..., None]) -> State:
    """Fresh arrays for a fold's statistics, one strip long.

    >>> [a.dtype.name for a in new_state(fold_votes)]
    ['float64', 'int32', 'int32']
    """
    return tuple(np.zeros(STRIP, "i4" if name in COUNTS else "f8") for name in STATISTICS[fold])


@njit(nogil=True, cache=True)
def count_dissent(rows: Array, a: int, e: int, counts: Array) -> None:
    """Add, for each member, the elements where it alone keeps the others from agreeing."""
    n = rows.shape[0] - 1
    positive, negative = np.empty(e - a, np.int32), np.empty(e - a, np.int32)
    add_votes(rows, a, e, positive, negative)
    base = rows[0, a:e]
    for k in range(1, n + 1):
        member = rows[k, a:e]
        alone = 0
        for i in range(e - a):
            up = positive[i] == n - 1 and not member[i] > base[i]
            down = negative[i] == n - 1 and not member[i] < base[i]
            alone += up | down
        counts[k - 1] += alone


def element(state: State, i: int) -> tuple[Any, ...]:
    """Element i of every statistic; numba needs one body for each number of them."""
    return tuple(statistic[i] for statistic in state)


@overload(element, inline="always", strict=False)
def _element(state: Any, i: Any) -> Callable[..., Any]:
    picks = {
        1: lambda state, i: (state[0][i],),
        2: lambda state, i: (state[0][i], state[1][i]),
        3: lambda state, i: (state[0][i], state[1][i], state[2][i]),
        5: lambda state, i: (state[0][i], state[1][i], state[2][i], state[3][i], state[4][i]),
        6: lambda state, i: (
            state[0][i],
            state[1][i],
            state[2][i],
            state[3][i],
            state[4][i],
            state[5][i],
        ),
    }
    return picks[len(state)]


@njit(nogil=True, cache=True)
def widen(raw: Array, half: int, count: int, rows: Array) -> None:
    """Widen 16-bit floats to float32, exactly; half: BFLOAT16 or FLOAT16."""
    halves, bits = raw.view(np.uint16), rows.view(np.uint32)
    for k in range(rows.shape[0]):
        if half == BFLOAT16:
            for i in range(count):
                bits[k, i] = np.uint32(halves[k, i]) << np.uint32(16)
            continue
        for i in range(count):
            bits[k, i] = (np.uint32(halves[k, i]) & np.uint32(0x7FFF)) << np.uint32(13)
        # The exponents differ by 112; a product also brings subnormals to their place.
        for i in range(count):
            rows[k, i] *= np.float32(2.0**112)
        for i in range(count):
            word = np.uint32(halves[k, i])
            special = np.uint32(0x7F800000) if word & np.uint32(0x7C00) == 0x7C00 else np.uint32(0)
            bits[k, i] |= special | ((word & np.uint32(0x8000)) << np.uint32(16))


@njit(nogil=True, cache=True)
def add_checksums(
    words: Array, first: int, last: int, block: int, keys: Array, sums: Array
) -> None:
    """Add, for every row, the checksum of words first … last, which begin with a block's number.

    Four rows share each look at the keys.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    n = words.shape[0]
    for at in range(first, last, 512):
        number = block + (at - first) // 512
        for k in range(0, n - 3, 4):
            w0, w1 = words[k, at : at + 512], words[k + 1, at : at + 512]
            w2, w3 = words[k + 2, at : at + 512], words[k + 3, at : at + 512]
            s0 = s1 = s2 = s3 = np.uint64(0)
            for i in range(512):
                key = keys[i]
                x = w0[i] + key
                s0 += (x & low) * (x >> half)
                x = w1[i] + key
                s1 += (x & low) * (x >> half)
                x = w2[i] + key
                s2 += (x & low) * (x >> half)
                x = w3[i] + key
                s3 += (x & low) * (x >> half)
            sums[k] += finalised(s0, number)
            sums[k + 1] += finalised(s1, number)
            sums[k + 2] += finalised(s2, number)
            sums[k + 3] += finalised(s3, number)
        for k in range(n - n % 4, n):
            sums[k] += checksum(words[k, at : at + 512], number, keys)


_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


@njit(nogil=True, cache=True)
def read_rows(
    descriptors: Array, offsets: Array, start: int, count: int, end: int, raw: Array
) -> int:
    """Read `count` bytes into every row and clear it up to `end`; return how many rows succeeded.

    The system's `pread` is called from compiled code: a merge reads in tens of thousands of
    pieces, and taking Python's lock for each would cost as much as the reading.
    """
    for k in range(raw.shape[0]):
        if _pread(descriptors[k], raw[k].ctypes.data, count, offsets[k] + start) != count:
            return k
        raw[k, count:end] = 0
    return raw.shape[0]


@intrinsic
def _lowest_bit(typing: Any, word: Any) -> Any:
    """The number of the lowest set bit of a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@njit(nogil=True, cache=True, error_model="numpy")
def pack(values: Array, divisor: float, mask: Array, kept: Array) -> int:
    """Write a bit per value, low bit first, and those that are not zero, divided and rounded.

    values: a multiple of 64 of them, but mask may end earlier. Returns how many were kept, or
    NOT_FINITE.
    """
    flags = np.empty(values.shape[0], np.uint8)
    for i in range(values.shape[0]):
        flags[i] = values[i] != 0
    groups = flags.view(np.uint64)
    at = 0
    wild = False
    for word in range(values.shape[0] // 64):
        bits = np.uint64(0)
        for j in range(8):
            byte = (groups[8 * word + j] * np.uint64(0x0102040810204080)) >> np.uint64(56)
            bits |= byte << np.uint64(8 * j)
        rest = bits
        while rest:
            i = _lowest_bit(rest)
            value = kept.dtype.type(values[np.uint64(64 * word) + i] / divisor)
            kept[at] = value
            if value != 0:
                at += 1
            else:  # too small for the format
                bits &= ~(np.uint64(1) << i)
            wild |= not abs(value) < np.inf
            rest &= rest - np.uint64(1)
        for j in range(min(8, mask.shape[0] - 8 * word)):
            mask[8 * word + j] = (bits >> np.uint64(8 * j)) & np.uint64(255)
    return NOT_FINITE if wild else at


@register_jitable
def settle(values: Array, divisor: float, out: Array) -> int:
    """Divide and round in place; return how many are not zero, or NOT_FINITE."""
    for i in range(out.shape[0]):
        out[i] = values[i] / divisor + 0.0
    alive, wild = np.int32(0), np.int64(0)
    for i in range(out.shape[0]):
        alive += np.int32(1) if out[i] != 0 else np.int32(0)
    for i in range(out.shape[0]):
        wild |= np.int64(0) if abs(out[i]) < np.inf else np.int64(1)
    return NOT_FINITE if wild else np.int64(alive)


@cache
def segment_kernel(fold: Callable[..., None], finish: Callable[..., Any]) -> Callable[..., int]:
    """One compiled loop over a segment: read, checksums, fold, finish, one rounding, pack.

    The kernel is cached on disk by the contents of this closure. numba would not notice an edited
    `finish`, so its code is part of them.
    """
    code = finish.__code__
    stamp = zlib.crc32(code.co_code + repr((code.co_consts, code.co_names)).encode())
    register_jitable(finish)

    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(
        descriptors: Array,
        offsets: Array,
        raw: Array,
        rows: Array,
        start: int,
        stop: int,
        tile: int,
        keys: Array,
        sums: Array,
        limits: Array,
        constants: tuple[float, ...],
        divisor: float,
        state: State,
        ballot: Array,
        out: Array,
        mask: Array,
        kept: Array,
    ) -> int:
        """Merge elements start … stop into out, or packed into mask and kept if there is a mask.

        descriptors, offsets: where row k is read from into raw, which is rows as bytes; none if
        rows are filled already.
        divisor: what the finished values are divided by.
        Returns how many are not zero, NOT_FINITE, or NOT_READ.
        """
        nonzero = stamp * 0
        values = np.empty(STRIP)
        width = rows.itemsize
        for begin in range(start, stop, tile):
            count = min(tile, stop - begin)
            whole = -(-count // STRIP) * STRIP
            if descriptors.shape[0]:
                end = -(-whole * width // 4096) * 4096
                if (
                    read_rows(descriptors, offsets, begin * width, count * width, end, raw)
                    < rows.shape[0]
                ):
                    return NOT_READ
            words = raw.view(np.uint64)
            filled = -(-count * width // 4096) * 512
            for a in range(0, count, STRIP):
                e, size = a + STRIP, min(STRIP, count - a)
                if descriptors.shape[0]:
                    first, last = a * width // 8, min(filled, e * width // 8)
                    block = (begin + a) * width // 4096
                    add_checksums(words, first, last, block, keys, sums)
                fold(rows, a, e, limits, state, ballot)
                witness = state[0]
                wild = np.int64(0)
                for i in range(STRIP):
                    wild |= np.int64(0) if abs(witness[i]) < np.inf else np.int64(1)
                if wild:
                    return NOT_FINITE
                for i in range(STRIP):
                    values[i] = finish(constants, *element(state, i))
                at = begin - start + a
                if mask.shape[0]:
                    found = pack(
                        values, divisor, mask[at // 8 : (at + size + 7) // 8], kept[nonzero:]
                    )
                else:
                    found = settle(values, divisor, out[at : at + size])
                if found < 0:
                    return NOT_FINITE
                nonzero += found
        return nonzero

    return kernel
