"""The search `refine`: λ up to a limit, or around an optimum, in few evaluations.

Both functions ask for the result of a λ and return nothing: whoever calls them keeps the results.
Lengths are not relative to λ = 1 but to a first λ, which the caller takes from the length of τ, so
that a vector of half the length is asked for twice the λ.
"""

from __future__ import annotations

from collections.abc import Callable
from math import copysign, inf, log, sqrt

TOLERANCE = 1 / 20
"""The share of what may be lost that a search may leave; of an optimum, the share of the loss of
the original that is near enough to the best loss."""
RESOLUTION = 1 / 256
"""The distance of two λ, as a share of the larger one, below which a limit is not looked for: a
metric of few samples has steps."""
COARSE = 1 / 16
"""The same where λ is the smallest one of equal losses, and around an optimum."""
GROWTH, LEAST_GROWTH = 4.0, 1.25
"""The largest and smallest factor between two λ while no λ is too large."""
SHRINK, LEAST_SHRINK = 1 / 16, 1 / 2
"""The same while every λ but 0 is too large."""
STEP = 3.0
"""The factor between two λ while an optimum is not enclosed."""
LEAST_STEP = STEP**-5
"""The smallest λ around an optimum, as a share of the first λ."""
GOLDEN = (3 - sqrt(5)) / 2


def readable(scale: float) -> float:
    """Round λ to four digits, so that tables show the λ that was measured.

    >>> readable(0.123456), readable(1234.56)
    (0.1235, 1235.0)
    """
    return float(f"{scale:.4g}")


def at_most(scale: float, largest: float) -> float:
    """Round λ, and return the largest λ itself where the rounded one is not below it.

    >>> at_most(0.123456, 1.0), at_most(9.0, 3.14159)
    (0.1235, 3.14159)
    """
    return min(readable(scale), largest)


# --------------------------------------------------------------------------------------- to a limit


def refine_to_limit(
    left: Callable[[float], float | None],
    first: float,
    largest: float = inf,
    evaluations: int = 12,
    reached: Callable[[float], bool] = lambda scale: False,
) -> None:
    """Ask for λ until the largest allowed one leaves at most `TOLERANCE` of what may be lost.

    What is lost is taken to be a power of λ, of exponent 2 until two points tell the exponent:
    each λ is the one at which the limit would be reached. If that fails twice on the same side,
    the next λ is the geometric mean of the largest allowed λ and the smallest other one.

    >>> asked = []
    >>> def left(scale):
    ...     asked.append(scale)
    ...     return 1 - (scale / 3) ** 3
    >>> refine_to_limit(left, first=0.5); asked
    [0.5, 2.0, 2.975]

    Args:
        left: returns the share that is left of what may be lost: 1 at λ = 0, 0 at the limit, less
            than 0 beyond it; None if λ is not allowed for another reason. A function that does not
            know the share returns 1, and λ is found by bisection.
        first: the first λ.
        largest: the largest λ.
        evaluations: the largest number of λ, with λ = 0, for which `left` is not called.
        reached: whether the loss of an allowed λ cannot be smaller; the smallest such λ is looked
            for.
    """
    known: dict[float, float] = {0.0: 0.0}
    """What is lost at each λ: 1 at the limit."""
    low, high, resolution = 0.0, inf, RESOLUTION
    sides = ""  # of the λ between two known ones: h was not allowed, l was
    scale = at_most(first, largest)
    while len(known) < evaluations and scale not in known:
        own, enclosed = left(scale), 0 < low < high < inf
        if own is None or own < 0:
            known[scale], high = inf if own is None else 1 - own, scale
        elif reached(scale):
            known[scale], high, resolution = inf, scale, COARSE
        else:
            known[scale], low = 1 - own, scale
            if own <= TOLERANCE or scale >= largest:
                return
        if high < inf and high - low <= resolution * high:
            return
        sides += ("h" if high == scale else "l") if enclosed else ""
        stuck = sides.endswith(("hh", "ll"))
        scale = at_most(_next_to_limit(known, low, high, stuck), largest)


