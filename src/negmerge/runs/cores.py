"""The cores that steps share, and how many threads each of them gets."""

from __future__ import annotations

from dataclasses import dataclass

from negmerge.support.parallel import MAX_WORKERS


@dataclass(frozen=True)
class Cores:
    """The cores that the steps of a stage share.

    The number of threads of a step follows from these numbers and the size of the stage, and not
    from how many steps happen to run: the last bits of a training depend on it.

    >>> Cores(cores=8, workers=4).threads(30), Cores(cores=8, workers=4).threads(1)
    (2, 8)
    >>> Cores(cores=8, workers=4, fixed=3).threads(30)
    3

    Args:
        cores: the number of cores.
        workers: the largest number of steps at a time.
        fixed: the number of threads that the recipe asks for, if any.
    """

    cores: int
    workers: int
    fixed: int | None = None

    def threads(self, stage_size: int) -> int:
        """Return the number of threads of each step of a stage."""
        shared = self.cores // min(self.workers, max(stage_size, 1))
        return self.fixed or min(max(shared, 1), MAX_WORKERS)
