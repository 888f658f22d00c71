"""The fields of the recipe of a run of `nm.unlearn`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from negmerge.evaluation.criteria import KEPT, Criterion, keep_share
from negmerge.evaluation.metrics import Metric
from negmerge.scenarios.image_settings import ImageSettings
from negmerge.scenarios.settings import Description, ScenarioSettings, scenarios
from negmerge.support.settings import File, Share, Strict
from negmerge.training.hyperparameters import HyperParameters


class Sets(Strict):
    """The name of the datasets: a hash of the module and of the samples."""

    name: str


class Module(Strict):
    """The name of the module, and the file of its weights."""

    name: str
    weights: File


class ModuleSettings(ImageSettings):
    """The fields of the recipe of a module with datasets."""

    kind = "module"
    summary = "a module and datasets in memory, by nm.unlearn"
    rivals = "classes"
    retrainable = True
    in_memory = True

    data: Sets
    model: Module
    train: HyperParameters = HyperParameters()

    def data_names(self) -> list[str]:
        """The hash of the datasets."""
        return [self.data.name]

    def check_criterion(self, criterion: Criterion) -> None:
        """Do nothing: `nm.unlearn` compares the criterion with the sets."""


class FunctionSettings(ScenarioSettings):
    """The fields of the recipe of a module with functions."""

    kind = "functions"
    summary = "a module in memory, and functions that fine-tune and measure it, by nm.unlearn"
    forget_metric = "forget"
    retain_metric = "retain"
    in_memory = True

    data: Sets
    model: Module
    keep: Share = KEPT
    lower: tuple[Literal["forget", "retain"], ...] = ()

    @property
    def default_criterion(self) -> str:
        """`keep`: the lowest forget metric that keeps the share `keep` of the retain metric."""
        return "keep"

    def criterion(self, name: str) -> Criterion:
        """The only criterion; λ is chosen by the same function that measures for the report."""
        return replace(keep_share(self.keep, self.lower), uses_reported_data=True)

    def metric(self, name: str) -> Metric:
        """Return a metric; for those in `lower`, smaller values mean that a model knows more."""
        lower = (name in self.lower) != (name == self.forget_metric)
        return replace(super().metric(name), better="lower" if lower else "higher")

    def forgotten(self, about: Description) -> str:
        """A description of the forget set."""
        return f"what the user's own code fine-tunes {self.model.name} on"


for _kind in (ModuleSettings, FunctionSettings):
    scenarios.register(_kind.kind, _kind)
