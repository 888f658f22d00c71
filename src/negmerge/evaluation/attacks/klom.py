"""KLoM (Rinberg et al., ICLR 2025): how far margins of unlearned models are from retrained ones.

KLoM of a sample is KL(p‖q): p is the distribution of its margin under unlearned models, q that
under models that were trained without it (oracles). It needs several models of both kinds, because
a training is random. KLoM between two halves of the oracles is its floor: fewer models give a
higher one, so that it is to be compared with as many models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from negmerge.errors import ValueRangeError
from negmerge.evaluation.attacks.margins import Floats

CLIP = 100.0
BINS = 20
FLOOR = 1e-5
"""The least share of q in a bin where p has samples."""
ENOUGH = 50
"""The least number of models of each kind for the published histograms: with fewer, 20 bins are
mostly noise."""
VARIANCE = 0.01
"""The least variance of a sample in the normal estimate, relative to the median of the oracles."""

Estimate = Literal["histogram", "normal"]


@dataclass(frozen=True)
class KLoM:
    """KLoM of the samples of a set, in nats.

    Args:
        values: of each sample.
        estimate: `histogram` as published, or `normal` for few models.
    """

    values: Floats
    estimate: Estimate

    @property
    def median(self) -> float:
        """The median over samples."""
        return float(np.median(self.values))

    @property
    def high(self) -> float:
        """The 95th percentile over samples."""
        return float(np.quantile(self.values, 0.95))


def klom(unlearned: Floats, oracles: Floats) -> KLoM:
    """Return KLoM of every sample.

    >>> rng = np.random.default_rng(0)
    >>> oracles = rng.normal(0.0, 1.0, (200, 50))
    >>> found = klom(rng.normal(3.0, 1.0, (100, 50)), oracles[100:])
    >>> floor = klom(oracles[:100], oracles[100:])
    >>> found.median > 1 > floor.median, found.estimate
    (True, 'histogram')

    Args:
        unlearned: margins, with a row of each model and a column of each sample.
        oracles: those of the models that were trained without the sample, with the same columns.
    """
    for name, margins in (("unlearned", unlearned), ("oracles", oracles)):
        if margins.ndim != 2 or len(margins) < 2 or not np.isfinite(margins).all():
            raise ValueRangeError(
                f"KLoM: the margins of {name} have the shape {margins.shape}; wanted a row of each "
                "of at least two models, and numbers"
            )
    if unlearned.shape[1] != oracles.shape[1] or not unlearned.shape[1]:
        raise ValueRangeError(
            f"KLoM: got {unlearned.shape[1]} and {oracles.shape[1]} samples; wanted the same ones"
        )
    if min(len(unlearned), len(oracles)) >= ENOUGH:
        return KLoM(histogram_divergences(unlearned, oracles), "histogram")
    return KLoM(normal_divergences(unlearned, oracles), "normal")


def histogram_divergences(p: Floats, q: Floats) -> Floats:
    """Return the published KLoM of each column, in nats.

    Margins are clipped to [−100, 100]; 20 equal bins cover the joint range; q is at least 1e-5
    where p is above 0. As in the published code, the highest margin of both lies outside the last
    bin; but a side with no other margin has them in the last bin.

    >>> same = np.tile(np.linspace(0, 1, 20)[:, None], (1, 2))
    >>> histogram_divergences(same, same).tolist()
    [0.0, 0.0]
    """
    p, q = np.clip(p, -CLIP, CLIP), np.clip(q, -CLIP, CLIP)
    low = np.minimum(p.min(0), q.min(0))
    high = np.maximum(p.max(0), q.max(0))
    edges = np.linspace(low, np.where(high > low, high, low + 1), BINS + 1)
    p_share, q_share = _shares(p, edges), _shares(q, edges)
    held = np.where(p_share > 0, np.maximum(q_share, FLOOR), q_share)
    held /= held.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = p_share * np.log(p_share / held)
    return np.maximum(np.where(p_share > 0, terms, 0.0).sum(0), 0.0)  # not below 0 by rounding


def _shares(margins: Floats, edges: Floats) -> Floats:
    """Return the share of each bin (rows) of each column."""
    counts = np.empty((BINS, margins.shape[1]))
    for column in range(margins.shape[1]):
        place = np.searchsorted(edges[:, column], margins[:, column], "right") - 1
        counts[:, column] = np.bincount(place[place < BINS], minlength=BINS)
    counts[-1] += len(margins) * (counts.sum(0) == 0)
    return counts / counts.sum(0)


def normal_divergences(p: Floats, q: Floats) -> Floats:
    """Return KL(p‖q) of each column, in nats, taking p and q for normal distributions.

    No variance is below 1 % of the median variance of q over all columns: a few models can agree by
    chance, and a sample would then seem infinitely far away.

    >>> p, q = np.array([[-1.0], [1.0]]), np.array([[0.0], [2.0]])
    >>> normal_divergences(p, q)  # equal variances of 2, means 0 and 1
    array([0.25])
    """
    spread = q.var(0, ddof=1)
    least = max(VARIANCE * float(np.median(spread)), np.finfo(np.float64).tiny)
    p_variance, q_variance = np.maximum(p.var(0, ddof=1), least), np.maximum(spread, least)
    distance = (p.mean(0) - q.mean(0)) ** 2
    ratio = p_variance / q_variance
    return (ratio - 1 - np.log(ratio) + distance / q_variance) / 2
