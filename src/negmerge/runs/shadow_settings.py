"""The section `shadows` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from negmerge.support.settings import Strict


class ShadowSettings(Strict):
    """The shadow models of `evidence: full`; each shadow trains, unlearns and retrains once."""

    count: Annotated[int, Field(ge=12, le=3000, multiple_of=3)] = 24
    """The number of shadows, a multiple of 3; below 64 the variances of both sides are pooled."""
    members: Annotated[int, Field(ge=2)] = 4
    """The number of pool members of a shadow; all of the pool if it has fewer."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the forget set whose records are targets; the others are kept."""
