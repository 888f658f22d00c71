"""Choices among members that need a score: rules never see data, selectors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from negmerge.errors import OptionError

Order = Literal["paper", "soup"]

SELECTORS = {
    "single_best": "the member that does best with its own λ: n × m evaluations",
    "greedy": "members join the mean while the retain loss falls: 2n − 1 evaluations, then one λ",
}


@dataclass(frozen=True)
class Greedy:
    """How members are merged one by one.

    >>> Greedy().walk([3.0, 1.0, 2.0], lambda members: 2.5 if 1 in members else 3.5)
    ([0, 1], [([0, 2], 3.5), ([0, 1], 2.5)])

    order: `paper` begins with the highest loss, as the paper's footnote has it; `soup` with the
        lowest, as model soups do.
    scale: λ of the models that are scored, θ − λ·mean(τ).
    """

    order: Order = "paper"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in ("paper", "soup"):
            raise OptionError(f"greedy: order {self.order!r}, wanted paper or soup")
        if not 0 < self.scale < float("inf"):
            raise OptionError(f"greedy: scale {self.scale!r}, wanted a number above 0")

    def walk(
        self, losses: Sequence[float], score: Callable[[list[int]], float]
    ) -> tuple[list[int], list[tuple[list[int], float]]]:
        """The members that are kept, and what was tried in what order.

        losses: of each member alone. score: the loss of the mean of some members.
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
    """The member with the smallest loss at its own best λ, of equals the first.

    >>> single_best([0.3, 0.1, 0.1])
    1
    """
    return min(range(len(losses)), key=lambda k: losses[k])
