"""The game of U-LiRA (Hayes et al. 2024): was a sample unlearned, or never seen?

Many shadow models are trained, and each unlearns its own part of the same targets. In each shadow a
target has a role: it is kept (IN), unlearned (UNLEARNED) or never seen (OUT). The attacker knows,
for each target, the margins under the other shadows of both roles, and decides by a likelihood
ratio: an attack on each single sample, which sees what an attack with one threshold for all hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.evaluation.attacks.margins import Floats
from negmerge.evaluation.attacks.operating_points import resolvable
from negmerge.evaluation.attacks.weighted_ranks import WeightedRanks
from negmerge.evaluation.metrics import Measured

ENOUGH = 64
"""From this number of shadows on, each role of a sample has a variance of its own."""
LEAST = 3
"""The least number of shadows of each role of a sample: leaving one out, two give a variance."""
SMALLEST = 1e-12  # a variance below it is rounding
FPRS = (0.01, 0.001)


class Role(IntEnum):
    """What a shadow did with a target."""

    OUT = 0
    IN = 1
    UNLEARNED = 2


@dataclass(frozen=True)
class Game:
    """The outcome of an attack on all shadows.

    Args:
        scores: the log-likelihood ratio of each shadow and target; NaN for other roles.
        member: whether the target has the attacked role.
        auc: as a percentage.
        tpr: the percentage of found members at each rate of false alarms; None where the rate is
            not resolvable.
        success: the percentage of right decisions about each target, both roles counted alike.
        worst_decile: the mean of `success` over the tenth of the targets where it is highest.
            Chance alone raises it above 50 %: compare with the retrained models.
    """

    scores: Floats
    member: NDArray[np.bool_]
    auc: Measured
    tpr: dict[float, Measured | None]
    success: Floats
    worst_decile: float


def draw_roles(shadows: int, targets: int, seed: int) -> NDArray[np.int8]:
    """Return a role for each shadow and target; each target has each role in a third of shadows.

    >>> roles = draw_roles(12, 5, seed=0)
    >>> roles.shape, [(roles == role).sum(0).tolist() for role in Role][0]
    ((12, 5), [4, 4, 4, 4, 4])
    """
    if shadows % 3:
        raise ValueRangeError(
            f"shadows: got {shadows}; wanted a multiple of 3, the number of roles"
        )
    column = np.repeat(np.array([*Role], np.int8), shadows // 3)
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(column[:, None], (1, targets)), axis=0)


def play(
    margins: Floats,
    roles: NDArray[np.integer],
    attacked: Role = Role.UNLEARNED,
    fprs: Sequence[float] = FPRS,
    seed: int = 0,
    draws: int = 1000,
) -> Game:
    """Attack every shadow with the margins of the others.

    The intervals are of the two-way bootstrap: shadows and targets are drawn with replacement, and
    a score counts as often as its shadow times its target. With the margins of retrained models,
    which saw neither unlearned nor other targets, the AUC is the null: about 50 %, and a little
    less, because a score that is left out pulls the mean of its own role away.

    >>> rng = np.random.default_rng(0)
    >>> roles = draw_roles(24, 40, seed=0)
    >>> known = rng.normal(size=(24, 40)) + 2.0 * (roles == Role.UNLEARNED)
    >>> play(known, roles).auc.value > 85 > 60 > play(rng.normal(size=(24, 40)), roles).auc.value
    True

    Args:
        margins: a row of each shadow, a column of each target.
        roles: of the same shape.
        attacked: the role to tell from OUT: UNLEARNED, or IN for what leaks of the retain set.
        fprs: the rates of false alarms at which members are counted.
    """
    member, other = roles == attacked, roles == Role.OUT
    _check(margins, member, other)
    scores = np.where(member | other, likelihood_ratios(margins, member, other), np.nan)

    used = member | other
    ranks = WeightedRanks(scores[used], member[used])
    once = np.ones(int(used.sum()))
    resolved = [fpr for fpr in fprs if resolvable(fpr, int(other.sum()))]
    values = [ranks.auc(once), *ranks.tprs(once, resolved)]
    rng = np.random.default_rng(seed)
    drawn: list[list[float]] = []
    for _ in range(draws):
        weights = np.outer(_drawn(rng, len(margins)), _drawn(rng, margins.shape[1]))[used]
        drawn.append([ranks.auc(weights), *ranks.tprs(weights, resolved)])
    lows, highs = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    measured = [
        Measured(100 * value, 100 * min(low, value), 100 * max(high, value), margins.shape[1])
        for value, low, high in zip(values, lows.tolist(), highs.tolist(), strict=True)
    ]

    right = np.where(member, scores > 0, scores < 0) + (scores == 0) / 2
    success = 50 * (_mean(right, member) + _mean(right, other))
    worst = np.sort(success)[-max(1, len(success) // 10) :]
    tpr: dict[float, Measured | None] = dict.fromkeys(fprs)
    tpr |= dict(zip(resolved, measured[1:], strict=True))
    return Game(scores, member, measured[0], tpr, success, float(worst.mean()))


def likelihood_ratios(
    margins: Floats, member: NDArray[np.bool_], other: NDArray[np.bool_]
) -> Floats:
    """Return log N(c; μ_a, v_a) − log N(c; μ_b, v_b) of each margin c, from the other shadows.

    Below 64 shadows both roles share one variance: a few margins give no useful one for each.

    Args:
        margins: a row of each shadow, a column of each target.
        member: where the target has the role a.
        other: where it has the role b.
    """
    mean_a, square_a, count_a = _left_out(margins, member)
    mean_b, square_b, count_b = _left_out(margins, other)
    if len(margins) < ENOUGH:
        variance = (square_a + square_b) / (count_a + count_b - 2)
        variance_a = variance_b = np.maximum(variance, SMALLEST)
    else:
        variance_a = np.maximum(square_a / (count_a - 1), SMALLEST)
        variance_b = np.maximum(square_b / (count_b - 1), SMALLEST)
    fit_a = (margins - mean_a) ** 2 / variance_a + np.log(variance_a)
    fit_b = (margins - mean_b) ** 2 / variance_b + np.log(variance_b)
    return (fit_b - fit_a) / 2


def _left_out(margins: Floats, role: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return mean, sum of squared deviations and count of a role without the shadow of each row."""
    count = role.sum(0)
    mean = np.where(role, margins, 0.0).sum(0) / count
    deviation = np.where(role, margins - mean, 0.0)
    square = (deviation**2).sum(0)
    rest = count - role
    # Without x, the mean of n numbers moves by (mean − x)/(n − 1), and the sum of squares loses
    # (x − mean)²·n/(n − 1).
    return (
        mean - deviation / rest,
        np.maximum(square - deviation**2 * count / rest, 0.0),
        rest.astype(np.float64),
    )


def _mean(values: NDArray[np.floating], where: NDArray[np.bool_]) -> Floats:
    """Return the mean of each column over some of its rows."""
    return np.where(where, values, 0.0).sum(0) / where.sum(0)


def _drawn(rng: np.random.Generator, count: int) -> NDArray[np.intp]:
    """Return how often each of `count` is drawn in as many draws with replacement."""
    return np.bincount(rng.integers(count, size=count), minlength=count)


def _check(margins: Floats, member: NDArray[np.bool_], other: NDArray[np.bool_]) -> None:
    if margins.ndim != 2 or margins.shape != member.shape or not margins.size:
        raise ValueRangeError(
            f"shadow game: got margins of shape {margins.shape} and roles of shape {member.shape}; "
            "wanted a row of each shadow and a column of each target in both"
        )
    if not np.isfinite(margins).all():
        raise ValueRangeError("shadow game: a margin is not finite; wanted numbers")
    least = int(min(member.sum(0).min(), other.sum(0).min()))
    if least < LEAST:
        raise ValueRangeError(
            f"shadow game: a target has a role in {least} shadows; wanted at least {LEAST} of each "
            "role; train more shadows"
        )
