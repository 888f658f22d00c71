"""The classify scenario: an image classifier forgets records or a class of its training data."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from negmerge.checkpoints.remote import local_model
from negmerge.errors import FileError, OptionError
from negmerge.scenarios.base import Given, ToTrain, TrainingSet, Use
from negmerge.scenarios.classify.settings import ClassifySettings, Retrain
from negmerge.scenarios.images import ClassifierScenario
from negmerge.scenarios.settings import Description, Setup
from negmerge.support.files import file_digest
from negmerge.support.remote.urls import is_url
from negmerge.training.feeds import Feed, Indices
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import channels_last, final_linear
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch
from negmerge.training.weights import load_model
from negmerge.vision.datasets import Images, Source, load, resolve
from negmerge.vision.feed import ImageFeed
from negmerge.vision.networks import create, models
from negmerge.vision.splits import SearchParts, Splits, divide_for_search, make_splits


class Classify(ClassifierScenario):
    """An image classifier and its data, which is opened on first use."""

    def __init__(self, settings: ClassifySettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.settings = settings

    def check(self) -> None:
        settings = self.settings
        models.get(settings.model.name)
        given = {
            "model.weights": settings.model.weights,
            "model.init": settings.model.init,
            "retrain.weights": settings.retrain and settings.retrain.weights,
        }
        for field, path in given.items():
            if path is not None and not is_url(path) and not Path(path).is_file():
                raise FileError(f"{path}: no such file; wanted a .safetensors file for {field}")
        self.splits  # noqa: B018 (opens the data and cuts it)
        self.check_shown_classes()
        given_weights = settings.model.weights
        network = self.model(None if given_weights is None else local_model(given_weights))
        shape = (2, self.source.channels, self.source.size, self.source.size)
        try:
            with torch.inference_mode():
                device = next(network.parameters()).device
                network.eval()(torch.zeros(shape, device=device))
        except RuntimeError as error:
            raise OptionError(
                f"model.name: {settings.model.name!r} does not take images of "
                f"{self.source.size} pixels: {error}; set data.size"
            ) from None

    # ----------------------------------------------------------------------------------------- data

    @cached_property
    def source(self) -> Source:
        """Where the data is, and the format of its images."""
        return resolve(self.settings.data.name, **self.settings.data.given())

    @cached_property
    def images(self) -> tuple[Images, Images]:
        """Training and test images."""
        data = self.settings.data
        options = {"root": data.root, "revision": data.revision, "progress": self.progress}
        return load(self.source, "train", **options), load(self.source, "test", **options)

    @cached_property
    def splits(self) -> Splits:
        """The positions of the samples of each set."""
        split, limit = self.settings.split, self.settings.data.limit
        return make_splits(
            *self.images, split.forget, split.validation, self.seed, (limit.train, limit.test)
        )

    @cached_property
    def parts(self) -> SearchParts:
        """The positions of the samples that choose λ and of those that are reported."""
        return divide_for_search(self.splits, self.samples, self.seed, self.tunes)

    def shadow(self, forget: Indices, left_out: Indices) -> Classify:
        all_of, parts = self.splits, self.parts
        kept = np.delete(all_of.forget, np.concatenate([forget, left_out]))
        retain = np.union1d(all_of.retain, kept)
        own = copy(self)  # with the same images
        own.splits = replace(all_of, retain=retain, forget=all_of.forget[forget])
        divided = divide_for_search(own.splits, self.samples, self.seed, self.tunes)
        own.parts = replace(
            parts,
            choose=parts.choose | {"forget": divided.choose["forget"]},
            report=parts.report | {"forget": divided.report["forget"]},
            tune=parts.tune | {k: v for k, v in divided.tune.items() if k == "forget"},
        )
        own.settings = self.settings.model_copy(update={"retrain": Retrain()})
        return own

    def train_set(self, name: TrainingSet) -> Feed:
        where = getattr(self.splits, name)
        return ImageFeed(self.images[0], where, self.source.crop, self.source.flip)

    def eval_sets(self, use: Use) -> dict[str, Feed]:
        parts, (train, test) = self.parts, self.images
        sets = {"choose": parts.choose, "report": parts.report, "tune": parts.tune}[use]
        if self.uses_reported_data:
            sets = {name: getattr(self.splits, name) for name in ("retain", "forget", "test")}
        of = {"holdout": test if parts.holdout_from == "test" else train, "test": test}
        return {name: ImageFeed(of.get(name, train), where) for name, where in sets.items()}

    def unseen_set(self) -> Feed | None:
        """Reported test images of the classes of the forget set.

        The test set has no images of a class that is forgotten as a whole; they are taken from the
        test images that it leaves out.
        """
        train, test = self.images
        forgotten = self.splits.forgotten_class
        where = self.splits.test if self.uses_reported_data else self.parts.report["test"]
        if forgotten is None:
            known = np.unique(train.labels[self.splits.forget])
            where = where[np.isin(test.labels[where], known)]
        else:
            where = np.flatnonzero(test.labels == forgotten)
        return ImageFeed(test, where) if len(where) else None

    @property
    def class_names(self) -> Sequence[str]:
        return self.images[0].classes

    # --------------------------------------------------------------------------------------- models

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """The network with the weights of a file, of `model.init`, or with random weights."""
        source, model = self.source, self.settings.model
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with fork_random_state():
            seed_torch(seed_of("weights", seed))
            channels = (source.channels, source.mean, source.std)
            network = create(model.name, len(self.class_names), *channels)
        if weights is not None:
            load_model(weights, network)
        elif model.init is not None:
            load_model(local_model(model.init), network, new_head=final_linear(network)[0])
        return channels_last(network.to(device))

    def original(self) -> ToTrain | Given:
        """A file, or a model trained on retain ∪ forget."""
        if self.settings.model.weights is not None:
            return Given(self.settings.model.weights, on="train")
        train = self.settings.train
        remedy = (
            f"{train.epochs} epochs are the default: set train.epochs, or give a trained model as "
            "model.weights"
        )
        return ToTrain("train", train, None if "epochs" in train.model_fields_set else remedy)

    def reference(self) -> ToTrain | Given | None:
        """A file, or a model trained on the retain set; None if the recipe turns it off."""
        retrain = self.settings.retrain
        if retrain is None:
            return None
        if retrain.weights is not None:
            return Given(retrain.weights, on="retain")
        asked = "retrain" in self.settings.model_fields_set or self.uses_reported_data
        remedy = "the recipe does not mention it: `retrain: null` skips it, and Avg. Gap with it"
        return ToTrain("retain", self.settings.train, None if asked else remedy)

    @property
    def training(self) -> HyperParameters:
        return self.settings.train

    @property
    def plugin_versions(self) -> list[str]:
        """The version of the plug-in that defines the network, if one does."""
        return models.versions(self.settings.model.name)

    @property
    def identity(self) -> list[Any]:
        data = [images.fingerprint for images in self.images]
        source, model = self.source, self.settings.model
        seen = [source.mean, source.std, source.crop, source.flip, self.class_names]
        start = None if model.init is None else file_digest(model.init)
        return [data, seen, self.splits.fingerprint, model.name, start]

    def describe(self) -> Description:
        splits, parts = self.splits, self.parts
        sets = ("retain", "forget", "validation", "test")
        chosen_on = {name: len(part) for name, part in parts.choose.items()}
        chosen_on[f"holdout ({parts.holdout_from})"] = chosen_on.pop("holdout")
        number, names = splits.forgotten_class, self.class_names
        return Description(
            data=self.source.name,
            classes=len(names),
            forgotten_class=None if number is None else names[number],
            sizes={name: len(getattr(splits, name)) for name in sets},
            looked=self.uses_reported_data or parts.shared,
            chosen_on="the reported data" if self.uses_reported_data else chosen_on,
            fingerprint=splits.fingerprint,
            labels=np.bincount(self.images[0].labels[splits.forget]).tolist(),
        )
