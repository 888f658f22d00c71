"""Reading files from outside: every such file is opened and parsed here.

A file must be a regular file (a pipe would block, a device never ends) of bounded size. Text must
be UTF-8 without NUL. JSON and YAML are parsed strictly: no duplicate keys, no NaN, no deep nesting,
no aliases that expand to a huge document. Everything else raises `FileError`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, quoted
from negmerge.support.remote.urls import is_url
from negmerge.support.systems import BINARY, NO_WAIT

MAX_JSON = 64 << 20
"""The largest size of a JSON file of a run or a model, in bytes."""
MAX_TABLE = 64 << 20
"""The largest size of a CSV file, in bytes."""
MAX_LIST = 256 << 20
"""The largest size of a list of records, in bytes: ten million ids of 25 characters."""
MAX_YAML = 256 << 10
"""The largest size of YAML, in bytes, which is parsed in a few seconds."""
MAX_EXPANDED = 1_000_000
"""The largest number of characters of YAML after every alias is replaced by its value."""
MAX_DEPTH = 64
MAX_TEXT = 4096
"""The largest number of characters of one string in YAML: the longest path of Linux."""
MAX_NUMBER = 10**40


# -------------------------------------------------------------------------------------------- files


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return the descriptor; never blocks on a pipe.

    The file of a URL is fetched.
    """
    if is_url(path):
        from negmerge.support.remote.scratch import local  # it imports this module

        path = local(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_WAIT | BINARY)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except OSError as error:
        raise FileError(f"{path}: cannot open: {error.strerror}") from error
    except ValueError as error:  # NUL, or a surrogate
        raise FileError(f"{quoted(path)}: cannot be the name of a file: {error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path}: not a regular file")
    return descriptor


