"""The records that a list names: by their position in the training set, or by their id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError, shown

if TYPE_CHECKING:
    from negmerge.data.datasets import Images

COMPARED = 20_000
"""So many ids are compared with a misspelt one: ImageNet's million would take a minute."""

CANDIDATES = 3
"""So many records are named for a file name that several have."""


def positions_from(lines: Sequence[str], path: Path, size: int) -> NDArray[np.int64]:
    """Positions written as numbers, each once, in rising order.

    >>> positions_from(["7", "3"], Path("forget.txt"), 10)
    array([3, 7])

    Args:
        lines: the list, without blanks and comments.
        path: what to call it in errors.
        size: of the training set.
    """
    for number, line in enumerate(lines, 1):
        # Python refuses to read numbers of thousands of digits.
        if not (line.isascii() and line.isdigit() and len(line) < 19 and int(line) < size):
            raise OptionError(
                f"{path}: record {number} is {shown(line, 40)}, wanted a position from 0 to "
                f"{size - 1}"
            )
    return _once([[int(line)] for line in lines], lines, path)


def positions_of(
    lines: Sequence[str], path: Path, train: Images, test: Images
) -> NDArray[np.int64]:
    """The positions of records named by id, each once, in rising order.

    An id that several records have means all of them. The end of an id that is a path, such as
    `7.png` for `train/cat/7.png`, serves if one record has it.

    Args:
        lines: the list, without blanks and comments.
        path: what to call it in errors.
        train: where the records are.
        test: where they might be by mistake.
    """
    if train.ids is None:
        raise OptionError(
            f"{path}: this data set has no ids; set data.id to its column of ids, or list "
            "positions in the training set with split.forget.indices"
        )
    where = _places(train.ids)
    unknown = [line for line in lines if line not in where]
    ends = _ends(where, set(unknown)) if unknown else {}
    lost = [line for line in unknown if line not in ends]
    if lost:
        raise OptionError(f"{path}: {_lost(lines, lost, where, train.ids, test.ids)}")
    several = [line for line in unknown if len(ends[line]) > 1]
    if several:
        names = [shown(name, 80) for name in ends[several[0]]]
        more = f" or {len(names) - CANDIDATES} more" if len(names) > CANDIDATES else ""
        raise OptionError(
            f"{path}: {len(several)} of {len(lines)} names are not of one record, "
            f"{shown(several[0], 80)} may be {' or '.join(names[:CANDIDATES])}{more}; "
            "write the whole id"
        )
    found = [where[line] if line in where else where[ends[line][0]] for line in lines]
    return _once(found, lines, path)


def _places(ids: Iterable[Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, name in enumerate(ids):
        found.setdefault(str(name), []).append(place)
    return found


def _ends(ids: Iterable[str], wanted: set[str]) -> dict[str, list[str]]:
    """The ids that end in a path as one of these."""
    found: dict[str, list[str]] = {}
    for name in ids:
        end = name
        while "/" in end:
            end = end.partition("/")[2]
            if end in wanted:
                found.setdefault(end, []).append(name)
    return found


def _lost(
    lines: Sequence[str],
    lost: Sequence[str],
    where: dict[str, list[int]],
    ids: NDArray[Any],
    tested: NDArray[Any] | None,
) -> str:
    """What is wrong with a list of ids, what ids look like here, and what was probably meant."""
    told = f"{len(lost)} of {len(lines)} ids are not in the training set, the first is "
    told += shown(lost[0], 80)
    if tested is not None and lost[0] in set(map(str, tested)):
        told += ", which is in the test set"
    elif near := _nearest(lost[0], where):
        told += f", did you mean {shown(near, 80)}?"
    told += f"; ids here look like {' and '.join(shown(ids[k], 80) for k in _two(len(ids)))}"
    fields = {line: [f.strip().strip('"') for f in re.split("[,;\t]", line)] for line in lost}
    words = {field for line in lost for field in fields[line]}
    known = words & where.keys() | _ends(where, words).keys()
    for line in (line for line in lost if not known.isdisjoint(fields[line])):
        if len(fields[line]) > 1:
            return (
                f"{told}; {shown(line, 80)} has several columns; keep the ids alone, one per line"
            )
        return f"{told}; {shown(line, 80)} stands in quotes; remove them"
    if list(lost) == [lines[0]] and len(lines) > 1:
        told += f"; {shown(lost[0], 80)} looks like the name of a column; remove the first line"
    return told


def _two(size: int) -> list[int]:
    return [0, size - 1] if size > 1 else [0]


def _nearest(line: str, ids: Iterable[str]) -> str | None:
    """The id that a misspelt one is nearest to: one of the same file's stem, or of like letters."""
    stem = PurePosixPath(line).stem.casefold()
    names = list(ids)
    same = [name for name in names if PurePosixPath(name).stem.casefold() == stem]
    near = same or get_close_matches(line, names[:COMPARED], n=1)
    return near[0] if near else None


def _once(found: Sequence[Sequence[int]], lines: Sequence[str], path: Path) -> NDArray[np.int64]:
    """The positions of all lines together; none may be of two lines."""
    seen: set[int] = set()
    again = [line for line, places in zip(lines, found, strict=True) if _met(places, seen)]
    if again:
        raise OptionError(
            f"{path}: {len(again)} of {len(lines)} records are listed twice, the first is "
            f"{shown(again[0], 80)}; list each once"
        )
    return np.array(sorted(seen), np.int64)


def _met(places: Sequence[int], seen: set[int]) -> bool:
    known = places[0] in seen
    seen.update(places)
    return known
