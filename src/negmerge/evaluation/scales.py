"""The λ that a search tries: the `search` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from negmerge.support.settings import Count, Positive, Strict

MOST_SCALES = 10_000
"""The largest number of λ in a search."""
MOST_TRIES = 1000
"""The largest number of trainings of a tuned rival."""
FINEST_STEP = 1e-9
"""The smallest step between two λ, which are rounded to ten decimals."""

Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Search(Strict):
    """The λ to try, and how one of them is chosen.

    Args:
        scales: the λ to try; if not given, `stop` and `count` define a grid.
        stop: the largest λ of the grid.
        count: the number of evenly spaced λ from 0 to `stop`.
        limit: the grid grows up to this λ while a larger λ may be better; if not given, it does
            not grow.
        strategy: `grid`, or `bracket`, which finds λ by bisection instead of measuring the whole
            grid; for the criterion `keep_retain`.
        criterion: the name of the criterion; that of the scenario if not given.
        samples: at most this number of samples of each set choose λ; they are not reported.
        tries: the number of trainings of each tuned rival.
    """

    scales: Annotated[tuple[Scale, ...], Field(max_length=MOST_SCALES)] | None = None
    stop: Positive = 1.0
    count: Annotated[int, Field(ge=2, le=MOST_SCALES)] = 21
    limit: Positive | None = None
    strategy: Literal["grid", "bracket"] = "grid"
    criterion: str | None = None
    samples: Count = 2000
    tries: Annotated[int, Field(ge=1, le=MOST_TRIES)] = 5

    @model_validator(mode="after")
    def _steps(self) -> Search:
        if self.scales is None and self.stop / (self.count - 1) < FINEST_STEP:
            raise ValueError(
                f"stop: the step between two λ is below {FINEST_STEP:g}; raise stop or lower count"
            )
        return self

    def grid(self) -> tuple[float, ...]:
        """Return the λ to try in rising order, with 0.

        >>> Search(stop=2.0, count=3).grid()
        (0.0, 1.0, 2.0)
        """
        if self.scales is not None:
            return tuple(sorted({0.0, *self.scales}))
        return tuple(round(self.stop * i / (self.count - 1), 10) for i in range(self.count))

    def coarse(self) -> Search:
        """Return a search of every fourth λ, for results that are only shown.

        >>> Search(stop=1.0, count=11).coarse().grid()
        (0.0, 0.4, 0.8)
        """
        return self.model_copy(update={"scales": self.grid()[::4]})

    def passes(self) -> int:
        """Estimate the number of λ that are measured."""
        return min(len(self.grid()), 8) if self.strategy == "bracket" else len(self.grid())

    def beyond(self, scales: tuple[float, ...]) -> tuple[float, ...]:
        """Return the λ to try after these: up to twice the last one, in double steps, to the limit.

        >>> search = Search(stop=1.0, count=5, limit=3.0)
        >>> search.beyond(search.grid()), search.beyond((0.0, 1.0, 1.5, 2.0))
        ((1.5, 2.0), (3.0,))
        """
        if self.scales is not None or self.limit is None:
            return ()
        last, step = scales[-1], 2 * (scales[-1] - scales[-2])
        count = max(round(last / step), 1)
        more = (round(last + step * k, 10) for k in range(1, count + 1))
        return tuple(scale for scale in more if scale <= self.limit)
