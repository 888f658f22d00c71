"""Data sets by name. ◄ ADD A DATA SET: one `add(...)` at the end of this file."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, OptionError, quoted
from negmerge.registry import Registry
from negmerge.support.progress import Progress, Quiet
from negmerge.support.remote.urls import Place, is_url
from negmerge.vision.cache import (
    Images,
    cache_folder,
    drop_parts,
    kept_parts,
    new_entry,
    open_entry,
    open_or_make,
    write_array,
)
from negmerge.vision.decode import VERSION, Picture, decode_all
from negmerge.vision.places import Hub, Local, Snapshot, find
from negmerge.vision.source import CLIP, GREY, IMAGENET, DataSize, Source
from negmerge.vision.splits import Indices, held_out_rows

if TYPE_CHECKING:
    from negmerge.vision.reading import Rows

Portion = Literal["all", "held_out", "labels"]

__all__ = ["DataSize", "Images", "Source", "datasets", "load", "load_some", "resolve"]

LARGE = 1 << 30
"""The largest decoded split, in bytes, of which all images are decoded when some are needed."""

datasets = Registry[Source]("data set")


def resolve(name: str, **overrides: Any) -> Source:
    """Return the source of a registered name, a local path or a Hub id.

    >>> resolve("cifar10").size
    32
    >>> resolve("someone/birds", size=64, label="species").label
    'species'
    >>> resolve("cifar11")
    Traceback (most recent call last):
    negmerge.errors.OptionError: unknown data set 'cifar11'; did you mean 'cifar10' or ...

    Args:
        name: a path is a folder of parquet files, an image folder `<split>/<class>/*.png`, or a
            parquet file.
        overrides: fields of `Source` to replace; a data set that is not registered needs `size`.
    """
    source = datasets.get(name) if name in datasets else _unregistered(name, overrides)
    unknown = overrides.keys() - vars(source).keys()
    if unknown:
        fields = ", ".join(vars(source))
        raise OptionError(
            f"data set {quoted(name)}: no field {min(unknown)!r}; there are: {fields}"
        )
    lists = {k: tuple(overrides[k]) for k in ("mean", "std") if k in overrides}
    return replace(source, **overrides | lists)


def _unregistered(name: str, overrides: dict[str, Any]) -> Source:
    local = is_url(name) or Path(name).expanduser().exists()
    if not local and (name.startswith(("/", "./", "../", "~")) or name.endswith(".parquet")):
        raise FileError(f"{quoted(name)}: no such file or folder")
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        return datasets.get(name)  # raises an error that suggests names
    if "size" not in overrides:
        raise OptionError(
            f"data set {quoted(name)}: is not registered; give the size of its images, e.g. "
            "data.size=224"
        )
    pixels = GREY if overrides.get("channels") == 1 else IMAGENET
    return Source(name=name, hub=None if local else name, size=overrides["size"], **pixels)


def load(
    source: Source,
    split: Literal["train", "test"],
    *,
    root: Place | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    part: Portion = "all",
    rows: Indices | None = None,
) -> Images:
    """Load a split: decode it into the cache the first time, afterwards open the cache.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(load(resolve("fashion_small"), "test", cache=Path(folder)))
    2500

    Args:
        source: from `resolve`.
        split: `train` or `test`, whatever the names of the splits in the data set.
        root: a folder of local copies; without it, the environment variable `NEGMERGE_DATA`.
        revision: branch, tag or commit on the Hub; a commit makes a run repeatable.
        cache: the folder of decoded images; without it, `NEGMERGE_CACHE`, then the user's cache.
        progress: shows how many images are decoded.
        part: `held_out` reads and decodes only the validation images of `held_out_rows`; ImageNet's
            training set would be too large for the cache. `labels` decodes nothing: the images have
            no pixels.
        rows: read and decode only these sorted positions.
    """
    place = find(source, root, revision, progress)
    snapshot = place.snapshot(fresh=False)
    entry = cache_folder(cache) / _entry_name(source, split, snapshot, part, rows)
    made = (entry, source, split, place, snapshot, progress or Quiet(), part, rows)
    return open_or_make(entry, lambda: open_entry(entry, snapshot), lambda: _make_entry(*made))


def load_some(
    source: Source,
    split: Literal["train", "test"],
    choose: Callable[[NDArray[np.int64]], Indices],
    **options: Any,
) -> tuple[Images, Indices]:
    """Load a split and choose some of its images; of a large split, no others are decoded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     options = {"cache": Path(folder)}
    ...     source = resolve("fashion_small")
    ...     images, chosen = load_some(source, "test", lambda k: np.flatnonzero(k == 3), **options)
    >>> len(images), np.unique(images.labels[chosen])
    (2500, array([3]))

    Args:
        source, split: as for `load`.
        choose: returns sorted positions, given the labels of the split.
        options: further arguments of `load`.

    Returns:
        The images, and the positions of the chosen ones among them. If the decoded split would have
        at most `LARGE` bytes, the images are the whole split.
    """
    known, limit = source.counts, LARGE // (source.size**2 * source.channels)
    if known is None or (known.test if split == "test" else known.train) > limit:
        labels = load(source, split, part="labels", **options).labels
        if len(labels) > limit:
            chosen = choose(labels)
            if len(chosen) < len(labels):
                return load(source, split, rows=chosen, **options), np.arange(len(chosen))
            return load(source, split, **options), chosen
    images = load(source, split, **options)
    return images, choose(images.labels)


def _make_entry(
    entry: Path,
    source: Source,
    split: str,
    place: Local | Hub,
    snapshot: Snapshot,
    progress: Progress,
    part: Portion,
    picked: Indices | None,
) -> None:
    from negmerge.vision.reading import open_rows

    pick = held_out_rows if part == "held_out" else None if picked is None else lambda size: picked
    with open_rows(place, source, split, pick, progress) as rows:
        side = 0 if part == "labels" else source.size
        shape = (len(rows.labels), side, side, source.channels)

        def parts() -> Iterator[NDArray[np.uint8]]:
            progress.stage(f"decoding {file_name(source)} {split}", shape[0], "images")
            found = _decoded(rows, source, 0)
            if isinstance(place, Hub):
                facts = [rows.origin, shape, hashlib.sha256(rows.picked.tobytes()).hexdigest()]
                found = kept_parts(entry, facts, partial(_decoded, rows, source))
            for pixels in found:
                yield pixels
                progress.advance(len(pixels))

        notes = {"classes": rows.classes}
        with new_entry(entry, math.prod(shape), notes, place, snapshot) as folder:
            if side:
                write_array(folder / "pixels.npy", shape[1:], parts())
            else:
                np.save(folder / "pixels.npy", np.empty(shape, np.uint8))
            np.save(folder / "labels.npy", rows.labels)
            if rows.ids is not None:
                np.save(folder / "ids.npy", rows.ids, allow_pickle=False)
    drop_parts(entry)


def _decoded(rows: Rows, source: Source, first: int) -> Iterator[NDArray[np.uint8]]:
    """Decode the pictures from a row on; those before a failure are decoded, and may be kept."""
    failure: list[FileError] = []

    def pictures() -> Iterator[list[Picture]]:
        try:
            yield from rows.read(first)
        except FileError as error:
            failure.append(error)

    options = (source.size, source.channels, source.fit, source.interpolation)
    yield from decode_all(pictures(), *options)
    if failure:
        raise failure[0]


def _entry_name(
    source: Source, split: str, snapshot: Snapshot, part: Portion, rows: Indices | None
) -> str:
    parts = (source.train, source.test, source.image, source.label, source.id)
    key: list[Any] = [split, parts, source.size, source.channels, VERSION]
    if part != "all":
        key.append(part)
    if rows is not None:
        key.append(["rows", hashlib.sha256(np.asarray(rows, "<i8").tobytes()).hexdigest()])
    if (source.fit, source.interpolation) != ("crop", "bicubic"):
        key += [source.fit, source.interpolation]
    if source.test_share is not None:
        key.append(["test_share", source.test_share])
    return f"{file_name(source)}-{split}-{snapshot.key(*key)[:20]}"


def file_name(source: Source) -> str:
    """Return a short name of a data set, for files and messages."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source.name).name)[:40]


