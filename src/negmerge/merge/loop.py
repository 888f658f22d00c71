"""The one compiled loop over a segment: read, checksums, fold, finish, one rounding, emit.

A segment is read tile by tile into rows, which are walked strip by strip. The folds of
`kernels.py`, the `finish` of a rule and one of the two emitters here are compiled into one
function, so that a run compiles only what its rule needs.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Most of this is compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from negmerge import fingerprint
from negmerge.dtypes import widen as widened
from negmerge.jit import Proof, compiled, twin
from negmerge.merge.kernels import STRIP, Array, Fold, State, bits_of, lowest_bit

NOT_FINITE, NOT_READ = -1, -2
BFLOAT16, FLOAT16 = 1, 2


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


def _widen(raw: Array, half: int, count: int, rows: Array) -> None:
    """`widen` in numpy."""
    size = rows[:, :count].size * 2
    values = widened(raw.reshape(-1)[:size], "BF16" if half == BFLOAT16 else "F16")
    rows[:, :count] = values.reshape(rows.shape[0], -1)


def _halves(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    # All numbers of 16 bits but NaN, whose bits numpy does not promise to keep.
    every = np.arange(1 << 16, dtype=np.uint16)
    for half, exponent in ((BFLOAT16, 0x7F80), (FLOAT16, 0x7C00)):
        words = every[(every & 0x7FFF) <= exponent]
        raw = words[: words.size // 2 * 2].view(np.uint8).reshape(2, -1)
        yield raw, half, raw.shape[1] // 2, np.zeros((2, raw.shape[1] // 2), np.float32)


@compiled(twin(_widen, _halves))
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


def _add_checksums(
    words: Array, first: int, last: int, number: int, keys: Array, sums: Array
) -> None:
    """`add_checksums` in numpy."""
    for k, row in enumerate(words):
        found = fingerprint.checksum(row[first:last].reshape(-1), number, keys)
        sums[k : k + 1] += np.array([found], np.uint64)


def _blocks(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    words = np.random.default_rng(0).integers(0, 2**64, (2, 5, 512), np.uint64)
    yield words, 1, 4, 7, fingerprint.KEYS, np.array([3, 2**64 - 1], np.uint64)


@compiled(twin(_add_checksums, _blocks))
def add_checksums(
    words: Array, first: int, last: int, number: int, keys: Array, sums: Array
) -> None:
    """Add, for every row, the checksum of blocks first … last, as `fingerprint.py` defines it.

    words: the rows as 64-bit words in blocks of 512; number: that of block `first` in its tensor.
    """
    low, half, phi = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
    for k in range(words.shape[0]):
        for block in range(first, last):
            some = words[k, block]
            inner = np.uint64(0)
            for i in range(512):
                x = some[i] + keys[i]
                inner += (x & low) * (x >> half)
            z = inner + np.uint64(number + block - first + 1) * phi
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            sums[k] += z ^ (z >> np.uint64(31))


_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


@contextmanager
def scratch(content: bytes) -> Iterator[int | None]:
    """A file to read from, by its descriptor; None where none can be written."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TemporaryFile())
            file.write(content)
            file.flush()
        except OSError:  # a full disk, or none: that says nothing of the code
            yield None
        else:
            yield file.fileno()


def _read_rows(
    descriptors: Array, offsets: Array, start: int, count: int, end: int, raw: Array
) -> int:
    """`read_rows` with Python's own `pread`."""
    for k, row in enumerate(raw):
        found = os.pread(descriptors[k], count, offsets[k] + start)
        row[: len(found)] = np.frombuffer(found, np.uint8)
        if len(found) != count:
            return k
        row[count:end] = 0
    return len(raw)


