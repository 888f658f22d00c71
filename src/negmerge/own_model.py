"""The unlearning problem of a module and datasets in memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from negmerge.data.draws import seed_of
from negmerge.data.feeds import DatasetFeed, Feed, Indices
from negmerge.data.samples import check_range, tensors_of
from negmerge.evaluation.predictions import BATCH
from negmerge.model_check import count_classes
from negmerge.models.weights import load_model
from negmerge.scenario import Part, Use


class OwnModel:
    """A module and its sets; what does not fit is refused when it is made.

    Args:
        model: the original; it is copied, never changed.
        splits: the sets by name.
        weights: a hash of the model's state.
        seed: decides which samples choose λ.
        trained: the sets that a model is trained on.
        depends: the sets that name a training; the others are only scored.
        samples: at most so many of each set choose λ, and are not reported; None: none do.
    """

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, Dataset[Any]],
        weights: str,
        seed: int,
        trained: Collection[str],
        depends: Collection[str],
        samples: int | None,
    ) -> None:
        self.model, self.weights, self.seed = model, weights, seed
        self.splits = {
            name: DatasetFeed(dataset, where=f"splits: {name}") for name, dataset in splits.items()
        }
        self.classes = count_classes(model, self.splits, trained)
        self.chosen = {} if samples is None else {n: self._half(n, samples) for n in splits}
        self.name = f"own-{self._hash(splits)}"
        self.identity = self.scored_on = [self.name]
        if {*depends} != {*splits}:
            self.identity = [f"own-{self._hash(depends)}"]
        self.class_names = ()

    def _hash(self, names: Collection[str]) -> str:
        """A hash of weights and samples; every label is checked on the way."""
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

    @property
    def shared(self) -> bool:
        """Whether a set is too small to be divided."""
        return any(len(self.splits[name]) < 2 for name in self.chosen)

    def training_feed(self, part: Part) -> Feed:
        """What a training may see."""
        return self.splits[part]

    def scoring_feeds(self, use: Use) -> dict[str, Feed]:
        """What chooses λ, and the rest, which is reported."""
        feeds: dict[str, Feed] = {}
        for name, feed in self.splits.items():
            picked = self.chosen.get(name, np.arange(0))
            if use == "report" and (len(feed) > 1 or not self.chosen):
                picked = np.setdiff1d(np.arange(len(feed)), picked)
            called = "holdout" if name == "test" and use == "choose" else name
            feeds[called] = DatasetFeed(feed.dataset, picked, feed.where)
        return feeds

    def network(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """A copy of the model, with a file's weights."""
        network = copy.deepcopy(self.model)
        if weights is not None:
            load_model(weights, network)
        return network

    def complete(self, weights: Path) -> list[Path]:
        """The caller has the module."""
        return []

    def describe(self) -> dict[str, Any]:
        """The sizes of all parts, for the record."""
        return {
            "data": self.name,
            "forgotten_class": None,
            "looked": self.shared,
            "sizes": {name: len(feed) for name, feed in self.splits.items()},
            "chosen_on": {name: len(picked) for name, picked in self.chosen.items()},
        }
