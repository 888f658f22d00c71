"""Folds written by hand, for statistics that are often used together and for whole rules.

Row 0 is the base and row k is member k; `rows[k, s]` is strip s of member k. A strip of all rows
and its statistics fit into the cache of the processor. Each fold sums in float64 in the order of
the rows.

These folds are faster than those that `folds.py` composes, and compile quickly: one body for each
loop and no slices. They take several members at a time to save loads and stores.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from negmerge.merging import statistics as stat
from negmerge.merging.folds import STRIP, Array, State, compiled_fold, finite


@register_jitable
def add_total(rows, s, total):
    """Write total = Σ (θₖ − θ₀), one member after the other."""
    n = rows.shape[0] - 1
    base, m0 = rows[0, s], rows[1, s]
    for i in range(STRIP):
        total[i] = 0.0 + (np.float64(m0[i]) - np.float64(base[i]))
    k = 2
    while k + 3 <= n:
        m0, m1, m2, m3 = rows[k, s], rows[k + 1, s], rows[k + 2, s], rows[k + 3, s]
        for i in range(STRIP):
            b = np.float64(base[i])
            t = total[i] + (np.float64(m0[i]) - b)
            t = t + (np.float64(m1[i]) - b)
            t = t + (np.float64(m2[i]) - b)
            total[i] = t + (np.float64(m3[i]) - b)
        k += 4
    while k <= n:
        m0 = rows[k, s]
        for i in range(STRIP):
            total[i] += np.float64(m0[i]) - np.float64(base[i])
        k += 1


@register_jitable
def add_votes(rows, s, positive, negative):
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
def add_extent(rows, s, edges):
    """Write the lowest and the highest member, compared as stored, to edges[0] and edges[1].

    Return whether all values and all differences from the base are finite, which comparisons do
    not show. If the sums in edges[2] are finite, they are; if a sum is not, the differences
    themselves are checked.
    """
    n = rows.shape[0] - 1
    base, low, high, total = rows[0, s], edges[0], edges[1], edges[2]
    for i in range(STRIP):
        low[i] = np.inf
        high[i] = -np.inf
        total[i] = base[i]
    for k in range(1, n + 1, 5):
        # The last member replaces members that do not exist: it changes nothing.
        m0, m1, m2 = rows[k, s], rows[min(k + 1, n), s], rows[min(k + 2, n), s]
        m3, m4 = rows[min(k + 3, n), s], rows[min(k + 4, n), s]
        for i in range(STRIP):
            x, y, z = low[i], high[i], total[i]
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
            low[i], high[i], total[i] = x, y, z
    for i in range(STRIP):
        total[i] += high[i] - low[i]
    return finite(total) or changes_are_finite(rows, s)


@register_jitable
def add_extent_and_total(rows, s, edges, total):
    """Do the same as `add_extent` and `add_total` in one pass over the members."""
    n = rows.shape[0] - 1
    base, low, high = rows[0, s], edges[0], edges[1]
    # The first two members, or the first one twice, so that pairs of members are left.
    odd = n % 2
    m0, m1, second = rows[1, s], rows[2 - odd, s], 0.0 if odd else 1.0
    for i in range(STRIP):
        x, y, b = m0[i], m1[i], np.float64(base[i])
        low[i] = y if y < x else x
        high[i] = y if y > x else x
        total[i] = 0.0 + (np.float64(x) - b) + (np.float64(y) - b) * second
    for k in range(3 - odd, n + 1, 2):
        m0, m1 = rows[k, s], rows[k + 1, s]
        for i in range(STRIP):
            x, y, b, t = low[i], high[i], np.float64(base[i]), total[i]
            m = m0[i]
            x, y, t = m if m < x else x, m if m > y else y, t + (np.float64(m) - b)
            m = m1[i]
            x, y, t = m if m < x else x, m if m > y else y, t + (np.float64(m) - b)
            low[i], high[i], total[i] = x, y, t
    return finite(total) or changes_are_finite(rows, s)


@register_jitable
def changes_are_finite(rows, s):
    """Return whether the changes of all members of a strip are finite, one by one."""
    for k in range(1, rows.shape[0]):
        for i in range(STRIP):
            if not abs(np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])) < np.inf:
                return False
    return True


@intrinsic
def bits_of(typing, flags, first):
    """Return the 64 bytes from `first` on as a word: a bit for each byte that is not zero."""

    def generate(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        many = ir.VectorType(ir.IntType(8), 64)
        place = builder.bitcast(builder.gep(array.data, [args[1]]), many.as_pointer())
        found = builder.icmp_unsigned("!=", builder.load(place, align=1), ir.Constant(many, None))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(flags, types.intp), generate


@intrinsic
def lowest_bit(typing, word):
    """Return the index of the lowest set bit of a 64-bit word."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def count_bits(typing, word):
    """Return the number of set bits of a 64-bit word."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@register_jitable
def count_flags(flags):
    """Return the number of flags that are set."""
    found = np.uint64(0)
    for first in range(0, STRIP, 64):
        found += count_bits(bits_of(flags, first))
    return np.int64(found)


@compiled_fold(stat.TOTAL)
def fold_total(rows, s, limits, state, flags, edges):
    """Compute the total."""
    add_total(rows, s, state[0])
    return finite(state[0])


@register_jitable
def fold_unanimous(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array
) -> bool:
    """Compute the total where all members share a sign, else zero; sum only those elements.

    The result is the value of the rule itself. `flags` are set where the value is not zero.
    """
    agreed = state[0]
    base, low, high = rows[0, s], edges[0], edges[1]
    # Where many elements agree it is faster to sum all. The flags are still those of the strip
    # before this one, which is about as dense; only the speed depends on the choice.
    dense = count_flags(flags) > STRIP // 16
    if dense:
        all_finite = add_extent_and_total(rows, s, edges, agreed)
    else:
        all_finite = add_extent(rows, s, edges)
    for i in range(STRIP):
        flags[i] = (low[i] > base[i]) | (high[i] < base[i])
    if dense:
        for i in range(STRIP):
            agreed[i] = agreed[i] if flags[i] else 0.0
        return all_finite
    for i in range(STRIP):
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
    return all_finite


@compiled_fold(stat.TOTAL, stat.POSITIVE, stat.NEGATIVE)
def fold_votes(rows, s, limits, state, flags, edges):
    """Compute the total and the votes."""
    add_total(rows, s, state[0])
    add_votes(rows, s, state[1], state[2])
    return finite(state[0])


@register_jitable
def fold_farthest(
    rows: Array, s: int, limits: Array, state: State, flags: Array, edges: Array
) -> bool:
    """Compute the change farthest from zero; the positive one of +a and −a.

    The result is the value of the rule itself.
    """
    all_finite = add_extent(rows, s, edges)
    base, low, high, farthest = rows[0, s], edges[0], edges[1], state[0]
    for i in range(STRIP):
        b = np.float64(base[i])
        down, up = np.float64(low[i]) - b, np.float64(high[i]) - b
        farthest[i] = up if up >= -down else down
    return all_finite


@compiled_fold(stat.TOTAL, stat.POSITIVE, stat.NEGATIVE, stat.LOW, stat.HIGH, stat.NEAREST)
def fold_all(rows, s, limits, state, flags, edges):
    """Compute the total, the votes, the lowest, the highest and the nearest change."""
    add_total(rows, s, state[0])
    add_votes(rows, s, state[1], state[2])
    all_finite = add_extent(rows, s, edges)
    base, low, high, nearest = rows[0, s], state[3], state[4], state[5]
    for i in range(STRIP):
        low[i] = np.float64(edges[0, i]) - np.float64(base[i])
        high[i] = np.float64(edges[1, i]) - np.float64(base[i])
        nearest[i] = np.inf
    for k in range(1, rows.shape[0]):
        for i in range(STRIP):
            delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
            closer = abs(delta) < abs(nearest[i]) or (delta == -nearest[i] and delta > 0)
            nearest[i] = delta if closer else nearest[i]
    return all_finite


@compiled_fold(stat.TOTAL, stat.GAIN, stat.LOSS, stat.GAINS, stat.LOSSES)
def fold_trimmed(rows, s, limits, state, flags, edges):
    """Compute the total, and sum and count by sign the changes that reach their limits."""
    total, gain, loss, gains, losses = state
    n = rows.shape[0] - 1
    base = rows[0, s]
    for i in range(STRIP):
        total[i] = 0.0
        gain[i] = 0.0
        loss[i] = 0.0
        gains[i] = 0
        losses[i] = 0
    for k in range(1, n + 1, 3):
        # The base replaces members that do not exist: its change is zero.
        j1, j2 = k + 1 if k + 1 <= n else 0, k + 2 if k + 2 <= n else 0
        m0, m1, m2 = rows[k, s], rows[j1, s], rows[j2, s]
        l0, l1, l2 = least(limits, k), least(limits, j1), least(limits, j2)
        for i in range(STRIP):
            # Counts are float64 here: masks of one width are cheaper than conversions.
            b, t, g, h = np.float64(base[i]), total[i], gain[i], loss[i]
            u, v = np.float64(gains[i]), np.float64(losses[i])
            delta = np.float64(m0[i]) - b
            up, down = delta >= l0, delta <= -l0
            t, g, h = t + delta, g + (delta if up else 0.0), h + (delta if down else 0.0)
            u, v = u + (1.0 if up else 0.0), v + (1.0 if down else 0.0)
            delta = np.float64(m1[i]) - b
            up, down = delta >= l1, delta <= -l1
            t, g, h = t + delta, g + (delta if up else 0.0), h + (delta if down else 0.0)
            u, v = u + (1.0 if up else 0.0), v + (1.0 if down else 0.0)
            delta = np.float64(m2[i]) - b
            up, down = delta >= l2, delta <= -l2
            t, g, h = t + delta, g + (delta if up else 0.0), h + (delta if down else 0.0)
            u, v = u + (1.0 if up else 0.0), v + (1.0 if down else 0.0)
            total[i], gain[i], loss[i] = t, g, h
            gains[i], losses[i] = np.int32(u), np.int32(v)
    return finite(total)


@register_jitable
def least(limits, k):
    """Return the least change of member k that counts: zero has no sign, whatever the limit."""
    return max(limits[max(min(k, limits.shape[0]) - 1, 0)], 5e-324)


@compiled_fold(stat.TOTAL, stat.ACTIVE)
def fold_active(rows, s, limits, state, flags, edges):
    """Compute the total, and the number of members with |τₖ| ≥ limits[0]·|τ̄ − τₖ|."""
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