def is_file(path: Path) -> bool:
    """Whether a path is a regular file; False for invalid paths.

    >>> is_file(Path("x" * 5000))
    False
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            raw = file.read(limit + 1)
        except OSError as error:
            raise FileError(f"{path}: cannot read: {error.strerror}") from error
    if len(raw) > limit:
        raise FileError(f"{path}: larger than {limit} bytes, the limit for this kind of file")
    return raw


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """The text of a regular file of at most `limit` bytes: UTF-8, without NUL."""
    try:
        text = read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise FileError(f"{path}: not text: contains a NUL character")
    return text


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a file, without blank lines and comments."""
    lines = [line.strip() for line in read_text(path, MAX_LIST).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def read_csv(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV file: the first line names the columns, and every row has all columns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "s.csv").write_text("scale,mia\\n0.5,12\\n")
    ...     read_csv(f"{folder}/s.csv")
    [{'scale': '0.5', 'mia': '12'}]
    """
    rows = csv.reader(io.StringIO(read_text(path, MAX_TABLE), newline=""), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise FileError(f"{path}: two columns have the same name")
        found = [dict(zip(names, row, strict=True)) for row in rows]
    except (csv.Error, ValueError) as error:
        raise FileError(f"{path}: line {rows.line_num} is not a row: {error}") from None
    if not found:
        raise FileError(f"{path}: has no rows")
    return found


# --------------------------------------------------------------------------------------------- JSON


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file."""
    return _object(read_json_value(path, limit), path, "content")


def read_json_value(
    path: str | os.PathLike[str], limit: int = MAX_JSON, *, infinite: bool = False
) -> Any:
    """The value in a JSON file, whose strings can be written as UTF-8."""
    found = parse_json_value(read_bytes(path, limit), path, "content", infinite=infinite)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FileError(f"{path}: content has a surrogate, which is not valid UTF-8") from None
    return found


def parse_json(raw: bytes | str, where: object, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly; errors name the file and the part of it.

    >>> parse_json('{"a": 1, "a": 2}', "x.json", "content")
    Traceback (most recent call last):
    negmerge.errors.FileError: x.json: duplicate key 'a' in the content; keep one of them
    """
    return _object(parse_json_value(raw, where, what), where, what)


def _object(found: Any, where: object, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FileError(f"{where}: {what} is a {type(found).__name__}, wanted an object")
    return found


def parse_json_value(raw: bytes | str, where: object, what: str, *, infinite: bool = False) -> Any:
    """Parse any JSON value strictly: UTF-8, no duplicate keys, no NaN, at most `MAX_DEPTH` levels.

    With `infinite`, Infinity and NaN are accepted, which Python's json module writes.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            raise FileError(
                f"{where}: duplicate key {quoted(twice)} in the {what}; keep one of them"
            )
        return found

    def constant(word: str) -> float:
        if not infinite:
            raise FileError(f"{where}: {word} is not JSON")
        return float(word)

    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: {what} is not valid JSON ({str(error)[:80]})") from error
    _check_plain(found, f"{where}: {what} is not valid JSON", infinite)
    return found


# --------------------------------------------------------------------------------------------- YAML


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML strictly: plain values, no duplicate keys, bounded aliases.

    >>> parse_yaml("{seed: 1, data: {name: mnist}}", "recipe")
    {'seed': 1, 'data': {'name': 'mnist'}}
    >>> parse_yaml("{a: &a {lr: 1}, b: {<<: *a, batch: 2}}", "recipe")["b"]
    {'lr': 1, 'batch': 2}
    """
    import yaml

    if len(text) > MAX_YAML:
        raise FileError(f"{where}: {len(text):,} characters of YAML, wanted at most {MAX_YAML:,}")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _expanded_size(root, where, loader, {})
        found = loader.construct_document(root)
    except FileError:
        raise
    except Exception as error:  # a tag on a value of another type: KeyError, IndexError, …
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileError(f"{where}: not YAML: {why}") from None
    _check_plain(found, f"{where}: not a plain value", infinite=True)
    return found


def _expanded_size(node: Any, where: str, loader: Any, known: dict[int, int | None]) -> int:
    """The characters of a node after its aliases are replaced; raises for duplicate keys."""
    import yaml

    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise FileError(f"{where}: an alias is inside its own value; write the value instead")
        return size
    known[id(node)] = None
    size = 1
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            size += _expanded_size(key, where, loader, known) + _expanded_size(
                value, where, loader, known
            )
            merges = key.tag == "tag:yaml.org,2002:merge"  # `<<`, which includes another mapping
            name = key.value if merges else loader.construct_object(key, deep=True)
            if name in seen:
                raise FileError(
                    f"{where}: line {key.start_mark.line + 1}: duplicate key {quoted(name)}; keep "
                    "one of them"
                )
            seen.add(name)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_expanded_size(child, where, loader, known) for child in node.value)
    else:
        _check_text(node, where)
        size += len(node.value)
    if size > MAX_EXPANDED:
        raise FileError(
            f"{where}: line {node.start_mark.line + 1}: more than {MAX_EXPANDED:,} characters "
            "after its aliases are replaced; write less"
        )
    known[id(node)] = size
    return size


def _check_text(node: Any, where: str) -> None:
    """Raise for strings that are too long, or are not valid UTF-8 text."""
    surrogates = any("\ud800" <= c <= "\udfff" for c in node.value)
    if len(node.value) > MAX_TEXT or "\0" in node.value or surrogates:
        raise FileError(
            f"{where}: line {node.start_mark.line + 1}: {quoted(node.value, 40)}: wanted at most "
            f"{MAX_TEXT} characters, without NUL and surrogates"
        )


# -------------------------------------------------------------------------------------------- both


def _check_plain(tree: Any, where: str, infinite: bool) -> None:
    """Raise for other types than those of JSON, deep nesting, and huge numbers."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int):
                if abs(value) > MAX_NUMBER:
                    raise FileError(f"{where}: a number of more than 40 digits")
            elif isinstance(value, float):
                if not (infinite or isfinite(value)):  # such as 1e999
                    raise FileError(f"{where}: a number too large for float64")
            elif not isinstance(value, str | None):
                raise FileError(f"{where}: a {type(value).__name__}; put it in quotes")
        if not below:
            return
        level = below
    raise FileError(f"{where}: nested more than {MAX_DEPTH} levels deep")