def add(
    name: str, *, summary: str = "", counts: tuple[int, int, int] | None = None, **fields: Any
) -> Source:
    """Register a data set.

    Args:
        name: the value of `data.name` in a recipe.
        summary: what the images show.
        counts: numbers of training images, test images and classes; they join the summary.
        fields: fields of `Source`.
    """
    size = None if counts is None else DataSize(*counts)
    if size is not None:
        summary += f": {size.train:,} + {size.test:,} images, {size.classes:,} classes."
    return datasets.register(name, Source(name=name, summary=summary, counts=size, **fields))


FASHION: dict[str, Any] = {
    "size": 28, "channels": 1, "mean": (0.2860,), "std": (0.3530,), "crop": 2, "licence": "MIT"
}  # fmt: skip
CLIP_TASK: dict[str, Any] = {"size": 224, "flip": False, **CLIP}
"""Common fields of the data sets that only the CLIP scenario of the paper uses."""

# `checked` names what was compared with the entry: the Hub's viewer (splits and rows), its list of
# files (parquet, no loading script), the card of the data set, or public code that reads it.
# fmt: off
add("fashion_small", counts=(8_000, 2_500, 10), **FASHION,
    summary="Part of Fashion-MNIST, included in this package", checked="the file in this package")
add("fashion_mnist", hub="zalando-datasets/fashion_mnist", counts=(60_000, 10_000, 10), **FASHION,
    summary="Pieces of clothing, grey",
    checked="the Hub's viewer and files; TensorFlow's catalogue of the Hub (columns, counts)")
