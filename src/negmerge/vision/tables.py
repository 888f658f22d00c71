"""The splits of a data set as tables, of which single columns and rows can be read.

`datasets` finds the files of a data set: it knows the cards and layouts of the Hub. Parquet files
are then read by row groups (`parquet`), a plain image folder is listed once (`folder`), and the
rest is streamed by `datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from negmerge.errors import FileError, quoted
from negmerge.support.progress import Advance
from negmerge.vision.card import check_card
from negmerge.vision.folder import FolderTable, open_folder
from negmerge.vision.parquet import ParquetTable
from negmerge.vision.places import Hub, Local, walk

Indices = NDArray[np.int64]
PICTURES_AT_ONCE = 64
LABELS_AT_ONCE = 8192

# Other builders of `datasets` take file names from the data, or open formats that link to files.
BUILDERS = ("parquet", "imagefolder")

# `datasets` takes the name of a folder for a pattern if it contains one of these.
PATTERNS = ("[", "*", "?", "{", "::", "://")

# Names that `datasets` uses for one and the same split of a folder without a card.
SYNONYMS = ({"train", "training"}, {"test", "testing"}, {"validation", "valid", "val", "dev"})


def open_tables(place: Local | Hub, splits: Sequence[str], scratch: Path) -> Mapping[str, Table]:
    """Open all splits; refuse other builders, and files outside of a local folder."""
    from datasets import config, load_dataset_builder

    options: dict[str, Any] = {"cache_dir": str(scratch / "cache")}
    if "trust_remote_code" in signature(load_dataset_builder).parameters:
        options["trust_remote_code"] = False  # later versions never run code of a data set
    if isinstance(place, Hub):
        if config.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        folder = place.id
        options |= {"name": place.config, "revision": place.revision}
    else:
        folder = str(place.path)
        options["data_files"] = _data_files(place.path, splits)
        if place.path.is_dir():
            check_card(place.path)
            if (plain := open_folder(place.path, options["data_files"])) is not None:
                return plain
        if place.path.is_file():
            folder = _link({"one.parquet": place.path}, scratch)
            options["data_files"] = {splits[0]: "one.parquet"}
        elif any(sign in folder for sign in PATTERNS):
            inner = {name.removeprefix(f"{folder}/"): Path(name) for name, _ in walk(place.path)}
            folder = _link(inner, scratch)
    builder = load_dataset_builder(folder, **options)
    if builder.name not in BUILDERS:
        raise FileError(
            f"{place}: `datasets` would read its files as {quoted(builder.name)}; wanted parquet "
            "files, or a folder of pictures for each class"
        )
    homes = () if isinstance(place, Hub) else (place.path, scratch / "set")
    inside = tuple(f"{home.resolve()}/" for home in homes) or ""

    def check(file: str) -> None:
        """Raise unless a file, or the archive that contains it, is in the local folder."""
        if not os.path.normpath(file.rpartition("::")[2]).startswith(inside):
            raise FileError(
                f"{place}: names a file of another folder, {quoted(file)}; copy the file into "
                "the folder"
            )

    found: dict[Any, Any] = builder.config.data_files or {}
    files = {str(split): [*map(str, some)] for split, some in found.items()}
    every = [file for some in files.values() for file in some]
    for file in every:
        check(file)
    streamed: Any = builder.as_streaming_dataset()
    embedded = builder.name == "parquet"
    if embedded and all(file.endswith(".parquet") and "::" not in file for file in every):
        return {name: ParquetTable(files[name], streamed[name].features) for name in streamed}
    return {name: StreamedTable(streamed[name], embedded, check) for name in streamed}


def _link(targets: dict[str, Path], scratch: Path) -> str:
    """Make a folder of symbolic links and return its path."""
    folder = scratch / "set"
    for name, target in targets.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    return str(folder)


def _data_files(path: Path, splits: Sequence[str]) -> dict[str, str] | None:
    # By default `datasets` takes any folder called train for a split, also a class of the test set.
    for base in (path, path / "data"):
        if any((base / split).is_dir() for split in splits):
            found = [name for name in sorted({*splits}.union(*SYNONYMS)) if (base / name).is_dir()]
            # A folder without classes, such as ImageNet's test set, would remove all labels.
            used = [name for name in found if any(find_split([name], one) for one in splits)]
            if all(find_split(used, split) for split in splits):
                found = used
            return {name: f"{(base / name).relative_to(path)}/**" for name in found}
    return None


def find_split(names: Any, wanted: str) -> str | None:
    """Return the wanted split, or the first one whose name is a synonym."""
    if wanted in names:
        return wanted
    synonyms = next((known for known in SYNONYMS if wanted in known), set[str]())
    return next((name for name in names if name in synonyms), None)


class StreamedTable:
    """The rows of a split that only `datasets` can read, such as pictures in archives.

    Args:
        embedded: whether the pictures are in the rows, and not in files.
        check: raises if the file of a picture may not be opened.
    """

    origin = ""

    def __init__(self, stream: Any, embedded: bool, check: Callable[[str], None]) -> None:
        self.stream, self.embedded, self.check = stream, embedded, check
        self.features = stream.features or {}

    @cached_property
    def size(self) -> int:
        """The number of rows, which is known only after reading."""
        first = next(iter(self.features), None)
        return 0 if first is None else len(self.column(first))

    def __len__(self) -> int:
        return self.size

    def column(
        self, name: str, picked: Indices | None = None, advance: Advance = lambda count: None
    ) -> pa.ChunkedArray:
        """Read the values of a column.

        Args:
            picked: sorted rows; None: all.
            advance: called with the numbers of rows that were read.
        """
        chunks: list[pa.Array] = []
        for batch in self._batches(name, LABELS_AT_ONCE):
            chunks += batch.chunks
            advance(len(batch))
        found = pa.chunked_array(chunks, type=None if chunks else pa.null())
        return found if picked is None else found.take(pa.array(picked))

    def cells(self, name: str, picked: Indices) -> Iterator[list[Any]]:
        """Read the values of sorted rows of a column of pictures, a few at once."""
        first = 0
        for batch in self._batches(name, PICTURES_AT_ONCE):
            low, high = np.searchsorted(picked, [first, first + len(batch)])
            values = batch.take(pa.array(picked[low:high] - first)).to_pylist()
            first += len(batch)
            for value in () if self.embedded else values:
                if path := value["path"]:
                    self.check(path)
            if values:
                yield values

    def _batches(self, name: str, size: int) -> Iterator[pa.ChunkedArray]:
        for batch in self.stream.select_columns([name]).with_format("arrow").iter(size):
            yield batch[name]


Table = FolderTable | ParquetTable | StreamedTable
"""The rows of a split, of which single columns and rows can be read.

A table has the `datasets` features of the columns, says whether pictures are in the rows and not in
files (`embedded`), and has a hash of the addresses of remote files (`origin`).
"""
