"""Strict reading of safetensors headers: everything is checked before a byte of data is trusted."""

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

from negmerge.dtypes import SIZES
from negmerge.errors import FileError, shown
from negmerge.reading import parse_json

MAX_HEADER = 100_000_000
"""The limit of the safetensors library. What is written keeps to the limits too, so that it can be
read again; models of some hundred thousand tensors fit."""
MAX_TENSORS = 1_000_000
MAX_NAME = 512
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_RANK = 64
METADATA = "__metadata__"
NAMES = f"tensor names must be printable and 1 to {MAX_NAME} characters"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: which file of the checkpoint, from which byte, and what it is."""

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
    """A checked header: tensors in file order, metadata, and the header's own bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def looks_pickled(start: bytes) -> bool:
    """Whether a file begins like what `torch.save` writes: a zip archive or a pickle."""
    return start[:4] == b"PK\x03\x04" or (
        start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"
    )


def read_header(descriptor: int, path: Path, file: int = 0, parts: bool = False) -> Header:
    """Parse and check the header of an open safetensors file.

    descriptor: an open file; path: its name, for errors; file: its number in the checkpoint;
    parts: whether names may carry the name of a part behind a '#'.
    """
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise FileError(f"{path}: {size} bytes, too short for a safetensors file")
    start = os.pread(descriptor, 8, 0)
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER, size - 8) or length < 2:
        if looks_pickled(start):
            raise FileError(
                f"{path}: a PyTorch pickle, not safetensors; if you trust it: "
                f"negmerge convert {shlex.quote(str(path))} --trust -o model.safetensors"
            )
        raise FileError(
            f"{path}: header length {length}, wanted 2 to {min(MAX_HEADER, size - 8)}; "
            "the file is cut off or not safetensors"
        )
    raw = os.pread(descriptor, length, 8)
    if len(raw) != length:
        raise FileError(f"{path}: header cut off at {len(raw)} of {length} bytes")
    if raw[:1] != b"{":
        raise FileError(f"{path}: header does not start with '{{'; not a safetensors file")
    if raw.count(b"{") + raw.count(b"[") > 8 * MAX_TENSORS:  # it would fill the memory
        raise FileError(f"{path}: more than {MAX_TENSORS} tensors, or not a safetensors file")
    fields = parse_json(raw, path, "header")
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise FileError(f"{path}: __metadata__ must map strings to strings")
    if len(fields) > MAX_TENSORS:
        raise FileError(f"{path}: {len(fields)} tensors, at most {MAX_TENSORS} are read")
    tensors = [
        _tensor(name, entry, path, file, 8 + length, parts) for name, entry in fields.items()
    ]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_cover(tensors, path, 8 + length, size)
    return Header({t.name: t for t in tensors}, metadata, start + raw)


def build_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], room: int = 0
) -> tuple[bytes, dict[str, int]]:
    """The header for tensors laid out in the given order, and the place of each in the file.

    tensors: name → (dtype, shape); room: pad the header to this length at least, with spaces.
    Raises if the header would be too long to be read again.
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
    """Raise if a file with such a header could not be read again.

    length: bytes of the header; tensors: how many it lists.
    """
    if length > MAX_HEADER or tensors > MAX_TENSORS:
        raise FileError(
            f"{tensors} tensors with a header of {length} bytes cannot be in one safetensors file: "
            f"at most {MAX_TENSORS} tensors and {MAX_HEADER} bytes can be read again"
        )


def is_name(name: Any) -> bool:
    """Whether a tensor may have this name.

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
    """Raise if a name is one that `read_header` refuses.

    >>> check_names(["a\\n"], Path("x.safetensors"))
    Traceback (most recent call last):
    negmerge.errors.FileError: x.safetensors 'a\\n': tensor names must be printable and ...
    """
    for name in names:
        if not is_name(name):
            raise FileError(f"{path} {shown(name)}: {NAMES}")


def _is_text(value: Any) -> bool:
    """A string that can be written again: half a surrogate pair cannot."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _tensor(name: str, entry: Any, path: Path, file: int, data: int, parts: bool) -> TensorInfo:
    def refuse(reason: str) -> FileError:
        return FileError(f"{path} {shown(name)}: {reason}")

    stem = name.rpartition("#")[0] if parts and "#" in name else name
    if not is_name(stem) or not name.isprintable():
        raise refuse(NAMES)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("wanted exactly the fields dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise refuse(f"unknown dtype {shown(dtype)}; known: {', '.join(SIZES)}")
    if not _naturals(shape):
        raise refuse(f"shape {shown(shape)} must be a list of whole numbers ≥ 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {shown(offsets)} must be two rising whole numbers")
    if len(shape) > MAX_RANK or prod(shape) >= 2**60:
        raise refuse(f"shape {shown(shape)} has more dimensions or elements than any file can hold")
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
            kind = (
                "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            )
            raise FileError(
                f"{path} {shown(tensor.name)}: starts at byte {tensor.offset}, wanted {at}: {kind}"
            )
        at += tensor.nbytes
    if at > size:
        raise FileError(f"{path}: {size} bytes, the header promises {at}: the file is cut off")
    if at < size:
        raise FileError(f"{path}: {size - at} bytes too many after the last tensor")
