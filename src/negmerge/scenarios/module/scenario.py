"""A classifier module and datasets in memory, unlearned by `nm.unlearn`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from negmerge.evaluation.passes import BATCH, batches
from negmerge.scenarios.base import Given, TrainingSet, Use
from negmerge.scenarios.images import ClassifierScenario
from negmerge.scenarios.module.check import count_classes
from negmerge.scenarios.module.settings import ModuleSettings
from negmerge.scenarios.settings import Description, Setup
from negmerge.training.feeds import DatasetFeed, Feed, Indices
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.samples import check_range, tensors_of
from negmerge.training.seeds import seed_of
from negmerge.training.weights import load_model


class ModuleScenario(ClassifierScenario):
    """A module and its sets; creating it raises if they do not fit.

    Args:
        model: the original; it is copied, never changed.
        splits: the sets, by name.
        weights: a hash of the model's state.
        seed: the seed of the choice of samples that choose λ.
        trained: the sets that models are trained on.
        depends: the sets that the key of a training depends on; the others are only measured.
        samples: the largest number of samples of each set that choose λ and are not reported; if
            None, λ is not chosen.
    """

    def __init__(
        self,
        settings: ModuleSettings,
        model: nn.Module,
        splits: Mapping[str, Dataset[Any]],
        weights: str,
        seed: int,
        trained: Collection[str],
        depends: Collection[str],
        samples: int | None,
    ) -> None:
        super().__init__(settings, Setup(seed))
        self.settings, self.module, self.weights = settings, model, weights
        self.splits = {
            name: DatasetFeed(dataset, where=f"splits: {name}") for name, dataset in splits.items()
        }
        self.classes = count_classes(model, self.splits, trained)
        self.chosen = {} if samples is None else {n: self._half(n, samples) for n in splits}
        self.name = self._trained_on = f"own-{self._hash(splits)}"
        if {*depends} != {*splits}:
            self._trained_on = f"own-{self._hash(depends)}"

    @property
    def class_names(self) -> Sequence[str]:
        """Empty: datasets in memory have no class names."""
        return ()

    @property
    def identity(self) -> list[Any]:
        """A hash of the weights and of the samples that a training depends on."""
        return [self._trained_on]

    @property
    def scored_on(self) -> list[Any]:
        """A hash of the weights and of the samples of all sets."""
        return [self.name]

    @property
    def training(self) -> HyperParameters:
        """The hyper-parameters that rivals take batch size and precision from."""
        return self.settings.train

    def start_key(self, base: Path) -> str:
        """The hash of the weights for rivals, and the hash of the file of the run for members."""
        return self.weights if not self.chosen else super().start_key(base)

    def original(self) -> Given:
        """The module."""
        return Given(self.settings.model.weights, sha256=self.weights)

    def _hash(self, names: Collection[str]) -> str:
        """Hash the weights and the samples of some sets, and check every label."""
        digest = hashlib.blake2b(self.weights.encode(), digest_size=8)
        for name in sorted(names):
            feed = self.splits[name]
            digest.update(f"{name} {len(feed)} {self.seed}".encode())
            for start in range(0, len(feed), BATCH):
                inputs, labels = feed.test_batch(np.arange(start, min(start + BATCH, len(feed))))
                check_range(labels, start, self.classes, feed.where)
                if isinstance(inputs, dict):
                    digest.update(" ".join(sorted(inputs)).encode())
                for tensor in (*tensors_of(inputs), labels):
                    digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _half(self, name: str, samples: int) -> Indices:
        size = len(self.splits[name])
        order = np.random.default_rng(seed_of("choice", self.seed, name)).permutation(size)
        return np.sort(order[: min(samples, max(size // 2, 1))])

    def train_set(self, name: TrainingSet) -> Feed:
        return self.splits[name]

    def eval_sets(self, use: Use) -> dict[str, Feed]:
        """The samples that choose λ, or the others, which are reported, by set."""
        feeds: dict[str, Feed] = {}
        for name, feed in self.splits.items():
            picked = self.chosen.get(name, np.arange(0))
            if use == "report" and (len(feed) > 1 or not self.chosen):
                picked = np.setdiff1d(np.arange(len(feed)), picked)
            called = "holdout" if name == "test" and use == "choose" else name
            feeds[called] = DatasetFeed(feed.dataset, picked, feed.where)
        return feeds

    def unseen_set(self) -> Feed | None:
        """The reported test samples of the classes of the forget set."""
        found = self.eval_sets("report")
        if not {"forget", "test"} <= found.keys():
            return None
        known, labels = (_labels(found[name]) for name in ("forget", "test"))
        where = np.flatnonzero(np.isin(labels, known))
        test = found["test"]
        assert isinstance(test, DatasetFeed)
        return DatasetFeed(test.dataset, test.indices[where], test.where) if len(where) else None

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """A copy of the module, with the weights of a file if one is given."""
        network = copy.deepcopy(self.module)
        if weights is not None:
            load_model(weights, network)
        return network

    def describe(self) -> Description:
        return Description(
            data=self.name,
            forgotten_class=None,
            looked=any(len(self.splits[name]) < 2 for name in self.chosen),
            sizes={name: len(feed) for name, feed in self.splits.items()},
            chosen_on={name: len(picked) for name, picked in self.chosen.items()},
        )


def _labels(feed: Feed) -> Indices:
    """Return the label of every sample of a feed."""
    return np.concatenate([feed.test_batch(some)[1].numpy() for some in batches(len(feed))])
