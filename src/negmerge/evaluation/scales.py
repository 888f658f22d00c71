"""The λ that a search tries: the `search` section of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from negmerge.evaluation.refinement import TOLERANCE
from negmerge.support.settings import Count, Positive, Strict

MOST_SCALES = 10_000
"""The largest number of λ in a search."""
MOST_TRIES = 1000
"""The largest number of trainings of a tuned rival."""
FINEST_STEP = 1e-9
"""The smallest step between two λ, which are rounded to ten decimals."""

FIRST = 0.25
"""The first λ of a search by doubling; of `refine` if the length of τ is not known."""
LARGEST = 64.0
"""The largest λ of a search by doubling without a limit of its own."""
FIRST_SHARE = 0.005
"""The length of the first change λτ of `refine`, as a share of the length of the weights."""
LARGEST_SHARE = 64.0
"""The length of the largest one, if no limit is given."""
MOST_EVALUATIONS = 12
"""The largest number of λ that `refine` and `doubling` measure, with λ = 0."""
COARSE_EVALUATIONS = 6
"""The same for results that are only shown."""
CONFIDENCE = 0.95
"""The confidence of the intervals of metrics."""
GRID_FIELDS = ("scales", "stop", "count")
"""The fields of a grid: a recipe that has one of them and no strategy has a grid."""

ADDED_LATER: dict[str, Any] = {
    "evaluations": MOST_EVALUATIONS,
    "confidence": None,
    "matched": None,
}
"""Fields that the recipes of older runs do not have, with their defaults."""

Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Search(Strict):
    """The λ to try, and how one of them is chosen.

    Args:
        scales: the λ to try; if not given, `stop` and `count` define a grid.
        stop: the largest λ of the grid.
        count: the number of evenly spaced λ from 0 to `stop`.
        limit: the grid grows up to this λ while a larger λ may be better; if not given, it does
            not grow. The largest λ of `refine` and `doubling`; if not given, 64, and for `refine`
            the λ at which the change is 64 times as long as the weights.
        strategy: `refine`, which measures few λ, up to the limit of the criterion or around its
            optimum; `grid`, which is the default if `scales`, `stop` or `count` is given;
            `bracket`, which finds λ by bisection instead of measuring the whole grid; `doubling`,
            which doubles λ from 0.25 while λ is allowed, then bisects; the last two for criteria
            that limit λ, such as `keep_retain`.
        evaluations: the largest number of λ that `refine` measures, with λ = 0.
        confidence: 0.95: the limit of a criterion such as `keep_retain` must be kept by the end of
            the 95 % interval of the metric; null: by its value.
        criterion: the name of the criterion; that of the scenario if not given.
        samples: at most this number of samples of each set choose λ; they are not reported.
        tries: the number of trainings of each tuned rival.
        matched: the value of the forget metric at which all methods are compared, each with the λ
            that gives it; that of the retrained model if not given.
    """

    scales: Annotated[tuple[Scale, ...], Field(max_length=MOST_SCALES)] | None = None
    stop: Positive = 1.0
    count: Annotated[int, Field(ge=2, le=MOST_SCALES)] = 21
    limit: Positive | None = None
    strategy: Literal["refine", "grid", "bracket", "doubling"] = "refine"
    evaluations: Annotated[int, Field(ge=3, le=MOST_EVALUATIONS)] = MOST_EVALUATIONS
    confidence: float | None = None
    criterion: str | None = None
    samples: Count = 2000
    tries: Annotated[int, Field(ge=1, le=MOST_TRIES)] = 5
    matched: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _grid_if_given(cls, tree: Any) -> Any:
        given = isinstance(tree, Mapping) and any(tree.get(k) is not None for k in GRID_FIELDS)
        return {**tree, "strategy": "grid"} if given and "strategy" not in tree else tree

    @model_validator(mode="after")
    def _steps(self) -> Search:
        if self.scales is None and self.stop / (self.count - 1) < FINEST_STEP:
            raise ValueError(
                f"stop: the step between two λ is below {FINEST_STEP:g}; raise stop or lower count"
            )
        return self

    @model_validator(mode="after")
    def _without_scales(self) -> Search:
        if self.strategy in ("refine", "doubling") and self.scales is not None:
            raise ValueError(
                f"scales: the strategy {self.strategy} chooses the λ to try; leave scales out, or "
                "use grid or bracket"
            )
        return self

    @model_validator(mode="after")
    def _known_confidence(self) -> Search:
        if self.confidence not in (None, CONFIDENCE):
            raise ValueError(
                f"confidence: got {self.confidence:g}, and the intervals of metrics are those of "
                f"{CONFIDENCE:g}; wanted {CONFIDENCE:g} or null"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: Callable[[Search], dict[str, Any]]) -> dict[str, Any]:
        """Leave out new fields that are not set: the recipes of older runs do not have them."""
        tree = dump(self)
        return {k: v for k, v in tree.items() if v != ADDED_LATER.get(k, ...)}

    def grid(self) -> tuple[float, ...]:
        """Return the λ to try in rising order, with 0.

        >>> Search(stop=2.0, count=3).grid()
        (0.0, 1.0, 2.0)
        >>> Search(strategy="doubling", limit=3.0).grid()
        (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)

        Of `doubling`, those that it doubles; of `refine` only 0, the others depend on the results.
        """
        if self.strategy == "refine":
            return (0.0,)
        if self.strategy == "doubling":
            last = LARGEST if self.limit is None else self.limit
            scales, scale = [0.0], FIRST
            while scale < last:
                scales.append(scale)
                scale *= 2
            return (*scales, last)
        if self.scales is not None:
            return tuple(sorted({0.0, *self.scales}))
        return tuple(round(self.stop * i / (self.count - 1), 10) for i in range(self.count))

    def coarse(self) -> Search:
        """Return a search of every fourth λ, for results that are only shown.

        >>> Search(stop=1.0, count=11).coarse().grid()
        (0.0, 0.4, 0.8)

        Of `refine`: a search of half as many λ. Of `doubling`: a search of the doubled λ, without
        the bisection between two of them.
        """
        if self.strategy == "refine":
            fewer = min(self.evaluations, COARSE_EVALUATIONS)
            return self.model_copy(update={"evaluations": fewer})
        if self.strategy == "doubling":
            return self.model_copy(update={"scales": self.grid(), "strategy": "bracket"})
        return self.model_copy(update={"scales": self.grid()[::4]})

    def passes(self) -> int:
        """Estimate the number of λ that are measured."""
        if self.strategy == "refine":
            return self.evaluations
        if self.strategy == "doubling":
            return MOST_EVALUATIONS
        return min(len(self.grid()), 8) if self.strategy == "bracket" else len(self.grid())

    @property
    def tolerance(self) -> float | None:
        """The share of what may be lost, or of a loss, that `refine` may leave; None of others."""
        return TOLERANCE if self.strategy == "refine" else None

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
