"""The patch file: a sparse task vector and where it came from (`docs/patch-format.md`).

It is a safetensors file. A dense tensor is stored under its own name; a sparse one as a bit mask
`NAME#mask` and the values that are not zero `NAME#values`; one that is all zero is only listed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoint import Checkpoint
from negmerge.dtypes import SIZES, Bytes
from negmerge.errors import FileError, OptionError, shown
from negmerge.files import atomic, temporary, write
from negmerge.header import MAX_RANK, TensorInfo, build_header, check_limits
from negmerge.reading import parse_json, parse_json_value

FORMAT = "negmerge-patch/1"
MASK, VALUES = "#mask", "#values"
TABLE = "patch#tensors"
"""The table of tensors, where the header has no room for it."""
Layout = Literal["auto", "sparse", "dense"]
Source = NDArray[Any] | tuple[Checkpoint, TensorInfo] | list[NDArray[Any]]
"""Where numbers are: in memory, in a file, or in memory in pieces that are joined when needed."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a task vector: bits and values, or all values, or nothing.

    mask: one bit per element, low bit first; None if the values are dense or there are none.
    values: float32, or float64 where an input was float64.
    """

    shape: tuple[int, ...]
    dtype: str
    nonzero: int
    mask: Source | None = None
    values: Source | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        if self.values is None:
            return 0
        if self.mask is None:
            return self.elements * SIZES[self.dtype]
        return -(-self.elements // 8) + self.nonzero * SIZES[self.dtype]

    @property
    def layout(self) -> str:
        return "zero" if self.values is None else "dense" if self.mask is None else "sparse"

    def bits(self, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes `start` to `stop` of the mask."""
        assert self.mask is not None
        return _part(self.mask, np.uint8, start, -(-self.elements // 8) if stop is None else stop)

    def stored(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Values `start` to `stop`, as stored."""
        if self.values is None:
            return np.empty(0, _numpy(self.dtype))
        count = self.elements if self.mask is None else self.nonzero
        return _part(self.values, _numpy(self.dtype), start, count if stop is None else stop)

    def dense(self) -> NDArray[Any]:
        """All elements, flat."""
        if self.values is None:
            return np.zeros(self.elements, _numpy(self.dtype))
        if self.mask is None:
            return self.stored()
        found = np.zeros(self.elements, _numpy(self.dtype))
        found[self.positions()] = self.stored()
        return found

    def positions(self) -> NDArray[np.int64]:
        """Flat indices of the elements that are not zero."""
        if self.values is None:
            return np.empty(0, np.int64)
        if self.mask is None:
            return np.flatnonzero(self.stored())
        self.counts(self.elements)
        return np.flatnonzero(np.unpackbits(self.bits(), count=self.elements, bitorder="little"))

    def counts(self, step: int) -> list[int]:
        """How many values lie in each range of `step` elements of a sparse tensor.

        This is where a mask that does not fit its values is found out.
        """
        found: list[int] = []
        last = np.zeros(1, np.uint8)
        for start in range(0, self.elements, step):
            bits = self.bits(start // 8, -(-min(start + step, self.elements) // 8))
            found.append(int(np.bitwise_count(bits).sum()))
            last = bits[-1:]
        spare = int(last[0]) >> (self.elements % 8) if self.elements % 8 else 0
        if sum(found) != self.nonzero or spare:
            raise FileError(
                f"{self.where()}: the mask has {sum(found)} bits for {self.nonzero} values; "
                "the patch is damaged"
            )
        return found

    def where(self) -> str:
        """The file and the name of this tensor, for errors."""
        if isinstance(self.values, tuple):
            model, info = self.values
            return f"{model.path} {shown(info.name.removesuffix(VALUES))}"
        return "a task vector in memory"

    @classmethod
    def of(cls, flat: NDArray[Any], shape: tuple[int, ...], layout: Layout = "auto") -> Entry:
        """Pack a flat float32 or float64 array.

        >>> Entry.of(np.array([0, 2, 0], np.float32), (3,), "sparse").stored()
        array([2.], dtype=float32)
        """
        dtype = {4: "F32", 8: "F64"}[flat.itemsize]
        nonzero = int(np.count_nonzero(flat))
        if not nonzero:
            return cls(shape, dtype, 0)
        if layout_for(nonzero, flat.size, dtype, layout) == "dense":
            return cls(shape, dtype, nonzero, None, flat)
        mask = np.packbits(flat != 0, bitorder="little")
        return cls(shape, dtype, nonzero, mask, flat[flat != 0])


def layout_for(nonzero: int, elements: int, dtype: str, layout: Layout) -> str:
    """The layout of a tensor: as asked for, or the smaller one."""
    if layout != "auto":
        return layout
    sparse = -(-elements // 8) + nonzero * SIZES[dtype]
    return "sparse" if sparse < elements * SIZES[dtype] else "dense"


@dataclass(frozen=True)
class Origin:
    """Where a task vector came from.

    members: name and fingerprint of each, and how often it alone kept the others from agreeing
        (`sole_dissent`, a share of the `sampled` elements; absent below three members).
    kept: tensors that stay the base's: integers, and BatchNorm statistics unless they are merged.
    """

    rule: str
    n: int
    base: str
    options: dict[str, Any] = field(default_factory=dict)
    members: list[dict[str, Any]] = field(default_factory=list)
    sampled: int = 0
    kept: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        return {k: v if isinstance(v, str) else _json(v) for k, v in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], path: Path) -> Origin:
        found: dict[str, Any] = {}
        for name, fits in _FIELDS.items():
            try:
                text = metadata[name]
                plain = name in ("rule", "base")
                found[name] = text if plain else parse_json_value(text, path, name)
                if not fits(found[name]):
                    raise ValueError
            except (KeyError, ValueError, FileError):
                raise FileError(
                    f"{path}: metadata {name!r} of the patch is missing or damaged: "
                    f"{shown(metadata.get(name))}"
                ) from None
        return cls(**found)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _word_map(value: Any) -> bool:
    return isinstance(value, dict) and _words(list(value.values()))


def _members(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict)
        and m.keys() <= {"name", "fingerprint", "sole_dissent"}
        and isinstance(m.get("name"), str)
        and isinstance(m.get("fingerprint"), str)
        and isinstance(m.get("sole_dissent", 0), int | float)
        for m in value
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "rule": lambda v: isinstance(v, str),
    "base": lambda v: isinstance(v, str),
    "n": lambda v: type(v) is int and v > 0,
    "options": lambda v: (
        isinstance(v, dict) and all(isinstance(x, str | int | float | bool) for x in v.values())
    ),
    "members": _members,
    "sampled": lambda v: type(v) is int and v >= 0,
    "kept": _words,
    "digests": _word_map,
    "versions": _word_map,
}


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("negmerge", "numba", "numpy")}


def header_room(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], kept: Sequence[str], members: Sequence[str]
) -> tuple[int, bool]:
    """Bytes to keep free for the header of a patch, and whether its table of tensors goes there.

    >>> header_room({"w": ("F32", (2, 3))}, [], ["m.safetensors"])
    (8184, True)

    It depends on names and shapes only. Raises if no header could hold all names: then there is no
    use in making the patch.

    tensors: dtype and shape of each; kept, members: names that the header will hold too.
    """
    _refuse_collisions(tensors)
    parts = {name + end: ("F64", (10**15,)) for name in tensors for end in (MASK, VALUES)}
    table = {name: ["F64", list(s), "sparse", 10**15] for name, (_, s) in tensors.items()}
    # For each member a fingerprint, a share and a digest; the rest is a page at most.
    around = 4096 + sum(4 * len(_json(name)) + 256 for name in members)

    def room(laid: Mapping[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> int:
        length = len(build_header(laid, metadata | {"kept": _json(list(kept))})[0]) + around
        length = -(-length // 4096) * 4096 - 8
        check_limits(length, len(laid))
        return length

    try:
        return room(parts, {"tensors": _json(table)}), True
    except FileError:
        pass
    try:
        return room(parts | {TABLE: ("U8", (10**15,))}, {}), False
    except FileError as error:
        raise FileError(
            f"a patch of {len(tensors)} tensors with such names cannot be written: {error}; "
            "shorten the names in all models"
        ) from error


class PatchWriter:
    """Writes a patch while it is made: values in the order they come, then masks, the header last.

    Room for the header is kept free at the front; it depends on names and shapes only, so the same
    input gives the same bytes.
    """

    def __init__(
        self,
        descriptor: int,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        kept: Sequence[str],
        members: Sequence[str],
    ) -> None:
        """tensors: dtype and shape of each; kept, members: names that the header will hold too."""
        self.descriptor = descriptor
        self.room, self.inside = header_room(tensors, kept, members)
        self.at = 8 + self.room
        self.laid: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.masks: list[tuple[str, Bytes]] = []
        self.table: dict[str, Any] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Append one tensor."""
        self.table[name] = [entry.dtype, list(entry.shape), entry.layout, entry.nonzero]
        if entry.layout == "zero":
            return
        values = entry.stored()
        if entry.layout == "dense":
            self._append(name, entry.dtype, entry.shape, values)
        else:
            self._append(name + VALUES, entry.dtype, (entry.nonzero,), values)
            self.masks.append((name, entry.bits()))

    def finish(self, origin: Origin) -> None:
        """Write masks and header; nothing may be added afterwards."""
        for name, mask in self.masks:
            self._append(name + MASK, "U8", mask.shape, mask)
        metadata = {"format": FORMAT} | origin.to_metadata()
        if self.inside:
            metadata["tensors"] = _json(self.table)
        else:
            table = np.frombuffer(_json(self.table).encode(), np.uint8)
            self._append(TABLE, "U8", table.shape, table)
        header, _ = build_header(self.laid, metadata, self.room)
        assert len(header) == 8 + self.room, "the room kept for the header was too small"
        write(self.descriptor, header, 0)

    def _append(self, key: str, dtype: str, shape: tuple[int, ...], data: NDArray[Any]) -> None:
        write(self.descriptor, np.ascontiguousarray(data).data, self.at)
        self.laid[key] = (dtype, shape)
        self.at += data.nbytes


@contextmanager
def patch_file(path: Path) -> Iterator[int]:
    """Open a descriptor for a patch, which takes its name only when it was found readable."""
    with atomic(path) as descriptor:
        yield descriptor
        with Checkpoint(temporary(path), own=True) as file:
            _read_entries(path, file)


def read_patch(path: str | os.PathLike[str]) -> tuple[dict[str, Entry], Origin]:
    """The entries of a patch, still on disk, and its origin."""
    file = Checkpoint(path, own=True)
    try:
        return _read_entries(path, file)
    except BaseException:
        file.close()
        raise


def _read_entries(
    path: str | os.PathLike[str], file: Checkpoint
) -> tuple[dict[str, Entry], Origin]:
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        found = metadata.get("format")
        raise FileError(
            f"{path}: not a patch: metadata 'format' is {shown(found)}, wanted {FORMAT!r}; "
            "a patch is what `negmerge merge` writes"
        )
    origin = Origin.from_metadata(metadata, file.path)
    table = parse_json(_table(file), file.path, "table of tensors")
    used = {TABLE} & file.tensors.keys()
    entries: dict[str, Entry] = {}

    def part(key: str, dtype: str, shape: tuple[int, ...]) -> Source:
        info = file.tensors.get(key)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            raise FileError(f"{path} {shown(key)}: wanted {dtype} of shape {shape}, as listed")
        used.add(key)
        return file, info

    for name, row in table.items():
        dtype, shape, layout, nonzero = _checked_row(path, name, row)
        elements = prod(shape)
        if layout == "zero":
            entries[name] = Entry(shape, dtype, 0)
        elif layout == "dense":
            entries[name] = Entry(shape, dtype, nonzero, None, part(name, dtype, shape))
        else:
            mask = part(name + MASK, "U8", (-(-elements // 8),))
            entries[name] = Entry(
                shape, dtype, nonzero, mask, part(name + VALUES, dtype, (nonzero,))
            )
    if used != file.tensors.keys():
        raise FileError(f"{path} {shown(min(file.tensors.keys() - used))}: not listed in the patch")
    return entries, origin


def _table(file: Checkpoint) -> bytes:
    """The table of tensors as JSON, from the header or from a tensor of its own."""
    info = file.tensors.get(TABLE)
    if info is None:
        return file.metadata.get("tensors", "").encode()
    if "tensors" in file.metadata or info.dtype != "U8":
        raise FileError(f"{file.path} {shown(TABLE)}: the patch has two tables, or a damaged one")
    check_limits(info.nbytes, 0)
    return file.read(info).tobytes()


def _checked_row(path: Any, name: str, row: Any) -> tuple[str, tuple[int, ...], str, int]:
    match row:
        case [
            ("F32" | "F64") as dtype,
            list(shape),
            ("zero" | "dense" | "sparse") as layout,
            int(nonzero),
        ]:
            small = len(shape) <= MAX_RANK and all(type(s) is int and s >= 0 for s in shape)
            if small and type(nonzero) is int and 0 <= nonzero <= prod(shape):
                return dtype, tuple(shape), layout, nonzero
    raise FileError(f"{path} {shown(name)}: damaged entry {shown(row)} in the patch's table")


def _refuse_collisions(tensors: Mapping[str, Any]) -> None:
    if TABLE in tensors:
        raise OptionError(f"tensor {shown(TABLE)}: its name is reserved; rename it in all models")
    for name in tensors:
        for end in (MASK, VALUES):
            if name.endswith(end) and name.removesuffix(end) in tensors:
                raise OptionError(
                    f"tensor {shown(name)}: its name is reserved for the parts of "
                    f"{shown(name.removesuffix(end))}; rename it in all models"
                )


def _part(source: Source, dtype: Any, start: int, stop: int) -> NDArray[Any]:
    if isinstance(source, list):
        if len(source) > 1:
            source[:] = [np.concatenate(source)]
        source = source[0]
    if isinstance(source, np.ndarray):
        return source.reshape(-1)[start:stop]
    model, info = source
    size = np.dtype(dtype).itemsize
    return model.read(info, start * size, stop * size).view(dtype)


def _numpy(dtype: str) -> Any:
    return np.float32 if dtype == "F32" else np.float64


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
