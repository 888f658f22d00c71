"""The message of one line for settings that are not valid, with the nearest name that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from negmerge.errors import quoted
from negmerge.registry import nearest

NO_FIELD = "there is no such field"
MESSAGES = {
    "extra_forbidden": NO_FIELD,
    "model_type": "has fields of its own; wanted a mapping, such as {FIELD: VALUE}",
    "tuple_type": "wanted a list, such as [VALUE, VALUE]",
}
"""Messages that replace those of pydantic, by type of error."""


def first_mistake(
    error: ValidationError, kind: type[BaseModel] | None = None, more: Iterable[str] = ()
) -> str:
    """Return the first error of a tree: the place, the problem, and what was found.

    >>> class Training(BaseModel, extra="forbid"):
    ...     epochs: int = 1
    >>> class Settings(BaseModel, extra="forbid"):
    ...     train: Training = Training()
    >>> try:
    ...     Settings(train={"epoch": 3})
    ... except ValidationError as error:
    ...     first_mistake(error, Settings)
    "train.epoch: there is no such field; did you mean 'epochs'?"

    Args:
        error: what pydantic raised.
        kind: the class that was validated; its fields are suggested for unknown ones.
        more: further fields that the tree may have.
    """
    first = error.errors()[0]
    if first["type"] == "settings":
        return first["msg"]
    loc = first["loc"]
    place = ".".join(str(part) for part in loc) or "the recipe"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == "extra_forbidden":
        known = [*(fields_at(kind, loc[:-1]) if kind else []), *(more if len(loc) == 1 else [])]
        return f"{place}: {message}{suggestion(str(loc[-1]), known)}{others}"
    got = first.get("input")
    value = "" if isinstance(got, dict | list | tuple | BaseModel) else f", got {quoted(got)}"
    if first["type"] == "literal_error":
        value += nearest(str(got), re.findall(r"'([^']+)'", first.get("ctx", {})["expected"]))
    return f"{place}: {message}{value}{others}"


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return what to write instead of an unknown name: the nearest one, or all that there are.

    >>> suggestion("epoch", ["epochs", "lr"]), suggestion("speed", ["epochs", "lr"])
    ("; did you mean 'epochs'?", '; there are: epochs, lr')
    """
    listed = f"; there are: {', '.join(known)}" if known else ""
    return nearest(name, known) or listed


def fields_at(kind: type[BaseModel], place: Sequence[object]) -> list[str]:
    """Return the fields of the section at a place of a tree; none if it is not known.

    Args:
        kind: the class of the whole tree.
        place: the fields that lead there; positions in lists are left out.
    """
    for part in (part for part in place if isinstance(part, str)):
        found = (f for name, f in kind.model_fields.items() if part in (name, f.alias))
        inner = next((section for f in found for section in sections(f.annotation)), None)
        if inner is None:
            return []
        kind = inner
    return [field.alias or name for name, field in kind.model_fields.items()]


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes with fields of their own that a type contains.

    >>> class Part(BaseModel):
    ...     count: int
    >>> [*sections(tuple[Part, ...] | None)] == [Part]
    True
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections(inner)
