"""`negmerge check clip NAME`: zero-shot accuracies of a CLIP model beside the known ones.

The first command for whoever has weights and data: if they pass, prompts, preparation of images and
weights are those of the paper.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from negmerge.errors import FileError, OptionError, quoted
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import classification_columns, observe_set
from negmerge.paper.experiments import FOLDER, published
from negmerge.paper.verdicts import Compared, Comparison
from negmerge.runs.recipe import change_fields
from negmerge.scenarios.clip.classifier import ClipClassifier
from negmerge.scenarios.clip.heads import cached_head
from negmerge.scenarios.clip.pretrained import ClipSource
from negmerge.support.mistakes import first_mistake
from negmerge.support.progress import Progress
from negmerge.support.reading import parse_json, read_json
from negmerge.support.remote.urls import Place, is_url
from negmerge.support.settings import File, Strict, check_name
from negmerge.training.feeds import Batch
from negmerge.training.weights import metadata_of
from negmerge.vision.datasets import Images, Source, datasets, load, resolve
from negmerge.vision.feed import ImageFeed
from negmerge.vision.places import Hub, find
from negmerge.vision.settings import Limit
from negmerge.vision.splits import balanced

EIGHT = ("cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn")
"""The data sets that the paper forgets."""
CONTROL = "imagenet"
TAG = "openai"
"""The weights of the paper."""
POINTS = 1.0
"""The largest difference that passes, in percentage points: published values of the same weights
differ by up to half a point."""
ABSENT = "not on this machine"


class CheckedData(Strict):
    """Where the data sets are, and how many images of each are used."""

    root: File | None = None
    limit: Limit = Limit()


class CheckSettings(Strict):
    """The fields that `--set` changes.

    The default `sets` are those that the model has heads for, or the paper's nine.
    """

    sets: tuple[str, ...] | None = None
    data: CheckedData = CheckedData()


@dataclass(frozen=True)
class ZeroShot(Comparison):
    """The accuracies of a model on the data sets that were found.

    Args:
        model: the name and the tag of the weights.
        images: the number of images of each data set that was found.
        missing: why each of the others was not measured.
    """

    model: str
    images: dict[str, int]
    missing: dict[str, str]

    def tree(self) -> dict[str, Any]:
        rows = [row.tree() | {"images": self.images.get(row.name)} for row in self.rows]
        about = {"missing": self.missing, "notes": self.notes}
        return {"model": self.model, "passed": self.passed, "numbers": rows} | about


@cache
def known_accuracies(name: str) -> Mapping[str, tuple[float, str]]:
    """Return the known accuracies of an architecture with OpenAI's weights, and their sources.

    The paper's numbers come first.

    >>> known_accuracies("ViT-B-32")["cars"], known_accuracies("ViT-B-32")["imagenet"]
    ((59.6, 'paper'), (63.33, 'paper'))
    >>> known_accuracies("RN50")
    {}
    """
    own = name.removesuffix("-quickgelu")
    others = read_json(FOLDER / "zero_shot.json")
    found: dict[str, tuple[float, str]] = {}
    for source in ("open_clip", "cards"):
        found |= {k: (v, source) for k, v in others[source].get(own, {}).items()}
    if row := _paper_row(own):
        found[CONTROL] = (row["acc_retain"], "paper")
    if own == "ViT-B-32":
        rows = [row for row in published()["T5"]["rows"] if row["method"] == "pretrained"]
        found |= {row["dataset"]: (row["acc_forget"], "paper") for row in rows}
    return found


def _paper_row(name: str) -> Mapping[str, Any] | None:
    backbone = name.lower().replace("-", "_", 1).replace("-", "")
    rows = [row for row in published()["T1"]["rows"] if row["method"] == "pretrained"]
    return next((row for row in rows if row["backbone"] == backbone), None)


def check_clip(
    name: str, pretrained: str | None, changes: Sequence[str], download: bool, progress: Progress
) -> ZeroShot:
    """Measure a CLIP model on the data sets that are found.

    Args:
        name: an architecture of open_clip, a folder, or a model of this package.
        pretrained: for an architecture, a tag of open_clip (OpenAI's if not given) or a file.
        changes: changes of `CheckSettings` as `key=value`.
        download: whether data sets that are not on this machine are downloaded. The Hub's libraries
            download weights unless HF_HUB_OFFLINE is set when they are imported.
        progress: shows the progress.
    """
    settings = read_settings(changes)
    for given in (name, pretrained or ""):
        try:
            check_name(given)
        except ValueError as error:
            raise OptionError(f"{quoted(given)}: {error}; name a model or a folder") from None
    source = ClipSource(name, pretrained)
    if pretrained is None and source.folder is None:
        source = ClipSource(name, TAG)
    try:
        source.fingerprint  # noqa: B018 (finds the weights before images are decoded)
    except FileError as error:
        helps = not download and source.folder is None
        raise FileError(f"{error}, or add --download" if helps else str(error)) from None
    sets, root = settings.sets or _default_sets(source), settings.data.root
    found: dict[str, Images] = {}
    missing: dict[str, str] = {}
    for data in sets:
        try:
            found[data] = open_set(source, data, root, progress, download)
        except FileError as error:
            missing[data] = str(error)
    if not found:
        raise FileError(f"no data set can be measured: {'; '.join(not_found(missing, root))}")
    heads = {
        k: cached_head(source, k, images.classes, None, progress) for k, images in found.items()
    }
    model = ClipClassifier(source.load(), heads, source.mean, source.std)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    limit, measured, images = settings.data.limit.test, dict[str, float](), dict[str, int]()
    for data, own in found.items():
        picked = balanced(own.labels, limit, np.random.default_rng(0))
        images[data] = len(picked)
        progress.stage(f"measuring {data}", len(picked), "images")
        feed = ImageFeed(own, picked)
        seen = observe_set(observe, model, data, feed, progress.advance)
        measured[data] = 100 * float(seen["correct"].mean())
    comparable = _uses_known_weights(source) and limit is None
    known = known_accuracies(name) if comparable else {}
    title = name if source.pretrained is None else f"{name} {source.pretrained}"
    notes = [*not_found(missing, root), *_notes(source, limit, bool(known))]
    return ZeroShot(_rows(name, sets, measured, known), notes, title, images, missing)


def read_settings(changes: Sequence[str]) -> CheckSettings:
    """Return the settings with some changes.

    >>> read_settings(["sets=[cars, dtd]", "data.limit.test=100"]).sets
    ('cars', 'dtd')
    """
    tree: dict[str, Any] = {}
    change_fields(tree, changes)
    try:
        settings = CheckSettings.model_validate(tree)
    except ValidationError as error:
        fields = "sets, data.root and data.limit.test"
        raise OptionError(
            f"--set {first_mistake(error, CheckSettings)}; the fields are {fields}"
        ) from None
    root = settings.data.root
    if root is not None and not is_url(root) and not Path(root).is_dir():
        raise FileError(f"data.root: got {quoted(root)}, wanted a folder of data sets")
    for data in settings.sets or ():
        datasets.get(data)  # raises an error that suggests names
    return settings


def _default_sets(source: ClipSource) -> tuple[str, ...]:
    """The sets that a folder has ready-made heads for, or the paper's."""
    if source.embeddings is None:
        return (*EIGHT, CONTROL)
    text = metadata_of(source.embeddings).get("classes", "{}")
    ready = parse_json(text, source.embeddings, "metadata `classes`")
    return tuple(name for name in ready if name in datasets) or (*EIGHT, CONTROL)


def open_set(
    source: ClipSource, data: str, root: Place | None, progress: Progress, download: bool
) -> Images:
    """Return the test images of a data set, prepared for a model."""
    prepared = resolve(
        data,
        size=source.size,
        channels=3,
        mean=source.mean,
        std=source.std,
        fit=source.fit,
        interpolation=source.interpolation,
    )
    if isinstance(find(prepared, root), Hub) and not download:
        if (folder := _hub_cache(prepared)) is None:
            raise FileError(ABSENT)
        prepared = replace(prepared, name=str(folder), hub=None)
    return load(prepared, "test", root=root, progress=progress)


def not_found(missing: Mapping[str, str], root: Place | None) -> list[str]:
    """Return a line about the sets that are not on this machine, and one about every other."""
    absent = [data for data, why in missing.items() if why == ABSENT]
    lines = [f"{data}: cannot be read: {why}" for data, why in missing.items() if why != ABSENT]
    if absent:
        from huggingface_hub.constants import HF_HUB_CACHE

        given = [str(root or ""), os.environ.get("NEGMERGE_DATA", ""), HF_HUB_CACHE]
        places = " and ".join(quoted(place) for place in given if place)
        lines.append(
            f"{', '.join(absent)}: not found in {places}; set data.root or NEGMERGE_DATA to a "
            "folder with local copies, or add --download"
        )
    return lines


def _hub_cache(source: Source) -> Path | None:
    """The folder of a data set in the user's cache of the Hub, if the set was downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(source.hub or "", repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(found)


def observe(model: nn.Module, name: str, batch: Batch) -> Columns:
    """Return whether each prediction is right."""
    inputs, targets = batch
    return classification_columns(model(inputs, head=name), targets, ("correct",))


def _uses_known_weights(source: ClipSource) -> bool:
    """Whether the weights are OpenAI's, or a file that may hold them."""
    named = source.pretrained or ""
    return source.folder is None and (named == TAG or named.endswith(".safetensors"))


def _rows(
    name: str,
    sets: Sequence[str],
    measured: Mapping[str, float],
    known: Mapping[str, tuple[float, str]],
) -> list[Compared]:
    """One row for each data set; if all eight were measured, one for their mean."""
    rows: list[Compared] = []
    for data in sets:
        value, source = known.get(data, (None, ""))
        rows.append(Compared(data, measured.get(data), value, POINTS, source))
    paper = _paper_row(name.removesuffix("-quickgelu"))
    if known and paper is not None and measured.keys() >= {*EIGHT}:
        average = mean(measured[data] for data in EIGHT)
        rows.append(Compared("mean of the eight", average, paper["acc_forget"], POINTS, "paper"))
    return rows


def _notes(source: ClipSource, limit: int | None, known: bool) -> list[str]:
    notes = list(source.notes)
    if known and source.pretrained != TAG:
        notes.append("the known accuracies are those of OpenAI's weights")
    if limit is not None:
        notes.append(f"at most {limit:,} images of each set: not compared with known accuracies")
    elif not known:
        notes.append("no accuracies of these weights are known; nothing was compared")
    return notes
