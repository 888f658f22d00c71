"""Rows of a data set through Hugging Face `datasets`: Hub, folder, parquet and image folder alike.

Rows are streamed: only the split that is wanted is fetched, and no second copy of it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.data.decode import Picture
from negmerge.data.places import Hub, Local
from negmerge.errors import FileError, NegMergeError, shown

BATCH = 256


@dataclass(frozen=True)
class Wanted:
    """Names of the columns to read, and whether another may stand in for a missing one."""

    image: str
    label: str
    id: str | None


@dataclass(frozen=True)
class Rows:
    """A split whose labels are read and whose pictures are still to come."""

    labels: NDArray[np.int64]
    ids: NDArray[np.str_] | None
    classes: tuple[str, ...]
    pictures: Iterator[list[Picture]]


@contextmanager
def open_rows(place: Local | Hub, wanted: Wanted, split: str) -> Iterator[Rows]:
    """Read labels and ids of a split, and make its pictures ready to be read in batches."""
    with _quiet(), TemporaryDirectory() as scratch:
        with _told(place):
            table = _open(place, scratch)[split]
            image = _column(table, wanted.image, "Image", place)
            label = _column(table, wanted.label, "ClassLabel", place)
            found = np.concatenate(
                [batch[label].to_numpy() for batch in table.with_format("arrow").iter(BATCH)]
            )
        yield Rows(
            labels=found.astype(np.int64),
            ids=None,
            classes=tuple(table.features[label].names),
            pictures=_pictures(table, image, place),
        )


def _open(place: Local | Hub, scratch: str) -> Any:
    from datasets import load_dataset

    if isinstance(place, Hub):
        options = {"name": place.config, "revision": place.revision}
        return load_dataset(place.id, streaming=True, cache_dir=scratch, **options)
    if place.path.is_file():
        chosen = {"train": place.path.name}
        folder = str(place.path.parent)
        return load_dataset(folder, data_files=chosen, streaming=True, cache_dir=scratch)
    return load_dataset(str(place.path), streaming=True, cache_dir=scratch)


def _column(table: Any, wanted: str, kind: str, place: Local | Hub) -> str:
    if wanted in table.features:
        return wanted
    fitting = [name for name, value in table.features.items() if type(value).__name__ == kind]
    if len(fitting) != 1:
        there = ", ".join(shown(name) for name in table.features)
        raise FileError(f"{place}: no column {shown(wanted)}; there are: {there}")
    return fitting[0]


def _pictures(table: Any, image: str, place: Local | Hub) -> Iterator[list[Picture]]:
    index = 0
    with _told(place):
        for batch in table.with_format("arrow").iter(BATCH):
            cells = batch[image].to_pylist()
            yield [Picture(index + i, cell["bytes"], cell["path"]) for i, cell in enumerate(cells)]
            index += len(cells)


@contextmanager
def _told(place: Local | Hub) -> Iterator[None]:
    try:
        yield
    except NegMergeError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise FileError(f"{place}: cannot be read: {why}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    import datasets

    shown_before = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown_before:
            datasets.enable_progress_bars()
