"""Reading what others wrote: every file and every text from outside is opened and parsed here.

A file must be a regular one (a pipe makes the reader wait, a device never ends) of bounded size.
Text must be UTF-8 without NUL. JSON and YAML are parsed strictly: no key twice, no NaN, no deep
nesting, no aliases that stand for more than anybody writes. What does not fit raises `FileError`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, shown

MAX_JSON = 64 << 20
"""Bytes of a JSON file of a run or a model."""
MAX_TABLE = 64 << 20
"""Bytes of a CSV file."""
MAX_LIST = 256 << 20
"""Bytes of a list of records: ten million ids of 25 characters."""
MAX_YAML = 256 << 10
"""Bytes of YAML: what is parsed in a few seconds."""
MAX_WRITTEN_OUT = 1_000_000
"""Characters of YAML when every alias is replaced by what it stands for."""
MAX_DEPTH = 64
MAX_TEXT = 4096
"""Characters of one text in YAML: the longest path that Linux takes."""
MAX_NUMBER = 10**40


# -------------------------------------------------------------------------------------------- files


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading; gives the descriptor, and never waits as a pipe would.

    >>> os.close(open_regular(__file__))
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except OSError as error:
        raise FileError(f"{path}: cannot open: {error.strerror}") from error
    except ValueError as error:  # NUL, or half a surrogate pair
        raise FileError(f"{shown(path)}: cannot be the name of a file: {error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path}: not a regular file")
    return descriptor


def is_file(path: Path) -> bool:
    """Whether a path is a regular file; no path is too strange to ask.

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
        raise FileError(f"{path}: larger than {limit} bytes")
    return raw


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """The text of a regular file of at most `limit` bytes: UTF-8, without NUL.

    >>> path = getfixture("tmp_path") / "ids.txt"
    >>> _ = path.write_text("a\\nb\\n")
    >>> read_text(path, limit=100)
    'a\\nb\\n'
    """
    try:
        text = read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise FileError(f"{path}: not text: holds a NUL character")
    return text


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a list, without blank lines and comments."""
    lines = [line.strip() for line in read_text(path, MAX_LIST).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def read_csv(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV file: the first line names the columns, and every row has all of them.

    >>> path = getfixture("tmp_path") / "s.csv"
    >>> _ = path.write_text("scale,mia\\n0.5,12\\n")
    >>> read_csv(path)
    [{'scale': '0.5', 'mia': '12'}]
    """
    rows = csv.reader(io.StringIO(read_text(path, MAX_TABLE), newline=""), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise FileError(f"{path}: a column is named twice")
        found = [dict(zip(names, row, strict=True)) for row in rows]
    except (csv.Error, ValueError) as error:
        raise FileError(
            f"{path}: line {rows.line_num} is not a row of the table: {error}"
        ) from None
    if not found:
        raise FileError(f"{path}: has no rows")
    return found


# --------------------------------------------------------------------------------------------- JSON


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file."""
    found = read_json_value(path, limit)
    if not isinstance(found, dict):
        raise FileError(f"{path}: content is a {type(found).__name__}, wanted an object")
    return found


def read_json_value(
    path: str | os.PathLike[str], limit: int = MAX_JSON, *, infinite: bool = False
) -> Any:
    """Any JSON value in a file; all of its texts can be written again."""
    found = parse_json_value(read_bytes(path, limit), path, "content", infinite=infinite)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FileError(f"{path}: content holds half a surrogate pair, which no file can") from None
    return found


def parse_json(raw: bytes | str, where: object, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly.

    >>> parse_json('{"a": 1, "a": 2}', "x.json", "content")
    Traceback (most recent call last):
    negmerge.errors.FileError: x.json: key 'a' stands twice in the content

    where: the file it is from; what: which part of the file, for errors.
    """
    found = parse_json_value(raw, where, what)
    if not isinstance(found, dict):
        raise FileError(f"{where}: {what} is a {type(found).__name__}, wanted an object")
    return found


def parse_json_value(raw: bytes | str, where: object, what: str, *, infinite: bool = False) -> Any:
    """Parse any JSON value strictly: UTF-8, no key twice, no NaN, at most `MAX_DEPTH` levels.

    infinite: whether Infinity and NaN may stand for numbers, as Python's own writer writes them.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))
            raise FileError(f"{where}: key {shown(twice)} stands twice in the {what}")
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
    _check_plain(found, f"{where}: {what} is not valid JSON")
    return found


# --------------------------------------------------------------------------------------------- YAML


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML strictly: plain values, no key twice, aliases that stand for little.

    >>> parse_yaml("{seed: 1, data: {name: mnist}}", "recipe")
    {'seed': 1, 'data': {'name': 'mnist'}}
    >>> parse_yaml("{a: &a {lr: 1}, b: {<<: *a, batch: 2}}", "recipe")["b"]
    {'lr': 1, 'batch': 2}

    where: what the text is, for errors.
    """
    import yaml

    if len(text) > MAX_YAML:
        raise FileError(f"{where}: {len(text):,} characters of YAML, wanted at most {MAX_YAML:,}")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _weigh(root, where, loader, {})
        found = loader.construct_document(root)
    except FileError:
        raise
    except Exception as error:  # a tag on a value that it does not fit: KeyError, IndexError, …
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileError(f"{where}: not YAML: {why}") from None
    _check_plain(found, f"{where}: not a plain value")
    return found


def _weigh(node: Any, where: str, loader: Any, known: dict[int, int | None]) -> int:
    """The characters of a node with its aliases written out; keys that stand twice are refused."""
    import yaml

    if id(node) in known:
        weight = known[id(node)]
        if weight is None:
            raise FileError(f"{where}: an alias stands inside what it names; write it out")
        return weight
    known[id(node)] = None
    weight = 1
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            weight += _weigh(key, where, loader, known) + _weigh(value, where, loader, known)
            merges = key.tag == "tag:yaml.org,2002:merge"  # `<<`, which takes in a mapping
            name = key.value if merges else loader.construct_object(key, deep=True)
            if name in seen:
                raise FileError(
                    f"{where}: line {key.start_mark.line + 1}: key {shown(name)} stands twice; "
                    "keep one of them"
                )
            seen.add(name)
    elif isinstance(node, yaml.SequenceNode):
        weight += sum(_weigh(child, where, loader, known) for child in node.value)
    else:
        _check_text(node, where)
        weight += len(node.value)
    if weight > MAX_WRITTEN_OUT:
        raise FileError(
            f"{where}: line {node.start_mark.line + 1}: stands for more than {MAX_WRITTEN_OUT:,} "
            "characters when its aliases are written out; write less"
        )
    known[id(node)] = weight
    return weight


def _check_text(node: Any, where: str) -> None:
    """Refuse texts that no field of YAML has: endless ones, and ones that no file can hold."""
    halves = any("\ud800" <= c <= "\udfff" for c in node.value)
    if len(node.value) > MAX_TEXT or "\0" in node.value or halves:
        raise FileError(
            f"{where}: line {node.start_mark.line + 1}: {shown(node.value, 40)}: wanted at most "
            f"{MAX_TEXT} characters, without NUL and half surrogate pairs"
        )


# -------------------------------------------------------------------------------------------- both


def _check_plain(tree: Any, told: str) -> None:
    """Refuse what is not plain data: other types, deep nesting, numbers without end.

    told: how an error begins.
    """
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
                    raise FileError(f"{told}: a number of more than 40 digits")
            elif not isinstance(value, str | float | None):
                raise FileError(f"{told}: a {type(value).__name__}; put it in quotes")
        if not below:
            return
        level = below
    raise FileError(f"{told}: nested more than {MAX_DEPTH} levels deep")
