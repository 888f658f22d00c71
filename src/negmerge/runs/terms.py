"""What all merges of a run have in common, whatever the rule: buffers, tensors and equal norms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Policy = Literal["keep", "merge", "recalibrate"]
"""What happens to the statistics of BatchNorm."""


@dataclass(frozen=True)
class Terms:
    """The arguments of every merge of a run, as in `nm.merge`.

    >>> Terms("merge").arguments()
    {'buffers': 'merge', 'include': (), 'exclude': (), 'equalise': False}

    Statistics that are recalibrated are not merged:

    >>> Terms("recalibrate").arguments()["buffers"]
    'keep'
    """

    buffers: Policy = "keep"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    equalise: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        buffers = "keep" if self.buffers == "recalibrate" else self.buffers
        return asdict(self) | {"buffers": buffers}

    @property
    def after_subtraction(self) -> list[str]:
        """What the key of a measurement of θ − λτ depends on beside θ, λ and τ."""
        return ["recalibrate"] if self.buffers == "recalibrate" else []

    def content(self) -> object:
        """Return what the key of a merge depends on; by default, as in older versions."""
        buffers, patterns = self.arguments()["buffers"], [self.include, self.exclude]
        if self.equalise:
            return [buffers, patterns, "equalise"]
        return [buffers, patterns] if any(patterns) else buffers
