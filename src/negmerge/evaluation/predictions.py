"""One pass over a split: what the model says about each sample, enough for every score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from negmerge.data.feeds import Feed
from negmerge.errors import ValueRangeError

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
    confidence = np.empty(len(feed), np.float32)
    correct = np.empty(len(feed), np.bool_)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(feed), BATCH):
                picked = np.arange(start, min(start + BATCH, len(feed)))
                inputs, targets = feed.test_batch(picked)
                logits = model(inputs.to(device)).float().cpu()
                if not bool(logits.isfinite().all()):
                    bad = int((~logits.isfinite().all(1)).sum())
                    raise ValueRangeError(
                        f"the model's outputs are NaN or infinite for {bad} of {len(picked)} "
                        "samples: it is broken, not unlearned; use a smaller λ or learning rate"
                    )
                probability = logits.softmax(1).gather(1, targets[:, None])[:, 0]
                confidence[picked] = probability.numpy()
                correct[picked] = (logits.argmax(1) == targets).numpy()
                advance(len(picked))
    finally:
        model.train(training)
    return Predictions(confidence, correct)


def predict_all(
    model: nn.Module,
    feeds: Mapping[str, Feed],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Predictions]:
    """The predictions on several sets."""
    return {name: predict(model, feed, advance) for name, feed in feeds.items()}
