"""The input of a page: a run, its recipe, its result, and the metrics of the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from negmerge.evaluation.criteria import Criterion
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.reports.names import Named, names_of
from negmerge.reports.ranking import TOW, gap_metric, measured_metrics
from negmerge.reports.styles import Styles, styles_of
from negmerge.runs.recipe import Recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from negmerge.support.progress import Progress, Quiet


@dataclass(frozen=True)
class PageData:
    """The input of a page."""

    run: Run
    recipe: Recipe
    result: RunResult
    progress: Progress = field(default_factory=Quiet)

    @property
    def criterion(self) -> Criterion:
        """The criterion that chose λ."""
        return self.recipe.settings.criterion(self.recipe.criterion)

    @property
    def loss_column(self) -> str:
        """The column of the criterion's loss in the table of scores."""
        return f"by_{self.criterion.name}"

    def metric(self, name: str) -> Metric:
        """A metric by its name, registered or not."""
        return self.recipe.settings.metric(name)

    @property
    def forget(self) -> Metric:
        """The metric of the forget set."""
        return self.metric(self.recipe.settings.forget_metric)

    @property
    def retain(self) -> Metric:
        """The metric of the retain set."""
        return self.metric(self.recipe.settings.retain_metric)

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Every metric that was measured, in the order of the result."""
        return {name: self.metric(name) for name in measured_metrics(self.result)}

    @cached_property
    def columns(self) -> dict[str, Metric]:
        """The metrics by column, with Avg. Gap, ToW and the criterion's loss."""
        loss = metric_of(f"{self.criterion.name}_loss")
        gap = gap_metric(self.result)
        return self.metrics | {"avg_gap": gap, "tow": TOW, self.loss_column: loss}

    @property
    def first(self) -> str:
        """The method that made the unlearned model."""
        return self.result.first.method

    @cached_property
    def styles(self) -> Styles:
        """The style of every model; it depends only on the methods of the recipe."""
        return styles_of(["original", "retrained", *(row.method for row in self.result.methods)])

    @cached_property
    def names(self) -> dict[str, Named]:
        """How the page calls every method, by title."""
        return names_of(self.recipe.methods)

    def label(self, title: str) -> str:
        """How the page calls a model: a method, `original` or `retrained`."""
        return self.names[title].label if title in self.names else title
