"""Scenarios whose data is divided into sets of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from negmerge.errors import OptionError
from negmerge.evaluation.metrics import Metric, observable
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import observe_all, observe_set
from negmerge.evaluation.scores import Scores, columns_to_compare, histograms, score
from negmerge.evaluation.search import Advance, Evaluator, InPlace
from negmerge.scenarios.base import Scenario, TrainingOptions, TrainingSet, Use
from negmerge.training.feeds import Batch, CachedFeed, Feed, Indices
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective, Trained, train
from negmerge.training.outputs import predictions_of
from negmerge.training.recalibration import recalibrated
from negmerge.training.samples import Inputs
from negmerge.vectors.task_vector import TaskVector


class DataScenario(Scenario):
    """A scenario that defines sets of samples, a loss and the observations of a sample.

    Class attributes:
        columns: the columns that it can observe; every metric that needs no others is measured.
            The selector `greedy` needs `loss`.
        reported_columns: those that take long to observe; metrics of them do not choose λ.
        has_features: whether `features` returns the features of samples.
    """

    columns: ClassVar[tuple[str, ...]]
    reported_columns: ClassVar[tuple[str, ...]] = ()
    has_features: ClassVar[bool] = False

    @abstractmethod
    def train_set(self, name: TrainingSet) -> Feed:
        """The samples of a set, for training."""

    @abstractmethod
    def eval_sets(self, use: Use) -> Mapping[str, Feed]:
        """The sets that choose λ, the sets that are reported, or those that tune, by name.

        Those that tune are wanted only if the settings say that methods may have `groups`; they
        have samples of their own if `tunes`.
        """

    def unseen_set(self) -> Feed | None:
        """Samples like those of the reported forget set that no model was trained on.

        If a class is forgotten, they are of that class. None if there are none, or if the reported
        forget set itself was not trained on.
        """
        return None

    @property
    def stands_alone(self) -> bool:
        """Whether the weights of a model alone are what a user runs."""
        return True

    def features(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The features of a batch of a set, from which the last layer computes the logits."""
        raise NotImplementedError(name)

    def shadow(self, forget: Indices, left_out: Indices) -> DataScenario:
        """The same scenario with a smaller forget set, for the shadow models of `evidence: full`.

        Only called if the settings say that the scenario `has_shadows`. The reference of the
        shadow is trained. It chooses λ on the samples of this scenario that choose λ, and on some
        of its own forget set.

        Args:
            forget: the positions of its forget set in that of this scenario.
            left_out: the positions of samples that no model of it is trained on; all others are
                part of its retain set.
        """
        raise NotImplementedError(self.settings.kind)

    @abstractmethod
    def loss(self, settings: HyperParameters) -> Objective:
        """The loss that training minimises."""

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and true classes of a batch, as rivals take them (`rivals.registry.Predict`)."""
        return predictions_of(model, batch)

    @abstractmethod
    def observe(self, model: nn.Module, name: str, batch: Batch, columns: Sequence[str]) -> Columns:
        """Return columns with one value per sample; raise if outputs are not finite."""

    @property
    def metrics(self) -> list[Metric]:
        """Every metric that can be computed from the columns."""
        return observable(self.columns, self.settings.order)

    def work(self, on: TrainingSet, settings: HyperParameters) -> int:
        """The number of samples that a training processes."""
        return settings.epochs * len(self.train_set(on))

    def size(self, use: Use) -> int:
        """The number of samples in one measurement."""
        return sum(len(feed) for feed in self.eval_sets(use).values())

    def train(
        self,
        model: nn.Module,
        on: TrainingSet,
        settings: HyperParameters,
        seed: int,
        **options: Unpack[TrainingOptions],
    ) -> Trained:
        feed, objective = self.train_set(on), self.loss(settings)
        return train(model, feed, settings, seed, objective=objective, **options)

    def measure(self, model: nn.Module, use: Use, advance: Advance = lambda count: None) -> Scores:
        return self.measure_on(self.eval_sets(use), model, advance, use)

    def measure_on(
        self,
        feeds: Mapping[str, Feed],
        model: nn.Module,
        advance: Advance = lambda count: None,
        use: Use = "choose",
    ) -> Scores:
        """Measure a model on some sets.

        Args:
            advance: called with the number of samples after each batch.
            use: reports have the histograms of the page, and metrics of all columns.
        """
        left_out = {*self.reported_columns} if use == "choose" else set[str]()
        chosen = [m for m in self.metrics if not left_out & {*m.columns}]
        wanted = [m for m in chosen if feeds.keys() >= {*m.sets}]
        columns = sorted({column for metric in wanted for column in metric.columns})
        found = observe_all(partial(self.observe, columns=columns), model, feeds, advance)
        scores = score(found, chosen)
        if use == "choose":
            return scores
        kept = columns_to_compare(found, wanted)
        return replace(scores, bins=histograms(found, chosen), kept=kept)

    def evaluator(self, model: nn.Module, tau: TaskVector) -> Evaluator:
        feeds = {name: CachedFeed(feed) for name, feed in self.eval_sets("choose").items()}
        return InPlace(
            model, tau, lambda own, advance: self.measure_on(feeds, own, advance), self.subtracted
        )

    @contextmanager
    def subtracted(self, model: nn.Module, tau: TaskVector, scale: float) -> Iterator[Any]:
        """Change θ to θ − λτ in a block, with recalibrated statistics if the recipe asks for it.

        λ = 0 is the original model, whose statistics are kept: criteria compare with it.
        """
        with tau.applied(model, -scale):
            if not self.recalibrates or scale == 0:
                yield model
                return
            name, feed = self._recalibration
            run = partial(self.observe, name=name, columns=())
            with recalibrated(model, feed, lambda own, batch: run(own, batch=batch)):
                yield model

    def recalibration_set(self) -> tuple[str, Feed]:
        """The name and the samples of the set that `buffers: recalibrate` uses, without labels."""
        held_out = self.eval_sets("choose").get("holdout")
        return ("forget", self.train_set("forget")) if held_out is None else ("holdout", held_out)

    @cached_property
    def _recalibration(self) -> tuple[str, Feed]:
        name, feed = self.recalibration_set()
        return name, CachedFeed(feed)

    def mean_loss(
        self, model: nn.Module, name: str, feed: Feed, advance: Advance = lambda count: None
    ) -> float:
        """The mean loss on a set; the selector `greedy` ranks members by it."""
        observe = partial(self.observe, columns=("loss",))
        return float(observe_set(observe, model, name, feed, advance)["loss"].mean())


def require_sets(scenario: Scenario, what: str) -> DataScenario:
    """Return the scenario if it has sets of samples, and raise if not.

    Args:
        what: the feature that needs the sets, for the error.
    """
    if not isinstance(scenario, DataScenario):
        raise OptionError(
            f"{what}: needs a scenario with sets of samples and a loss; got scenario "
            f"{scenario.settings.kind}"
        )
    return scenario
