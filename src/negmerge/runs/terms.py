"""What all merges of a run have in common, whatever the rule: buffers, tensors and equal norms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from negmerge.merging.inputs import Buffers


@dataclass(frozen=True)
class Terms:
    """The arguments of every merge of a run, as in `nm.merge`.

    >>> Terms("merge").arguments()
    {'buffers': 'merge', 'include': (), 'exclude': (), 'equalise': False}
    """

    buffers: Buffers = "keep"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    equalise: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return asdict(self)

    def content(self) -> object:
        """Return what the key of a step depends on; by default, the key of older versions."""
        patterns = [self.include, self.exclude]
        if self.equalise:
            return [self.buffers, patterns, "equalise"]
        return [self.buffers, patterns] if any(patterns) else self.buffers
