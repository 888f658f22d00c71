"""One unlearning problem: a network and its data, cut into the parts that each step may see."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from negmerge.criteria import criteria
from negmerge.data.datasets import Images, Source, load, resolve
from negmerge.data.draws import seed_of
from negmerge.data.feeds import Feed, ImageFeed
from negmerge.data.splits import Parts, Splits, divide, make_splits
from negmerge.data.transforms import own_random_state, seed_torch
from negmerge.errors import FileError, OptionError
from negmerge.files import file_digest
from negmerge.models.classifiers import channels_last, create, final_linear, models
from negmerge.models.weights import load_model
from negmerge.progress import Progress
from negmerge.recipe import Recipe

Part = Literal["train", "retain", "forget", "test"]
Use = Literal["choose", "report"]


def identity(*parts: object) -> str:
    """A short name for content: the same parts, the same name.

    >>> identity("a", {"lr": 0.1}) == identity("a", {"lr": 0.1})
    True
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Problem(Protocol):
    """What training and measuring need to know of an unlearning problem."""

    seed: int

    @property
    def class_names(self) -> Sequence[str]:
        """What the labels mean; empty if that is not known."""
        ...

    @property
    def identity(self) -> list[Any]:
        """What every model of this problem depends on."""
        ...

    @property
    def scored_on(self) -> list[Any]:
        """What every score depends on beside the weights."""
        ...

    def training_feed(self, part: Part) -> Feed: ...
    def scoring_feeds(self, use: Use) -> dict[str, Feed]: ...
    def network(self, weights: Path | None = None, seed: int = 0) -> nn.Module: ...
    def describe(self) -> dict[str, Any]: ...

    def complete(self, weights: Path) -> list[Path]:
        """Put beside the unlearned weights what others need to open them; the files."""
        ...


class Scenario:
    """The problem a recipe describes; data is opened when it is first needed."""

    def __init__(self, recipe: Recipe, progress: Progress | None = None) -> None:
        self.recipe, self.progress, self.seed = recipe, progress, recipe.seed
        self.looks = criteria.get(recipe.criterion).looks

    def check(self) -> None:
        """Find what is wrong with the recipe's data, model or files before hours of work."""
        models.get(self.recipe.model.name)
        given = {"model.weights": self.recipe.model.weights, "model.init": self.recipe.model.init}
        given["retrain.weights"] = self.recipe.retrain and self.recipe.retrain.weights
        for field, path in given.items():
            if path is not None and not path.is_file():
                raise FileError(f"{path}: not there; {field} names a .safetensors file")
        self.splits  # noqa: B018 (opens the data and cuts it)
        network = self.network(self.recipe.model.weights)
        shape = (2, self.source.channels, self.source.size, self.source.size)
        try:
            with torch.inference_mode():
                device = next(network.parameters()).device
                network.eval()(torch.zeros(shape, device=device))
        except RuntimeError as error:
            raise OptionError(
                f"model.name {self.recipe.model.name!r} does not take images of "
                f"{self.source.size} pixels: {error}; set data.size"
            ) from None

    # ----------------------------------------------------------------------------------------- data

    @cached_property
    def source(self) -> Source:
        """Where the data is and how it looks."""
        return resolve(self.recipe.data.name, **self.recipe.data.given())

    @cached_property
    def images(self) -> tuple[Images, Images]:
        """Training and test images."""
        data = self.recipe.data
        options: dict[str, Any] = {"root": data.root, "revision": data.revision}
        options["progress"] = self.progress
        return load(self.source, "train", **options), load(self.source, "test", **options)

    @cached_property
    def splits(self) -> Splits:
        """Who belongs where."""
        recipe, limit = self.recipe, self.recipe.data.limit
        return make_splits(
            *self.images,
            recipe.split.forget,
            recipe.split.validation,
            recipe.seed,
            (limit.train, limit.test),
        )

    @cached_property
    def parts(self) -> Parts:
        """Who chooses λ, who is reported."""
        return divide(self.splits, self.recipe.search.samples, self.recipe.seed)

    def training_feed(self, part: Part) -> Feed:
        """What a training may see."""
        indices = {"train": self.splits.train, "retain": self.splits.retain}
        indices["forget"] = self.splits.forget
        return ImageFeed(self.images[0], indices[part], self.source.crop, self.source.flip)

    def scoring_feeds(self, use: Use) -> dict[str, Feed]:
        """What an evaluation runs over: the samples that choose λ, or those that are reported."""
        splits, parts = self.splits, self.parts
        train, test = self.images
        if self.looks:
            found = {
                "retain": (train, splits.retain),
                "forget": (train, splits.forget),
                "test": (test, splits.test),
            }
        elif use == "choose":
            found = {
                "retain": (train, parts.retain),
                "forget": (train, parts.forget),
                "holdout": (test if parts.holdout_from == "test" else train, parts.holdout),
            }
        else:
            found = {
                "retain": (train, parts.report_retain),
                "forget": (train, parts.report_forget),
                "test": (test, parts.report_test),
            }
        return {name: ImageFeed(images, where) for name, (images, where) in found.items()}

    @property
    def class_names(self) -> Sequence[str]:
        """What the labels mean."""
        return self.images[0].classes

    # -------------------------------------------------------------------------------------- network

    def network(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """The network, with a file's weights or with fresh ones (or the recipe's `init`)."""
        source = self.source
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with own_random_state():
            seed_torch(seed_of("weights", seed))
            network = create(
                self.recipe.model.name,
                len(self.images[0].classes),
                source.channels,
                source.mean,
                source.std,
            )
        if weights is not None:
            load_model(weights, network)
        elif self.recipe.model.init is not None:
            load_model(self.recipe.model.init, network, new_head=final_linear(network)[0])
        return channels_last(network.to(device))

    @property
    def identity(self) -> list[Any]:
        """What every model of this problem depends on."""
        data = [images.fingerprint for images in self.images]
        seen = [self.source.mean, self.source.std, self.source.crop, self.source.flip]
        seen.append(self.images[0].classes)
        init = self.recipe.model.init
        start = None if init is None else file_digest(init)
        return [data, seen, self.splits.fingerprint, self.recipe.model.name, start]

    @property
    def scored_on(self) -> list[Any]:
        """What every score depends on beside the weights."""
        return self.identity

    def complete(self, weights: Path) -> list[Path]:
        """The weights of a classifier are enough."""
        return []

    def describe(self) -> dict[str, Any]:
        """The sizes of all parts, for the record."""
        splits, parts = self.splits, self.parts
        sizes = {
            "retain": len(splits.retain),
            "forget": len(splits.forget),
            "validation": len(splits.validation),
            "test": len(splits.test),
        }
        chosen_on = {"retain": len(parts.retain), "forget": len(parts.forget)}
        chosen_on[f"holdout ({parts.holdout_from})"] = len(parts.holdout)
        return {
            "data": self.source.name,
            "classes": len(self.images[0].classes),
            "forgotten_class": None
            if splits.forgotten_class is None
            else self.images[0].classes[splits.forgotten_class],
            "sizes": sizes,
            "looked": self.looks or parts.shared,
            "chosen_on": "the reported data" if self.looks else chosen_on,
            "fingerprint": splits.fingerprint,
            "labels": np.bincount(self.images[0].labels[splits.forget]).tolist(),
        }
