"""A linearised model at every λ from one pass: features(θ₀ − λτ) = f(θ₀) − λ·Jτ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from negmerge.data.feeds import Feed
from negmerge.data.samples import only_tensor
from negmerge.evaluation.predictions import Predictions, batches, joined, judge
from negmerge.models.linearized import LinearizedClassifier
from negmerge.task_vector import TaskVector


class LinearRay:
    """The predictions of θ₀ − λτ for any λ; the images run through the model once."""

    def __init__(self, model: LinearizedClassifier, tau: TaskVector) -> None:
        self.model, self.tau = model, tau
        self.parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        """By set, of each batch: f(θ₀), −Jτ and the true classes."""

    def predictions(
        self,
        scale: float,
        feeds: Mapping[str, Feed],
        advance: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Predictions]:
        """What the model at one λ says about every set."""
        found: dict[str, Predictions] = {}
        for name, feed in feeds.items():
            if name in self.parts:
                advance(len(feed))
            else:
                self.parts[name] = self._pass(feed, advance)
            said: list[Predictions] = []
            for at_start, slope, targets in self.parts[name]:
                with torch.inference_mode():
                    logits = self.model.classify(at_start + scale * slope, name)
                said.append(judge(logits, targets))
            found[name] = joined(said)
        return found

    def _pass(
        self, feed: Feed, advance: Callable[[int], None]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        device = self.model.mean.device
        training = self.model.training
        self.model.eval()
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        try:
            with self.tau.applied(self.model, -1.0), torch.inference_mode():
                for picked in batches(len(feed)):
                    inputs, targets = feed.test_batch(picked)
                    pixels = only_tensor(inputs, "a linearised model").to(device)
                    parts.append((*self.model.parts(pixels), targets))
                    advance(len(picked))
        finally:
            self.model.train(training)
        return parts
