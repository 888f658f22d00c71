"""The data sets that have a name. ◄ ADD A DATA SET: one `add(...)` at the end of this file."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from negmerge.data.cache import Images, cache_folder, only_one, open_entry, write_entry
from negmerge.data.decode import VERSION, decode_all
from negmerge.data.places import find
from negmerge.errors import OptionError
from negmerge.progress import Progress, Quiet
from negmerge.registry import Registry

__all__ = ["Images", "Source", "datasets", "load", "resolve"]


@dataclass(frozen=True)
class Source:
    """Where a data set is, what its columns are called, and how its images are shown to a model.

    Args:
        name: the registered name, or the Hub id or path it was resolved from.
        hub: its id on the Hugging Face Hub, if it is there.
        config: the Hub's name for the part to take.
        image, label, id: columns.
        train, test: the Hub's names of the two splits.
        size, channels: of the decoded images.
        mean, std: per channel, for inputs in [0, 1]; the model applies them.
        flip, crop: augmentation: mirrored at random, and padding of the random crop.
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
    summary: str = ""
    licence: str = ""


datasets = Registry[Source]("data set")


def resolve(name: str, **overrides: Any) -> Source:
    """The source of a registered name, a Hub id or a local path, with fields overridden.

    >>> resolve("cifar10").size
    32
    >>> resolve("someone/birds", size=64, label="species").label
    'species'
    """
    if name in datasets:
        source = datasets.get(name)
    elif Path(name).expanduser().exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        local = Path(name).expanduser().exists()
        source = Source(
            name=name,
            hub=None if local else name,
            config=None,
            image="image",
            label="label",
            train="train",
            test="test",
            size=overrides.get("size", 224),
            channels=3,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            flip=True,
            crop=0,
        )
    else:
        return datasets.get(name)
    try:
        return replace(source, **overrides)
    except TypeError:
        unknown = ", ".join(sorted(overrides.keys() - vars(source).keys()))
        raise OptionError(f"data set {name!r}: no field {unknown}") from None


def load(
    source: Source,
    split: Literal["train", "test"],
    *,
    root: Path | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Images:
    """Load a split, decoded; the first time it is decoded into the cache.

    >>> len(load(resolve("fashion_small"), "test", cache=getfixture("tmp_path")))
    2500
    """
    place = find(source, root, revision)
    named = source.train if split == "train" else source.test
    columns = [source.image, source.label, source.id]
    identity = [place.identity(), named, columns, source.size, source.channels, VERSION]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w-]+", "_", Path(source.name).name)[:40]
    entry = cache_folder(cache) / f"{readable}-{split}-{key}"
    if (images := open_entry(entry)) is not None:
        return images
    with only_one(entry):
        if (images := open_entry(entry)) is not None:
            return images
        from negmerge.data.reading import Wanted, open_rows

        with open_rows(place, Wanted(source.image, source.label, source.id), named) as rows:
            shape = (len(rows.labels), source.size, source.size, source.channels)
            shows = progress or Quiet()
            shows.stage(f"decoding {readable} {split}", shape[0])

            def batches():
                for batch in decode_all(rows.pictures, source.size, source.channels):
                    yield batch
                    shows.advance(len(batch))

            write_entry(entry, batches(), shape, rows.labels, rows.ids, rows.classes)
    images = open_entry(entry)
    assert images is not None, "just written"
    return images


def add(name: str, **fields: Any) -> Source:
    """Register a data set under a name; columns and splits are called as on most of the Hub."""
    usual: dict[str, Any] = {
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
    return datasets.register(name, Source(name=name, **(usual | fields)))


add(
    "fashion_small",
    size=28,
    channels=1,
    mean=(0.2860,),
    std=(0.3530,),
    crop=2,
    summary="8,000 + 2,500 images of Fashion-MNIST, part of this package.",
    licence="MIT",
)
add(
    "fashion_mnist",
    hub="zalando-datasets/fashion_mnist",
    size=28,
    channels=1,
    mean=(0.2860,),
    std=(0.3530,),
    crop=2,
    summary="Ten kinds of clothing, 60,000 + 10,000 grey images.",
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
    summary="Handwritten digits, 60,000 + 10,000 grey images.",
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
    summary="Ten kinds of things, 50,000 + 10,000 colour images.",
    licence="unknown",
)