def _files(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    with scratch(bytes(range(256))) as file:
        if file is None:
            return
        descriptors = np.full(3, file, np.int32)
        raw = np.full((3, 64), 255, np.uint8)
        yield descriptors, np.array([0, 30, 9]), 5, 40, 48, raw
        yield descriptors, np.array([0, 30, 9]), 200, 40, 48, raw  # the second row is cut off


@compiled(twin(_read_rows, _files))
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
        for i in range(count, end):
            raw[k, i] = 0
    return raw.shape[0]


# The two ways to emit take a strip of finished values, the divisor, flags for those that are not
# zero, where the results go, the place of the strip in its segment, how many of its values count,
# and how many were kept before. They return how many are kept now, or NOT_FINITE.


@register_jitable
def pack(
    values: Array,
    divisor: float,
    flags: Array,
    mask: Array,
    out: Array,
    at: int,
    size: int,
    nonzero: int,
) -> int:
    """Write a bit per flagged value, low bit first, and the value, divided and rounded.

    mask: words of 64 bits; out: the values kept, one after the other.
    """
    wild = False
    for first in range(0, STRIP, 64):
        bits = bits_of(flags, first)
        rest = bits
        while rest:
            i = lowest_bit(rest)
            value = out.dtype.type(values[np.uint64(first) + i] / divisor)
            out[nonzero] = value
            if value != 0:
                nonzero += 1
            else:  # too small for the format
                bits &= ~(np.uint64(1) << i)
            wild |= not abs(value) < np.inf
            rest &= rest - np.uint64(1)
        mask[(at + first) // 64] = bits
    return NOT_FINITE if wild else nonzero


@register_jitable
def settle(
    values: Array,
    divisor: float,
    flags: Array,
    mask: Array,
    out: Array,
    at: int,
    size: int,
    nonzero: int,
) -> int:
    """Divide and round into place."""
    place = out[at : at + size]
    if divisor == 1:
        for i in range(size):
            place[i] = values[i] + 0.0
    else:
        for i in range(size):
            place[i] = values[i] / divisor + 0.0
    alive, wild = np.int32(0), np.int64(0)
    for i in range(size):
        alive += np.int32(1) if place[i] != 0 else np.int32(0)
    for i in range(size):
        wild |= np.int64(0) if abs(place[i]) < np.inf else np.int64(1)
    return NOT_FINITE if wild else nonzero + np.int64(alive)


def _conclusion(finish: Callable[..., Any] | None, packs: bool) -> Callable[..., None]:
    """A strip's values from its statistics, and flags for those that are not zero if they will be
    packed; nothing is left to do if a fold gives both."""
    if finish is None:
        return register_jitable(lambda constants, state, values, flags: None)
    # A copy, for numba compiles a function once, with the values its names have then.
    finish = FunctionType(
        finish.__code__, finish.__globals__, closure=finish.__closure__, argdefs=finish.__defaults__
    )
    register_jitable(finish)

    @register_jitable
    def conclude(constants: tuple[float, ...], state: State, values: Array, flags: Array) -> None:
        for i in range(STRIP):
            values[i] = finish(constants, *element(state, i))
        if packs:
            for i in range(STRIP):
                flags[i] = values[i] != 0

    return conclude


def segment_kernel(
    fold: Fold, finish: Callable[..., Any] | None, packs: bool, proof: Proof
) -> Callable[..., int]:
    """The loop for a fold, a finish (None: the fold's statistic is the value) and a way to emit.

    proof: what shows that the compiled loop computes that.
    """
    conclude, emit = _conclusion(finish, packs), pack if packs else settle

    @compiled(proof, error_model="numpy")
    def kernel(
        descriptors: Array,
        offsets: Array,
        raw: Array,
        words: Array,
        rows: Array,
        start: int,
        stop: int,
        keys: Array,
        sums: Array,
        limits: Array,
        constants: tuple[float, ...],
        divisor: float,
        state: State,
        values: Array,
        flags: Array,
        edges: Array,
        ballot: Array,
        mask: Array,
        out: Array,
        nonzero: int,
    ) -> int:
        """Merge elements start … stop.

        descriptors, offsets: where row k is read from; none if rows are filled already.
        raw, words, rows: the same rows as bytes, as blocks of words and as strips of floats.
        divisor: what the finished values are divided by.
        nonzero: how many values were kept before. Returns how many are kept now, NOT_FINITE, or
        NOT_READ.
        """
        width = rows.itemsize
        tile = rows.shape[1] * STRIP
        for begin in range(start, stop, tile):
            count = min(tile, stop - begin)
            blocks = -(-count * width // 4096)
            if descriptors.shape[0]:
                end = -(-count // STRIP) * STRIP * width
                size = count * width
                done = read_rows(descriptors, offsets, begin * width, size, end, raw)
                if done < rows.shape[0]:
                    return NOT_READ
            for s in range(-(-count // STRIP)):
                if descriptors.shape[0]:
                    first = s * STRIP * width // 4096
                    last = min(blocks, first + STRIP * width // 4096)
                    add_checksums(words, first, last, begin * width // 4096 + first, keys, sums)
                if not fold(rows, s, limits, state, flags, edges, ballot):
                    return NOT_FINITE
                conclude(constants, state, values, flags)
                at = begin - start + s * STRIP
                left = min(STRIP, count - s * STRIP)
                nonzero = emit(values, divisor, flags, mask, out, at, left, nonzero)
                if nonzero < 0:
                    return NOT_FINITE
        return nonzero

    return kernel
