"""Reading records: from files, folders, the Hub, or by registered name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, OptionError, one_line, quoted
from negmerge.registry import nearest
from negmerge.support.reading import parse_json, read_text
from negmerge.text.library import texts
from negmerge.text.settings import Columns, Records

MAX_TEXTS = 4 << 30
"""The largest size of a file of records, in bytes."""
FOLDER_FILES = (".jsonl", ".parquet", ".txt")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A document, or a prompt with its answer.

    Args:
        prompt: the beginning, which the model is given; None for a document.
        answer: what follows; the whole text of a document.
        wrong: wrong answers of the same kind.
        values: the other columns, by which records are chosen.
    """

    prompt: str | None
    answer: str
    wrong: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def content(self) -> str:
        """A text that is equal for equal records."""
        return json.dumps([self.prompt, self.answer, self.wrong])


def fingerprint(records: Sequence[Record]) -> str:
    """Return a hash of records and their order."""
    found = hashlib.blake2b(digest_size=16)
    for record in records:
        found.update(record.content.encode() + b"\n")
    return found.hexdigest()


def load_records(source: Records, seed: int = 0) -> list[Record]:
    """Read records.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\\n')
    ...     load_records(Records(name=f"{folder}/a.jsonl"))
    [Record(prompt='2 + 2 =', answer='4', wrong=(), values={})]

    Args:
        seed: the seed of a generated set.
    """
    rows = list(read_rows(source, seed))
    records = [_record(place, row, source.columns) for place, row in rows[: source.limit]]
    if not records:
        raise FileError(f"{source.name}: has no records")
    return records


def read_rows(source: Records, seed: int = 0) -> Iterator[tuple[str, Row]]:
    """Yield the place of each record, for errors, and its columns."""
    path = Path(source.name)
    if source.name in texts and not path.exists():
        for number, row in enumerate(texts.get(source.name)(seed), 1):
            yield f"{source.name}, record {number}", row
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in FOLDER_FILES and p.is_file())
        if not files:
            raise FileError(f"{path}: has no file of the kinds {', '.join(FOLDER_FILES)}")
        for file in files:
            yield from _rows_of_file(file, source.columns)
    elif path.exists() or path.suffix in FOLDER_FILES:
        yield from _rows_of_file(path, source.columns)
    else:
        yield from _rows_of_hub(source)


def _rows_of_file(path: Path, columns: Columns) -> Iterator[tuple[str, Row]]:
    if path.suffix == ".jsonl":
        # Only a line feed ends a line: JSON may contain other separators, such as U+2028.
        for number, line in enumerate(read_text(path, MAX_TEXTS).split("\n"), 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, parse_json(line.encode(), place, "record")
    elif path.suffix == ".parquet":
        for number, row in enumerate(_parquet(path), 1):
            yield f"{path}, row {number}", row
    elif path.suffix == ".txt":
        yield str(path), {columns.text: read_text(path, MAX_TEXTS)}
    else:
        raise FileError(
            f"{path}: is no file of records; wanted one of {', '.join(FOLDER_FILES)}, or a folder"
        )


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: not UTF-8
        raise FileError(f"{path}: cannot be read as parquet: {one_line(error)}") from None


def _rows_of_hub(source: Records) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        found: Any = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision
        )
    except Exception as error:  # the libraries of the Hub raise errors of many kinds
        known, near = ", ".join(texts), nearest(source.name, texts).removeprefix(";")
        raise OptionError(
            f"{quoted(source.name)}: no such file or folder, no registered set ({known}{near}), "
            f"and the Hub does not give it: {one_line(error)}"
        ) from None
    for number, row in enumerate(found, 1):
        yield f"{source.name}, record {number}", row


def _record(place: str, row: Row, columns: Columns) -> Record:
    own = {columns.text, columns.prompt, columns.answer, columns.wrong}
    values = {name: value for name, value in row.items() if name not in own}
    if row.get(columns.answer) is None:
        if columns.answer in row and row.get(columns.text) is None:
            raise FileError(f"{place}: {quoted(columns.answer)} is empty; remove the record")
        text = _text(place, row, columns.text, f" or {quoted(columns.answer)}")
        return Record(None, text, (), values)
    prompt = _text(place, row, columns.prompt)
    answer = _text(place, row, columns.answer)
    wrong = row.get(columns.wrong)
    given: list[Any] = [] if wrong is None else wrong if isinstance(wrong, list) else [wrong]
    for text in given:
        if not isinstance(text, str) or not text.strip():
            raise FileError(f"{place}: {quoted(columns.wrong)} has {quoted(text)}; wanted texts")
        _check_characters(place, text, columns.wrong)
        if text.strip() == answer.strip():
            raise FileError(f"{place}: the right answer {quoted(text)} is among the wrong ones")
    return Record(prompt, answer, tuple(given), values)


def _text(place: str, row: Row, column: str, other: str = "") -> str:
    value = row.get(column)
    if value is None:
        known = ", ".join(map(quoted, row))
        raise FileError(
            f"{place}: has no column {quoted(column)}{other}; it has {known}; name the columns in "
            "data, such as records: {name: FILE, columns: {prompt: NAME, answer: NAME}}"
        )
    if not isinstance(value, str):
        raise FileError(f"{place}: {quoted(column)} is a {type(value).__name__}; wanted a text")
    if not value.strip():
        raise FileError(f"{place}: {quoted(column)} is empty; remove the record")
    _check_characters(place, value, column)
    return value


def _check_characters(place: str, text: str, column: str) -> None:
    """Raise for a surrogate or a NUL, which JSON can write and tokenizers cannot read."""
    try:
        kind = "NUL character" if b"\0" in text.encode() else ""
    except UnicodeEncodeError:
        kind = "surrogate, which is no character"
    if kind:
        raise FileError(f"{place}: {quoted(column)} has a {kind}; remove it")
