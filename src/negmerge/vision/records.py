"""Lists of records to forget: positions in the training set, or ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, OptionError, quoted
from negmerge.support.reading import read_lines
from negmerge.support.remote.urls import Place

if TYPE_CHECKING:
    from negmerge.vision.datasets import Images
    from negmerge.vision.settings import Forget

MAX_COMPARED = 20_000
"""How many ids are compared with a misspelt one; a million would take a minute."""

MAX_CANDIDATES = 3
"""How many records an error names for an ambiguous file name."""


def listed_positions(train: Images, test: Images, forget: Forget) -> NDArray[np.int64] | None:
    """Return the sorted positions of the listed records; None if there is no list.

    An id that several records have means all of them. The end of an id that is a path, such as
    `7.png` for `train/cat/7.png`, is enough if only one record has it.

    Args:
        test: searched for unknown ids, for the error message.
    """
    path = forget.indices or forget.ids
    if path is None:
        return None
    lines = read_lines(path)
    if not lines:
        raise FileError(f"{path}: lists no records; wanted one per line")
    if forget.indices is not None:
        found = _numbers(lines, path, len(train))
    else:
        found = _find_ids(lines, path, train, test)
    seen: set[int] = set()
    repeated: list[str] = []
    for line, positions in zip(lines, found, strict=True):
        if positions[0] in seen:
            repeated.append(line)
        seen.update(positions)
    if repeated:
        raise OptionError(
            f"{path}: {len(repeated)} of {len(lines)} records are listed twice, the first is "
            f"{quoted(repeated[0], 80)}; list each once"
        )
    return np.array(sorted(seen), np.int64)


def _numbers(lines: Sequence[str], path: Place, size: int) -> list[list[int]]:
    for number, line in enumerate(lines, 1):
        # int() refuses thousands of digits.
        if not (line.isascii() and line.isdigit() and len(line) < 19 and int(line) < size):
            raise OptionError(
                f"{path}: record {number} is {quoted(line, 40)}, wanted a position from 0 to "
                f"{size - 1}"
            )
    return [[int(line)] for line in lines]


def _find_ids(lines: Sequence[str], path: Place, train: Images, test: Images) -> list[list[int]]:
    if train.ids is None:
        raise OptionError(
            f"{path}: this data set has no ids; set data.id to its column of ids, or list "
            "positions in the training set with split.forget.indices"
        )
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(train.ids):
        positions.setdefault(str(name), []).append(position)
    partial = [line for line in lines if line not in positions]
    matches = _match_ends(positions, set(partial)) if partial else {}
    unknown = [line for line in partial if line not in matches]
    if unknown:
        raise OptionError(f"{path}: {_explain(lines, unknown, positions, train.ids, test.ids)}")
    ambiguous = [line for line in partial if len(matches[line]) > 1]
    if ambiguous:
        names = [quoted(name, 80) for name in matches[ambiguous[0]]]
        more = f" or {len(names) - MAX_CANDIDATES} more" if len(names) > MAX_CANDIDATES else ""
        raise OptionError(
            f"{path}: {len(ambiguous)} of {len(lines)} names fit several records, "
            f"{quoted(ambiguous[0], 80)} may be {' or '.join(names[:MAX_CANDIDATES])}{more}; "
            "write the whole id"
        )
    return [positions[line if line in positions else matches[line][0]] for line in lines]


def _match_ends(ids: Iterable[str], wanted: set[str]) -> dict[str, list[str]]:
    """Return the ids that are paths and end in one of the wanted paths, by that path."""
    found: dict[str, list[str]] = {}
    for name in ids:
        end = name
        while "/" in end:
            end = end.partition("/")[2]
            if end in wanted:
                found.setdefault(end, []).append(name)
    return found


def _explain(
    lines: Sequence[str],
    unknown: Sequence[str],
    positions: dict[str, list[int]],
    ids: NDArray[Any],
    test_ids: NDArray[Any] | None,
) -> str:
    """Say which ids are unknown, show ids of the data set, and guess the mistake."""
    first = quoted(unknown[0], 80)
    text = f"{len(unknown)} of {len(lines)} ids are not in the training set, the first is {first}"
    if test_ids is not None and unknown[0] in set(map(str, test_ids)):
        text += ", which is in the test set"
    elif near := _nearest(unknown[0], list(positions)):
        text += f", did you mean {quoted(near, 80)}?"
    examples = dict.fromkeys(quoted(name, 80) for name in (ids[0], ids[-1]))
    text += f"; ids of this data set look like {' and '.join(examples)}"
    fields = {line: [f.strip().strip('"') for f in re.split("[,;\t]", line)] for line in unknown}
    words = {field for parts in fields.values() for field in parts}
    known = words & positions.keys() | _match_ends(positions, words).keys()
    for line, parts in fields.items():
        if not known.isdisjoint(parts):
            if len(parts) > 1:
                return (
                    f"{text}; {quoted(line, 80)} has several columns; list only ids, one per line"
                )
            return f"{text}; {quoted(line, 80)} is in quotes; remove them"
    if list(unknown) == [lines[0]] and len(lines) > 1:
        text += f"; {first} looks like the name of a column; remove the first line"
    return text


def _nearest(line: str, ids: list[str]) -> str | None:
    """Return the id of a file with the same stem, or the id with the most similar spelling."""
    stem = PurePosixPath(line).stem.casefold()
    same = [name for name in ids if PurePosixPath(name).stem.casefold() == stem]
    near = same or get_close_matches(line, ids[:MAX_COMPARED], n=1)
    return near[0] if near else None
