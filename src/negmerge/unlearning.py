"""The same job from Python: any `nn.Module`, any map-style Datasets, one call."""

from __future__ import annotations

import copy
import hashlib
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from negmerge.checking import check_methods
from negmerge.criteria import criteria
from negmerge.data.draws import seed_of
from negmerge.data.feeds import DatasetFeed, Feed, Indices
from negmerge.errors import OptionError
from negmerge.evaluation.predictions import BATCH
from negmerge.executors import InProcess
from negmerge.files import file_digest
from negmerge.models.weights import load_model, save_model
from negmerge.outcome import NO_REFERENCE
from negmerge.pipeline import Pipeline, problem_of
from negmerge.progress import Progress, make_progress
from negmerge.recipe import Data, Model, Pool, Recipe, Search
from negmerge.rivalry import make_rival_job, run_rival
from negmerge.rivals import rivals
from negmerge.rivals.registry import PARTS
from negmerge.rundir import Run
from negmerge.scenario import Part, Use

SETS = ("forget", "retain", "test")
USUAL = {"epochs": [5, 10, 15], "label_smoothing": [0.0, 0.05, 0.1]}
"""The pool if none is given: nine members."""


def unlearn(
    model: nn.Module,
    splits: Mapping[str, Dataset[Any]],
    method: str = "consensus",
    *,
    pool: Pool | None = None,
    search: Search | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> nn.Module:
    """A copy of a classifier that has forgotten some data; the model itself is left as it is.

    >>> from torch.utils.data import TensorDataset
    >>> _ = torch.manual_seed(2)
    >>> data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    >>> pool = Pool(grid={"epochs": [1, 2]}, settings={"lr": 0.01, "batch": 8})
    >>> forgot = unlearn(nn.Linear(4, 2), {"forget": data, "test": data}, pool=pool)
    >>> type(forgot).__name__
    'Linear'

    splits: datasets of (input, label): `forget`, and `retain` or `test` or both. λ matches the
        accuracy on `test`, or without one keeps that on `retain` (`search` says otherwise).
        A rival takes those it uses, and looks at no others.
    method, options: a merge rule with its options, `single_best`, or a rival with its options and
        settings (`negmerge list rivals`), such as `method="salun", keep=0.3, epochs=5`.
    pool: how members are fine-tuned; nine members if not given. search: which λ are tried and how
        one is chosen.
    out: keep everything in this folder, and go on there after an interruption.
    """
    if method in rivals:
        if pool is not None or search is not None:
            raise OptionError(
                f"{method}: pool and search are for merged task vectors; leave them out"
            )
        return _by_rival(model, splits, method, options, out, seed, progress)
    unknown = sorted(set(splits) - set(SETS))
    if unknown or "forget" not in splits or len(splits) < 2:
        raise OptionError(
            f"splits: got {', '.join(sorted(splits)) or 'nothing'}; wanted forget, and retain or "
            "test or both"
        )
    with ExitStack() as stack:
        folder = Run(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        stack.enter_context(folder.working())
        given = folder.states / "given.safetensors"
        save_model(given, model, {})
        search = search or Search(limit=16.0)
        if search.criterion is None:
            criterion = "match_holdout" if "test" in splits else "keep_retain"
            search = search.model_copy(update={"criterion": criterion})
        needs = criteria.get(search.criterion or "").needs
        if needs not in splits:
            raise OptionError(f"search.criterion {search.criterion!r} needs the {needs} set")
        own = OwnModel(model, splits, search, file_digest(given), seed)
        recipe = Recipe(
            title=f"{type(model).__name__}: {method}",
            seed=seed,
            data=Data(name=own.name),
            model=Model(name=type(model).__name__, weights=given),
            retrain=None,
            pool=pool or Pool.model_validate({"grid": USUAL}),
            methods=[{"name": method, "options": options}],  # pyright: ignore[reportArgumentType]
            search=search,
        )
        check_methods(recipe)
        if folder.finished_with(recipe.dump(), problem_of(recipe, own)):
            folder.clear()
        else:
            shows = stack.enter_context(make_progress()) if progress is None else progress
            shown = out is not None  # there will be no page of a folder that goes
            Pipeline(recipe, folder, own, InProcess(own), shows, illustrated=shown).run()
        for text in folder.scores["warnings"]:
            if text != NO_REFERENCE:
                warnings.warn(text, stacklevel=2)
        forgot = copy.deepcopy(model)
        load_model(folder.unlearned, forgot)
    return forgot


def _by_rival(
    model: nn.Module,
    splits: Mapping[str, Dataset[Any]],
    method: str,
    options: Mapping[str, Any],
    out: str | Path | None,
    seed: int,
    progress: Progress | None,
) -> nn.Module:
    rival = rivals.get(method)
    parts = PARTS[rival.used(rival.resolve(options)[1])]
    missing = [part for part in parts if part not in splits]
    if missing:
        hint = ", or use_retain=False" if "use_retain" in rival.defaults else ""
        raise OptionError(
            f"{method}: splits has no {missing[0]} set; wanted {' and '.join(parts)}: give it{hint}"
        )
    with ExitStack() as stack:
        folder = Run(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        stack.enter_context(folder.working())
        given = folder.states / "given.safetensors"
        save_model(given, model, {})
        digest = file_digest(given)
        used = {part: splits[part] for part in parts}
        own = OwnModel(model, used, Search(), digest, seed)
        place = partial(folder.rival, method)
        job = make_rival_job(
            own, method, rival, options, None, place, folder.states, (given, digest)
        )
        if not job.done():
            shows = stack.enter_context(make_progress()) if progress is None else progress
            shows.stage(method, job.samples(own), "samples")
            run_rival(own, job, shows.advance)
        folder.clear()
        forgot = copy.deepcopy(model)
        load_model(job.out, forgot)
    return forgot


class OwnModel:
    """The unlearning problem of a module and datasets in memory."""

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, Dataset[Any]],
        search: Search,
        weights: str,
        seed: int,
    ) -> None:
        self.model, self.seed = model, seed
        self.splits = {name: DatasetFeed(dataset) for name, dataset in splits.items()}
        for name, feed in self.splits.items():
            if not len(feed):
                raise OptionError(f"splits: the {name} set is empty")
        self.chosen = {name: self._half(name, search.samples) for name in splits}
        digest = hashlib.blake2b(weights.encode(), digest_size=8)
        for name, feed in sorted(self.splits.items()):
            digest.update(f"{name} {len(feed)} {seed}".encode())
            for start in range(0, len(feed), BATCH):
                for tensor in feed.test_batch(np.arange(start, min(start + BATCH, len(feed)))):
                    digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.name = f"own-{digest.hexdigest()}"
        self.identity = self.scored_on = [self.name]
        self.class_names = ()

    def _half(self, name: str, samples: int) -> Indices:
        size = len(self.splits[name])
        order = np.random.default_rng(seed_of("choice", self.seed, name)).permutation(size)
        return np.sort(order[: min(samples, max(size // 2, 1))])

    @property
    def shared(self) -> bool:
        """Whether a set is too small to be divided."""
        return any(len(feed) < 2 for feed in self.splits.values())

    def training_feed(self, part: Part) -> Feed:
        """What a training may see."""
        return self.splits[part]

    def scoring_feeds(self, use: Use) -> dict[str, Feed]:
        """What chooses λ, and the rest, which is reported."""
        feeds: dict[str, Feed] = {}
        for name, feed in self.splits.items():
            picked = self.chosen[name]
            if use == "report" and len(feed) > 1:
                picked = np.setdiff1d(np.arange(len(feed)), picked)
            called = "holdout" if name == "test" and use == "choose" else name
            feeds[called] = DatasetFeed(feed.dataset, picked)
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
