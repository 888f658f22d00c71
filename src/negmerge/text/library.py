"""Sets of texts by name: generated, or shipped with the package. ◄ ADD A SET OF TEXTS here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from negmerge.registry import Registry
from negmerge.support.reading import parse_json, read_text
from negmerge.text.persons import invented_persons

STORIES = Path(str(files("negmerge") / "assets" / "stories15m"))
"""The folder of the language model of the package, and of its stories."""
PERSONS = 36
"""The number of persons of the set `persons`."""
Rows = list[dict[str, Any]]

texts: Registry[Any] = Registry("text", "negmerge.text.library")
"""Functions of a seed that return the rows of a set."""


def persons(seed: int) -> Rows:
    """Facts about invented persons, six for each of them.

    >>> len(persons(0))
    216
    """
    return [dict(record) for record in invented_persons(PERSONS, seed)]


def stories(seed: int) -> Rows:
    """Short stories that the model `stories15m` tells: the language that it knows.

    >>> len(stories(0)) > 200
    True
    """
    path = STORIES / "stories.jsonl"
    lines = read_text(path, 1 << 20).splitlines()
    return [parse_json(line.encode(), path, "record") for line in lines]


texts.register("persons", persons)
texts.register("stories", stories)
