"""The compiled loop over a segment: read, checksums, fold, finish, one rounding, write.

A segment is read tile by tile into rows, and the rows are folded strip by strip; 16-bit formats are
widened strip by strip, while the strip is in the cache. The fold and the
`finish` of a rule, its tallies, and one of two functions that write the result are compiled into
one function, so that a run compiles only what its rule needs.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba.extending import overload, register_jitable

from negmerge.checkpoints.checksum import add_checksums
from negmerge.checkpoints.fingerprint import BLOCK
from negmerge.merging.fast_folds import bits_of, count_bits, lowest_bit
from negmerge.merging.folds import STRIP, Fold, State, jitable
from negmerge.merging.rows import read_rows, widen
from negmerge.support.jit import Check, compiled

NOT_FINITE, NOT_READ = -1, -2
"""What a loop returns instead of a count."""
DENSE = 16
"""If more of 64 flags are set, it is faster to move all values than to look for those."""
NO_FILES = (np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, 0), np.uint8), 0)
"""The first argument of a loop whose rows are filled already."""


def element(state: State, i: int) -> tuple[Any, ...]:
    """Return element i of every statistic."""
    return tuple(statistic[i] for statistic in state)


@overload(element, inline="always", strict=False)
def _element(state: Any, i: Any) -> Callable[..., Any]:
    # numba needs a body for each number of statistics; a recursive body compiles twice as long.
    picks = "".join(f"state[{j}][i], " for j in range(len(state)))
    return eval(f"lambda state, i: ({picks})")  # noqa: S307 made of numbers only


@register_jitable
def divide(values, divisor, out):
    """Divide values and round them to the format of `out`; −0 becomes 0."""
    size = out.shape[0]
    scale = 1.0 / divisor
    if divisor == 1 or divisor == 2 or divisor == 4 or divisor == 8:
        # The scale is exact, so that the product is the quotient.
        for i in range(size):
            out[i] = values[i] * scale + 0.0
    else:
        for i in range(size):
            out[i] = values[i] / divisor + 0.0


@register_jitable
def write_packed(values, divisor, flags, mask, out, at, size, nonzero):
    """Write a bit for each value of a strip, and the values that are not zero, divided and rounded.

    Args:
        values: the values of the strip; they are overwritten.
        flags: 1 where a value is not zero, else 0.
        mask: the bits, low bit first, in words of 64.
        out: the values that are not zero, one after the other.
        at: the position of the strip in its segment.
        size: the number of values of the strip that belong to the tensor.
        nonzero: the number of values before this strip that are not zero.

    Returns:
        The number of values so far that are not zero, or NOT_FINITE.
    """
    for i in range(size, STRIP):  # a rule may return other values for the zeros after the end
        flags[i] = 0
    found = pack(values, flags)
    place = out[nonzero : nonzero + found]
    divide(values, divisor, place)
    infinite, zero = np.int64(0), np.int64(0)
    for i in range(found):
        infinite |= np.int64(0) if abs(place[i]) < np.inf else np.int64(1)
        zero |= np.int64(1) if place[i] == 0 else np.int64(0)
    if infinite:
        return NOT_FINITE
    if zero:  # too small for the format
        found = remove_zeros(place, flags)
    for first in range(0, STRIP, 64):
        mask[(at + first) // 64] = bits_of(flags, first)
    return nonzero + found


@register_jitable
def pack(values, flags):
    """Move the values whose flags are set to the front; return their number."""
    found = np.uint64(0)  # an index that cannot be negative is faster
    for first in range(0, STRIP, 64):
        rest = bits_of(flags, first)
        if count_bits(rest) > DENSE:
            for i in range(first, first + 64):
                values[found] = values[i]
                found += np.uint64(flags[i])
            continue
        while rest:
            values[found] = values[np.uint64(first) + lowest_bit(rest)]
            found += np.uint64(1)
            rest &= rest - np.uint64(1)
    return np.int64(found)


@register_jitable
def remove_zeros(packed, flags):
    """Remove the zeros from packed values, and clear their flags; return the number of values."""
    found = at = 0
    for i in range(STRIP):
        if flags[i]:
            packed[found] = packed[at]
            flags[i] = packed[at] != 0
            found += flags[i]
            at += 1
    return found


@register_jitable
def write_all(values, divisor, flags, mask, out, at, size, nonzero):
    """Write all values, divided and rounded; arguments and result are those of `write_packed`."""
    place = out[at : at + size]
    divide(values, divisor, place)
    found, infinite = np.int32(0), np.int64(0)
    for i in range(size):
        found += np.int32(1) if place[i] != 0 else np.int32(0)
    for i in range(size):
        infinite |= np.int64(0) if abs(place[i]) < np.inf else np.int64(1)
    return NOT_FINITE if infinite else nonzero + np.int64(found)


def _finish_strip(finish: Callable[..., Any] | None, packs: bool) -> Callable[..., None]:
    """Return a function that computes the values of a strip, and their flags if they are packed.

    Without a finish, the fold computes both and the function does nothing.
    """
    if finish is None:
        return register_jitable(lambda constants, state, values, flags: None)
    finish = jitable(finish)

    @register_jitable
    def finish_strip(constants, state, values, flags):
        for i in range(STRIP):
            values[i] = finish(constants, *element(state, i))
        if packs:
            for i in range(STRIP):
                flags[i] = values[i] != 0

    return finish_strip


def _count_strip(tallies: Sequence[Callable[..., Any]]) -> Callable[..., None]:
    """Return a function that adds the tallies of a strip to their sums."""
    count = register_jitable(lambda constants, state, size, tally: None)
    for j, function in enumerate(tallies):
        count = _with_tally(count, j, jitable(function))
    return count


def _with_tally(before: Callable[..., Any], j: int, function: Callable[..., Any]) -> Any:
    """Return a function that calls another one and then adds tally j."""

    @register_jitable
    def count(constants, state, size, tally):
        before(constants, state, size, tally)
        found = np.int64(0)
        for i in range(size):
            found += np.int64(function(constants, *element(state, i)))
        tally[j] += found

    return count


def segment_loop(
    fold: Fold,
    finish: Callable[..., Any] | None,
    tallies: Sequence[Callable[..., Any]],
    packs: bool,
    proof: Check,
) -> Callable[..., int]:
    """Return the compiled loop of a rule.

    Args:
        finish: computes the values from the statistics; None if the fold computes the values.
        tallies: return an integer for each element, which are summed.
        packs: whether only the values that are not zero are written, with a mask.
    """
    finish_strip, count_strip = _finish_strip(finish, packs), _count_strip(tallies)
    write = write_packed if packs else write_all

    @compiled(proof, error_model="numpy")
    def loop(files, rows, start, stop, checksums, numbers, memory, tally, mask, out, nonzero):
        """Merge elements start … stop of a tensor.

        Args:
            files: the descriptor of each file, the offset of the tensor in it, the rows as bytes
                to read into, and the 16-bit format of the bytes or 0; empty (`NO_FILES`) if the
                rows are filled already.
            rows: strips of floats, in the same memory as the bytes; room for one strip that is
                widened, if the format has 16 bits.
            checksums: one for each model; the checksums of the elements are added.
            numbers: the limits for the fold, the constants for the finish and the tallies, and the
                divisor of the finished values.
            memory: working memory for a strip (`rule.new_memory`).
            tally: the sums of the tallies; those of the elements are added.
            mask: a bit for each value, if the values are packed.
            out: the values.
            nonzero: the number of values before these that are not zero.

        Returns:
            The number of values so far that are not zero, NOT_FINITE, or NOT_READ.
        """
        descriptors, offsets, raw, kind = files
        limits, constants, divisor = numbers
        state, values, flags, edges = memory
        reads = descriptors.shape[0] > 0
        width = 2 if kind else rows.itemsize
        tile = raw.shape[1] // width if reads else rows.shape[1] * STRIP
        for begin in range(start, stop, tile):
            size = min(tile, stop - begin)
            blocks = -(-size * width // BLOCK)
            if reads:
                end = -(-size // STRIP) * STRIP * width
                done = read_rows(descriptors, offsets, begin * width, size * width, end, raw)
                if done < rows.shape[0]:
                    return NOT_READ
            for s in range(-(-size // STRIP)):
                if reads:
                    first = s * STRIP * width // BLOCK
                    last = min(blocks, first + STRIP * width // BLOCK)
                    number = begin * width // BLOCK + first
                    add_checksums(raw, first, last, number, checksums)
                if kind:
                    widen(raw, kind, s * STRIP, rows.shape[1], rows)
                if not fold(rows, 0 if kind else s, limits, state, flags, edges):
                    return NOT_FINITE
                finish_strip(constants, state, values, flags)
                at = begin - start + s * STRIP
                left = min(STRIP, size - s * STRIP)
                count_strip(constants, state, left, tally)
                nonzero = write(values, divisor, flags, mask, out, at, left, nonzero)
                if nonzero < 0:
                    return NOT_FINITE
        return nonzero

    return loop
