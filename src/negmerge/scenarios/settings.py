"""What recipes and reports know about a scenario: fields, texts and metrics, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from negmerge.errors import OptionError
from negmerge.evaluation.criteria import KEPT, Criterion, criteria, keep_share
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.registry import Registry
from negmerge.support.progress import Progress
from negmerge.support.settings import Strict

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario
    from negmerge.scenarios.workload import Workload
    from negmerge.training.hyperparameters import HyperParameters


@dataclass(frozen=True)
class Panel:
    """A section of the page that only one kind of scenario has.

    Args:
        id: the id of the section; `Scenario.draw` returns its data, `report/data/ID.json`.
    """

    id: str
    title: str


class Description(BaseModel):
    """The data and the model of a run: `splits` in `scores.json`.

    Args:
        sizes: the number of samples of every set.
        chosen_on: the number of samples of each set that choose λ, or "the reported data".
        looked: whether λ was chosen on samples that are reported.
        forgotten_class: the class, if a whole class is forgotten.
        fingerprint: a hash of the samples of each set.
        notes: remarks for the user before the work begins.
        scenario: the kind of scenario, if it is not `classify`.
        labels: the number of samples to forget, by class.
        control: the data set that is kept, if it is another one.
        base_model: the Hub id of the model that is to forget, if it comes from there.
        base_commit: the commit of `base_model`, if it is known.
        base_fits: whether the files of `base_model` are those of the original, so that a patch of
            the run can be applied to them.
        licence: the licence that the model card of the model that is to forget names.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    data: str
    sizes: dict[str, int]
    chosen_on: dict[str, int] | str
    looked: bool = False
    forgotten_class: str | None = None
    fingerprint: str | None = None
    notes: list[str] = Field(default_factory=list)
    scenario: str | None = None
    classes: int | None = None
    labels: list[int] | None = None
    control: str | None = None
    model: dict[str, Any] | None = None
    base_model: str | None = None
    base_commit: str | None = None
    base_fits: bool = False
    licence: str | None = None


class ScenarioSettings(Strict):
    """The fields of a recipe that belong to one kind of scenario, and facts that need no data.

    Class attributes:
        kind: the value of `scenario:` in a recipe.
        summary: a description of one line.
        forget_metric: the metric that measures how well the forget set is known.
        retain_metric: the metric that measures how well the rest is kept.
        order: names of metrics in the order of tables; other metrics follow.
        panels: sections of the page that only this scenario has.
        rivals: what the model predicts, if rivals can be run, which need a retain set; `classes` or
            `texts`.
        retrainable: whether a retrained model is possible, so that its absence is a warning.
        has_shadows: whether the scenario makes shadows of itself, for `evidence: full`.
        checks_losses: whether a run compares the losses of its members with that of the original.
        reshapes: the fields that change the τ of a method with data, of those that are possible:
            `retain` and `fisher` if models can be trained on the retain set, `groups` if
            `eval_sets("tune")` returns samples that neither choose λ nor are reported.
        in_memory: whether model and data are arguments of `nm.unlearn`, which no recipe has.
        task: what the Hugging Face Hub calls the task of the model.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    forget_metric: ClassVar[str]
    retain_metric: ClassVar[str]
    order: ClassVar[tuple[str, ...]] = ()
    panels: ClassVar[tuple[Panel, ...]] = ()
    rivals: ClassVar[Literal["classes", "texts"] | None] = None
    retrainable: ClassVar[bool] = False
    has_shadows: ClassVar[bool] = False
    checks_losses: ClassVar[bool] = False
    reshapes: ClassVar[tuple[str, ...]] = ()
    in_memory: ClassVar[bool] = False
    task: ClassVar[str | None] = None

    @classmethod
    def defaults(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tree of a whole recipe, with the default values of this scenario."""
        return tree

    def check_members(self, members: Sequence[HyperParameters]) -> None:
        """Raise if this scenario cannot train a pool member with its settings."""

    def member_notes(self, members: Sequence[HyperParameters]) -> list[str]:
        """Warnings about settings of pool members that are possible, but spoil the result."""
        return []

    @property
    def default_criterion(self) -> str:
        """The criterion that chooses λ if a recipe names none."""
        return "keep_retain"

    def metric(self, name: str) -> Metric:
        """Return a metric by its name; one that is not registered has a name and a direction."""
        return metric_of(name, forgotten=name == self.forget_metric)

    def criterion(self, name: str) -> Criterion:
        """Return a criterion by its name; `keep_retain` uses the two metrics of the scenario."""
        forget, retain = self.metric(self.forget_metric), self.metric(self.retain_metric)
        if name != "keep_retain" or forget.name == "acc_forget":
            return criteria.get(name)
        lower = [retain.name] if retain.better == "lower" else []
        lower += [forget.name] if forget.better == "higher" else []
        return keep_share(KEPT, lower, forget.name, retain.name, name)

    def check_criterion(self, criterion: Criterion) -> None:
        """Raise if a criterion needs a set or a model that this scenario does not have."""
        if criterion.needs != "retain":
            raise OptionError(
                f"search.criterion: got {criterion.name}, but scenario {self.kind} has only a "
                f"forget and a retain set; wanted {self.default_criterion}"
            )

    def forgotten(self, about: Description) -> str:
        """A description of the forget set, for the page."""
        return f"{about.sizes['forget']:,} training records of {about.data}"

    def retraining(self, sizes: Mapping[str, int]) -> int | None:
        """The number of samples that retraining would process; None if it is not known."""
        return None

    def data_names(self) -> list[str]:
        """The names of the data sets that a run needs; the one to forget comes first."""
        return []

    def hub_data(self, name: str) -> str | None:
        """The Hub id of the data that a set of samples belongs to; None if it is not there."""
        return None

    def network(self) -> str | None:
        """The name of the network, or the folder of the model, as the recipe has it."""
        return None

    def facts(self) -> dict[str, str]:
        """Values for the placeholders in texts about a run, by name."""
        return {}

    def workload(self, setup: Setup) -> Workload:
        """The cost of a run."""
        raise OptionError(f"scenario {self.kind}: has no estimate of the cost of a run")

    def scenario(self, setup: Setup) -> Scenario:
        """Create the scenario, which opens data and models."""
        raise OptionError(
            f"scenario {self.kind}: its model and data are in memory only; call nm.unlearn again"
        )


def check_reference(criterion: Criterion, retrain: object) -> None:
    """Raise if a criterion needs the retrained model and a recipe turns it off."""
    if criterion.needs == "retrain" and retrain is None:
        raise OptionError(
            f"search.criterion: {criterion.name} needs the retrained model, but retrain is null; "
            "remove `retrain: null` or use another criterion"
        )


@dataclass(frozen=True)
class Setup:
    """The values that a recipe gives to every scenario.

    Args:
        seed: the seed of the splits and of all trainings.
        samples: the largest number of samples of each set that choose λ.
        uses_reported_data: whether λ is chosen on the reported data.
        progress: shows the progress of long preparations.
        recalibrates: whether the statistics of BatchNorm are computed again after each subtraction.
        tunes: whether half of the samples that choose λ are set apart, for methods with `groups`.
    """

    seed: int = 0
    samples: int = 2000
    uses_reported_data: bool = False
    progress: Progress | None = None
    recalibrates: bool = False
    tunes: bool = False


scenarios: Registry[type[ScenarioSettings]] = Registry(
    "scenario",
    "negmerge.scenarios.classify.settings",
    "negmerge.scenarios.clip.settings",
    "negmerge.scenarios.module.settings",
    "negmerge.scenarios.text.settings",
)
