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

from negmerge.checkpoints.model_folder import base_of
from negmerge.checkpoints.remote import local_model
from negmerge.errors import FileError, OptionError, quoted
from negmerge.scenarios.base import Given, ToTrain, TrainingSet, Use
from negmerge.scenarios.classify.settings import ClassifySettings, Retrain
from negmerge.scenarios.classify.source import folder_of, source_of
from negmerge.scenarios.images import ClassifierScenario
from negmerge.scenarios.settings import Description, Setup
from negmerge.support.files import file_digest
from negmerge.support.remote.urls import is_url
from negmerge.training.feeds import Feed, Indices
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import channels_last, final_linear
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch
from negmerge.training.weights import load_model
from negmerge.vision.datasets import Images, Source, load
from negmerge.vision.feed import ImageFeed
from negmerge.vision.networks import create, models
from negmerge.vision.pretrained import ImageModel, Preparation
from negmerge.vision.splits import SearchParts, Splits, divide_for_search, make_splits


class Classify(ClassifierScenario):
    """An image classifier and its data, which is opened on first use."""

    def __init__(self, settings: ClassifySettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.settings = settings

    def check(self) -> None:
        settings = self.settings
        if self.folder is None:
            models.get(settings.model.name)
        self._check_folder()
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
        original = self.original()
        given_weights = original.weights if isinstance(original, Given) else None
        network = self.model(None if given_weights is None else local_model(given_weights))
        if self.folder is not None and final_linear(network)[1].out_features != len(
            self.class_names
        ):
            raise OptionError(
                f"model.name {quoted(settings.model.name)}: its last linear layer does not compute "
                f"the logits of the {len(self.class_names)} classes; wanted another classifier"
            )
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

    def _check_folder(self) -> None:
        """Raise if fields of the recipe do not fit the classifier of a folder, or none is named."""
        model, folder = self.settings.model, self.folder
        if folder is None:
            for field in ("knows", "revision"):
                if getattr(model, field):
                    raise OptionError(
                        f"model.{field}: is for a folder or a Hub id; model.name is the network "
                        f"{model.name}; remove this field"
                    )
            return
        if model.init is not None and not model.knows:
            raise OptionError(
                f"model.init: {model.name} has its own weights, from which training starts; remove "
                "this field"
            )
        names = list(self.class_names)
        if model.knows and folder.classes != len(names):
            raise OptionError(
                f"model.knows: {model.name} has {folder.classes} classes, the data has "
                f"{len(names)}; wanted a classifier of the data, or knows: false, which trains it "
                "with a new last layer"
            )
        known = None if folder.labels is None else [name.lower() for name in folder.labels]
        wanted = [name.lower() for name in names]
        if model.knows and known is not None and known != wanted and {*known} == {*wanted}:
            k = next(k for k, name in enumerate(known) if name != wanted[k])
            raise OptionError(
                f"model.knows: {model.name} has the classes of the data in another order: class "
                f"{k} is {quoted(known[k])}, that of the data {quoted(wanted[k])}; wanted the same "
                "order"
            )

    # ----------------------------------------------------------------------------------------- data

    @cached_property
    def folder(self) -> ImageModel | None:
        """The classifier of a folder or Hub id; None for a registered network."""
        return folder_of(self.settings)

    @cached_property
    def source(self) -> Source:
        """Where the data is, and the format of its images."""
        return source_of(self.settings)

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
        """The network with the weights of a file or folder, of `model.init`, or random ones."""
        source, model = self.source, self.settings.model
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with fork_random_state():
            seed_torch(seed_of("weights", seed))
            channels = (source.channels, source.mean, source.std)
            network = create(model.name, len(self.class_names), *channels, model.revision)
        if weights is not None and weights.is_dir():  # the original, if its folder knows the data
            assert self.folder is not None
            self.folder.load(network)
        elif weights is not None:
            load_model(weights, network)
        elif self.folder is not None and not model.knows:
            self.folder.load(network)
        elif model.init is not None:
            load_model(local_model(model.init), network, new_head=final_linear(network)[0])
        return channels_last(network.to(device))

    def original(self) -> ToTrain | Given:
        """A file or folder, or a model trained on retain ∪ forget."""
        if self.settings.model.weights is not None:
            return Given(self.settings.model.weights, on="train")
        if self.settings.model.knows and self.folder is not None:
            return Given(self.folder.path, on="train", sha256=self.folder.fingerprint)
        train = self.settings.train
        remedy = (
            f"{train.epochs} epochs are the default: set train.epochs, or give a trained model as "
            "model.weights"
        )
        return ToTrain("train", train, None if "epochs" in train.model_fields_set else remedy)

    def reference(self) -> ToTrain | Given | None:
        """A file, or a model trained on the retain set; None if the recipe turns it off.

        There is none either if the original was trained elsewhere, from weights that are not known.
        """
        retrain = self.settings.retrain
        if retrain is None or self.settings.is_unrepeatable:
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
        return [] if self.folder is not None else models.versions(self.settings.model.name)

    @property
    def identity(self) -> list[Any]:
        data = [images.fingerprint for images in self.images]
        source, model = self.source, self.settings.model
        seen = [source.mean, source.std, source.crop, source.flip, self.class_names]
        start = None if model.init is None else file_digest(model.init)
        name = model.name if self.folder is None else self.folder.fingerprint
        return [data, seen, self.splits.fingerprint, name, start]

    def export(self, weights: Path) -> list[Path]:
        """Write the configuration of a classifier that came in a folder, so that others open it."""
        if self.folder is None:
            return []
        source = self.source
        images = Preparation(source.size, source.mean, source.std, source.fit, source.interpolation)
        return self.folder.export(weights.parent, list(self.class_names), images)

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
            **self._about_folder,
        )

    @cached_property
    def _about_folder(self) -> dict[str, Any]:
        if self.folder is None:
            return {}
        about = {"name": self.folder.name, "library": self.folder.library}
        shapes = None
        if self.settings.model.knows:
            with torch.device("meta"):
                state = self.folder.build(self.folder.classes).state_dict()
            shapes = {name: (*tensor.shape,) for name, tensor in state.items()}
        return {"model": about, **base_of(self.folder.name, self.folder.path, shapes)}
