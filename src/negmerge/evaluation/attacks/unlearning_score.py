"""The score of the NeurIPS 2023 unlearning competition (Triantafillou et al. 2024).

For each forgotten sample, an attacker tells unlearned from retrained models by the margin of the
sample. The best of simple rules bounds ε, the privacy loss: how well unlearned models can be told
from retrained ones. The samples with a small ε count more in the forget score F, which is
multiplied by what is left of the accuracies.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.evaluation.attacks.margins import Floats

DELTA = 1e-5
CAP = 50.0
PEAKED = 0.01
"""Below this ratio of the ranges of both sides, ε is `CAP`: one side is a single point."""
BUFFER = 2.0
"""How far, in units of the margin, an interval may differ from the range of the narrower side."""
BUCKET = 0.5
LEAST = 3
"""The least number of models: with fewer, the largest ε that can be seen is zero."""


def epsilons(unlearned: Floats, retrained: Floats) -> Floats:
    """Return ε of each sample, from 0 to 50.

    The rules are thresholds, where the side with the higher median is expected above, and
    intervals, where the side with the smaller range is expected inside. A rule with a share of
    false positives FPR and of false negatives FNR gives
    max(ln((1 − δ − FPR)/FNR), ln((1 − δ − FNR)/FPR)) with δ = 1e-5, or infinity if it never errs.
    A rule with errors of one kind only is left out: it needs more models to be judged. The
    published code takes thresholds from a grid of a hundredth; here they are all those that divide
    the margins differently.

    >>> rng = np.random.default_rng(0)
    >>> far = epsilons(rng.normal(9.0, 1.0, (30, 2)), rng.normal(0.0, 1.0, (30, 2)))
    >>> near = epsilons(rng.normal(0.0, 1.0, (30, 2)), rng.normal(0.0, 1.0, (30, 2)))
    >>> far.tolist(), bool((near < 3).all())
    ([50.0, 50.0], True)

    Args:
        unlearned: margins, with a row of each model and a column of each forgotten sample.
        retrained: those of the models that were trained without the sample.
    """
    for name, margins in (("unlearned", unlearned), ("retrained", retrained)):
        if margins.ndim != 2 or len(margins) < LEAST or not np.isfinite(margins).all():
            raise ValueRangeError(
                f"unlearning score: the margins of {name} models have the shape {margins.shape}; "
                f"wanted a row of each of at least {LEAST} models, and numbers"
            )
    if unlearned.shape[1] != retrained.shape[1]:
        raise ValueRangeError(
            f"unlearning score: got {unlearned.shape[1]} and {retrained.shape[1]} samples; wanted "
            "the same ones"
        )
    columns = zip(unlearned.T, retrained.T, strict=True)
    return np.array([_epsilon(np.sort(u), np.sort(r)) for u, r in columns])


def _epsilon(unlearned: Floats, retrained: Floats) -> float:
    """Return ε of one sample from margins in order."""
    ranges = np.ptp(unlearned), np.ptp(retrained)
    if max(ranges) == 0:  # two single points
        return CAP if unlearned[0] != retrained[0] else 0.0
    if min(ranges) / max(ranges) < PEAKED:
        return CAP
    higher = np.median(retrained) > np.median(unlearned)
    above, below = (retrained, unlearned) if higher else (unlearned, retrained)
    inside, outside = (retrained, unlearned) if ranges[0] >= ranges[1] else (unlearned, retrained)
    found = max(_thresholds(above, below), _intervals(inside, outside))
    # Where every rule was left out, no error of one kind comes without being free of the other.
    return CAP if found == -math.inf else min(max(found, 0.0), CAP)


def _thresholds(positive: Floats, negative: Floats) -> float:
    """Return the largest ε of the rules: at or above a threshold is positive."""
    places = np.unique(np.concatenate([positive, negative]))
    missed = np.searchsorted(positive, places, "left") / len(positive)
    passed = 1 - np.searchsorted(negative, places, "left") / len(negative)
    return _largest(passed, missed)


def _intervals(positive: Floats, negative: Floats) -> float:
    """Return the largest ε of the rules: from a left to a right threshold is positive.

    As published, the right threshold is at most `BUFFER` away from the highest positive margin, and
    the length of the interval at most `BUFFER` from the range of the positive side.
    """
    places = np.unique(np.concatenate([positive, negative]))
    # An interval covers places[i] … places[j]: its left end is in (places[i−1], places[i]], its
    # right end in [places[j], places[j+1]).
    left_low, left_high = np.concatenate([[-np.inf], places[:-1]]), places
    right_low = np.maximum(places, positive[-1] - BUFFER)
    right_high = np.minimum(np.concatenate([places[1:], [np.inf]]), positive[-1] + BUFFER)
    width = positive[-1] - positive[0]
    longest = right_high - left_low[:, None]  # never reached
    shortest = right_low - left_high[:, None]
    allowed = (right_low < right_high) & np.triu(np.ones((len(places), len(places)), bool))
    allowed &= (longest > width - BUFFER) & (shortest <= width + BUFFER)
    found = _covered(positive, places)[allowed] / len(positive)
    passed = _covered(negative, places)[allowed] / len(negative)
    return _largest(passed, 1 - found)


def _covered(margins: Floats, places: Floats) -> NDArray[np.intp]:
    """Return the number of margins from places[i] to places[j], by i and j."""
    before = np.searchsorted(margins, places, "left")
    upto = np.searchsorted(margins, places, "right")
    return upto - before[:, None]


def _largest(fpr: Floats, fnr: Floats) -> float:
    """Return the largest ε of some rules; −infinity if none is left."""
    fpr, fnr = np.round(fpr, 12), np.round(fnr, 12)  # 1 − 1 + rounding is no error
    if ((fpr == 0) & (fnr == 0)).any():
        return math.inf
    both = (fpr > 0) & (fnr > 0)
    if not both.any():
        return -math.inf
    fpr, fnr = fpr[both], fnr[both]
    with np.errstate(divide="ignore", invalid="ignore"):  # ln of 0 or less: that side says nothing
        sides = np.log(1 - DELTA - fpr) - np.log(fnr), np.log(1 - DELTA - fnr) - np.log(fpr)
    return float(np.nanmax(np.concatenate([[0.0], *sides])))


def forget_score(epsilons: Floats, models: int) -> float:
    """Return F, the mean of the points of all samples; the arguments are as in `forget_points`.

    >>> forget_score(np.array([0.2, 0.7, 1.2, 50.0]), models=64)
    0.4375
    """
    return float(forget_points(epsilons, models).mean())


def forget_points(epsilons: Floats, models: int) -> Floats:
    """Return 2^−⌊ε/0.5⌋ of each sample; 0 for an ε that reaches ⌈ln(models − 1)⌉.

    >>> forget_points(np.array([0.2, 0.7, 1.2, 50.0]), models=64).tolist()
    [1.0, 0.5, 0.25, 0.0]

    Args:
        models: the number of models of each kind; the smaller one if they differ.
    """
    if models < LEAST or not len(epsilons):
        raise ValueRangeError(
            f"unlearning score: got {models} models and {len(epsilons)} samples; wanted at least "
            f"{LEAST} models and one sample"
        )
    largest = math.ceil(math.log(models - 1))
    return np.where(epsilons < largest, 0.5 ** np.floor(epsilons / BUCKET), 0.0)


def final_score(forget: float, retain: tuple[float, float], test: tuple[float, float]) -> float:
    """Return F · RA_u/RA_r · TA_u/TA_r.

    >>> final_score(0.5, retain=(90.0, 100.0), test=(80.0, 80.0))
    0.45

    Args:
        forget: F.
        retain: the accuracies of unlearned and of retrained models on the retain set.
        test: those on the test set.
    """
    for name, (_, reference) in (("retain", retain), ("test", test)):
        if not reference > 0:
            raise ValueRangeError(
                f"unlearning score: the accuracy of retrained models on the {name} set is "
                f"{reference:g}; wanted more than 0"
            )
    return forget * (retain[0] / retain[1]) * (test[0] / test[1])
