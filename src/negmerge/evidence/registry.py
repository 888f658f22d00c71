"""The registry of tests of forgetting, and the three kinds of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from negmerge.evaluation.scores import Scores
from negmerge.evidence.findings import RETRAINED, TIERS, Finding, Quantity, TestResult, Tier
from negmerge.evidence.shadow_margins import ShadowMargins
from negmerge.registry import Registry
from negmerge.support.progress import Advance

if TYPE_CHECKING:
    from torch import nn

    from negmerge.scenarios.data import DataScenario
    from negmerge.scenarios.settings import ScenarioSettings

Need = Literal[
    "chances", "features", "relearning", "retrained", "second", "sets", "shadows", "unseen",
    "weights",
]  # fmt: skip
"""What a test needs: `chances`, how likely the model finds the true answer to each sample;
`features` of each sample; `relearning`, that the model can be trained on forget and retain set; the
`retrained` model; a `second` one; `sets` of samples; `shadows`, that models can be trained without
some of the forget set; `unseen` samples like those of the forget set; `weights` that alone are the
model."""

Findings = dict[str, Finding]
"""The findings of one model, by name of the quantity."""


@dataclass(frozen=True)
class Seen:
    """What was observed of one model.

    Args:
        sets: by set (`forget`, `unseen`, `retain`, `test`), columns with one value for each sample:
            `margin`, and those of the forget metric.
        scores: on the reported data.
    """

    sets: Mapping[str, Mapping[str, NDArray[Any]]]
    scores: Scores


@dataclass(frozen=True)
class Exhibits:
    """What was observed of all models of a run, by title.

    Args:
        forget_metric: the name of the metric of the forget set.
        seed: of the run.
    """

    models: Mapping[str, Seen]
    forget_metric: str
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """One model, on which a test runs something; it must leave the weights as they were.

    Args:
        title: of the model.
        network: the model, with τ applied.
        original: the file of the original model.
        seed: of the run.
        advance: to be called with the amount of work done.
    """

    title: str
    scenario: DataScenario
    network: nn.Module
    original: Path
    seed: int
    advance: Advance


def named(quantity: Quantity, settings: ScenarioSettings) -> Quantity:
    """Return a quantity with the label and the unit of the metric that it is, if it is one.

    Points stay points, which percentages differ by.

    A larger value of a forget metric that rises by forgetting, such as an error, means what a
    smaller one of others does.
    """
    if quantity.of is None:
        return quantity
    name = settings.forget_metric if quantity.of == "forget" else settings.retain_metric
    metric = settings.metric(name)
    label = quantity.label.replace("{metric}", metric.label)
    points = (quantity.unit, metric.unit) == ("points", "%")
    changes = {"label": label, "unit": quantity.unit if points else metric.unit}
    if quantity.of == "forget" and metric.better == "higher":
        changes |= {"above": quantity.below, "below": quantity.above}
    return quantity.model_copy(update=changes)


def same(found: dict[str, Findings]) -> dict[str, Findings]:
    """Return the findings of all models as they are."""
    return found


@dataclass(frozen=True, kw_only=True)
class ForgettingTest:
    """A test of forgetting.

    Args:
        name: the name in `scores.json` and in listings.
        title: the title of its figure.
        text: what is measured, and how, for the page.
        tier: the tier from which on a run does the test.
        quantities: the numbers that it finds; the first one decides what the page says.
        needs: what a run must have; without it the test is recorded as not done.
        axis: the label of the horizontal axis of the curves, if it has curves.
        y_axis: that of the other axis; `{metric}` is replaced by the label of the forget metric.
        null: the title of the model whose finding is the line to reach.
        finish: computes findings that need those of other models, from those of all.
        place: tests with a smaller number come first on the page.
        version: to be raised when the same model gives other findings.
    """

    name: str
    title: str
    text: str
    tier: Tier
    quantities: tuple[Quantity, ...]
    needs: frozenset[Need] = frozenset()
    axis: str = ""
    y_axis: str = "{metric}"
    null: str = RETRAINED
    finish: Callable[[dict[str, Findings]], dict[str, Findings]] = same
    place: int = 100
    version: int = 1

    def result(
        self, settings: ScenarioSettings, models: dict[str, Findings], missing: str | None = None
    ) -> TestResult:
        """Return the record of what was found, or of why nothing was."""
        found: dict[str, Any] = {"models": models} if missing is None else {"missing": missing}
        if self.axis:
            metric = settings.metric(settings.forget_metric)
            found["axis"] = self.axis
            found["y_axis"] = self.y_axis.replace("{metric}", metric.axis)
        if self.null != RETRAINED:
            found["null"] = self.null
        about = {"title": self.title, "text": self.text, "tier": self.tier}
        own = [named(quantity, settings) for quantity in self.quantities]
        return TestResult(**about, quantities=own, **found)  # pyright: ignore


@dataclass(frozen=True, kw_only=True)
class ObservedTest(ForgettingTest):
    """A test that is computed from what was observed of single samples, of one or all models.

    Args:
        find: returns the findings of a model, given what was observed of all, and its title.
        sets: the sets to observe, by the names of `evidence.sets.sets_of`; empty if the metrics of
            the models are enough.
    """

    find: Callable[[Exhibits, str], Findings]
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelTest(ForgettingTest):
    """A test that runs something on the model.

    Args:
        find: returns the findings of a model.
        size: the amount of work for one model, in units of progress.
    """

    find: Callable[[Subject], Findings]
    size: Callable[[DataScenario], int]


@dataclass(frozen=True, kw_only=True)
class ShadowTest(ForgettingTest):
    """A test that is computed from the margins of shadow models.

    Args:
        find: returns the findings for the originals, the unlearned and the retrained models of all
            shadows, by title of a model.
    """

    find: Callable[[ShadowMargins], dict[str, Findings]]


forgetting_tests: Registry[ForgettingTest] = Registry("evidence", "negmerge.evidence")


def tests_of(tier: Tier) -> list[ForgettingTest]:
    """Return the tests of a tier and of those before it, in the order of the page.

    >>> [test.name for test in tests_of("basic")]
    ['membership', 'precision']
    """
    found = [forgetting_tests.get(name) for name in forgetting_tests]
    some = [test for test in found if TIERS.index(test.tier) <= TIERS.index(tier)]
    return sorted(some, key=lambda test: test.place)
