"""Scores from predictions: accuracies with intervals, membership inference, gap to retraining."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from negmerge.errors import ValueRangeError
from negmerge.evaluation.mia import mia_efficacy
from negmerge.evaluation.predictions import Predictions

METRICS = ("acc_retain", "acc_forget", "acc_test", "mia")
Z = 1.959963984540054  # of a two-sided 95 % interval


def accuracy(found: Predictions) -> float:
    """The share of correct answers in percent.

    >>> import numpy as np
    >>> accuracy(Predictions(np.ones(4, np.float32), np.array([True, True, True, False])))
    75.0
    """
    if not len(found):
        raise ValueRangeError("accuracy of no samples: the set is empty")
    return 100 * int(found.correct.sum()) / len(found)


def cross_entropy(found: Predictions) -> float:
    """The mean negative logarithm of the true class's probability.

    >>> import numpy as np
    >>> cross_entropy(Predictions(np.ones(2, np.float32), np.array([True, True])))
    0.0
    """
    smallest = np.finfo(np.float32).tiny  # a probability of 0 is one that float32 cannot hold
    return 0.0 - float(np.log(np.maximum(found.confidence, smallest), dtype=np.float64).mean())


def interval(percent: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share in percent of n samples (Wilson), also near 0 and 100.

    >>> [round(x, 2) for x in interval(100.0, 1000)]
    [99.62, 100.0]
    """
    share = percent / 100
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    # Rounding must not put 0 or 100 % outside its own interval.
    low, high = max(100 * (middle - half), 0.0), min(100 * (middle + half), 100.0)
    return min(low, percent), max(high, percent)


def score(found: Mapping[str, Predictions]) -> dict[str, Any]:
    """The paper's four numbers of one model, in percent, with 95 % intervals and sample counts.

    found: the predictions on retain, forget and test; what is not there is not measured, and None.
    """
    sizes = {name: len(predictions) for name, predictions in found.items()}
    values: dict[str, Any] = {f"acc_{name}": None for name in ("retain", "forget", "test")}
    values |= {f"acc_{name}": accuracy(predictions) for name, predictions in found.items()}
    values["mia"] = None
    if {"retain", "forget", "test"} <= found.keys():
        retain, forget, test = (found[k].confidence for k in ("retain", "forget", "test"))
        values["mia"] = mia_efficacy(retain, test, forget)
    counts = {f"acc_{name}": size for name, size in sizes.items()}
    counts["mia"] = sizes.get("forget", 0)
    values["intervals"] = {
        m: list(interval(values[m], counts[m])) for m in METRICS if values[m] is not None
    }
    values["samples"] = sizes
    return values


def avg_gap(scores: Mapping[str, Any], retrain: Mapping[str, Any]) -> float:
    """The mean distance to the retrained model over the four metrics.

    >>> ours = dict(zip(METRICS, (99.15, 93.13, 93.45, 11.99)))
    >>> round(avg_gap(ours, dict(zip(METRICS, (100.0, 95.0, 95.0, 12.0)))), 2)
    1.07
    """
    return sum(abs(scores[m] - retrain[m]) for m in METRICS) / len(METRICS)
