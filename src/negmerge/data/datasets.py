"""The data sets that have a name. ◄ ADD A DATA SET: one `add(...)` at the end of this file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.data.cache import Images, cache_folder, only_one, open_entry, write_entry
from negmerge.data.decode import VERSION, Fit, Interpolation, Picture, decode_all
from negmerge.data.places import Hub, Local, Seen, find
from negmerge.data.splits import held_out_of
from negmerge.errors import FileError, OptionError, shown
from negmerge.progress import Progress, Quiet
from negmerge.registry import Registry

Portion = Literal["all", "held_out"]

__all__ = ["Images", "Source", "datasets", "load", "resolve"]


@dataclass(frozen=True)
class Source:
    """Where a data set is, what its columns are called, and how its images are shown to a model.

    >>> datasets.get("mnist").size
    28

    Args:
        name: the registered name, or the Hub id or path it was resolved from.
        hub: its id on the Hugging Face Hub, if it is there.
        config: the Hub's name for the part to take.
        image, label, id: columns.
        train, test: what the two splits are called.
        size, channels: height and width, and 1 (grey) or 3 (colour), of the decoded images.
        mean, std: per channel, for inputs in [0, 1]; the model applies them.
        flip, crop: augmentation: mirrored at random, and the padding of the random crop.
        fit, interpolation: how an image of another size is brought to it.
        summary, licence: for people.
    """

    name: str
    hub: str | None
    config: str | None
    image: str
    label: str
    train: str
    test: str
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    crop: int
    id: str | None = None
    fit: Fit = "crop"
    interpolation: Interpolation = "bicubic"
    summary: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise OptionError(f"data set {shown(self.name)}: size {self.size}, wanted at least 1")
        if self.channels not in (1, 3):
            raise OptionError(
                f"data set {shown(self.name)}: channels {self.channels}, wanted 1 or 3"
            )
        for field in SEVERAL:
            if (count := len(getattr(self, field))) != self.channels:
                raise OptionError(
                    f"data set {shown(self.name)}: {field} has {count} numbers, wanted "
                    f"{self.channels}, one for each channel"
                )


datasets = Registry[Source]("data set")
SEVERAL = ("mean", "std")  # a recipe gives them as lists


def resolve(name: str, **overrides: Any) -> Source:
    """The source of a registered name, a local path or a Hub id, with fields overridden.

    >>> resolve("cifar10").size
    32
    >>> resolve("someone/birds", size=64, label="species").label
    'species'
    >>> resolve("cifar11")
    Traceback (most recent call last):
    negmerge.errors.OptionError: unknown data set 'cifar11'; did you mean 'cifar10' or ...

    Args:
        name: a path is a folder of parquet, an image folder `<split>/<class>/*.png`, or a parquet.
        overrides: any fields of `Source`; `size` is needed for a set that is not registered.
    """
    source = datasets.get(name) if name in datasets else _unregistered(name, overrides)
    unknown = overrides.keys() - vars(source).keys()
    if unknown:
        fields = ", ".join(vars(source))
        raise OptionError(f"data set {shown(name)}: no field {min(unknown)!r}; there are: {fields}")
    return replace(source, **{k: tuple(v) if k in SEVERAL else v for k, v in overrides.items()})


def load(
    source: Source,
    split: Literal["train", "test"],
    *,
    root: Path | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    part: Portion = "all",
) -> Images:
    """Load a split; the first time it is decoded into the cache, then it is only opened.

    >>> len(load(resolve("fashion_small"), "test", cache=getfixture("tmp_path")))
    2500

    Args:
        source: from `resolve`.
        split: `train` or `test`, whatever the set calls them.
        root: folder of local mirrors; then the environment variable `NEGMERGE_DATA` names one.
        revision: branch, tag or commit on the Hub; pin it to be able to repeat a run.
        cache: where decoded images are kept; else `NEGMERGE_CACHE`, else the user's cache.
        progress: told of each image that is decoded.
        part: `held_out` decodes only the validation images of `held_out_of`; ImageNet's training
            set is too large to be kept for 5,000 of them.
    """
    place = find(source, root, revision)
    seen = place.look()
    entry = cache_folder(cache) / _entry_name(source, split, seen.identity, part)
    images = open_entry(entry, seen)
    if images is None:
        with only_one(entry):
            images = open_entry(entry, seen) or _make_entry(
                entry, source, split, place, seen, progress, part
            )
    return images


def _make_entry(
    entry: Path,
    source: Source,
    split: str,
    place: Local | Hub,
    seen: Seen,
    progress: Progress | None,
    part: Portion,
) -> Images:
    from negmerge.data.reading import Columns, open_rows

    columns = Columns(source.image, source.label, source.id, _chosen(source))
    splits = (source.train, source.test)
    with open_rows(place, columns, splits[split == "test"], splits) as rows:
        size = len(rows.labels)
        picked = np.arange(size) if part == "all" else np.sort(held_out_of(size)[1])
        shape = (len(picked), source.size, source.size, source.channels)
        shows = progress or Quiet()

        def parts() -> Iterator[NDArray[np.uint8]]:
            shows.stage(f"decoding {_readable(source)} {split}", shape[0], "images")
            done = 0
            pictures = _only(rows.pictures, picked)
            way = (source.size, source.channels, source.fit, source.interpolation)
            for decoded in decode_all(pictures, *way):
                yield decoded
                done += len(decoded)
                shows.advance(len(decoded))
            seen.content  # noqa: B018 (before the last look: then it is of the same files)
            if done != shape[0] or place.look() != seen:
                raise FileError(f"{place}: changed while it was read; run again")

        ids = None if rows.ids is None else rows.ids[picked]
        write_entry(entry, parts(), shape, rows.labels[picked], ids, rows.classes, seen)
    images = open_entry(entry, seen)
    if images is None:
        raise FileError(f"{entry}: was changed while it was written; run again")
    return images


def _only(pictures: Iterator[list[Picture]], picked: NDArray[np.int64]) -> Iterator[list[Picture]]:
    first = 0
    for some in pictures:
        own = picked[(first <= picked) & (picked < first + len(some))] - first
        first += len(some)
        if len(own):
            yield [some[k] for k in own]


def _entry_name(source: Source, split: str, identity: object, part: Portion) -> str:
    parts = (source.train, source.test, source.image, source.label, source.id)
    key = [identity, split, parts, source.size, source.channels, VERSION]
    if part != "all":
        key.append(part)
    if (source.fit, source.interpolation) != ("crop", "bicubic"):
        key += [source.fit, source.interpolation]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return f"{_readable(source)}-{split}-{digest[:20]}"


def _readable(source: Source) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source.name).name)[:40]


def _chosen(source: Source) -> frozenset[str]:
    # A column the caller named has to be there; one of the entry may differ in a mirror.
    usual = vars(datasets.get(source.name)) if source.name in datasets else USUAL
    return frozenset(f for f in ("image", "label") if getattr(source, f) != usual[f])


def _unregistered(name: str, overrides: dict[str, Any]) -> Source:
    local = Path(name).expanduser().exists()
    if not local and (name.startswith(("/", "./", "../", "~")) or name.endswith(".parquet")):
        raise FileError(f"{shown(name)}: no such file or folder")
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        return datasets.get(name)  # raises, and suggests
    if "size" not in overrides:
        raise OptionError(
            f"data set {shown(name)}: is not a registered one: give the size of its images, "
            "e.g. data.size=224"
        )
    fields = USUAL | {"hub": None if local else name, "size": overrides["size"]}
    fields |= GREY if overrides.get("channels") == 1 else IMAGENET
    return Source(name=name, **fields)


def add(name: str, **fields: Any) -> Source:
    """Register a data set; what is not said is as it is usual on the Hub."""
    return datasets.register(name, Source(name=name, **(USUAL | fields)))


USUAL: dict[str, Any] = {
    "hub": None,
    "config": None,
    "image": "image",
    "label": "label",
    "train": "train",
    "test": "test",
    "channels": 3,
    "flip": True,
    "crop": 0,
}
GREY: dict[str, Any] = {"channels": 1, "mean": (0.5,), "std": (0.25,)}
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
FASHION: dict[str, Any] = {
    "size": 28,
    "channels": 1,
    "mean": (0.2860,),
    "std": (0.3530,),
    "crop": 2,
}

add(
    "fashion_small",
    **FASHION,
    summary="The part of Fashion-MNIST inside this package: 8,000 + 2,500 images, 10 classes.",
    licence="MIT",
)
add(
    "fashion_mnist",
    hub="zalando-datasets/fashion_mnist",
    **FASHION,
    summary="Pieces of clothing: 60,000 + 10,000 grey images, 10 classes.",
    licence="MIT",
)
add(
    "mnist",
    hub="ylecun/mnist",
    size=28,
    channels=1,
    mean=(0.1307,),
    std=(0.3081,),
    flip=False,
    crop=2,
    summary="Handwritten digits: 60,000 + 10,000 grey images, 10 classes.",
    licence="MIT",
)
add(
    "cifar10",
    hub="uoft-cs/cifar10",
    image="img",
    size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    crop=4,
    summary="Animals and vehicles: 50,000 + 10,000 images, 10 classes.",
    licence="not stated",
)
add(
    "cifar100",
    hub="uoft-cs/cifar100",
    image="img",
    label="fine_label",
    size=32,
    mean=(0.5071, 0.4866, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    crop=4,
    summary="Animals, plants and things: 50,000 + 10,000 images, 100 classes.",
    licence="not stated",
)
add(
    "svhn",
    hub="ufldl-stanford/svhn",
    config="cropped_digits",
    size=32,
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    flip=False,
    crop=4,
    summary="House numbers, one digit each: 73,257 + 26,032 images, 10 classes.",
    licence="non-commercial use only",
)
add(
    "tiny_imagenet",
    hub="zh-plus/tiny-imagenet",
    test="valid",
    size=64,
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    crop=4,
    summary="ImageNet made small: 100,000 + 10,000 images, 200 classes.",
    licence="not stated",
)
add(
    "cub200",
    hub="Donghyun99/CUB-200-2011",
    size=224,
    **IMAGENET,
    crop=28,
    summary="Birds (CUB-200-2011): 5,994 + 5,794 images, 200 species.",
    licence="non-commercial research only",
)
add(
    "imagenet",
    hub="ILSVRC/imagenet-1k",
    test="validation",
    size=224,
    **CLIP,
    summary="ImageNet, the control of the CLIP scenario: 1,281,167 + 50,000 images, 1,000 classes.",
    licence="non-commercial research only; ask for access on the Hub",
)

# The CLIP scenario has these six besides mnist and svhn.
add(
    "cars",
    hub="tanganke/stanford_cars",
    size=224,
    **CLIP,
    flip=False,
    summary="Makes and models of cars: 8,144 + 8,041 images, 196 classes.",
    licence="non-commercial research only",
)
add(
    "dtd",
    hub="tanganke/dtd",
    size=224,
    **CLIP,
    flip=False,
    summary="Describable textures: 3,760 + 1,880 images, 47 classes.",
    licence="research only",
)
add(
    "eurosat",
    hub="tanganke/eurosat",
    size=224,
    **CLIP,
    flip=False,
    summary="Land use seen by Sentinel-2: 21,600 + 2,700 images, 10 classes.",
    licence="MIT",
)
add(
    "gtsrb",
    hub="tanganke/gtsrb",
    size=224,
    **CLIP,
    flip=False,
    summary="German traffic signs: 26,640 + 12,630 images, 43 classes.",
    licence="not stated",
)
add(
    "resisc45",
    hub="tanganke/resisc45",
    size=224,
    **CLIP,
    flip=False,
    summary="Scenes from the air: 18,900 + 6,300 images, 45 classes.",
    licence="not stated",
)
add(
    "sun397",
    hub="tanganke/sun397",
    size=224,
    **CLIP,
    flip=False,
    summary="Scenes: 19,850 + 19,850 images, 397 classes.",
    licence="not stated",
)
