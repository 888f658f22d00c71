"""A first look at records of text: how many, of which kind, and which columns they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from negmerge.errors import FileError, printable, quoted
from negmerge.text.documents import Row, load_records, read_rows
from negmerge.text.settings import Columns, Records

USUAL = {
    "text": ("text", "content", "document", "story", "body"),
    "prompt": ("prompt", "question", "instruction", "input", "query"),
    "answer": ("answer", "output", "response", "completion", "target"),
}
"""Names that columns have in files of other people, by the name that they have here."""


@dataclass(frozen=True)
class TextSurvey:
    """What a file or folder of records holds.

    Args:
        count: the number of records.
        answers: whether the records are prompts with answers; otherwise they are documents.
        columns: the columns of the texts.
        values: the other columns, by which records are chosen, each with its different values by
            their text.
        longest: the number of characters of the longest record.
    """

    count: int
    answers: bool
    columns: Columns
    values: dict[str, dict[str, Any]]
    longest: int

    def describe(self) -> str:
        """Return one line about the records.

        >>> TextSurvey(8, True, Columns(), {"person": {"Ada": "Ada"}}, 40).describe()
        "8 prompts with answers, at most 40 characters long; other columns: 'person' (1 values)"
        """
        kind = "prompts with answers" if self.answers else "documents"
        parts = [f"{quoted(name)} ({len(some):,} values)" for name, some in self.values.items()]
        return printable(
            f"{self.count:,} {kind}, at most {self.longest:,} characters long; other columns: "
            f"{', '.join(parts) or 'none'}"
        )


def survey_texts(name: str) -> TextSurvey:
    """Look at records, as a run would read them, and find out what their columns are called.

    Args:
        name: a file, a folder or a registered set.
    """
    rows = [row for _, row in read_rows(Records(name=name))]
    if not rows:
        raise FileError(f"{name}: has no records")
    columns = guess_columns(rows)
    records = load_records(Records(name=name, columns=columns))
    answers = records[0].prompt is not None
    others = dict.fromkeys(key for record in records for key in record.values)
    values = {
        key: {
            str(found): found for record in records if (found := record.values.get(key)) is not None
        }
        for key in others
    }
    longest = max(len(record.prompt or "") + len(record.answer) for record in records)
    return TextSurvey(len(records), answers, columns, values, longest)


def guess_columns(rows: Sequence[Row]) -> Columns:
    """Return the columns of records by the names that are usual.

    >>> guess_columns([{"question": "2 + 2 =", "answer": "4"}]).prompt
    'question'
    """
    known = {key for row in rows for key in row}
    found = {
        ours: next((name for name in names if name in known), ours) for ours, names in USUAL.items()
    }
    if found["answer"] not in known or found["prompt"] not in known:
        found |= {"prompt": "prompt", "answer": "answer"}
    return Columns(**found)
