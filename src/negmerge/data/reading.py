"""Rows of a data set through Hugging Face `datasets`: Hub, folder, parquet and image folder alike.

Rows are streamed: only the split that is wanted is fetched, and no second copy of it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.data.card import check_card
from negmerge.data.decode import Picture
from negmerge.data.places import Hub, Local, files_of
from negmerge.errors import FileError, NegMergeError, printable, shown
from negmerge.terminal import unattended

PICTURES_AT_ONCE = 64
LABELS_AT_ONCE = 8192

# Others of `datasets` take the names of files from the data, or open formats that link to files.
BUILDERS = ("parquet", "imagefolder")

# Where the name of a folder has one of these, `datasets` takes it for a pattern.
PATTERNS = ("[", "*", "?", "{", "::", "://")

# `datasets` calls the splits of a folder without a card by one name for each of these.
SAME = ({"train", "training"}, {"test", "testing"}, {"validation", "valid", "val", "dev"})


@dataclass(frozen=True)
class Columns:
    """What the columns are called; one not in `exact` may be called otherwise in a mirror."""

    image: str
    label: str
    id: str | None
    exact: frozenset[str]


@dataclass(frozen=True)
class Rows:
    """A split whose labels are read and whose pictures are still to come."""

    labels: NDArray[np.int64]
    ids: NDArray[np.str_] | None
    classes: tuple[str, ...]
    pictures: Iterator[list[Picture]]


@contextmanager
def open_rows(
    place: Local | Hub, columns: Columns, split: str, splits: Sequence[str]
) -> Iterator[Rows]:
    """Read the labels and ids of a split, and make its pictures ready to be read in parts.

    Args:
        place: where the set lies.
        columns: what to read.
        split: the split to read.
        splits: the splits whose labels make up the classes, if the set does not list them.
    """
    with _quiet(), TemporaryDirectory(prefix="negmerge-") as temporary:
        scratch = Path(temporary)
        with _told(place, scratch):
            tables = _open(place, splits, scratch)
            name = _find_split(tables, split, place)
            where = f"{place}: split {shown(name)}"
            image = _find_column(tables[name], columns, "image", "Image", place)
            label = _find_column(tables[name], columns, "label", "ClassLabel", place)
            few = _only(tables, [label, columns.id], place, splits, scratch)
            raw = _values(few[name], label)
            if not raw:
                raise FileError(f"{where}: has no images")
            classes = getattr(tables[name].features[label], "names", None)
            if classes is None:
                others = [_same(few, other) for other in splits]
                seen = {v for other in others if other for v in _values(few[other], label)}
                raw, classes = _numbered(raw, seen, where)
            labels = _checked(raw, classes, where)
            ids = _ids(few[name], columns.id, image, place, scratch)
        pictures = _pictures(tables[name], image, place, where, scratch)
        yield Rows(labels, ids, tuple(classes), pictures)


def _open(
    place: Local | Hub, splits: Sequence[str], scratch: Path, columns: list[str] | None = None
) -> Any:
    from datasets import config, load_dataset_builder

    options: dict[str, Any] = {"cache_dir": str(scratch / "cache")}
    if "trust_remote_code" in signature(load_dataset_builder).parameters:
        options["trust_remote_code"] = False  # later versions run no scripts, and have no such word
    if columns is not None:
        options |= {"columns": columns, "batch_size": LABELS_AT_ONCE}
    if isinstance(place, Hub):
        if config.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        where = {"name": place.config, "revision": place.revision}
        return _streamed(load_dataset_builder(place.id, **where, **options), place, scratch)
    if place.path.is_dir():
        check_card(place.path)
    folder, data_files = str(place.path), _folders(place.path, splits)
    if place.path.is_file():
        folder, data_files = (
            _linked({"one.parquet": place.path}, scratch),
            {splits[0]: "one.parquet"},
        )
    elif any(sign in folder for sign in PATTERNS):
        inner = {name.removeprefix(f"{folder}/"): Path(name) for name in files_of(place.path)}
        folder = _linked(inner, scratch)
    builder = load_dataset_builder(folder, data_files=data_files, **options)
    return _streamed(builder, place, scratch)


def _streamed(builder: Any, place: Local | Hub, scratch: Path) -> Any:
    """The splits of a set: parquet or pictures, and of a folder only files of its own."""
    if builder.name not in BUILDERS:
        raise FileError(
            f"{place}: its files would be read as {shown(builder.name)}; wanted parquet, or "
            "pictures in a folder for each class"
        )
    homes = _homes(place, scratch)
    for files in (builder.config.data_files or {}).values():
        for file in files:
            _need_own(str(file), homes, place)
    return builder.as_streaming_dataset()


def _homes(place: Local | Hub, scratch: Path) -> tuple[str, ...]:
    """What the names of all files of a set begin with; nothing for one of the Hub."""
    if isinstance(place, Hub):
        return ("",)
    return tuple(f"{folder.resolve()}/" for folder in (place.path, scratch / "set"))


def _need_own(file: str, homes: tuple[str, ...], place: Local | Hub) -> None:
    """Raise unless a file, or the archive that it is in, lies in the folder of the set."""
    if not os.path.normpath(file.rpartition("::")[2]).startswith(homes):
        raise FileError(f"{place}: names a file of another folder, {shown(file)}; copy it here")


def _linked(targets: dict[str, Path], scratch: Path) -> str:
    folder = scratch / "set"
    for name, target in targets.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)
    return str(folder)


def _folders(path: Path, splits: Sequence[str]) -> dict[str, str] | None:
    # Left to itself `datasets` takes any folder called train for one, also a class of the test.
    for base in (path, path / "data"):
        if any((base / split).is_dir() for split in splits):
            found = [name for name in sorted({*splits}.union(*SAME)) if (base / name).is_dir()]
            # One without classes, such as ImageNet's test, would take the labels from all.
            own = [name for name in found if any(_same([name], split) for split in splits)]
            if all(_same(own, split) for split in splits):
                found = own
            folders = [base / name for name in found]
            return {folder.name: f"{folder.relative_to(path)}/**" for folder in folders}
    return None


def _find_split(tables: Any, wanted: str, place: Local | Hub) -> str:
    if (name := _same(tables, wanted)) is not None:
        return name
    there = ", ".join(shown(name) for name in tables)
    raise FileError(f"{place}: no split {shown(wanted)}; there are: {there}")


def _same(tables: Any, wanted: str) -> str | None:
    if wanted in tables:
        return wanted
    alike = next((names for names in SAME if wanted in names), set[str]())
    return next((name for name in tables if name in alike), None)


def _find_column(table: Any, columns: Columns, field: str, kind: str, place: Local | Hub) -> str:
    wanted = getattr(columns, field)
    features = table.features or {}
    if wanted in features:
        return wanted
    fitting = [name for name, value in features.items() if type(value).__name__ == kind]
    if len(fitting) == 1 and field not in columns.exact:
        return fitting[0]
    there = ", ".join(f"{shown(name)} ({_kind(value)})" for name, value in features.items())
    raise FileError(
        f"{place}: no column {shown(wanted)} for the {field}s; there are: {there or 'none'}; "
        f"name one with data.{field}"
    )


def _kind(feature: Any) -> str:
    return printable(str(getattr(feature, "dtype", type(feature).__name__)))


def _only(
    tables: Any, wanted: list[str | None], place: Local | Hub, splits: Sequence[str], scratch: Path
) -> Any:
    # Parquet can be read without the pictures; a folder of pictures has nothing to leave out.
    first = next(iter(tables.values()))
    present = [name for name in wanted if name is not None and name in first.features]
    if first.info.builder_name != "parquet":
        return tables
    return _open(place, splits, scratch, present)


def _values(table: Any, column: str) -> list[Any]:
    batches = table.with_format("arrow").iter(LABELS_AT_ONCE)
    return [value for batch in batches for value in batch[column].to_pylist()]


def _numbered(raw: list[Any], seen: set[Any], where: str) -> tuple[list[Any], list[str]]:
    given = {value for value in seen if not _missing(value)}
    kinds = {type(value) for value in given}
    if kinds and kinds not in ({str}, {int}):
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise FileError(f"{where}: labels are {found}, wanted names or whole numbers")
    names = sorted(given)
    places = {name: place for place, name in enumerate(names)}
    return [places.get(value) for value in raw], [str(name) for name in names]


def _missing(label: Any) -> bool:
    return label is None or label == "" or (isinstance(label, int) and label < 0)


def _checked(raw: list[Any], classes: Sequence[str], where: str) -> NDArray[np.int64]:
    for index, label in enumerate(raw):
        if _missing(label):
            raise FileError(f"{where}: image {index} has no label; remove it or give it one")
        if label >= len(classes):
            wanted = f"wanted 0 to {len(classes) - 1}"
            raise FileError(f"{where}: image {index} has label {label}, {wanted}")
    return np.array(raw, dtype=np.int64)


def _ids(
    table: Any, column: str | None, image: str, place: Local | Hub, scratch: Path
) -> NDArray[np.str_] | None:
    if column is not None:
        if column not in table.features:
            there = ", ".join(shown(name) for name in table.features)
            raise FileError(f"{place}: no column {shown(column)} for the ids; there are: {there}")
        # An empty id is nobody's: no line of a list is empty.
        given = _values(table, column)
        return np.array(["" if value is None else str(value) for value in given])
    if isinstance(place, Local) and table.info.builder_name == "imagefolder":
        paths = [_known(cell["path"], place, scratch) for cell in _values(table, image)]
        return np.array([path.removeprefix(f"{place.path}/") for path in paths])
    return None


def _pictures(
    table: Any, image: str, place: Local | Hub, where: str, scratch: Path
) -> Iterator[list[Picture]]:
    index = 0
    with _told(place, scratch):
        # The file a parquet names is not looked up: it is a label, and could lead anywhere.
        inside, homes = table.info.builder_name == "parquet", _homes(place, scratch)
        for batch in table.with_format("arrow").iter(PICTURES_AT_ONCE):
            part: list[Picture] = []
            for cell in batch[image].to_pylist():
                data, path = _content(cell, where, index)
                if path and not inside:
                    _need_own(path, homes, place)
                known = _known(path, place, scratch) if path else None
                name = f"{where}: image {index}" + (f" ({shown(known)})" if known else "")
                part.append(Picture(name, data, None if inside else path))
                index += 1
            yield part


def _known(text: str, place: Local | Hub, scratch: Path) -> str:
    return text.replace(str(scratch / "set"), str(place.path)) if isinstance(place, Local) else text


def _content(cell: Any, where: str, index: int) -> tuple[bytes | None, str | None]:
    if isinstance(cell, bytes):
        return cell, None
    if isinstance(cell, dict) and cell.keys() <= {"bytes", "path"}:
        return cell.get("bytes"), cell.get("path")
    raise FileError(f"{where}: image {index} is {type(cell).__name__}, wanted an encoded picture")


@contextmanager
def _told(place: Local | Hub, scratch: Path) -> Iterator[None]:
    try:
        yield
    except NegMergeError:
        raise
    except Exception as error:  # `datasets`, pyarrow, fsspec and the network each have their own
        why = " ".join(str(error).split()) or type(error).__name__
        why = printable(_known(why, place, scratch))
        if isinstance(place, Local):
            raise FileError(f"{place}: cannot be read: {why}") from error
        looked = "".join(f"{shown(path)}, " for path in place.sought)
        raise FileError(
            f"data set {shown(place.name)}: looked for {looked}{place}: {why}; set data.root or "
            f"NEGMERGE_DATA to a folder with {printable(place.name)}/train.parquet"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets
    from datasets.utils import logging
    from huggingface_hub.utils import logging as cards

    loud, bars_off = logging.get_verbosity(), datasets.are_progress_bars_disabled()
    chatty = cards.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what goes wrong is told once, by us
    cards.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with unattended():
            yield
    finally:
        logging.set_verbosity(loud)
        cards.set_verbosity(chatty)
        if not bars_off:
            datasets.enable_progress_bars()
