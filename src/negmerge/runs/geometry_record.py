"""The types of the lengths, distances and losses that a run measures in the space of the weights.

`geometry.py` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from negmerge.runs.records import Number, Record

Losses = dict[str, Number | None]
"""The mean loss on each set; None if it is not finite."""


class Distances(Record):
    """The lengths of one change λτ, over parameters without buffers.

    Args:
        length: ‖λτ‖.
        separation: ‖θ_retrained − θ‖.
        distance: ‖θ − λτ − θ_retrained‖.
        cosine: the cosine of the angle between −τ and θ_retrained − θ; None if one of them is zero.
    """

    length: Number
    separation: Number | None = None
    distance: Number | None = None
    cosine: Number | None = None


class Placed(Distances):
    """Where a model θ − λτ lies, and the losses on the way to it and beyond.

    Args:
        model: the title of a method, `conflict`, or `member-KEY`.
        scale: λ.
        losses: the loss of θ − tλτ on each set, for each t of `Geometry.path`; empty if λ is 0 or
            losses were not measured.
        barriers: for each set, how far the losses between θ and θ − λτ rise above a straight line.
    """

    model: str
    scale: Number
    losses: dict[str, list[Number | None]] = Field(default_factory=dict)
    barriers: dict[str, Number] = Field(default_factory=dict)


class Geometry(Record):
    """Where the models of a run lie.

    Args:
        path: the t of the losses along θ − tλτ.
        samples: the number of samples of each set on which the losses were measured.
        retrained: the losses of the retrained model on them.
        missing: why there are no losses.
    """

    path: list[Number]
    models: list[Placed]
    samples: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    retrained: Losses = Field(default_factory=dict)
    missing: str | None = None


def barrier(path: Sequence[float], losses: Sequence[float | None]) -> float | None:
    """Return how far a loss rises above the straight line between its values at t = 0 and t = 1.

    None if a loss between them, or one of the two, is not known. Without a barrier, the two models
    are linearly connected.

    >>> barrier([0.0, 0.5, 1.0, 2.0], [1.0, 2.5, 2.0, 9.0])
    1.0
    >>> barrier([0.0, 0.5, 1.0], [1.0, 1.2, 2.0])
    0.0
    """
    on_way = [(t, loss) for t, loss in zip(path, losses, strict=True) if 0 <= t <= 1]
    known = {t: loss for t, loss in on_way if loss is not None}
    if len(known) < len(on_way) or not {0.0, 1.0} <= known.keys():
        return None
    start, end = known[0.0], known[1.0]
    return max(loss - ((1 - t) * start + t * end) for t, loss in known.items())
