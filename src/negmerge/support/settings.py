"""The base class of the sections of a recipe, and the types of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from negmerge.errors import OptionError
from negmerge.support.remote.urls import Place, checked, has_secret, is_url, shown

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


def check_place(value: Any) -> Place:
    """Return a path, or the text of a URL, which a recipe records: it must have no secret.

    >>> check_place("runs/base.safetensors"), check_place("s3://bucket/base.safetensors")
    (PosixPath('runs/base.safetensors'), 's3://bucket/base.safetensors')
    >>> check_place("https://user:secret@host/base.safetensors")
    Traceback (most recent call last):
    ValueError: https://host/base.safetensors: has a user, a password or a query, ...
    """
    if isinstance(value, Path):
        return check_path(value)
    if not isinstance(value, str):
        raise PydanticCustomError("path_type", "Input is not a valid path")
    return _check_url(value) if is_url(value) else check_path(Path(value))


def _check_url(url: str) -> str:
    if has_secret(url):
        raise ValueError(
            f"{shown(url)}: has a user, a password or a query, and recipes are recorded; give the "
            "credentials to the store's own settings"
        )
    try:
        return checked(url)
    except OptionError as error:
        raise ValueError(str(error)) from None


def check_name(name: str) -> str:
    """Return a name, a path or the text of a URL; as `check_place`, but without reading it."""
    return _check_url(name) if is_url(name) else check_path(name)


Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
File = Annotated[
    Place, PlainValidator(check_place), PlainSerializer(str, when_used="json", return_type=str)
]
"""A path, or the text of a URL."""
NameOrPath = Annotated[str, AfterValidator(check_name)]
"""A registered name, a path, or a URL."""


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
