"""Compiled reading and widening of rows: one range of a tensor from the files of all models."""

# pyright: basic, reportCallIssue=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import codegen
from numba.extending import intrinsic

from negmerge.checkpoints.dtypes import widen as widen_plainly
from negmerge.support.jit import compiled, equals_reference
from negmerge.support.systems import HAS_PREAD, read_at

BFLOAT16, FLOAT16 = 1, 2
"""The 16-bit formats, as `widen` takes them."""
FORMATS = {BFLOAT16: "BF16", FLOAT16: "F16"}
WORD = ir.IntType(32)
CONVERTS = "+f16c" in codegen.get_host_cpu_features() and not (
    getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None)
)
"""Whether the processor has an instruction for float16, and the compiler may use it."""


# Written for LLVM: numba computes with integers of 64 bits, which would halve the speed.


@intrinsic
def _from_bfloat16(typing, word):
    """Return the float32 of a bfloat16."""

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], WORD), WORD(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _from_float16(typing, word):
    """Return the float32 of a float16."""

    def generate(context, builder, signature, args):
        single = ir.FloatType()
        if CONVERTS:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), single)
        wide = builder.zext(args[0], WORD)
        magnitude = builder.shl(builder.and_(wide, WORD(0x7FFF)), WORD(13))
        # The exponents differ by 112; the product is also right for subnormal numbers.
        product = builder.fmul(builder.bitcast(magnitude, single), single(2.0**112))
        special = builder.icmp_unsigned(">=", magnitude, WORD(0x7C00 << 13))
        bits = builder.or_(
            builder.bitcast(product, WORD), builder.select(special, WORD(0x7F800000), WORD(0))
        )
        sign = builder.shl(builder.and_(wide, WORD(0x8000)), WORD(16))
        return builder.bitcast(builder.or_(bits, sign), single)

    return types.float32(types.uint16), generate


def _widen(raw, kind, first, strips, rows):
    """Do the same as `widen`, with numpy."""
    for k, words in enumerate(raw.view(np.uint16)):
        some = words[first : first + rows[k, :strips].size]
        values = widen_plainly(some.view(np.uint8), FORMATS[kind])
        rows[k, :strips] = values.reshape(strips, -1)


def _numbers(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    # Every 61st 16-bit number except NaN, whose bits the reference does not promise to keep.
    every = np.arange(0, 1 << 16, 61, dtype=np.uint16)
    for kind, infinite in ((BFLOAT16, 0x7F80), (FLOAT16, 0x7C00)):
        words = np.append(every[(every & 0x7FFF) < infinite], [infinite, 1]).astype(np.uint16)
        raw = words[: words.size // 2 * 2].view(np.uint8).reshape(2, -1)
        yield raw, kind, 10, 2, np.zeros((2, 3, raw.shape[1] // 4 - 5), dtypes[4])


@compiled(equals_reference(_widen, _numbers))
def widen(raw, kind, first, strips, rows):
    """Widen 16-bit floats of each row of bytes exactly, from number `first` on.

    Args:
        strips: the number of strips to write.
        rows: models × strips × elements.
    """
    words = raw.view(np.uint16)
    count = rows.shape[2]
    for k in range(rows.shape[0]):
        for s in range(strips):
            some = words[k, first + s * count : first + (s + 1) * count]
            row = rows[k, s]
            if kind == BFLOAT16:
                for i in range(count):
                    row[i] = _from_bfloat16(some[i])
            else:
                for i in range(count):
                    row[i] = _from_float16(some[i])


_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


@contextmanager
def temporary_file(content: bytes) -> Iterator[int | None]:
    """Yield the descriptor of a file with some content.

    None if no file can be written, or if compiled code cannot read one.
    """
    if not HAS_PREAD:
        yield None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TemporaryFile())
            file.write(content)
            file.flush()
        except OSError:  # a full or missing disk, which is no error of the compiled code
            yield None
        else:
            yield file.fileno()


def _read_rows(descriptors, offsets, start, count, end, raw):
    """Do the same as `read_rows`, in Python."""
    for k, row in enumerate(raw):
        if read_at(descriptors[k], row[:count].data, offsets[k] + start) != count:
            return k
        row[count:end] = 0
    return len(raw)


def _files(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    with temporary_file(bytes(range(256))) as file:
        if file is None:
            return
        descriptors = np.full(3, file, np.int32)
        raw = np.full((3, 64), 255, np.uint8)
        yield descriptors, np.array([0, 30, 9]), 5, 40, 48, raw
        yield descriptors, np.array([0, 30, 9]), 200, 40, 48, raw  # the second row is cut off


def _read_rows_by_pread(descriptors, offsets, start, count, end, raw):
    """Read the same bytes of every file into its row; return the number of rows that were read.

    Compiled code calls the `pread` of the system: a merge reads tens of thousands of pieces, and
    acquiring the lock of Python for each would take as long as the reading.

    Args:
        descriptors: an open file for each row.
        offsets: the offset of the tensor in each file.
        start: the first byte of the tensor to read.
        end: each row is filled with zeros from `count` to `end`.
    """
    for k in range(raw.shape[0]):
        if _pread(descriptors[k], raw[k].ctypes.data, count, offsets[k] + start) != count:
            return k
        for i in range(count, end):
            raw[k, i] = 0
    return raw.shape[0]


def _read_no_rows(descriptors, offsets, start, count, end, raw):
    """Read no row, where the system has no `pread`: all rows are then read as those that failed."""
    return 0


read_rows = (
    compiled(equals_reference(_read_rows, _files))(_read_rows_by_pread)
    if HAS_PREAD
    else compiled(equals_reference(_read_no_rows, _files))(_read_no_rows)
)
