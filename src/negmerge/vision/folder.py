"""A plain image folder, `<split>/<class>/<picture>`, listed once and without `datasets`.

`datasets` makes several Python objects for each file and lists a folder several times, which takes
minutes for a million files. A folder with anything else than pictures in folders of classes is left
to `datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from negmerge.support.progress import Advance
from negmerge.vision.card import CARDS

ROWS_AT_ONCE = 64
ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".ppm", ".pgm", ".pbm", ".bmp", ".gif", ".tif", ".tiff")
)

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class FolderTable:
    """A split of a plain image folder: rows are sorted by path, as `datasets` sorts them.

    Args:
        folders: the folders of the classes, in the order of the rows.
        names: for each folder the sorted names of its pictures.
        classes: the sorted names of the classes of all splits.
    """

    folders: tuple[str, ...]
    names: tuple[pa.Array, ...]
    classes: tuple[str, ...]
    embedded = False
    origin = ""

    @cached_property
    def features(self) -> dict[str, Any]:
        """The columns that `datasets` gives to an image folder."""
        from datasets import ClassLabel, Image

        return {"image": Image(), "label": ClassLabel(names=list(self.classes))}

    @cached_property
    def firsts(self) -> Indices:
        """The first row of each folder, and the number of rows."""
        return np.cumsum([0, *map(len, self.names)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def column(
        self, name: str, picked: Indices | None = None, advance: Advance = lambda count: None
    ) -> pa.ChunkedArray:
        """Return the labels, or the paths as the column `image`.

        Args:
            picked: sorted rows; None: all.
            advance: not called: there is nothing to wait for.
        """
        picked = np.arange(len(self)) if picked is None else picked
        if name == "image":
            return pa.chunked_array([pa.array(cells) for cells in self.cells(name, picked)])
        numbers = {known: number for number, known in enumerate(self.classes)}
        labels = np.array([numbers[Path(folder).name] for folder in self.folders])
        return pa.chunked_array([pa.array(labels[self._folders_of(picked)])])

    def cells(self, name: str, picked: Indices) -> Iterator[list[Any]]:
        """Yield the paths of the pictures in sorted rows, a few at once."""
        for start in range(0, len(picked), ROWS_AT_ONCE):
            rows = picked[start : start + ROWS_AT_ONCE]
            found = zip(rows.tolist(), self._folders_of(rows).tolist(), strict=True)
            yield [
                {"path": f"{self.folders[k]}/{self.names[k][row - int(self.firsts[k])]}"}
                for row, k in found
            ]

    def _folders_of(self, rows: Indices) -> Indices:
        return np.searchsorted(self.firsts, rows, side="right") - 1


def open_folder(path: Path, splits: dict[str, str] | None) -> dict[str, FolderTable] | None:
    """List the splits of a plain image folder; return None if the folder is not plain.

    Args:
        splits: the folder of each split, relative to `path`, followed by `/**`.
    """
    if splits is None or any((path / name).exists() for name in (*CARDS, "dataset_infos.json")):
        return None
    listed: dict[str, dict[str, pa.Array]] = {}
    for split, pattern in splits.items():
        found = _classes(f"{path}/{pattern.removesuffix('/**')}")
        if found is None:
            return None
        listed[split] = found
    folders = [folder for found in listed.values() for folder in found]
    classes = tuple(sorted({Path(folder).name for folder in folders}))
    if len(classes) < 2 or not all(listed.values()):  # `datasets` gives such a folder no labels
        return None
    return {
        split: FolderTable(tuple(found), tuple(found.values()), classes)
        for split, found in listed.items()
    }


def _classes(folder: str) -> dict[str, pa.Array] | None:
    """Return the folders of the classes with the sorted names of their pictures."""
    found: dict[str, pa.Array] = {}
    with os.scandir(folder) as entries:
        inner = [entry for entry in entries if entry.name[0] != "."]
    # With the "/", the order is that of the sorted paths of the pictures.
    for entry in sorted(inner, key=lambda entry: f"{entry.name}/"):
        if not entry.is_dir() or entry.name.startswith("__"):
            return None
        with os.scandir(entry.path) as files:
            pictures = [file for file in files if file.name[0] != "."]
        if not all(_is_picture(file) for file in pictures):
            return None
        if pictures:
            try:
                found[entry.path] = pa.array(sorted(file.name for file in pictures))
            except UnicodeEncodeError:  # a name that is not UTF-8
                return None
    return found


def _is_picture(file: os.DirEntry[str]) -> bool:
    ending = os.path.splitext(file.name)[1].lower()  # noqa: PTH122 - a million files
    return ending in ENDINGS and not file.name.startswith("__") and not file.is_dir()