def _next_to_limit(known: dict[float, float], low: float, high: float, stuck: bool) -> float:
    """Return the λ at which the limit is expected, between or beyond those that are known.

    Args:
        low: the largest allowed λ.
        high: the smallest other one; infinity if there is none.
        stuck: whether the last two λ between known ones were both allowed, or both not.
    """
    wanted, lost = 1 - TOLERANCE / 2, known[low]  # the middle of what is near enough
    before = max((scale for scale in known if scale < low), default=0.0)
    step = 0 < lost <= known[before]  # the metric has steps, and this one may be wide
    if high == inf:
        if step:
            return low * GROWTH
        exponent = 2.0
        if 0 < known[before] < lost:
            exponent = min(max(log(lost / known[before]) / log(low / before), 0.5), 4.0)
        factor = (wanted / lost) ** (1 / exponent) if lost > 0 else GROWTH
        return low * min(max(factor, LEAST_GROWTH), GROWTH)
    if low == 0:
        factor = sqrt(wanted / known[high]) if known[high] < inf else 1 / GROWTH
        return high * min(max(factor, SHRINK), LEAST_SHRINK)
    if stuck or step or not 0 < lost < known[high] < inf:
        return sqrt(low * high)
    expected = low * (high / low) ** (log(wanted / lost) / log(known[high] / lost))
    edge = (high - low) / 50  # a λ nearer than that to a known one tells little
    return min(max(expected, low + edge), high - edge)


# ----------------------------------------------------------------------------------- to an optimum


def refine_to_optimum(
    loss: Callable[[float], float],
    first: float,
    largest: float = inf,
    evaluations: int = 12,
    best: float = 0.0,
) -> None:
    """Ask for λ around the smallest loss until they are close together.

    λ grows in steps of a factor 3 while the largest λ is the best one, or no worse than λ = 0. If
    already the first λ is worse, a smaller one is asked for, and a larger one if that is worse,
    too: small changes may be worse by chance. Then each λ is where two lines meet that continue the
    curve from the left and from the right, as the losses of distances have a kink at the optimum;
    or the golden section of the larger side.

    >>> losses = {}
    >>> def loss(scale):
    ...     return losses.setdefault(scale, abs(scale - 0.7) + 1)
    >>> refine_to_optimum(loss, first=0.1); len(losses), min(losses, key=losses.get)
    (11, 0.7)

    Args:
        loss: returns the loss of a λ; infinity if λ is not allowed.
        first, largest: as in `refine_to_limit`.
        evaluations: the largest number of λ, with λ = 0.
        best: the lower bound of the loss. A loss is near enough to it if it is nearer than
            `TOLERANCE` times the loss of λ = 0.
    """
    known: dict[float, float] = {0.0: loss(0.0)}
    original = known[0.0]
    enough = best + TOLERANCE * (original - best) if best > -inf else -inf

    def goes_on() -> bool:
        return len(known) < evaluations and min(known.values()) > enough

    def ask(scale: float) -> float:
        scale = at_most(scale, largest)
        if scale not in known and goes_on():
            known[scale] = loss(scale)
        return known.get(scale, inf)

    if ask(first) > original and ask(first / STEP) > original:
        ask(first * STEP)
    while goes_on() and known[top := max(known)] <= min(known.values()) and top < largest:
        ask(top * STEP)
    while goes_on():
        scale = _next_to_optimum(known, first)
        if scale is None or (scale := readable(scale)) in known:
            return
        ask(scale)


def _next_to_optimum(known: dict[float, float], first: float) -> float | None:
    """Return the λ at which the optimum is expected; None if it is known well enough."""
    best = min(known, key=lambda scale: (known[scale], scale))
    scales = sorted(known)
    place = scales.index(best)
    if best == 0:
        return scales[1] / STEP if scales[1] > LEAST_STEP * first else None
    if place == len(scales) - 1:
        return None
    low, high = scales[place - 1], scales[place + 1]
    if high - low <= COARSE / 4 * best:
        return None
    edge = (high - low) / 20
    for expected in _kinks(known, scales, place):
        if abs(expected - best) < edge:
            expected = best + copysign(edge, expected - best)
        if low + edge <= expected <= high - edge:
            return expected
    if high - best > best - low:
        return best + GOLDEN * (high - best)
    return best - GOLDEN * (best - low)


def _kinks(known: dict[float, float], scales: list[float], place: int) -> list[float]:
    """Return where lines through neighbours of the best λ meet, the lowest place first."""
    low, best, high = scales[place - 1 : place + 2]
    found: list[tuple[float, float]] = []
    if place + 2 < len(scales):  # right of the best λ
        found += _meeting(known, low, best, high, scales[place + 2], best, high)
    if place >= 2:  # left of it
        found += _meeting(known, scales[place - 2], low, best, high, low, best)
    return [scale for _, scale in sorted(found)]


def _meeting(
    known: dict[float, float], a: float, b: float, c: float, d: float, low: float, high: float
) -> list[tuple[float, float]]:
    """Return height and place at which the lines a–b and c–d meet between `low` and `high`."""
    if max(known[s] for s in (a, b, c, d)) == inf:
        return []
    falls, rises = (known[b] - known[a]) / (b - a), (known[d] - known[c]) / (d - c)
    if falls >= 0 or rises <= 0:
        return []
    scale = (known[b] - falls * b - known[c] + rises * c) / (rises - falls)
    return [(known[b] + falls * (scale - b), scale)] if low < scale < high else []
