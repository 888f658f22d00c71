"""Dividing records into the sets of a run: forget, retain, holdout and general texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from negmerge.errors import OptionError, quoted
from negmerge.text.documents import Record, fingerprint, load_records
from negmerge.text.settings import Part, TextData, TextSplit
from negmerge.training.seeds import seed_of


@dataclass(frozen=True)
class TextSets:
    """The records of each set.

    Args:
        holdout: records that no model has seen; empty if there are none.
        general: general texts to measure.
        general_train: general texts that originals are trained on beside the records.
    """

    forget: list[Record]
    retain: list[Record]
    holdout: list[Record]
    general: list[Record]
    general_train: list[Record]

    @property
    def fingerprint(self) -> str:
        """A hash of all sets."""
        parts = (self.forget, self.retain, self.holdout, self.general, self.general_train)
        return "-".join(fingerprint(part)[:12] for part in parts)


def make_sets(data: TextData, split: TextSplit, seed: int) -> TextSets:
    """Read and divide the records of a run; raise if the sets overlap.

    Args:
        seed: the seed of the division, and of generated sets.
    """
    holdout = [] if data.holdout is None else load_records(data.holdout, seed)
    if data.records is not None:
        records = load_records(data.records, seed)
        if split.holdout is not None and holdout:
            raise OptionError("split.holdout: data.holdout is given, too; remove one of them")
        if split.holdout is None:
            forget, retain = divide(records, split.forget, "split.forget", seed)
        elif split.forget.column is None:
            holdout, records = divide(records, split.holdout, "split.holdout", seed)
            forget, retain = divide(records, split.forget, "split.forget", seed)
        else:  # named records to forget must not be drawn for the holdout set
            forget, records = divide(records, split.forget, "split.forget", seed)
            holdout, retain = divide(records, split.holdout, "split.holdout", seed)
    else:
        forget, retain = (load_records(own, seed) for own in (data.forget, data.retain) if own)
    general = [] if data.general is None else load_records(data.general, seed)
    # At least one text is measured, if there are any.
    cut = min(round(len(general) * (split.general or 0)), max(len(general) - 1, 0))
    order = np.random.default_rng(seed_of("general", seed)).permutation(len(general))
    parts = [[general[i] for i in sorted(own)] for own in (order[:cut], order[cut:])]
    named = {"forget": forget, "retain": retain, "holdout": holdout, "general": general}
    for one, other in combinations(named, 2):
        _check_apart(one, named[one], other, named[other])
    return TextSets(forget, retain, holdout, parts[1], parts[0])


def divide(
    records: Sequence[Record], part: Part, where: str, seed: int
) -> tuple[list[Record], list[Record]]:
    """Return the records of a part, and the others, both in their order.

    >>> records = [Record(None, text, values={"author": text[0]}) for text in ("ab", "ac", "bc")]
    >>> own, others = divide(records, Part(column="author", values=["b"]), "split.forget", 0)
    >>> [record.answer for record in own]
    ['bc']

    Args:
        where: the field, for errors.
    """
    if part.column is not None:
        wanted = {str(value) for value in part.values or ()}
        found = [_value(record, part.column, where) for record in records]
        missing = wanted - {*found}
        if missing:
            known = ", ".join(sorted({*found})[:5])
            raise OptionError(
                f"{where}: no record has {part.column} = {quoted(min(missing))}; there are {known}"
            )
        chosen = {i for i, value in enumerate(found) if value in wanted}
    else:
        chosen = _drawn(records, part, where, seed)
    own = [record for i, record in enumerate(records) if i in chosen]
    others = [record for i, record in enumerate(records) if i not in chosen]
    if not own or not others:
        raise OptionError(
            f"{where}: takes {len(own)} of {len(records)} records; wanted some, but not all"
        )
    return own, others


def _drawn(records: Sequence[Record], part: Part, where: str, seed: int) -> set[int]:
    rng = np.random.default_rng(seed_of(where, seed))
    if part.by is None:
        count = max(1, round((part.fraction or 0) * len(records)))
        return {int(i) for i in rng.permutation(len(records))[:count]}
    found = [_value(record, part.by, where) for record in records]
    groups = sorted({*found})
    count = max(1, round((part.fraction or 0) * len(groups)))
    drawn = {groups[i] for i in rng.permutation(len(groups))[:count]}
    return {i for i, value in enumerate(found) if value in drawn}


def _value(record: Record, column: str, where: str) -> str:
    if column not in record.values:
        known = ", ".join(record.values) or "none beside prompt, answer, text and wrong"
        raise OptionError(f"{where}: records have no column {quoted(column)}; they have {known}")
    return str(record.values[column])


def _check_apart(name: str, own: list[Record], other: str, others: list[Record]) -> None:
    """Raise if two sets share a record: what is measured would mean nothing."""
    contents = {(record.prompt, record.answer) for record in own}
    shared = sum((record.prompt, record.answer) in contents for record in others)
    if shared:
        raise OptionError(
            f"data: {shared} records are both in the {name} set and in the {other} set; remove "
            "them from one of them"
        )
