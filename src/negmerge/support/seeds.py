"""Seeds as the command line and functions take them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from negmerge.errors import OptionError, quoted

MOST_SEEDS = 10_000


def parse_seeds(words: Sequence[str]) -> list[int]:
    """Parse seeds: numbers, ranges and lists of them.

    >>> parse_seeds(["0-3", "7,9"]), parse_seeds(["0", "1", "2"])
    ([0, 1, 2, 3, 7, 9], [0, 1, 2])
    """
    found: list[int] = []
    for part in (part.strip() for word in words for part in word.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < MOST_SEEDS:
            raise OptionError(
                f"--seeds {quoted(part, 40)}: wanted whole numbers or ranges, such as 0-11 or "
                f"0,3,5; at most {MOST_SEEDS:,} of them"
            )
        found += range(first, last + 1)
    return check_seeds(found)


def check_seeds(seeds: Sequence[int]) -> list[int]:
    """Return the seeds; raise unless there is one at least, and all are different."""
    if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
        got = " ".join(map(str, seeds[:20])) or "none"
        raise OptionError(f"--seeds: got {got}, wanted different whole numbers from 0")
    return list(seeds)
