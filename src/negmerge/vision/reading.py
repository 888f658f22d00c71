"""Reading of data sets: labels, ids, classes and encoded pictures of the wanted rows.

The rows are those of `tables`. No second copy of them is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import index_in  # pyright: ignore[reportAttributeAccessIssue]

from negmerge.errors import FileError, NegMergeError, printable, quoted
from negmerge.support.progress import Advance, Progress
from negmerge.support.terminal import without_stdin
from negmerge.vision.datasets import datasets as registered
from negmerge.vision.decode import Picture
from negmerge.vision.places import Hub, Local
from negmerge.vision.source import Source
from negmerge.vision.splits import balanced
from negmerge.vision.tables import Table, find_split, open_tables

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows of a split: labels, ids and classes, and a function that reads the pictures.

    Args:
        labels, ids, classes: of the picked rows, in order; the classes of the whole data set.
        picked: the positions of the rows in the split.
        origin: a hash of the addresses of remote files.
        read: yields lists of pictures, from a given one of the rows on.
    """

    labels: NDArray[np.int64]
    ids: NDArray[np.str_] | None
    classes: tuple[str, ...]
    picked: Indices
    origin: str
    read: Callable[[int], Iterator[list[Picture]]]


Pick = Callable[[int], Indices]
"""From the number of rows of a split to the sorted positions of the wanted ones."""


@contextmanager
def open_rows(
    place: Local | Hub,
    source: Source,
    split: str,
    pick: Pick | None = None,
    progress: Progress | None = None,
) -> Iterator[Rows]:
    """Read the labels and ids of rows of a split, and open their pictures for reading in lists.

    If the data set does not list its classes, they are the labels of both splits.

    Args:
        split: `train` or `test`.
        pick: chooses the rows; None: all. Nothing is read of row groups without picked rows.
        progress: shows the reading of the labels on the Hub.
    """
    splits = (source.train, source.test)
    with _quiet(), TemporaryDirectory(prefix="negmerge-") as temporary:
        scratch = Path(temporary)
        with _one_line_errors(place, scratch):
            tables = open_tables(place, splits, scratch)
            wanted = splits[split == "test" and source.test_share is None]
            name = find_split(tables, wanted)
            if name is None:
                there = ", ".join(map(quoted, tables))
                remedy = "; set data.test_share, such as 0.2" if split == "test" else ""
                raise FileError(f"{place}: no split {quoted(wanted)}; there are: {there}{remedy}")
            table = tables[name]
            where = f"{place}: split {quoted(name)}"
            image = _find_column(table, source, "image", "Image", place)
            label = _find_column(table, source, "label", "ClassLabel", place)
            if not len(table):
                raise FileError(f"{where}: has no images")
            used = [found for other in splits if (found := find_split(tables, other))]
            classes, number = _classes(tables, used, name, label, where)
            own = np.arange(len(table))
            if source.test_share is not None:
                tested = _tested(number(table.column(label), own), source.test_share)
                own = tested if split == "test" else np.setdiff1d(own, tested)
            picked = own if pick is None else own[pick(len(own))]
            advance: Advance = lambda count: None  # noqa: E731
            if progress is not None and isinstance(place, Hub):  # elsewhere it takes a moment
                title = f"reading the labels of {place.name} {printable(name)}"
                progress.stage(title, len(picked), "rows")
                advance = progress.advance
            labels = number(table.column(label, picked, advance), picked)
            ids = _ids(table, source.id, image, picked, place, scratch)

        def read(first: int) -> Iterator[list[Picture]]:
            return _pictures(table, image, picked[first:], place, where, scratch)

        yield Rows(labels, ids, classes, picked, table.origin, read)


def split_columns(place: Local | Hub, source: Source) -> dict[str, list[str]]:
    """Return the names of the splits that a location has, and the columns of each."""
    with _quiet(), TemporaryDirectory(prefix="negmerge-") as temporary:
        scratch = Path(temporary)
        with _one_line_errors(place, scratch):
            tables = open_tables(place, (source.train, source.test), scratch)
            return {name: list(table.features or {}) for name, table in tables.items()}


def _tested(labels: NDArray[np.int64], share: float) -> Indices:
    """Return the rows of a split that are the test set; the same ones in every run."""
    return balanced(labels, max(round(share * len(labels)), 1), np.random.default_rng(0))


def _find_column(table: Table, source: Source, field: str, kind: str, place: Local | Hub) -> str:
    wanted, features = getattr(source, field), table.features or {}
    if wanted in features:
        return wanted
    # A column that the caller named must exist; the default names may differ in a local copy.
    usual = registered.get(source.name) if source.name in registered else Source
    fitting = [name for name, value in features.items() if type(value).__name__ == kind]
    if len(fitting) == 1 and wanted == getattr(usual, field):
        return fitting[0]
    kinds = {k: printable(str(getattr(v, "dtype", type(v).__name__))) for k, v in features.items()}
    there = ", ".join(f"{quoted(name)} ({value})" for name, value in kinds.items())
    raise FileError(
        f"{place}: no column {quoted(wanted)} for the {field}s; there are: {there or 'none'}; "
        f"name one with data.{field}"
    )


