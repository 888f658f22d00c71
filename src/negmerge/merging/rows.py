"""Compiled reading of rows: one range of a tensor from the files of all models."""

# pyright: basic, reportCallIssue=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numba import types

from negmerge.support.jit import compiled, compiled_as_python, equals_reference

BFLOAT16, FLOAT16 = 1, 2
"""The 16-bit formats, as `widen` takes them."""


def _numbers(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    # Every 61st 16-bit number except NaN, whose bits Python does not promise to keep.
    every = np.arange(0, 1 << 16, 61, dtype=np.uint16)
    for kind, infinite in ((BFLOAT16, 0x7F80), (FLOAT16, 0x7C00)):
        words = np.append(every[(every & 0x7FFF) < infinite], [infinite, 1]).astype(np.uint16)
        raw = words[: words.size // 2 * 2].view(np.uint8).reshape(2, -1)
        yield raw, kind, raw.shape[1] // 2, np.zeros((2, raw.shape[1] // 2), np.float32)


@compiled_as_python(_numbers)
def widen(raw, kind, count, rows):
    """Widen `count` 16-bit floats of each row of bytes to float32, exactly."""
    words, bits = raw.view(np.uint16), rows.view(np.uint32)
    for k in range(rows.shape[0]):
        if kind == BFLOAT16:
            for i in range(count):
                bits[k, i] = np.uint32(words[k, i]) << np.uint32(16)
            continue
        for i in range(count):
            bits[k, i] = (np.uint32(words[k, i]) & np.uint32(0x7FFF)) << np.uint32(13)
        # The exponents differ by 112; the product is also right for subnormal numbers.
        for i in range(count):
            rows[k, i] *= np.float32(2.0**112)
        for i in range(count):
            word = np.uint32(words[k, i])
            special = np.uint32(0x7F800000) if word & np.uint32(0x7C00) == 0x7C00 else np.uint32(0)
            bits[k, i] |= special | ((word & np.uint32(0x8000)) << np.uint32(16))


_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64)
)


@contextmanager
def temporary_file(content: bytes) -> Iterator[int | None]:
    """Yield the descriptor of a file with some content, or None if no file can be written."""
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
    """Do the same as `read_rows`, with the `pread` of Python."""
    for k, row in enumerate(raw):
        found = os.pread(descriptors[k], count, offsets[k] + start)
        row[: len(found)] = np.frombuffer(found, np.uint8)
        if len(found) != count:
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


@compiled(equals_reference(_read_rows, _files))
def read_rows(descriptors, offsets, start, count, end, raw):
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
