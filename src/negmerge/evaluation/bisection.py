"""The searches `bracket` and `doubling`: the largest allowed λ by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

from negmerge.evaluation.scales import MOST_EVALUATIONS


def bracket(loss: Callable[[float], float | None], scales: Sequence[float]) -> None:
    """Compute the few losses that determine the best λ, if larger λ forget more and lose more.

    Bisection finds the largest allowed λ. Then the assumption is checked: the λ below it must not
    be better, nor as good (then smaller ones are computed), and the second λ above it must not be
    allowed. If a loss contradicts the assumption, all losses are computed.

    >>> asked = []
    >>> def loss(scale):
    ...     asked.append(scale)
    ...     return None if scale > 12 else 90.0 - scale
    >>> bracket(loss, range(21)); len(set(asked)), 12 in asked
    (7, True)

    Args:
        loss: returns the loss of a λ, or None if the λ is not allowed.
        scales: the λ in rising order; the first is 0.
    """
    seen: dict[int, float | None] = {}

    def at(place: int) -> float | None:
        if place not in seen:
            seen[place] = loss(scales[place])
        return seen[place]

    def halved(low: int, high: int, goes_on: Callable[[float | None], bool]) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if goes_on(at(middle)) else (low, middle)
        return low

    at(0)
    best = halved(0, len(scales), lambda own: own is not None)
    if best > 0 and at(best - 1) == at(best):  # the smallest λ of equal losses is chosen
        halved(-1, best, lambda own: own != at(best))
    if best + 2 < len(scales):
        at(best + 2)
    known = [seen[place] for place in sorted(seen)]
    allowed = [own for own in known if own is not None]
    falls = all(a >= b for a, b in pairwise(allowed))
    if not falls or None in known[: len(allowed)]:
        for place in range(len(scales)):
            at(place)


TOLERANCE = 1 / 16
"""The distance of two λ at which `doubling` stops, as a share of the larger one."""


def doubling(
    loss: Callable[[float], float | None],
    scales: Sequence[float],
    best: float = -inf,
    tolerance: float = TOLERANCE,
    evaluations: int = MOST_EVALUATIONS,
) -> None:
    """Compute losses up to the first λ that is not allowed, then bisect below it.

    The search ends when the largest allowed λ and the smallest other one differ by at most
    `tolerance` times the larger one, or times the first λ if that is larger: where already the
    first λ is not allowed, the allowed one may be 0. No λ is computed twice.

    >>> asked = []
    >>> def loss(scale):
    ...     asked.append(scale)
    ...     return None if scale > 1.3 else 90.0 - scale
    >>> doubling(loss, [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]); asked
    [0.0, 0.25, 0.5, 1.0, 2.0, 1.5, 1.25, 1.375, 1.3125]

    Args:
        loss: returns the loss of a λ, or None if the λ is not allowed.
        scales: the λ to double: 0, the first one, and so on.
        best: the lower bound of the loss; a λ that reaches it ends the doubling, too, and the
            smallest such λ is looked for.
        tolerance: the relative distance to stop at.
        evaluations: the largest number of losses to compute.
    """
    count = 0

    def ends(scale: float) -> bool:
        nonlocal count
        count += 1
        own = loss(scale)
        return own is None or own <= best

    low = high = scales[0]
    for scale in scales[:evaluations]:
        low, high = high, scale
        if ends(scale):
            break
    else:
        return
    while high - low > tolerance * max(high, scales[1]) and count < evaluations:
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle) else (middle, high)
