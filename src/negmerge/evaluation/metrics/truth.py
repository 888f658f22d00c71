"""Metrics of TOFU that compare right and wrong answers: truth ratio, forget quality, model utility.

The truth ratio R of a sample is p(wrong answers) / p(right answer), per token. A model that does
not know the record has R near 1, one that knows it has R near 0. Samples without wrong answers have
no truth ratio and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from negmerge.evaluation.metrics import Comparison, Measured, Metric, Observed, metrics
from negmerge.evaluation.metrics.accuracy import Z
from negmerge.evaluation.metrics.answers import ANSWER, SETS, mean_share
from negmerge.evaluation.observations import Observations

Floats = NDArray[np.float64]


def undecided(ratios: Floats) -> Floats:
    """Return min(R, 1/R): 1 if wrong and right answers are equally probable. For the forget set.

    >>> undecided(np.array([0.0, 0.5, 4.0]))
    array([0.  , 0.5 , 0.25])
    """
    ratios = ratios.astype(np.float64)
    return np.minimum(ratios, 1 / np.maximum(ratios, 1e-300))


def truthful(ratios: Floats) -> Floats:
    """Return max(0, 1 - R): 1 if wrong answers are impossible. For all other sets.

    >>> truthful(np.array([0.0, 0.25, 4.0]))
    array([1.  , 0.75, 0.  ])
    """
    return np.maximum(0.0, 1 - ratios.astype(np.float64))


def forget_quality(ratios: Floats, reference: Floats) -> float | None:
    """Return the p-value of the Kolmogorov-Smirnov test that two models have the same truth ratios.

    Near 1 the unlearned model cannot be told from the retrained one by them, near 0 it can. None if
    one of the two has no truth ratio.

    >>> same = np.array([0.9, 1.1, 0.7, 1.0])
    >>> forget_quality(same, same), round(forget_quality(same / 100, same), 4)
    (1.0, 0.0286)

    Args:
        ratios: of the forget set under the unlearned model; NaN values are left out.
        reference: those under the retrained model.
    """
    from scipy.stats import ks_2samp

    ours, theirs = ratios[~np.isnan(ratios)], reference[~np.isnan(reference)]
    if not len(ours) or not len(theirs):
        return None
    with catch_warnings():
        # Where rounding prevents the exact p-value, scipy warns and takes the asymptotic one.
        simplefilter("ignore", RuntimeWarning)
        found: Any = ks_2samp(ours, theirs)
        return float(found.pvalue)


def harmonic_mean(values: Sequence[float]) -> float:
    """Return the harmonic mean of numbers that are not negative; 0 if one of them is 0.

    >>> harmonic_mean([1.0, 0.5]), harmonic_mean([1.0, 0.0])
    (0.6666666666666666, 0.0)
    """
    return len(values) / sum(1 / value for value in values) if all(values) else 0.0


def utility_parts(found: Observations) -> list[Floats]:
    """Return probability, ROUGE and truthfulness of the samples of a set, those that it has."""
    parts = [found["probability"], found["rouge"], truthful(found["truth_ratio"])]
    return [part.astype(np.float64) for part in parts if not np.isnan(part).all()]


def model_utility(*sets: Observations) -> Measured:
    """Return TOFU's model utility: the harmonic mean over sets of what `utility_parts` average to.

    The interval is normal, to first order in the averages; a sample counts in all of its parts.

    >>> found = {"probability": np.ones(2), "rouge": np.full(2, 0.5), "truth_ratio": np.zeros(2)}
    >>> model_utility(Observations(found)).value
    75.0
    """
    parts = [utility_parts(found) for found in sets]
    means = [[float(np.nanmean(part)) for part in own] for own in parts]
    flat = [mean for own in means for mean in own]
    value, variance = harmonic_mean(flat), 0.0
    if value:
        for own, averages in zip(parts, means, strict=True):
            # The derivative of the harmonic mean by one of K means m is value² / (K m²).
            shifts = sum(
                np.nan_to_num(part - mean) / (mean * mean * int((~np.isnan(part)).sum()))
                for part, mean in zip(own, averages, strict=True)
            )
            shifts = np.asarray(shifts) * value * value / len(flat)
            variance += float((shifts**2).sum()) * len(shifts) / max(len(shifts) - 1, 1)
    value, half = min(100 * value, 100.0), 100 * Z * sqrt(variance)
    return Measured(value, max(value - half, 0.0), min(value + half, 100.0), len(sets[0]))


def _truth_ratio(name: str, found: Observed) -> Measured | None:
    ratios = found[name]["truth_ratio"]
    return mean_share(undecided(ratios) if name == "forget" else truthful(ratios))


def _utility(found: Observed) -> Measured:
    return model_utility(found["retain"], found["general"])


for _set in SETS:
    metrics.register(
        f"truth_ratio_{_set}",
        Metric(
            name=f"truth_ratio_{_set}",
            label=(
                "wrong and right answers equally probable (truth ratio), forget set"
                if _set == "forget"
                else f"right answers more probable than wrong ones (truth ratio), {_set} set"
            ),
            short=f"{_set} truth",
            better="reference" if _set == "forget" else "higher",
            sets=(_set,),
            columns=(ANSWER, "truth_ratio"),
            value=partial(_truth_ratio, _set),
        ),
    )
metrics.register(
    "forget_quality",
    Metric(
        name="forget_quality",
        label="forget quality: p-value of equal truth ratios, unlearned and retrained",
        short="forget quality",
        better="higher",
        sets=("forget",),
        columns=(ANSWER, "truth_ratio"),
        value=lambda found: None,
        unit="",
        compares=Comparison("forget", "truth_ratio", forget_quality),
    ),
)
metrics.register(
    "utility",
    Metric(
        name="utility",
        label="model utility: harmonic mean over retain and general set",
        short="utility",
        better="higher",
        sets=("retain", "general"),
        columns=(ANSWER, "probability", "rouge", "truth_ratio"),
        value=_utility,
    ),
)
