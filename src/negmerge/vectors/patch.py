"""The patch file: a sparse task vector and its origin (`docs/patch-format.md`).

A patch is a safetensors file. A dense tensor is stored under its own name; a sparse tensor as a bit
mask `NAME#mask` and the nonzero values `NAME#values`; a listed tensor as a list of positions
`NAME#list` and the nonzero values; a tensor of zeros is only in the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from negmerge.checkpoints.header import MAX_RANK, Tensors, build_header, check_limits
from negmerge.checkpoints.remote import local_model, resolved
from negmerge.errors import FileError, OptionError, quoted
from negmerge.support.files import atomic_file, temporary_path, write_fully
from negmerge.support.reading import is_file, parse_json
from negmerge.support.remote.stores import Store
from negmerge.support.remote.urls import is_url, join
from negmerge.vectors.entry import LISTED, VALUES, Entry, Layout, Source, listing_is_smaller
from negmerge.vectors.origin import Origin, to_json

FORMAT = "negmerge-patch/1"
FORMATS = (FORMAT, "negmerge-patch/2", "negmerge-patch/3")
"""Version 2 may have listed tensors and bfloat16 values, version 3 also tied tensors."""
PATCH_FILE = "patch.safetensors"
"""The name of the patch in a folder, and on the Hub."""
MASK, LIST = "#mask", "#list"
TABLE = "patch#tensors"
"""The tensor that stores the table of tensors if the header is too small for the table."""


def local_patch(place: str | os.PathLike[str], or_model: bool = False) -> Path:
    """Return the path of a patch on this machine: a file, or `patch.safetensors` of a folder.

    Args:
        place: a path, a URL or a Hub id; it is fetched.
        or_model: return a folder with a model as it is.
    """
    (given,) = resolved([place])
    models = {SINGLE_FILE, INDEX_FILE} if or_model else set[str]()
    if is_url(given):
        store = Store(given)
        names = {f.name for f in store.files(deep=False)} if store.kind == "folder" else set[str]()
        inside = PATCH_FILE in names and names.isdisjoint(models)
        return local_model(join(given, PATCH_FILE) if inside else given)
    folder = Path(given)
    inside = is_file(folder / PATCH_FILE) and not any(is_file(folder / name) for name in models)
    return folder / PATCH_FILE if inside else folder


def header_size(tensors: Tensors, kept: Sequence[str], members: Sequence[str]) -> tuple[int, bool]:
    """The size of a patch's header, and whether the header contains the table of tensors.

    >>> header_size({"w": ("F32", (2, 3))}, [], ["m.safetensors"])
    (8184, True)

    The size depends on names and shapes only. Raises if no header can hold all names, because then
    the patch cannot be written.
    """
    _check_reserved_names(tensors)
    parts = {name + end: ("F64", (10**15,)) for name in tensors for end in (MASK, VALUES)}
    table = {name: ["F64", list(s), "sparse", 10**15] for name, (_, s) in tensors.items()}
    # For each member a fingerprint, a share and a digest; everything else fits into one page.
    around = 4096 + sum(4 * len(to_json(name)) + 256 for name in members)

    def room(stored: Tensors, metadata: dict[str, str]) -> int:
        length = len(build_header(stored, metadata | {"kept": to_json(list(kept))})[0]) + around
        length = -(-length // 4096) * 4096 - 8
        check_limits(length, len(stored))
        return length

    try:
        return room(parts, {"tensors": to_json(table)}), True
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
    """Writes a patch tensor by tensor: values first, then masks and lists, then the header.

    The size of the header at the front of the file depends on names and shapes only, so that the
    same input gives the same bytes.

    Args:
        layout: `auto` to list the positions of a sparse tensor where that is smaller than a mask.
    """

    def __init__(
        self,
        descriptor: int,
        tensors: Tensors,
        kept: Sequence[str],
        members: Sequence[str],
        layout: Layout = "auto",
    ) -> None:
        self.descriptor, self.layout = descriptor, layout
        self.room, self.table_in_header = header_size(tensors, kept, members)
        self.at = 8 + self.room
        self.stored: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.places: list[tuple[str, str, NDArray[Any]]] = []
        self.table: dict[str, Any] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Write the values of one tensor."""
        layout = entry.layout
        if layout == "dense":
            self._append(name, entry.dtype, entry.shape, entry.words())
        elif layout != "zero":
            self._append(name + VALUES, entry.dtype, (entry.nonzero,), entry.words())
            if self.layout == "auto" and listing_is_smaller(entry):
                layout = "listed"
                self.places.append((name + LIST, "U16", entry.listed_positions()))
            else:
                self.places.append((name + MASK, "U8", entry.mask_bits()))
                layout = "sparse"
        self.table[name] = [entry.dtype, list(entry.shape), layout, entry.nonzero]

    def finish(self, origin: Origin) -> None:
        """Write masks, lists and header; no tensor can be added afterwards."""
        for key, dtype, data in self.places:
            self._append(key, dtype, data.shape, data)
        new = any(row[0] == "BF16" or row[2] == "listed" for row in self.table.values())
        metadata = {"format": FORMATS[2 if origin.tied else new]} | origin.to_metadata()
        if self.table_in_header:
            metadata["tensors"] = to_json(self.table)
        else:
            table = np.frombuffer(to_json(self.table).encode(), np.uint8)
            self._append(TABLE, "U8", table.shape, table)
        header, _ = build_header(self.stored, metadata, self.room)
        assert len(header) == 8 + self.room, "the reserved space is too small for the header"
        write_fully(self.descriptor, header, 0)

    def _append(self, key: str, dtype: str, shape: tuple[int, ...], data: NDArray[Any]) -> None:
        write_fully(self.descriptor, np.ascontiguousarray(data).data, self.at)
        self.stored[key] = (dtype, shape)
        self.at += data.nbytes


