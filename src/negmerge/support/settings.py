"""The base class of the sections of a recipe, and the types of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

T = TypeVar("T")


class Strict(BaseModel):
    """Immutable settings that refuse unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


def check_path(value: T) -> T:
    """Raise for values that cannot be a path, such as a name of 5,000 characters.

    >>> check_path("x" * 5000)
    Traceback (most recent call last):
    ValueError: cannot be a path: File name too long
    """
    try:
        Path(str(value)).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot be a path: {why}") from None
    return value


Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
File = Annotated[Path, AfterValidator(check_path)]
NameOrPath = Annotated[str, AfterValidator(check_path)]
"""A registered name, or a path."""


def set_dotted(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings; missing mappings are created.

    >>> tree = {"a": {"b": 1}}
    >>> set_dotted(tree, "a.c", 2); tree
    {'a': {'b': 1, 'c': 2}}
    """
    *path, last = key.split(".")
    for part in path:
        below = tree.get(part)
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    tree[last] = value
