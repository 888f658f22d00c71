"""One pass over a split: what the model says about each sample, enough for every score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negmerge.data.feeds import Feed
from negmerge.data.samples import to_device
from negmerge.errors import ValueRangeError
from negmerge.models.clip import reader
from negmerge.models.outputs import logits_of

BATCH = 250
"""Larger batches fall out of the cache: on a CPU 500 ran at two thirds of the speed."""


@dataclass(frozen=True)
class Predictions:
    """Per sample: the probability of the true class, and whether it is the largest."""

    confidence: NDArray[np.float32]
    correct: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.correct)


def predict(
    model: nn.Module,
    feed: Feed,
    advance: Callable[[int], None] = lambda count: None,
) -> Predictions:
    """Run a model in evaluation mode over a feed; outputs that are not finite are an error.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.data.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.eye(2), torch.tensor([0, 0])))
    >>> predict(nn.Identity(), feed).correct.tolist()
    [True, False]

    advance: told the number of samples of each batch.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parts: list[Predictions] = []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for picked in batches(len(feed)):
                inputs, targets = feed.test_batch(picked)
                parts.append(judge(logits_of(model, to_device(inputs, device)), targets))
                advance(len(picked))
    finally:
        model.train(training)
    return joined(parts)


def batches(size: int) -> list[NDArray[np.int64]]:
    """The samples of each batch of a pass.

    >>> [len(picked) for picked in batches(600)]
    [250, 250, 100]
    """
    return [np.arange(start, min(start + BATCH, size)) for start in range(0, size, BATCH)]


def judge(logits: Tensor, targets: Tensor) -> Predictions:
    """What logits say about samples of known classes; those that are not finite are an error."""
    logits = logits.float().cpu()
    if not bool(logits.isfinite().all()):
        bad = int((~logits.isfinite().all(1)).sum())
        raise ValueRangeError(
            f"the model's outputs are NaN or infinite for {bad} of {len(logits)} "
            "samples: it is broken, not unlearned; use a smaller λ or learning rate"
        )
    probability = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    return Predictions(probability.numpy(), (logits.argmax(1) == targets).numpy())


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Batches as one pass."""
    confidence = [np.empty(0, np.float32), *(part.confidence for part in parts)]
    correct = [np.empty(0, np.bool_), *(part.correct for part in parts)]
    return Predictions(np.concatenate(confidence), np.concatenate(correct))


def predict_all(
    model: nn.Module,
    feeds: Mapping[str, Feed],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Predictions]:
    """The predictions on several sets, each read by its own head if the model has several."""
    return {name: predict(reader(model, name), feed, advance) for name, feed in feeds.items()}
