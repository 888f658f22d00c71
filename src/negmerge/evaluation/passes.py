"""One pass of a model over a set, which observes each sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evaluation.observations import Columns, Observations, join_columns
from negmerge.support.progress import Advance
from negmerge.training.feeds import Batch, Feed
from negmerge.training.samples import to_device

BATCH = 250
"""Larger batches do not fit into the cache: 500 ran at two thirds of the speed on a CPU."""

Observe = Callable[[nn.Module, str, Batch], Columns]
"""A function of the model, the name of the set and a batch on the device of the model."""


def observe_set(
    observe: Observe, model: nn.Module, name: str, feed: Feed, advance: Advance = lambda count: None
) -> Observations:
    """Run a model in evaluation mode over a set; `advance` gets the samples of each batch."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parts: list[Columns] = []
    with evaluating(model), torch.inference_mode():
        for picked in batches(len(feed)):
            inputs, targets = feed.test_batch(picked)
            parts.append(observe(model, name, (to_device(inputs, device), targets)))
            advance(len(picked))
    return join_columns(parts)


def observe_all(
    observe: Observe,
    model: nn.Module,
    feeds: Mapping[str, Feed],
    advance: Advance = lambda count: None,
) -> dict[str, Observations]:
    """Observe several sets, by name."""
    return {name: observe_set(observe, model, name, feed, advance) for name, feed in feeds.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def batches(size: int) -> list[NDArray[np.int64]]:
    """Return the indices of the samples of each batch of a pass.

    >>> [len(picked) for picked in batches(600)]
    [250, 250, 100]
    """
    return [np.arange(start, min(start + BATCH, size)) for start in range(0, size, BATCH)]


def check_finite(outputs: Tensor) -> None:
    """Raise if outputs of a model are not finite: the model is broken, not unlearned."""
    if not bool(outputs.isfinite().all()):
        finite = outputs.reshape(len(outputs), -1).isfinite().all(1)
        raise ValueRangeError(
            f"the outputs of the model are NaN or infinite for {int((~finite).sum())} of "
            f"{len(outputs)} samples: the model is broken, not unlearned; use a smaller λ or "
            "learning rate"
        )


def classification_columns(logits: Tensor, targets: Tensor, columns: Collection[str]) -> Columns:
    """Return the columns of samples of known classes.

    >>> found = classification_columns(torch.eye(2), torch.tensor([0, 0]), ["correct", "loss"])
    >>> found["correct"].tolist(), found["loss"].round(2).tolist()
    ([True, False], [0.3100000023841858, 1.309999942779541])

    Args:
        logits: samples × classes.
        targets: the true classes.
        columns: some of `correct`, `confidence` (the probability of the true class), `loss` (the
            cross-entropy), `label` and `logits`.
    """
    logits = logits.float().cpu()
    check_finite(logits)
    computed: dict[str, Callable[[], Tensor]] = {
        "confidence": lambda: logits.softmax(1).gather(1, targets[:, None])[:, 0],
        "correct": lambda: logits.argmax(1) == targets,
        "loss": lambda: nn.functional.cross_entropy(logits, targets, reduction="none"),
        "label": lambda: targets,
        "logits": lambda: logits,
    }
    return {name: column().numpy() for name, column in computed.items() if name in columns}
