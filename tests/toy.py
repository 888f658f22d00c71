"""A scenario that has nothing to do with images: numbers to predict, squared error, two metrics.

It is what a plug-in of another package looks like; `cli/test_unlearn_toy.py` runs it through the
command line with `--plugin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from negmerge.evaluation.criteria import Criterion, Reference, Row, criteria, kept
from negmerge.evaluation.metrics import Measured, Metric, Observed, metrics
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import check_finite
from negmerge.scenarios.base import Given, ToTrain, TrainingSet, Use
from negmerge.scenarios.data import DataScenario
from negmerge.scenarios.settings import Description, ScenarioSettings, Setup, scenarios
from negmerge.support.settings import Count
from negmerge.training.feeds import Batch, Feed, Indices
from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.loop import Objective
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch
from negmerge.training.weights import load_model

# ------------------------------------------------------------------------------------------ metrics


def mean_error(name: str, found: Observed) -> Measured:
    """The mean squared error on a set, with a normal interval."""
    errors = found[name]["error"].astype(np.float64)
    half = 1.96 * float(errors.std()) / len(errors) ** 0.5
    mean = float(errors.mean())
    return Measured(mean, mean - half, mean + half, len(errors))


for _set in ("forget", "retain"):
    metrics.register(
        f"error_{_set}",
        Metric(
            name=f"error_{_set}",
            label=f"squared error on the {_set} set",
            short=f"{_set} error",
            better="higher" if _set == "forget" else "lower",
            sets=(_set,),
            columns=("error",),
            value=partial(mean_error, _set),
            unit="",
            in_gap=True,
        ),
    )


def _loss(row: Row, zero: Row, reference: Reference) -> float | None:
    return -row["error_forget"] if kept(row, zero, "error_retain", 0.2, lower=True) else None


def _aim(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    limit = zero["error_retain"] / 0.2
    return (limit, f"at most {limit:.3g}") if metric == "error_retain" else None


criteria.register(
    "keep_error",
    Criterion(
        "keep_error",
        "highest forget error with at most five times the original's retain error",
        _loss,
        _aim,
        ("error_forget", "error_retain"),
        "retain",
        limits=True,
        best=float("-inf"),
    ),
)


# ----------------------------------------------------------------------------------------- scenario


class NumbersSettings(ScenarioSettings):
    """The fields of a recipe."""

    kind = "numbers"
    summary = "a small network forgets how to predict some numbers"
    forget_metric = "error_forget"
    retain_metric = "error_retain"
    reshapes = ("retain", "fisher", "groups")

    records: Count = 200
    train: HyperParameters = HyperParameters(epochs=30, batch=32, lr=0.05)

    @property
    def default_criterion(self) -> str:
        return "keep_error"

    def scenario(self, setup: Setup) -> Numbers:
        return Numbers(self, setup)


class Pairs:
    """Inputs and the numbers to predict."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.test_batch(picked)

    def test_batch(self, picked: Indices) -> Batch:
        return self.x[picked], self.y[picked]


class Numbers(DataScenario):
    """Two clouds of points; the sum is to be predicted, and one cloud is to be forgotten."""

    columns = ("error", "loss")

    def __init__(self, settings: NumbersSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.settings = settings
        draw = torch.Generator().manual_seed(setup.seed)
        self.sets: dict[str, Pairs] = {}
        centres = {"retain": -2.0, "forget": 2.0}
        parts = [(name, part) for name in centres for part in ("train", "choose", "report")]
        for name, part in (*parts, ("retain", "tune"), ("forget", "tune")):
            x = torch.randn(settings.records, 4, generator=draw) + centres[name]
            noise = 0.05 * torch.randn(settings.records, 1, generator=draw)
            self.sets[f"{name} {part}"] = Pairs(x, x.sum(1, keepdim=True) + noise)

    @property
    def identity(self) -> list[Any]:
        return ["numbers", self.settings.records, self.seed]

    def describe(self) -> Description:
        sizes = {"forget": self.settings.records, "retain": self.settings.records}
        return Description(data="numbers", sizes=sizes, chosen_on=sizes)

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        with fork_random_state():
            seed_torch(seed_of("weights", seed))
            network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        if weights is not None:
            load_model(weights, network)
        return network

    def original(self) -> ToTrain | Given:
        return ToTrain("train", self.settings.train)

    def reference(self) -> ToTrain | Given | None:
        return ToTrain("retain", self.settings.train)

    def train_set(self, name: TrainingSet) -> Feed:
        if name != "train":
            return self.sets[f"{name} train"]
        both = [self.sets[f"{part} train"] for part in ("retain", "forget")]
        return Pairs(torch.cat([p.x for p in both]), torch.cat([p.y for p in both]))

    def eval_sets(self, use: Use) -> Mapping[str, Feed]:
        return {name: self.sets[f"{name} {use}"] for name in ("retain", "forget")}

    def loss(self, settings: HyperParameters) -> Objective:
        return lambda model, batch, epoch: nn.functional.mse_loss(model(batch[0]), batch[1])

    def observe(self, model: nn.Module, name: str, batch: Batch, columns: Sequence[str]) -> Columns:
        inputs, wanted = batch
        outputs = model(inputs).cpu()
        check_finite(outputs)
        error = (outputs - wanted).square()[:, 0].numpy()
        return {"error": error, "loss": error}


scenarios.register(NumbersSettings.kind, NumbersSettings)
