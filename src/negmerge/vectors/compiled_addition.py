"""θ + s·τ in compiled loops, for every pair of float formats; the same bytes as `ranges.py`.

A function is compiled for the formats of the base, of the result and of the stored values. Numbers
are given as their bits (`uint16`, `uint32`, `uint64`): each is widened to float64 exactly, and the
sum is rounded once. A number that is not finite is only reported; `ranges.py` raises the error.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from negmerge.checkpoints.dtypes import BITS, narrow, widen
from negmerge.support.jit import compiled, compiled_as_python, equals_reference

STRIP = 2048
"""Numbers that are computed at once, in the first-level cache."""
SLACK = 8
"""`find_positions` writes up to so many numbers after the last position."""

# ------------------------------------------------------------------------------------------ formats

U16, U32, U64 = np.uint16, np.uint32, np.uint64
EXPONENT = U64(0x7FF0000000000000)
INFINITE = {"BF16": U16(0x7F80), "F16": U16(0x7C00), "F32": U32(0x7F800000), "F64": EXPONENT}
"""The bits of infinity; a number is finite if not all of these bits are set."""
SIGN, SIGN_OF_DOUBLE = U32(0x8000), U64(1 << 63)
SMALL = np.float32(2.0**-14)
"""The smallest normal float16."""


@register_jitable
def as_single(bits):
    return np.uint32(bits).view(np.float32)


@register_jitable
def as_double(bits):
    return np.uint64(bits).view(np.float64)


@register_jitable
def bits_of_single(x):
    return np.float32(x).view(np.uint32)


@register_jitable
def bits_of_double(x):
    return np.float64(x).view(np.uint64)


@register_jitable
def from_bf16(word):
    return as_single(U32(word) << U32(16))


@register_jitable
def from_f16(word):
    bits = (U32(word) & U32(0x7FFF)) << U32(13)
    # The exponents differ by 112. Subnormal numbers get the leading bit that they do not store,
    # which is then subtracted: arithmetic with subnormal numbers is slow.
    subnormal = bits < U32(1 << 23)
    special = U32(0x7F800000) if bits >= U32(31 << 23) else U32(0)
    bits += U32(113 << 23) if subnormal else U32(112 << 23)
    value = as_single(bits | special) - (SMALL if subnormal else np.float32(0))
    return as_single(bits_of_single(value) | ((U32(word) & SIGN) << U32(16)))


@register_jitable
def rounded(x, smallest, step):
    """Round a float64 once, half to even, to the numbers of a 16-bit format, as float32.

    A number whose last bit has the wanted weight is added and subtracted again. The result for
    numbers that are too large for the format is infinite or, from 2^978 on, NaN.

    Args:
        smallest: the smallest normal number of the format; below it the weight is constant.
        step: 1.5 · 2^(52 - the explicit bits of the format's significand).
    """
    bits = bits_of_double(x)
    power = as_double(bits & EXPONENT)
    large = (power if power > smallest else smallest) * step
    # The difference of equal numbers is +0: the sign is put back.
    return np.float32(as_double(bits_of_double((x + large) - large) | (bits & SIGN_OF_DOUBLE)))


@register_jitable
def round_bf16(x):
    return rounded(x, 2.0**-126, 1.5 * 2.0**45)


@register_jitable
def round_f16(x):
    return rounded(x, 2.0**-14, 1.5 * 2.0**42)


@register_jitable
def round_f32(x):
    return np.float32(x)


@register_jitable
def round_f64(x):
    return x


@register_jitable
def to_bf16(value):
    return U16(bits_of_single(value) >> U32(16))


@register_jitable
def to_f16(value):
    bits = bits_of_single(value)
    sign = (bits >> U32(16)) & SIGN
    size = as_single(bits & U32(0x7FFFFFFF))
    subnormal = size < SMALL
    bits = bits_of_single(size + (SMALL if subnormal else np.float32(0))) >> U32(13)
    bits -= U32(113 << 10) if subnormal else U32(112 << 10)
    return U16((bits if size < np.float32(65536) else U32(0x7C00)) | sign)


FROM = {"F64": as_double, "F32": as_single, "BF16": from_bf16, "F16": from_f16}
"""From bits to a float32 (a float64 for F64) of the same value."""
ROUND = {"F64": round_f64, "F32": round_f32, "BF16": round_bf16, "F16": round_f16}
"""From a float64 to the nearest value of the format, as a float32 (a float64 for F64)."""
TO = {"F64": bits_of_double, "F32": bits_of_single, "BF16": to_bf16, "F16": to_f16}
"""From such a value to its bits."""
WIDE = {"F64": np.float64, "F32": np.float32, "BF16": np.float32, "F16": np.float32}

# ---------------------------------------------------------------------------------------- additions


@register_jitable
def largest(words, infinite):
    """The largest exponent of some numbers, in its place."""
    most = infinite & ~infinite
    for i in range(words.shape[0]):
        exponent = words[i] & infinite
        most = exponent if exponent > most else most
    return most


@dataclass(frozen=True)
class Loops:
    """The compiled functions for a format of the base, of the result and of the values.

    Args:
        convert: `convert(base, out)` converts all numbers; returns whether all are finite.
        add_all: `add_all(base, out, values, scale)` replaces the results where the values are not
            zero; returns the number of changed results, and whether all results are finite.
        add_at: `add_at(base, out, positions, values, scale)` replaces the results at positions;
            returns their number that changed, and whether these are finite. In both, `out` may be
            `base`, if the format is the same.
    """

    convert: Callable[..., bool]
    add_all: Callable[..., tuple[int, bool]]
    add_at: Callable[..., tuple[int, bool]]


@cache
def loops_for(base: str, out: str, values: str) -> Loops:
    """The compiled functions for three formats; the first call compiles them.

    >>> base, values = np.array([0x3F80], np.uint16), np.array([0x3F800000], np.uint32)
    >>> loops_for("BF16", "BF16", "F32").add_all(base, base, values, -0.5)
    (1, True)
    >>> hex(base[0])  # 0.5
    '0x3f00'
    """
    from_base, from_value = FROM[base], FROM[values]
    round_out, to_out, wide_base, wide_out = ROUND[out], TO[out], WIDE[base], WIDE[out]
    infinite, kind = INFINITE[out], BITS[out]
    magnitude = ~BITS[values](0) >> BITS[values](1)
    plain, examples = Plain(base, out, values), Examples(base, out, values)

    @compiled(equals_reference(plain.convert, examples.convert))
    def convert(numbers, results):
        near = np.empty(STRIP, wide_out)
        for start in range(0, numbers.shape[0], STRIP):
            count = min(STRIP, numbers.shape[0] - start)
            some, place = numbers[start : start + count], results[start : start + count]
            for i in range(count):
                near[i] = round_out(np.float64(from_base(some[i])))
            for i in range(count):
                place[i] = to_out(near[i])
        return largest(results, infinite) < infinite

    @compiled(equals_reference(plain.add_all, examples.add_all))
    def add_all(numbers, results, stored, scale):
        changed, most = np.int64(0), infinite & ~infinite
        # One loop for each width of numbers: LLVM computes as many at once as the widest allows.
        wide, near = np.empty(STRIP, wide_base), np.empty(STRIP, wide_out)
        new = np.empty(STRIP, kind)
        for start in range(0, numbers.shape[0], STRIP):
            count = min(STRIP, numbers.shape[0] - start)
            some, place = numbers[start : start + count], results[start : start + count]
            weights = stored[start : start + count]
            for i in range(count):
                wide[i] = from_base(some[i])
            for i in range(count):
                value = np.float64(from_value(weights[i]))
                near[i] = round_out(np.float64(wide[i]) + scale * value)
            for i in range(count):
                new[i] = to_out(near[i])
            for i in range(count):
                fresh, old = new[i], place[i]  # loaded without a condition, or LLVM uses branches
                new[i] = fresh if weights[i] & magnitude else old
            differ = np.int32(0)
            for i in range(count):
                differ += np.int32(1) if new[i] != place[i] else np.int32(0)
            changed += np.int64(differ)
            for i in range(count):
                place[i] = new[i]
            most = max(most, largest(place, infinite))
        return changed, most < infinite

    @compiled(equals_reference(plain.add_at, examples.add_at))
    def add_at(numbers, results, positions, stored, scale):
        changed, bad = np.int64(0), np.int64(0)
        for k in range(stored.shape[0]):
            i = positions[k]
            value = np.float64(from_value(stored[k]))
            word = to_out(round_out(np.float64(from_base(numbers[i])) + scale * value))
            bad |= np.int64(word & infinite == infinite)
            changed += np.int64(word != results[i])
            results[i] = word
        return changed, bad == 0

    return Loops(convert, add_all, add_at)


OF_BYTE = np.array(
    [[*np.flatnonzero([b >> i & 1 for i in range(8)]), *[0] * 8][:8] for b in range(256)], np.uint8
)
"""The positions of the bits of a byte that are set, then zeros."""
COUNTS = np.bitwise_count(np.arange(256, dtype=np.uint8))


def _masks(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    bits = np.arange(256, dtype=np.uint8)
    yield bits, np.zeros(bits.size * 8 + SLACK, U32)


@compiled_as_python(_masks)
def find_positions(bits, positions):
    """Write the numbers of the bits that are set; return how many there are."""
    at = 0
    for j in range(bits.shape[0]):
        byte = bits[j]
        for i in range(8):
            positions[at + i] = U32(8 * j) + U32(OF_BYTE[byte, i])
        at += int(COUNTS[byte])
    return at


# -------------------------------------------------------------------------------------------- proof


@dataclass(frozen=True)
class Plain:
    """The same functions with numpy."""

    base: str
    out: str
    values: str

    def convert(self, numbers, results):
        """All numbers."""
        results[:] = self._bits(widen(numbers.view(np.uint8), self.base))
        return self._finite(results)

    def add_all(self, numbers, results, stored, scale):
        """All numbers where values are not zero."""
        where = np.flatnonzero(widen(stored.view(np.uint8), self.values))
        return self.add_at(numbers, results, where, stored[where], scale)

    def add_at(self, numbers, results, positions, stored, scale):
        """The numbers at positions."""
        where = positions[: stored.size]
        base = widen(numbers[where].view(np.uint8), self.base)
        new = self._bits(base + scale * widen(stored.view(np.uint8), self.values))
        changed = int(np.count_nonzero(new != results[where]))
        results[where] = new
        return changed, self._finite(new)

    def _bits(self, exact):
        return narrow(exact, self.out).view(BITS[self.out])

    def _finite(self, words):
        return bool((words & INFINITE[self.out] != INFINITE[self.out]).all())


@dataclass(frozen=True)
class Examples:
    """Arguments for the check of compiled code: sums that are hard to round, and ordinary ones."""

    base: str
    out: str
    values: str

    def convert(self, dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Every power of two of the base, plus a little."""
        base = self._hard(self.base)
        yield base, np.zeros(base.size, BITS[self.out])

    def add_all(self, dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """More than one strip."""
        base, values = self._numbers()
        values[::3] = 0
        for scale in (-0.45, 1.0, 2.0**-30):
            yield base, self._results(base), values, scale

    def add_at(self, dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Every second number."""
        base, values = self._numbers()
        positions = np.arange(0, base.size, 2, dtype=U32)
        for scale in (-0.45, 1.0, 2.0**-30):
            yield base, self._results(base), positions, values[: positions.size], scale

    def _numbers(self):
        """Numbers of the base, and values, many of which are near half of the last bit."""
        base = np.resize(self._hard(self.base), 2 * STRIP + 7)
        exact = widen(base.view(np.uint8), self.base)
        rng = np.random.default_rng(1)
        small = 2.0 ** -rng.integers(0, 60, base.size) * rng.choice(
            [-1, 1, 3, 1 + 2**-7], base.size
        )
        with np.errstate(all="ignore"):
            values = np.where(np.abs(exact) > 1e30, small, exact * small)
            values = np.where(np.isfinite(values.astype(np.float32)), values, small)
        return base, narrow(values, self.values).view(BITS[self.values])

    def _results(self, base):
        with np.errstate(all="ignore"):
            return narrow(widen(base.view(np.uint8), self.base), self.out).view(BITS[self.out])

    @staticmethod
    def _hard(dtype: str):
        """Zeros, and numbers near each power of two that the format has, of both signs."""
        powers = 2.0 ** np.arange(-1074, 977)
        some = np.concatenate([[0.0], *(powers * f for f in (1, 1.5, 1 + 2.0**-8, 1 + 2.0**-20))])
        with np.errstate(all="ignore"):
            words = narrow(np.concatenate([some, -some]), dtype).view(BITS[dtype])
        return words[words & INFINITE[dtype] != INFINITE[dtype]][:: 1 if dtype != "F64" else 7]
