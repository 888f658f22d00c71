"""The types of the files that a run writes about itself, and the function that reads them.

The types list only the fields that are read again; a file may hold more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from negmerge.errors import FileError, printable
from negmerge.support.reading import read_json_value

T = TypeVar("T")
Number = Annotated[float, Field(allow_inf_nan=False)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Inside = Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$", max_length=4096)]
"""The name of a file of a run, relative to the run directory."""


class Record(BaseModel):
    """A JSON object with required, strictly typed fields; other fields are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class Artefact(Record):
    """A file in the manifest."""

    bytes: int
    sha256: Sha256


class Manifest(Record):
    """`manifest.json`."""

    format: Literal["negmerge-run/1"]
    problem: str
    result: str
    versions: dict[str, str]
    files: dict[Inside, Artefact]


class Unit(Record):
    """An entry of `journal.json`: a finished merge or sweep."""

    id: str
    sha256: str
    seconds: Number
    evaluations: int


class Cost(Record):
    """The cost of a training and the hash of its model; `failure` says why there is no model."""

    id: str
    samples: int
    seconds: Number
    sha256: Sha256 | None = None
    failure: str | None = None


class Begun(Record):
    """`.state/cores.json`: the cores that a run began with."""

    cores: Annotated[int, Field(ge=1)]
    workers: Annotated[int, Field(ge=1)]


class Receipt(Record):
    """The value of a step, as `.state` keeps it until the run is finished."""

    id: str
    seconds: float
    value: Any


@dataclass(frozen=True)
class Done(Generic[T]):
    """The value that a step returned, and the seconds it took."""

    value: T
    seconds: float


def read_record(path: Path, kind: Any, remedy: str, *, infinite: bool = False) -> Any:
    """Read a JSON file as a type; with `infinite`, numbers may be infinite.

    The other arguments are those of `check_record`.
    """
    return check_record(read_json_value(path, infinite=infinite), kind, path, remedy)


def check_record(tree: Any, kind: Any, path: Path | str, remedy: str) -> Any:
    """Return a tree of JSON values as a type.

    >>> check_record({"a": "b"}, dict[str, float], Path("row.json"), "remove it")
    Traceback (most recent call last):
    negmerge.errors.FileError: row.json: is damaged: a: Input should be a valid number; ...

    Args:
        tree: the values.
        kind: a `Record`, or any type that pydantic knows.
        path, remedy: of the error: the damaged file, and what the user can do about it.
    """
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the content"
        problem = printable(f"{place[:200]}: {first['msg'].removeprefix('Value error, ')}")
        raise FileError(f"{path}: is damaged: {problem}; {remedy}") from None
