"""Reading and writing safetensors headers; every field is checked before any data is read."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from negmerge.checkpoints.dtypes import SIZES
from negmerge.errors import FileError, quoted
from negmerge.support.reading import parse_json
from negmerge.support.systems import read_at

MAX_HEADER = 100_000_000
"""The limit of the safetensors library. The limits hold for reading and writing; a model of some
hundred thousand tensors is within them."""
MAX_TENSORS = 1_000_000
MAX_NAME = 512
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_RANK = 64
METADATA = "__metadata__"
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and the shape of each tensor of a file, in the order of the file."""
NAME_RULE = f"tensor names must be printable and 1 to {MAX_NAME} characters"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint; `offset` is its place in the file of number `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * SIZES[self.dtype]


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of the file, metadata, and all its bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def looks_pickled(start: bytes) -> bool:
    """Whether a file with these first four bytes is a pickle or a zip file, as of `torch.save`."""
    return start[:4] == b"PK\x03\x04" or (
        start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"
    )


def _bytes_at(descriptor: int, count: int, offset: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: read_at(descriptor, memoryview(buffer), offset)])


def read_header(descriptor: int, path: Path, file: int = 0, parts: bool = False) -> Header:
    """Parse and check the header of an open safetensors file.

    With `parts`, tensors may be stored in parts, as `NAME#PART`. `file` is the number of the file
    in the checkpoint.
    """
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise FileError(f"{path}: {size} bytes, too short for a safetensors file")
    start = _bytes_at(descriptor, 8, 0)
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER, size - 8) or length < 2:
        if looks_pickled(start):
            raise FileError(
                f"{path}: a PyTorch pickle, not safetensors; if you trust its source, run "
                f"negmerge convert {shlex.quote(str(path))} --trust -o model.safetensors"
            )
        raise FileError(
            f"{path}: header length {length}, wanted 2 to {min(MAX_HEADER, size - 8)}; "
            "the file is cut off or not safetensors"
        )
    raw = _bytes_at(descriptor, length, 8)
    if len(raw) != length:
        raise FileError(f"{path}: header cut off at {len(raw)} of {length} bytes")
    if raw[:1] != b"{":
        raise FileError(f"{path}: header does not start with '{{'; not a safetensors file")
    if raw.count(b"{") + raw.count(b"[") > 8 * MAX_TENSORS:  # parsing it would fill the memory
        raise FileError(f"{path}: more than {MAX_TENSORS} tensors, or not a safetensors file")
    fields = parse_json(raw, path, "header")
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise FileError(f"{path}: __metadata__ must map strings to strings")
    if len(fields) > MAX_TENSORS:
        raise FileError(f"{path}: {len(fields)} tensors, wanted at most {MAX_TENSORS}")
    tensors = [
        _tensor(name, entry, path, file, 8 + length, parts) for name, entry in fields.items()
    ]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_cover(tensors, path, 8 + length, size)
    return Header({t.name: t for t in tensors}, metadata, start + raw)


def build_header(
    tensors: Tensors, metadata: Mapping[str, str], room: int = 0
) -> tuple[bytes, dict[str, int]]:
    """The header for tensors stored in the given order, and the offset of each in the file.

    The header is padded with spaces to `room` bytes. Raises if it is too long to be read again.
    """
    fields: dict[str, Any] = {}
    if metadata:
        fields[METADATA] = dict(sorted(metadata.items()))
    places: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        places[name] = at
        end = at + prod(shape) * SIZES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * max(-len(raw) % 8, room - len(raw))
    check_limits(len(raw), len(tensors))
    begin = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {k: begin + v for k, v in places.items()}


def check_limits(length: int, tensors: int) -> None:
    """Raise if a header of this length, with this number of tensors, could not be read again."""
    if length > MAX_HEADER or tensors > MAX_TENSORS:
        raise FileError(
            f"{tensors} tensors with a header of {length} bytes do not fit into one safetensors "
            f"file, wanted at most {MAX_TENSORS} tensors and {MAX_HEADER} bytes"
        )


def is_name(name: Any) -> bool:
    """Whether a value is a valid name of a tensor.

    >>> is_name("blocks.0.weight"), is_name("a\\x1b[31m"), is_name(5)
    (True, False, False)
    """
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
        and name != METADATA
    )


def check_names(names: Iterable[str], path: Path) -> None:
    """Raise if `read_header` would refuse one of the names.

    >>> check_names(["a\\n"], Path("x.safetensors"))
    Traceback (most recent call last):
    negmerge.errors.FileError: x.safetensors 'a\\n': tensor names must be printable and ...
    """
    for name in names:
        if not is_name(name):
            raise FileError(f"{path} {quoted(name)}: {NAME_RULE}")


def _is_text(value: Any) -> bool:
    """Whether a value is a string without surrogates, which cannot be written as UTF-8."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _tensor(name: str, entry: Any, path: Path, file: int, data: int, parts: bool) -> TensorInfo:
    def refuse(reason: str) -> FileError:
        return FileError(f"{path} {quoted(name)}: {reason}")

    stem = name.rpartition("#")[0] if parts and "#" in name else name
    if not is_name(stem) or not name.isprintable():
        raise refuse(NAME_RULE)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("wanted exactly the fields dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise refuse(f"unknown dtype {quoted(dtype)}; known: {', '.join(SIZES)}")
    if not _naturals(shape):
        raise refuse(f"shape {quoted(shape)}, wanted a list of whole numbers ≥ 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {quoted(offsets)}, wanted two whole numbers ≥ 0, begin and end")
    if len(shape) > MAX_RANK or prod(shape) >= 2**60:
        raise refuse(f"shape {quoted(shape)} has too many dimensions or elements for any file")
    info = TensorInfo(name, dtype, tuple(shape), file, data + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise refuse(
            f"{offsets[1] - offsets[0]} bytes in the file, "
            f"{dtype} of shape {tuple(shape)} needs {info.nbytes}"
        )
    return info


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_cover(tensors: list[TensorInfo], path: Path, begin: int, size: int) -> None:
    at = begin
    for tensor in tensors:
        if tensor.offset != at:
            kind = "overlaps the tensor before" if tensor.offset < at else "leaves a gap before"
            raise FileError(
                f"{path} {quoted(tensor.name)}: starts at byte {tensor.offset}, wanted {at}: {kind}"
            )
        at += tensor.nbytes
    if at > size:
        raise FileError(f"{path}: has {size} bytes, wanted {at} by its header; the file is cut off")
    if at < size:
        raise FileError(f"{path}: {size - at} bytes too many after the last tensor")
