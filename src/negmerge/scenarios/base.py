"""The protocol of scenarios: the data, the model, the loss and the measurements of a run.

◄ ADD A SCENARIO. A run knows sets, metrics and files of weights by name; its scenario does the
rest. To add a scenario, subclass `ScenarioSettings` (`settings.py`), which validates the fields of
a recipe, and `DataScenario` (`data.py`), which the settings create; register the settings in
`scenarios`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from torch import nn

from negmerge.evaluation.metrics import Metric
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Advance, Evaluator, InPlace
from negmerge.scenarios.settings import Description, ScenarioSettings, Setup
from negmerge.support.files import file_digest
from negmerge.support.remote.urls import Place
from negmerge.training.feeds import TrainingSet
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained, WriteCheckpoint
from negmerge.vectors.task_vector import TaskVector

Use = Literal["choose", "report", "tune"]
"""Whether samples choose λ, are reported, or tune the factors of methods with `groups`."""


class TrainingOptions(TypedDict, total=False):
    """Options of a training that do not change its result, as in `training.loop.train`."""

    state: Path | None
    save_every: float
    advance: Advance
    checkpoints: Mapping[int, WriteCheckpoint] | None


def identity(*parts: object) -> str:
    """Return a short hash of content.

    >>> identity("a", {"lr": 0.1}) == identity("a", {"lr": 0.1})
    True
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ToTrain:
    """A model that a run trains from random weights.

    Args:
        on: the set that the model is trained on.
        remedy: if the recipe does not mention this training, how to skip or to shorten it.
    """

    on: TrainingSet
    settings: HyperParameters
    remedy: str | None = None


@dataclass(frozen=True)
class Given:
    """A model that exists already.

    Args:
        weights: its file, or the URL of it; if None, the model is `Scenario.model(None)`.
        content: what `Scenario.model(None)` depends on.
        on: the set that the model was trained on, if it is known.
        sha256: the hash of the file, if it is known.
    """

    weights: Place | None = None
    content: object = None
    on: TrainingSet | None = None
    sha256: str | None = None

    def digest(self) -> str | None:
        """Return the hash of the file; None if there is no file."""
        if self.weights is None or self.sha256 is not None:
            return self.sha256
        return file_digest(self.weights)


@dataclass(frozen=True)
class PanelModel:
    """A model that a panel shows: a file of weights minus λ times a patch."""

    title: str
    model: Path
    patch: Path | None = None
    scale: float = 0.0


@dataclass(frozen=True)
class PanelContent:
    """The content of a panel.

    Args:
        tree: `text`, `columns` and `rows` of cells with `file`, `caption` and `alt`; or `missing`,
            the reason why the panel is empty.
        files: the pictures, by file name.
    """

    tree: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)


class Scenario(ABC):
    """One unlearning problem: a model, its data, how it is trained and measured.

    Args:
        settings: the fields of the recipe that belong to the scenario.
        setup: the other values that a recipe gives to every scenario.

    Class attributes:
        unit: the unit of progress.
    """

    unit: ClassVar[str] = "samples"

    def __init__(self, settings: ScenarioSettings, setup: Setup) -> None:
        self.settings = settings
        self.seed, self.samples, self.progress = setup.seed, setup.samples, setup.progress
        self.uses_reported_data, self.recalibrates = setup.uses_reported_data, setup.recalibrates
        self.tunes = setup.tunes

    # ---------------------------------------------------------------------------------- description

    def check(self) -> None:  # noqa: B027 (a scenario may have nothing to check)
        """Raise if the data, the model or the files cannot be used; called before any work."""

    @abstractmethod
    def describe(self) -> Description:
        """The sizes of all sets and other facts, which are recorded in `scores.json`."""

    @property
    @abstractmethod
    def identity(self) -> list[Any]:
        """What every trained model depends on beside its hyper-parameters."""

    @property
    def plugin_versions(self) -> list[str]:
        """Versions of the plug-ins that models depend on; the scenario's own is not among them."""
        return []

    @property
    def scored_on(self) -> list[Any]:
        """What every score depends on beside the weights."""
        return [*self.identity, "tune"] if self.tunes else self.identity

    # --------------------------------------------------------------------------------------- models

    @abstractmethod
    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """The network with the weights of a file, or with those that it starts from."""

    @abstractmethod
    def original(self) -> ToTrain | Given:
        """How the model that is to forget is made."""

    def reference(self) -> ToTrain | Given | None:
        """How the model that never saw the forget set is made, if there is one."""
        return None

    @property
    def training(self) -> HyperParameters:
        """How the original is trained; rivals take over batch size, augmentation and precision."""
        return HyperParameters()

    def draw(self, panel: str, models: Sequence[PanelModel], advance: Advance) -> PanelContent:
        """The content of a panel; `advance` is called with 1 after each model."""
        raise NotImplementedError(panel)

    def start_key(self, base: Path) -> str:
        """The part of the key of a training that stands for the original it starts from."""
        return file_digest(base)

    def details(self, tau: TaskVector) -> dict[str, Any]:
        """Fields about a task vector that only this scenario adds to `scores.json`."""
        return {}

    def export(self, weights: Path) -> list[Path]:
        """Write files that other programs need beside the unlearned weights; return their paths."""
        return []

    # -------------------------------------------------------------------- training and measurements

    @property
    def metrics(self) -> list[Metric]:
        """The metrics in the order of tables; empty if they are known only after a measurement."""
        return []

    @abstractmethod
    def work(self, on: TrainingSet, settings: HyperParameters) -> int:
        """The length of a training, in units of progress."""

    @abstractmethod
    def size(self, use: Use) -> int:
        """The length of one measurement, in units of progress."""

    @abstractmethod
    def train(
        self,
        model: nn.Module,
        on: TrainingSet,
        settings: HyperParameters,
        seed: int,
        **options: Unpack[TrainingOptions],
    ) -> Trained:
        """Train a model in place.

        Args:
            on: the set that it is trained on.
            options: the file of the state, the function that shows progress, and those that write
                checkpoints.
        """

    @abstractmethod
    def measure(self, model: nn.Module, use: Use, advance: Advance = lambda count: None) -> Scores:
        """Measure a model on the sets that choose λ or on those that are reported."""

    def subtracted(
        self, model: nn.Module, tau: TaskVector, scale: float
    ) -> AbstractContextManager[Any]:
        """Change θ to θ − λτ in place during a block; a negative λ adds τ."""
        return tau.applied(model, -scale)

    @contextmanager
    def shown(self, one: PanelModel) -> Iterator[nn.Module]:
        """Make the network of a model that a panel shows."""
        network = self.model(one.model)
        if one.patch is None:
            yield network
            return
        with self.subtracted(network, TaskVector.load(one.patch), one.scale):
            yield network

    def evaluator(self, model: nn.Module, tau: TaskVector) -> Evaluator:
        """Return an object that measures θ − λτ at any λ, on the sets that choose λ."""
        return InPlace(model, tau, lambda own, advance: self.measure(own, "choose", advance))