def _classes(
    tables: Mapping[str, Table], used: Sequence[str], name: str, label: str, where: str
) -> tuple[tuple[str, ...], Callable[[pa.ChunkedArray, Indices], NDArray[np.int64]]]:
    """Return the names of the classes, and a function from values of the labels to numbers.

    Args:
        used: the splits whose labels are the classes, if the data set does not list its classes.
    """
    names, values = getattr(tables[name].features[label], "names", None), None
    if names is None:
        found = {
            value for other in used for value in tables[other].column(label).unique().to_pylist()
        }
        present = {value for value in found if not _is_missing(value)}
        kinds = {type(value) for value in present}
        if kinds and kinds not in ({str}, {int}):
            kind = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise FileError(f"{where}: labels are {kind}, wanted names or whole numbers")
        values = sorted(present)
        names = [str(value) for value in values]
    count = len(names)

    def number(column: pa.ChunkedArray, rows: Indices) -> NDArray[np.int64]:
        if values is not None:
            column = index_in(column, value_set=pa.array(values, type=column.type))
        labels = column.cast(pa.int64()).fill_null(-1).to_numpy()
        wrong = np.flatnonzero((labels < 0) | (labels >= count))
        if len(wrong):
            index, value = rows[wrong[0]], labels[wrong[0]]
            if value < 0:
                raise FileError(f"{where}: image {index} has no label; remove it or label it")
            raise FileError(f"{where}: image {index} has label {value}, wanted 0 to {count - 1}")
        return labels

    return tuple(names), number


def _is_missing(label: Any) -> bool:
    return label is None or label == "" or (isinstance(label, int) and label < 0)


def _ids(
    table: Table, column: str | None, image: str, picked: Indices, place: Local | Hub, scratch: Path
) -> NDArray[np.str_] | None:
    if column is not None:
        if column not in table.features:
            there = ", ".join(map(quoted, table.features))
            raise FileError(f"{place}: no column {quoted(column)} for the ids; there are: {there}")
        # A missing id becomes "", which no list of records can contain.
        values = table.column(column, picked).to_pylist()
        return np.array(["" if value is None else str(value) for value in values])
    if isinstance(place, Local) and not table.embedded:
        cells = chain.from_iterable(table.cells(image, picked))
        paths = (_original(cell["path"], place, scratch) for cell in cells)
        return np.array([path.removeprefix(f"{place.path}/") for path in paths])
    return None


def _pictures(
    table: Table, image: str, picked: Indices, place: Local | Hub, where: str, scratch: Path
) -> Iterator[list[Picture]]:
    rows = iter(picked.tolist())
    with _one_line_errors(place, scratch):
        for cells in table.cells(image, picked):
            part: list[Picture] = []
            for cell in cells:
                name = f"{where}: image {next(rows)}"
                found: Any = {"bytes": cell} if isinstance(cell, bytes) else cell
                if not isinstance(found, dict) or not found.keys() <= {"bytes", "path"}:
                    kind = type(cell).__name__
                    raise FileError(f"{name} is {kind}, wanted an encoded picture")
                if path := found.get("path"):
                    name += f" ({quoted(_original(path, place, scratch))})"
                # The path in a parquet file is only a name: reading it could open any file.
                part.append(Picture(name, found.get("bytes"), None if table.embedded else path))
            yield part
        if next(rows, None) is not None:
            raise FileError(f"{place}: changed while it was read; run again")


def _original(text: str, place: Local | Hub, scratch: Path) -> str:
    """Replace the folder of links by the folder of the data set."""
    return text.replace(str(scratch / "set"), str(place.path)) if isinstance(place, Local) else text


@contextmanager
def _one_line_errors(place: Local | Hub, scratch: Path) -> Iterator[None]:
    try:
        yield
    except NegMergeError:
        raise
    except Exception as error:  # `datasets`, pyarrow, fsspec and the network have many types
        why = " ".join(str(error).split()) or type(error).__name__
        why = printable(_original(why, place, scratch))
        if isinstance(place, Local):
            raise FileError(f"{place}: cannot be read: {why}") from error
        searched = "".join(f"{quoted(path)}, " for path in place.searched)
        raise FileError(
            f"data set {quoted(place.name)}: looked for {searched}{place}: {why}; set data.root or "
            f"NEGMERGE_DATA to a folder with {printable(place.name)}/train.parquet"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off messages, progress bars and questions of `datasets` and `huggingface_hub`."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub.utils import logging as hub_logging

    with ExitStack() as stack:
        for library in (logging, hub_logging):
            stack.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(logging.CRITICAL)
        if not datasets.are_progress_bars_disabled():
            stack.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        stack.enter_context(without_stdin())
        yield
