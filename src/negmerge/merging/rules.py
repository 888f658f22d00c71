"""◄ ADD A MERGE RULE here: one small class.

A rule folds the task vectors into a few statistics per element (`statistics.py`), and `finish`
computes the merged values from the statistics. `finish` is written with operators and `where`, on
whole arrays: the same lines are compiled into the loop of the rule, run on numpy arrays in an
accumulator, and run on torch tensors on a GPU. The fields of the class are the options of the rule;
`rule.py` lists everything else that a rule may define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import ClassVar, Literal

from numba.extending import register_jitable

from negmerge.errors import OptionError
from negmerge.merging import statistics as stat
from negmerge.merging.fast_folds import fold_farthest, fold_unanimous
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.folds import Fold, Statistics
from negmerge.merging.rule import (
    A,
    Constants,
    Finish,
    Rule,
    make_rule,
    options_of,
    rule,
    rules,
    summary,
)
from negmerge.merging.thresholds import Threshold

__all__ = ["Rule", "make_rule", "options_of", "rule", "rules", "summary"]


def _check_range(where: str, value: float, above: float) -> None:
    if not above < value <= 1:
        raise OptionError(f"{where}: got {value}, wanted more than {above} and at most 1")


# ------------------------------------------------------------------------------------ consensus


VOTES = (stat.TOTAL, stat.POSITIVE, stat.NEGATIVE)
SPREAD = (*VOTES, stat.LOW, stat.HIGH, stat.NEAREST)


def _votes_needed(n: int, quorum: float, zeros: str) -> Constants:
    """Return (n, a, b): an element is kept if at least a + b·voters members share a sign."""
    # 0.7 · 10 is 7.000000000000001 in binary: seven of ten votes must be enough.
    slack = 1e-9
    if zeros == "abstain":
        return (float(n), -slack, quorum)
    return (float(n), float(ceil(quorum * n - slack)), 0.0)


@register_jitable
def kept(c: Constants, positive: A, negative: A) -> A:
    """Return whether enough members share a sign."""
    voters = positive + negative
    return (positive >= c[1] + c[2] * voters) | (negative >= c[1] + c[2] * voters)


def _mean_strict(c: Constants, total: A, positive: A, negative: A) -> A:
    return total * ((positive >= c[1]) | (negative >= c[1]))


def _mean_kept(c: Constants, total: A, positive: A, negative: A) -> A:
    return total * kept(c, positive, negative)


def _nearest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return nearest * kept(c, positive, negative)


def _farthest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    farthest = high * (high >= -low) + low * (high < -low)
    return farthest * kept(c, positive, negative)


def _lowest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return low * kept(c, positive, negative)


def _highest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return high * kept(c, positive, negative)


@rule
@dataclass(frozen=True)
class Consensus(Rule):
    """Keep the elements whose sign all members share, and average them (NegMerge).

    Args:
        reduce: the merged value: the mean, or the change nearest to (min) or farthest from (max)
            zero.
        signed: compare signed values instead of magnitudes in min and max.
        quorum: the share of members that must agree, above one half.
        zeros: whether a member that did not change an element blocks it (strict) or abstains.
    """

    paper: ClassVar[str] = "NegMerge, ICML 2025, Eq. 1; reduce: Table C1"
    reduce: Literal["mean", "min", "max"] = "mean"
    signed: bool = False
    quorum: float = 1.0
    zeros: Literal["strict", "abstain"] = "strict"

    def __post_init__(self) -> None:
        _check_range("consensus option quorum", self.quorum, 0.5)

    def divisor(self, n: int) -> float:
        return float(n) if self.reduce == "mean" else 1.0

    def parts(self) -> tuple[Statistics, Finish]:
        if self.reduce == "mean":
            return VOTES, _mean_strict if self.zeros == "strict" else _mean_kept
        if self.signed:
            return SPREAD, _lowest if self.reduce == "min" else _highest
        return SPREAD, _nearest if self.reduce == "min" else _farthest

    def direct_fold(self) -> Fold | None:
        unanimous = (self.reduce, self.zeros, self.quorum) == ("mean", "strict", 1)
        return fold_unanimous if unanimous else None

    def constants(self, n: int) -> Constants:
        return _votes_needed(n, self.quorum, self.zeros)


@rule
@dataclass(frozen=True)
class Conflict(Rule):
    """Keep the mean where members disagree: the complement of consensus.

    Args:
        quorum: as in consensus; consensus and conflict always add up to uniform.
        zeros: as in consensus.
    """

    paper: ClassVar[str] = "NegMerge, ICML 2025, Table 3"
    quorum: float = 1.0
    zeros: Literal["strict", "abstain"] = "strict"

    def __post_init__(self) -> None:
        _check_range("conflict option quorum", self.quorum, 0.5)

    statistics = VOTES

    def divisor(self, n: int) -> float:
        return float(n)

    def constants(self, n: int) -> Constants:
        return _votes_needed(n, self.quorum, self.zeros)

    @staticmethod
    def finish(c: Constants, total: A, positive: A, negative: A) -> A:
        return total * (kept(c, positive, negative) ^ True)


# -------------------------------------------------------------------------------------- averages


@rule
@dataclass(frozen=True)
class Uniform(Rule):
    """The plain mean of all task vectors (a uniform soup)."""

    paper: ClassVar[str] = "Model soups, ICML 2022; Task arithmetic, ICLR 2023"
    mostly_dense = True
    statistics = (stat.TOTAL,)

    def divisor(self, n: int) -> float:
        return float(n)

    @staticmethod
    def finish(c: Constants, total: A) -> A:
        return total


@rule
@dataclass(frozen=True)
class Localize(Rule):
    """Keep the largest magnitudes of the mean, regardless of the signs of the members.

    Args:
        density: the share of elements to keep.
        scope: take that share of the whole model or of each tensor.
    """

    paper: ClassVar[str] = "Localize-and-Stitch, TMLR 2025 (its dataless top-k mask)"
    density: float = 0.1
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        _check_range("localize option density", self.density, 0.0)

    def first_pass(self) -> FirstPass:
        return Threshold(self.density, of="mean", scope=self.scope)

    statistics = (stat.TOTAL,)

    @staticmethod
    def finish(c: Constants, total: A) -> A:
        mean = total / c[0]
        return mean * ((mean >= c[1]) | (-mean >= c[1]))


# --------------------------------------------------------- between the mean and unanimity


@register_jitable
def _agreement(c: Constants, positive: A, negative: A) -> A:
    """Return |members above zero − members below zero| / n."""
    return abs(positive - negative) / c[0]


def _soft_1(c: Constants, total: A, positive: A, negative: A) -> A:
    return total * _agreement(c, positive, negative)


def _soft_2(c: Constants, total: A, positive: A, negative: A) -> A:
    a = _agreement(c, positive, negative)
    return total * (a * a)


def _soft_3(c: Constants, total: A, positive: A, negative: A) -> A:
    a = _agreement(c, positive, negative)
    return total * (a * a * a)


def _soft_4(c: Constants, total: A, positive: A, negative: A) -> A:
    a = _agreement(c, positive, negative)
    return total * (a * a * a * a)


# Products and no `**`: numpy, torch and compiled code have powers of their own.
SOFT = (_soft_1, _soft_2, _soft_3, _soft_4)


@rule
@dataclass(frozen=True)
class Soft(Rule):
    """The mean times a power of the agreement: less where members disagree, nothing where half do.

    Args:
        power: the power of the agreement |members above zero − members below zero| / n, from 1 to
            4. The higher it is, the nearer the result is to consensus.
    """

    paper: ClassVar[str] = "between Model soups, ICML 2022, and NegMerge, ICML 2025"
    power: int = 2
    mostly_dense = True

    def __post_init__(self) -> None:
        if self.power not in range(1, len(SOFT) + 1):
            raise OptionError(
                f"soft option power: got {self.power}, wanted a whole number from 1 to {len(SOFT)}"
            )

    def parts(self) -> tuple[Statistics, Finish]:
        return VOTES, SOFT[self.power - 1]

    def divisor(self, n: int) -> float:
        return float(n)


MOMENTS = (stat.TOTAL, stat.SQUARES)
MOST_ERRORS = 1e6
"""More standard errors than this would be decided by the rounding of sums."""


@register_jitable
def _signal_and_spread(c: Constants, total: A, squares: A) -> tuple[A, A]:
    """Return mean² and the square of its standard error, both times n²·(n − 1).

    Nothing is divided, so that a mean of exactly so many standard errors is seen as such. The
    spread is a difference of sums and may be rounded below zero, which it cannot be.
    """
    spread = c[0] * squares - total * total
    return c[1] * (total * total), spread * (spread > 0)


# Squares that overflow (float64 changes above 1e150) give NaN, so that the merge is refused.


def _significant(c: Constants, total: A, squares: A) -> A:
    signal, spread = _signal_and_spread(c, total, squares)
    return stat.where(signal > c[2] * spread, total, 0.0) + 0.0 * (signal + spread)


def _shrunk(c: Constants, total: A, squares: A) -> A:
    signal, spread = _signal_and_spread(c, total, squares)
    factor = 1.0 - spread / stat.where(signal > 0, signal, 1.0)
    return stat.where(signal > spread, total * factor, 0.0) + 0.0 * (signal + spread)


@rule
@dataclass(frozen=True)
class Shrink(Rule):
    """Keep of the mean what stands out from the spread of the members.

    Args:
        by: threshold keeps the mean where it is more than `errors` standard errors from zero;
            james_stein multiplies it by 1 − (standard error / mean)², or by 0 if that is negative.
        errors: the number of standard errors; only for threshold.
    """

    paper: ClassVar[str] = "James and Stein, 1961 (positive part, one element); Student, 1908"
    by: Literal["threshold", "james_stein"] = "threshold"
    errors: float = 3.0
    least_members = 2

    def __post_init__(self) -> None:
        if not 0 <= self.errors <= MOST_ERRORS:
            raise OptionError(
                f"shrink option errors: got {self.errors}, wanted a number from 0 to "
                f"{MOST_ERRORS:.0f}"
            )

    def parts(self) -> tuple[Statistics, Finish]:
        return MOMENTS, _significant if self.by == "threshold" else _shrunk

    def constants(self, n: int) -> Constants:
        return (float(n), float(n - 1), self.errors * self.errors)

    def divisor(self, n: int) -> float:
        return float(n)


# -------------------------------------------------------------------------- elections, magnitudes


def _elected(c: Constants, total: A, gain: A, loss: A, gains: A, losses: A) -> A:
    """Return the elected sign of an element."""
    return 1 * (gain + loss > 0) - 1 * (gain + loss < 0)


def _cancelled(c: Constants, total: A, gain: A, loss: A, gains: A, losses: A) -> A:
    """Return whether the changes of an element cancel exactly."""
    return (gain + loss == 0) & (gains > 0)


@rule
@dataclass(frozen=True)
class Ties(Rule):
    """Trim each task vector, elect a sign by sum, average the members of that sign (TIES).

    Args:
        density: the share of each task vector to keep, by magnitude.
        scope: take that share of the whole model or of each tensor.
    """

    paper: ClassVar[str] = "TIES-Merging, NeurIPS 2023"
    density: float = 0.2
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        _check_range("ties option density", self.density, 0.0)

    def first_pass(self) -> FirstPass:
        return Threshold(self.density, of="members", scope=self.scope)

    def final_constants(self, sums: Sequence[int]) -> Constants:
        """Return the majority sign of the whole vector, for elements that cancel exactly."""
        elected, cancelled = sums
        return (-1.0 if cancelled and elected <= 0 else 1.0,)

    statistics = (stat.TOTAL, stat.GAIN, stat.LOSS, stat.GAINS, stat.LOSSES)
    tallies = (_elected, _cancelled)

    @staticmethod
    def finish(c: Constants, total: A, gain: A, loss: A, gains: A, losses: A) -> A:
        elected = gain + loss
        up = (elected > 0) | ((elected == 0) & (c[1] > 0))
        count = stat.where(up, gains, losses)
        return stat.where(up, gain, loss) / stat.where(count == 0, 1, count)


@rule
@dataclass(frozen=True)
class MagMax(Rule):
    """Take the change of largest magnitude for each element; the positive one of two equal ones."""

    paper: ClassVar[str] = "MagMax, ECCV 2024"
    mostly_dense = True
    statistics = (stat.LOW, stat.HIGH)

    def direct_fold(self) -> Fold | None:
        return fold_farthest

    @staticmethod
    def finish(c: Constants, low: A, high: A) -> A:
        return high * (high >= -low) + low * (high < -low)


@rule
@dataclass(frozen=True)
class Tall(Rule):
    """Keep the mean where it is near the changes of enough members (TALL-mask consensus).

    Args:
        factor: member k is active where |τₖ| ≥ factor · |τ̄ − τₖ|; τ̄ is the mean of the pool.
        agree: the number of members that must be active.
    """

    paper: ClassVar[str] = "TALL masks, ICML 2024"
    factor: float = 0.4
    agree: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.factor < inf:
            raise OptionError(f"tall option factor: got {self.factor}, wanted a number > 0")
        if self.agree < 1:
            raise OptionError(f"tall option agree: got {self.agree}, wanted at least 1")

    statistics = (stat.TOTAL, stat.ACTIVE)

    def constants(self, n: int) -> Constants:
        return (float(n), float(self.agree))

    def divisor(self, n: int) -> float:
        return float(n)

    def limits(self) -> tuple[float, ...]:
        return (self.factor,)

    @staticmethod
    def finish(c: Constants, total: A, active: A) -> A:
        return total * (active >= c[1])
