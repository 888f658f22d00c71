"""Factors of groups of tensors, found by coordinate steps at a fixed level of forgetting.

The factors of τ′ = Σ f_g·τ_g matter only relative to each other, because λ is searched afterwards.
Two choices of factors are therefore compared at the λ at which both have the same loss on the
forget set, that of τ at its own λ: the better one has the lower loss on the retain set. Losses are
compared and not accuracies, because they have no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt

MOST_LOSSES = 24
"""The largest number of models that are measured."""
ROUNDS = 2
NEAR = 0.1
"""How far from the level the nearest measured loss may be, as a share of the distance of the
original; the retain loss at the level is read from the line through the two nearest."""
CLOSE = 0.02
"""The same, for the first λ of a choice to be enough."""
FIRST_POWER = 1.5
"""What is forgotten is taken to grow with this power of λ, and then with the power that the last
two losses show."""
MOST_POWER = 8.0
MOST_STEP = 4.0
"""The largest ratio of the two λ at which one choice of factors is measured."""
LEAST = 0.01
"""The least share of the rise of the retain loss that a better choice of factors saves."""

Factors = Mapping[str, float]


@dataclass(frozen=True)
class Losses:
    """The mean losses of one model on the forget and on the retain set."""

    forget: float
    retain: float


Measure = Callable[[Factors, float], Losses | None]
"""Returns the losses for factors and λ; None if the outputs of the model are not finite."""


@dataclass(frozen=True)
class AtLevel:
    """Factors, the λ at which they reach the level, and the retain loss there."""

    factors: dict[str, float]
    scale: float
    retain: float


def tune_factors(
    lengths: Mapping[str, float], scale: float, measure: Measure, most: int = MOST_LOSSES
) -> dict[str, float]:
    """Return a factor for each group.

    Each group in turn is halved, and left out if that was better, or else doubled, in at most two
    rounds.

    >>> def measure(factors, scale):  # one group forgets, the other only harms
    ...     return Losses(scale * factors["a"], scale * (factors["a"] + factors["b"]))
    >>> tune_factors({"a": 1.0, "b": 1.0}, 1.0, measure)
    {'a': 2.0, 'b': 0.0}

    Args:
        lengths: the squared length of τ in each group.
        scale: the λ of τ, which gives the level.
        measure: called at most `most` times.
    """
    plain, used = dict.fromkeys(lengths, 1.0), 0

    def losses(factors: Factors, scale: float) -> Losses | None:
        nonlocal used
        used += 1
        return measure(factors, scale)

    zero = losses(plain, 0.0)
    start = losses(plain, scale) if scale and zero is not None else None
    if zero is None or start is None or start.forget <= zero.forget:
        return plain  # τ does not make the model forget these samples: there is no level
    level, rise = start.forget, start.forget - zero.forget
    best, power = AtLevel(plain, scale, start.retain), FIRST_POWER

    def at_level(factors: dict[str, float]) -> AtLevel | None:
        """Measure other factors at one λ or two."""
        nonlocal power
        before, after = _length(best.factors, lengths), _length(factors, lengths)
        if not after:
            return None
        first = best.scale * before / after  # a change of the same length
        found = losses(factors, first)
        if found is None:
            return None
        points = [(0.0, zero), (first, found)]
        if abs(found.forget - level) > CLOSE * rise:
            share = (found.forget - zero.forget) / rise
            step = share ** (-1 / power) if share > 0 else MOST_STEP
            second = first * min(max(step, 1 / MOST_STEP), MOST_STEP)
            if (more := losses(factors, second)) is None:
                return None
            points.append((second, more))
            other = (more.forget - zero.forget) / rise
            if share > 0 and other > 0 and other != share:
                slope = log(other / share) / log(second / first)
                power = min(max(slope, 1 / MOST_POWER), MOST_POWER)
        return _read(factors, points, level, NEAR * rise)

    def better(group: str, factor: float) -> bool:
        """Take over a factor if it is better."""
        nonlocal best
        found = at_level(best.factors | {group: factor}) if used + 2 <= most else None
        least = LEAST * abs(best.retain - zero.retain)
        if found is None or found.retain >= best.retain - least:
            return False
        best = found
        return True

    for _ in range(ROUNDS):
        before = best
        for group in lengths:
            own = best.factors[group]
            if own and better(group, own / 2):
                better(group, 0.0)
            elif own:
                better(group, 2 * own)
        if best is before:
            break
    return best.factors


def _length(factors: Factors, lengths: Mapping[str, float]) -> float:
    """Return the length of τ′."""
    return sqrt(sum(factors[group] ** 2 * own for group, own in lengths.items()))


def _read(
    factors: dict[str, float], points: list[tuple[float, Losses]], level: float, near: float
) -> AtLevel | None:
    """Read λ and the retain loss at a level from the line through the two nearest points."""
    (here, one), (there, two) = sorted(points, key=lambda p: abs(p[1].forget - level))[:2]
    if abs(one.forget - level) > near:
        return None
    share = (level - one.forget) / (two.forget - one.forget) if one.forget != two.forget else 0.0
    retain = one.retain + share * (two.retain - one.retain)
    return AtLevel(factors, here + share * (there - here), retain)