@contextmanager
def new_patch_file(path: Path) -> Iterator[int]:
    """A descriptor to write a patch to; the file appears only if it can be read as a patch."""
    with atomic_file(path) as descriptor:
        yield descriptor
        with Checkpoint(temporary_path(path), own=True) as file:
            _read_entries(path, file)


def read_patch(path: str | os.PathLike[str]) -> tuple[dict[str, Entry], Origin]:
    """Read the header of a patch; the values of the entries are read later."""
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
    if metadata.get("format") not in FORMATS:
        raise FileError(
            f"{path}: not a patch: metadata 'format' is {quoted(metadata.get('format'))}, wanted "
            f"{' or '.join(map(repr, FORMATS))}; name a file that `negmerge merge` wrote"
        )
    origin = Origin.from_metadata(metadata, file.path)
    table = parse_json(_table(file), file.path, "table of tensors")
    if origin.tied and (metadata["format"] != FORMATS[2] or origin.tied.keys() & table.keys()):
        raise FileError(f"{path}: metadata 'tied' does not fit the tensors; the patch is damaged")
    used = {TABLE} & file.tensors.keys()
    entries: dict[str, Entry] = {}

    def part(key: str, dtype: str, shape: tuple[int, ...]) -> Source:
        info = file.tensors.get(key)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            raise FileError(
                f"{path} {quoted(key)}: wanted {dtype} of shape {shape}, as listed in the table"
            )
        used.add(key)
        return file, info

    for name, row in table.items():
        dtype, shape, layout, nonzero = _checked_row(path, name, row)
        if metadata["format"] == FORMAT and (dtype == "BF16" or layout == "listed"):
            raise FileError(
                f"{path} {quoted(name)}: {dtype} {layout} is not allowed in {FORMAT}; the patch is "
                "damaged"
            )
        mask = values = listing = None
        if layout == "dense":
            values = part(name, dtype, shape)
        elif layout == "sparse":
            mask = part(name + MASK, "U8", (-(-prod(shape) // 8),))
            values = part(name + VALUES, dtype, (nonzero,))
        elif layout == "listed":
            blocks = -(-prod(shape) // LISTED)
            listing = part(name + LIST, "U16", (2 * blocks + nonzero,))
            values = part(name + VALUES, dtype, (nonzero,))
        entries[name] = Entry(shape, dtype, nonzero if values else 0, mask, values, listing)
    if used != file.tensors.keys():
        name = min(file.tensors.keys() - used)
        raise FileError(f"{path} {quoted(name)}: not listed in the table of the patch")
    return entries, origin


def _table(file: Checkpoint) -> bytes:
    """The table of tensors as JSON, from the header or from a tensor of its own."""
    info = file.tensors.get(TABLE)
    if info is None:
        return file.metadata.get("tensors", "").encode()
    if "tensors" in file.metadata or info.dtype != "U8":
        raise FileError(f"{file.path} {quoted(TABLE)}: the patch has two tables, or a damaged one")
    check_limits(info.nbytes, 0)
    return file.read(info).tobytes()


def _checked_row(path: Any, name: str, row: Any) -> tuple[str, tuple[int, ...], str, int]:
    match row:
        case [
            ("F32" | "F64" | "BF16") as dtype,
            list(shape),
            ("zero" | "dense" | "sparse" | "listed") as layout,
            int(nonzero),
        ]:
            small = len(shape) <= MAX_RANK and all(type(s) is int and s >= 0 for s in shape)
            if small and type(nonzero) is int and 0 <= nonzero <= prod(shape):
                return dtype, tuple(shape), layout, nonzero
    raise FileError(f"{path} {quoted(name)}: damaged entry {quoted(row)} in the table of the patch")


def _check_reserved_names(tensors: Mapping[str, Any]) -> None:
    if TABLE in tensors:
        raise OptionError(f"tensor {quoted(TABLE)}: the name is reserved; rename it in all models")
    for name in tensors:
        for end in (MASK, LIST, VALUES):
            if name.endswith(end) and name.removesuffix(end) in tensors:
                raise OptionError(
                    f"tensor {quoted(name)}: the name is reserved for the parts of "
                    f"{quoted(name.removesuffix(end))}; rename it in all models"
                )
