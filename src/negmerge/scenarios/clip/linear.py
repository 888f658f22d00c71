"""Scores of a linearised model at every λ from one pass: features(θ₀ − λτ) = f(θ₀) − λ·Jτ."""

from __future__ import annotations

import torch
from torch import Tensor

from negmerge.evaluation.observations import Columns, Observations, join_columns
from negmerge.evaluation.passes import batches, classification_columns, evaluating
from negmerge.evaluation.scores import Scores, score
from negmerge.evaluation.search import Advance
from negmerge.scenarios.clip.linearized import LinearizedClassifier
from negmerge.scenarios.data import DataScenario
from negmerge.training.feeds import Feed
from negmerge.training.samples import only_tensor
from negmerge.vectors.task_vector import TaskVector


class LinearEvaluator:
    """Measures θ₀ − λτ for any λ; the images run through the model once.

    Args:
        scenario: the scenario with the sets and the metrics.
        model: the model, linear around θ₀.
        tau: the task vector τ.
    """

    single_pass = True

    def __init__(
        self, scenario: DataScenario, model: LinearizedClassifier, tau: TaskVector
    ) -> None:
        self.model, self.tau = model, tau
        self.feeds, self.metrics = scenario.eval_sets("choose"), scenario.metrics
        self.parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        """By set, for each batch: f(θ₀), −Jτ and the true classes."""

    def at(self, scale: float, advance: Advance) -> Scores:
        """Every metric at one λ."""
        return score(self.observations(scale, advance), self.metrics)

    def observations(
        self, scale: float, advance: Advance = lambda count: None
    ) -> dict[str, Observations]:
        """The observations of every set at one λ."""
        columns = sorted({column for metric in self.metrics for column in metric.columns})
        found: dict[str, Observations] = {}
        for name, feed in self.feeds.items():
            if name in self.parts:
                advance(len(feed))
            else:
                self.parts[name] = self._pass(feed, advance)
            parts: list[Columns] = []
            for at_start, slope, targets in self.parts[name]:
                with torch.inference_mode():
                    logits = self.model.classify(at_start + scale * slope, name)
                parts.append(classification_columns(logits, targets, columns))
            found[name] = join_columns(parts)
        return found

    def _pass(self, feed: Feed, advance: Advance) -> list[tuple[Tensor, Tensor, Tensor]]:
        device = self.model.mean.device
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        moved = self.tau.applied(self.model, -1.0)
        with evaluating(self.model), moved, torch.inference_mode():
            for picked in batches(len(feed)):
                inputs, targets = feed.test_batch(picked)
                pixels = only_tensor(inputs, "a linearised model").to(device)
                parts.append((*self.model.parts(pixels), targets))
                advance(len(picked))
        return parts
