"""The file of an accumulator: a safetensors file with the arrays of all statistics."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.header import build_header
from negmerge.checkpoints.state_dict import PathLike
from negmerge.errors import FileError, quoted
from negmerge.merging.inputs import Buffers
from negmerge.support.files import atomic_file, temporary_path, write_fully
from negmerge.support.reading import parse_json_value

FORMAT = "negmerge-accumulator/1"
"""A tensor `NAME#STATISTIC` for every tensor and statistic."""
COMPACT = "negmerge-accumulator/2"
"""One tensor for each statistic, for models with more tensors than a header can list."""

Arrays = Mapping[str, Mapping[str, NDArray[Any]]]
"""Tensor → statistic → a flat array of int16 or float64."""
Shapes = Mapping[str, tuple[int, ...]]
_Member = Annotated[dict[Literal["name", "fingerprint"], str], Field(min_length=2)]
_FIELDS: dict[str, TypeAdapter[Any]] = {
    "members": TypeAdapter(list[_Member]),
    "rules": TypeAdapter(dict[str, dict[str, Any]]),
    "dtypes": TypeAdapter(dict[str, Literal["F32", "F64"]]),
    "buffers": TypeAdapter(Buffers),
    "include": TypeAdapter(list[str]),
    "exclude": TypeAdapter(list[str]),
}


def state_header(
    arrays: Arrays, shapes: Shapes, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Build the header of a file.

    Returns:
        The header, and the offset of the arrays of each statistic, which follow each other in the
        order of the tensors.
    """
    first, statistics = next(iter(arrays.items()))
    formats = {s: _format(statistics[s]) for s in sorted(statistics)}
    listed = {f"{name}#{s}": (formats[s], shapes[name]) for s in formats for name in arrays}
    try:
        header, places = build_header(listed, {**metadata, "format": FORMAT})
        return header, {s: places[f"{first}#{s}"] for s in formats}
    except FileError:
        compact = {s: (formats[s], (_elements(shapes),)) for s in formats}
        return build_header(compact, {**metadata, "format": COMPACT})


def write_state(
    path: PathLike, arrays: Arrays, shapes: Shapes, metadata: Mapping[str, str]
) -> None:
    """Write a file atomically."""
    header, places = state_header(arrays, shapes, metadata)
    with atomic_file(Path(path)) as descriptor:
        write_fully(descriptor, header, 0)
        for s, at in places.items():
            for statistics in arrays.values():
                write_fully(descriptor, statistics[s].data, at)
                at += statistics[s].nbytes
        with Checkpoint(temporary_path(Path(path)), own=True):
            pass


def read_metadata(file: Checkpoint) -> dict[str, Any]:
    """Return the members, rules, dtypes and buffers of a file, checked."""
    metadata, found = file.metadata, dict[str, Any]()
    if metadata.get("format") not in (FORMAT, COMPACT):
        raise FileError(
            f"{file.path}: not an accumulator: metadata 'format' is "
            f"{quoted(metadata.get('format'))}, wanted {FORMAT!r}"
        )
    for name, adapter in _FIELDS.items():
        value: Any = metadata.get(name, "[]" if name in ("include", "exclude") else "")
        if name != "buffers":
            value = parse_json_value(value, file.path, f"metadata {name!r}")
        try:
            found[name] = adapter.validate_python(value, strict=True)
        except ValidationError:
            raise damaged(file, f"{name} is {quoted(metadata.get(name))}") from None
    return found


def read_arrays(file: Checkpoint, arrays: Arrays, shapes: Shapes) -> None:
    """Read the statistics of a file into arrays."""
    first = 0
    for name, statistics in arrays.items():
        for s, array in statistics.items():
            if file.metadata["format"] == FORMAT:
                key, shape, at = f"{name}#{s}", shapes[name], 0
            else:
                key, shape, at = s, (_elements(shapes),), first * array.itemsize
            info = file.tensors.get(key)
            if info is None or (info.dtype, info.shape) != (_format(array), shape):
                raise FileError(
                    f"{file.path} {quoted(name)}: statistic {s!r} is missing or damaged"
                )
            array[:] = file.read(info, at, at + array.nbytes).view(array.dtype)
        first += prod(shapes[name])


def damaged(file: Checkpoint, reason: object) -> FileError:
    """Return the error for metadata that cannot be used."""
    return FileError(f"{file.path}: metadata of the accumulator is damaged: {reason}")


def _format(array: NDArray[Any]) -> str:
    return "I16" if array.dtype.kind == "i" else "F64"


def _elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))