add("mnist", hub="ylecun/mnist", counts=(60_000, 10_000, 10),
    size=28, channels=1, mean=(0.1307,), std=(0.3081,), flip=False, crop=2,
    summary="Handwritten digits, grey", licence="MIT",
    checked="the Hub's viewer; a copy of its card (columns, counts)")
add("cifar10", hub="uoft-cs/cifar10", counts=(50_000, 10_000, 10), image="img",
    size=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), crop=4,
    summary="Animals and vehicles", licence="not stated",
    checked="the card and files on the Hub (columns, counts)")
add("cifar100", hub="uoft-cs/cifar100", counts=(50_000, 10_000, 100), image="img",
    label="fine_label",
    size=32, mean=(0.5071, 0.4866, 0.4409), std=(0.2673, 0.2564, 0.2762), crop=4,
    summary="Animals, plants and things", licence="not stated",
    checked="the Hub's viewer and files; code that reads the columns")
add("svhn", hub="ufldl-stanford/svhn", config="cropped_digits", counts=(73_257, 26_032, 10),
    size=32, mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), flip=False, crop=4,
    summary="House numbers, one digit each", licence="non-commercial use only",
    checked="the Hub's viewer (counts to three digits) and files; code that reads the columns")
add("tiny_imagenet", hub="zh-plus/tiny-imagenet", counts=(100_000, 10_000, 200), test="valid",
    size=64, mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821), crop=4,
    summary="Part of ImageNet, small images", licence="not stated",
    checked="the Hub's viewer and files; code that reads the columns")
add("cub200", hub="Donghyun99/CUB-200-2011", counts=(5_994, 5_794, 200),
    size=224, **IMAGENET, crop=28,
    summary="Birds (CUB-200-2011)", licence="non-commercial research only",
    checked="the Hub's viewer (counts to three digits) and files; code that reads the columns")
add("imagenet", hub="ILSVRC/imagenet-1k", counts=(1_281_167, 50_000, 1000), test="validation",
    size=224, **CLIP, summary="ImageNet, the control set of the CLIP scenario",
    licence="non-commercial research only; ask for access on the Hub",
    checked="code that reads its files (294 of parquet for training), columns and splits")
add("cars", hub="tanganke/stanford_cars", counts=(8_144, 8_041, 196), **CLIP_TASK,
    summary="Makes and models of cars", licence="non-commercial research only",
    checked="the files on the Hub; code that compares columns, splits and counts")
add("dtd", hub="tanganke/dtd", counts=(3_760, 1_880, 47), **CLIP_TASK,
    summary="Describable textures", licence="research only",
    checked="the files on the Hub; code that reads columns and splits and states the counts")
add("eurosat", hub="tanganke/eurosat", counts=(21_600, 2_700, 10), **CLIP_TASK,
    summary="Land use in images of Sentinel-2", licence="MIT",
    checked="the Hub's viewer (columns); published results that state the counts")
add("gtsrb", hub="tanganke/gtsrb", counts=(26_640, 12_630, 43), **CLIP_TASK,
    summary="German traffic signs", licence="not stated",
    checked="the Hub's viewer (counts to three digits) and files; code that reads the columns")
add("resisc45", hub="tanganke/resisc45", counts=(18_900, 6_300, 45), **CLIP_TASK,
    summary="Scenes from the air", licence="not stated",
    checked="the Hub's viewer and files; code that reads the columns")
add("sun397", hub="tanganke/sun397", counts=(19_850, 19_850, 397), **CLIP_TASK,
    summary="Scenes", licence="not stated",
    checked="the Hub's viewer (counts to three digits) and files; code that reads the columns")
# fmt: on
