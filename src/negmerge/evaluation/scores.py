"""The scores of one model: every metric with its interval, and the gap to retraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

import numpy as np

from negmerge.errors import OptionError, quoted
from negmerge.evaluation.metrics import Measured, Metric, Observed, metrics
from negmerge.evaluation.observations import Observations


@dataclass(frozen=True)
class Scores:
    """The measurements of one model.

    Args:
        values: the value of each metric; None if a set of the metric does not exist, or if no
            sample has what the metric needs.
        samples: the number of samples of each set.
        bins: the histograms of each metric for its section of the page.
        kept: columns of samples for the metrics that compare with the retrained model.
    """

    values: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    bins: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    kept: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """Return the values that were measured, for a criterion."""
        return {name: value for name, value in self.values.items() if value is not None}


def score(found: Observed, wanted: Sequence[Metric]) -> Scores:
    """Compute metrics from the observations of one model.

    Args:
        wanted: the metrics, in the order of tables. A metric whose sets do not exist, or that no
            sample has, is None if it is reported, and omitted if not.
    """
    computed = {m.name: _measured(m, found) for m in wanted if found.keys() >= {*m.sets}}
    measured = {name: one for name, one in computed.items() if one is not None}
    shown = [m for m in wanted if m.reported or m.name in measured]
    return Scores(
        {m.name: measured[m.name].value if m.name in measured else None for m in shown},
        {name: (one.low, one.high) for name, one in measured.items()},
        {name: len(own) for name, own in found.items()},
    )


def _measured(metric: Metric, found: Observed) -> Measured | None:
    """Compute a metric as plain numbers that files can hold."""
    one: object = metric.value(found)
    if one is None:
        return None
    if not isinstance(one, Measured):
        raise OptionError(
            f"metric {metric.name}: returned {quoted(one)}; wanted a Measured, or None"
        )
    value, low, high = float(one.value), float(one.low), float(one.high)
    if not all(map(isfinite, (value, low, high))):
        raise OptionError(
            f"metric {metric.name}: got {value:g}, from {low:g} to {high:g}; wanted finite numbers"
        )
    return Measured(value, low, high, one.n)


def histograms(found: Observed, wanted: Sequence[Metric]) -> dict[str, list[dict[str, Any]]]:
    """Compute the histograms of the metrics that have one, for the page."""
    return {
        m.name: m.histogram.bins(found)
        for m in wanted
        if m.histogram is not None and found.keys() >= {*m.sets}
    }


def columns_to_compare(found: Observed, wanted: Sequence[Metric]) -> dict[str, list[float]]:
    """Return the columns that metrics compare with the retrained model, without NaN."""
    kept: dict[str, list[float]] = {}
    for metric in wanted:
        if (how := metric.compares) is not None and how.set in found:
            values = np.asarray(found[how.set][how.column], np.float64)
            kept[metric.name] = values[~np.isnan(values)].tolist()
    return kept


def compared(scores: Scores, reference: Scores, wanted: Sequence[Metric]) -> Scores:
    """Return the scores of a model with the metrics that compare it with the retrained one.

    They have no intervals: a p-value is itself a statement about chance.

    Args:
        reference: the scores of the retrained model.
    """
    values = dict(scores.values)
    for metric in wanted:
        ours, theirs = (one.kept.get(metric.name) for one in (scores, reference))
        if metric.compares is None or ours is None or theirs is None:
            continue
        value = metric.compares.value(np.array(ours), np.array(theirs))
        if value is not None:
            values[metric.name] = value
    return replace(scores, values=values)


def cross_entropy(found: Observations) -> float:
    """Return the mean negative logarithm of the probability of the true class.

    >>> cross_entropy(Observations({"confidence": np.ones(2, np.float32)}))
    0.0
    """
    smallest = np.finfo(np.float32).tiny  # a probability of 0 is one that float32 cannot hold
    confidence = np.maximum(found["confidence"], smallest)
    return 0.0 - float(np.log(confidence, dtype=np.float64).mean())


def avg_gap(scores: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Return the mean distance to the retrained model over the `in_gap` metrics; None without any.

    >>> ours = {"acc_retain": 99.15, "acc_forget": 93.13, "acc_test": 93.45, "mia": 11.99}
    >>> theirs = {"acc_retain": 100.0, "acc_forget": 95.0, "acc_test": 95.0, "mia": 12.0}
    >>> round(avg_gap(ours, theirs), 2)
    1.07

    Args:
        reference: the scores of the retrained model; its order is the order of the sum.
    """
    gaps = [abs(scores[name] - reference[name]) for name in gap_metrics(reference)]
    return sum(gaps) / len(gaps) if gaps else None


def gap_metrics(reference: Mapping[str, Any]) -> list[str]:
    """Return the metrics that Avg. Gap is the mean over: measured metrics with `in_gap`.

    >>> gap_metrics({"acc_retain": 100.0, "acc_test": None, "squared_error": 0.5})
    ['acc_retain']
    """
    return [
        name
        for name, value in reference.items()
        if name in metrics and metrics.get(name).in_gap and value is not None
    ]


TUG_OF_WAR = ("acc_forget", "acc_retain", "acc_test")


def tug_of_war(scores: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Return ToW: the product of 1 − |gap| over the accuracies of forget, retain and test set.

    1 for a model with the accuracies of the retrained one. Unlike a mean, the product does not let
    two small gaps hide a large one (Zhao et al. 2024). None if an accuracy was not measured.

    >>> theirs = {"acc_forget": 90.0, "acc_retain": 100.0, "acc_test": 90.0}
    >>> round(tug_of_war({"acc_forget": 40.0, "acc_retain": 90.0, "acc_test": 80.0}, theirs), 3)
    0.405

    Args:
        reference: the scores of the retrained model.
    """
    if any(one.get(name) is None for one in (scores, reference) for name in TUG_OF_WAR):
        return None
    return prod(1 - abs(scores[name] - reference[name]) / 100 for name in TUG_OF_WAR)
