"""Selectors: choose members by a score on data; rules never use data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from negmerge.errors import OptionError

SELECTORS = {
    "single_best": "the best member at its own best λ: n × m evaluations",
    "greedy": "add members to the mean while the retain loss falls: 2n − 1 evaluations, then one λ",
}


@dataclass(frozen=True)
class Greedy:
    """Add members to a mean one by one if the loss falls.

    >>> Greedy().walk([3.0, 1.0, 2.0], lambda members: 2.5 if 1 in members else 3.5)
    ([0, 1], [([0, 2], 3.5), ([0, 1], 2.5)])

    Args:
        order: `paper` begins with the highest loss, as in the footnote of the paper; `soup` with
            the lowest, as model soups do.
        scale: λ of the scored models θ − λ·mean(τ).
    """

    order: Literal["paper", "soup"] = "paper"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in ("paper", "soup"):
            raise OptionError(f"greedy: order: got {self.order!r}, wanted paper or soup")
        if not 0 < self.scale < inf:
            raise OptionError(f"greedy: scale: got {self.scale!r}, wanted a number above 0")

    def walk(
        self, losses: Sequence[float], score: Callable[[list[int]], float]
    ) -> tuple[list[int], list[tuple[list[int], float]]]:
        """Return the chosen members, and all combinations that were tried with their losses.

        `score` returns the loss of the mean of some members.
        """
        sign = -1 if self.order == "paper" else 1
        first, *others = sorted(range(len(losses)), key=lambda k: (sign * losses[k], k))
        kept, best = [first], losses[first]
        tried: list[tuple[list[int], float]] = []
        for member in others:
            loss = score([*kept, member])
            tried.append(([*kept, member], loss))
            if loss < best:
                kept, best = [*kept, member], loss
        return kept, tried


def single_best(losses: Sequence[float]) -> int:
    """Return the first member with the smallest loss, each at its own best λ.

    >>> single_best([0.3, 0.1, 0.1])
    1
    """
    return min(range(len(losses)), key=losses.__getitem__)
