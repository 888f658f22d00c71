"""The shape of what a run writes about itself; a file of a run is checked against it when read.

Only what is read again is listed: a file may hold more, and is handed on as it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from negmerge.errors import FileError, printable
from negmerge.reading import read_json_value

Number = Annotated[float, Field(allow_inf_nan=False)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Inside = Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$", max_length=4096)]
"""The name of a file inside a run."""
FORMAT = "negmerge-run/1"


class Record(BaseModel):
    """Fields that must be there, of these types; others may be there too."""

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
    """A finished merge or sweep in `journal.json`."""

    id: str
    sha256: str
    seconds: Number
    evaluations: int


class Cost(Record):
    """What a training cost, beside its model."""

    id: str
    samples: int
    seconds: Number


class Measured(Record):
    """The scores of one model."""

    acc_retain: Number | None
    acc_forget: Number | None
    acc_test: Number | None
    mia: Number | None
    intervals: dict[str, Pair]
    samples: dict[str, int]

    @model_validator(mode="after")
    def _bounded(self) -> Measured:
        for metric in ("acc_retain", "acc_forget", "acc_test", "mia"):
            if getattr(self, metric) is not None and metric not in self.intervals:
                raise ValueError(f"no interval of {metric}")
        return self


class Scored(Measured):
    """The scores of one model, and the seconds it took."""

    seconds: Number


class Tried(Record):
    """One try of a tuned rival."""

    options: dict[str, Number]


class MethodRow(Scored):
    """The scores of a method, and what it took."""

    method: str
    splits: str
    scale: Number | None
    sparsity: Number | None
    avg_gap: Number | None
    cost_ratio: Number | None
    samples_processed: int
    evaluations: int
    criterion: str | None
    looked: bool
    edge: bool
    settings: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    tried: list[Tried] | None = None

    @model_validator(mode="after")
    def _tries(self) -> MethodRow:
        values = self.settings | self.options
        for name in self.tried[0].options if self.tried else ():
            if not isinstance(values.get(name), int | float):
                raise ValueError(f"{name} was tried, and neither settings nor options has it")
        return self


class SplitSizes(Record):
    """What the data was cut into."""

    data: str
    sizes: dict[str, int]
    chosen_on: dict[str, int] | str


class Scores(Record):
    """`scores.json`."""

    title: str
    seed: int
    original: Scored
    retrain: Scored | None
    methods: Annotated[list[MethodRow], Field(min_length=1)]
    splits: SplitSizes
    pool: list[dict[str, Any]]
    warnings: list[str]

    @model_validator(mode="after")
    def _chosen(self) -> Scores:
        if isinstance(self.splits.chosen_on, str) and not all(
            method.looked for method in self.methods if method.criterion is not None
        ):
            raise ValueError("splits.chosen_on: wanted the number of samples of each set")
        return self


def read_record(path: Path, kind: Any, remedy: str, *, infinite: bool = False) -> Any:
    """The JSON of a file, exactly as it stands, if it has the shape of a kind.

    >>> path = getfixture("tmp_path") / "row.json"
    >>> _ = path.write_text('{"a": "b"}')
    >>> read_record(path, dict[str, float], "remove it")
    Traceback (most recent call last):
    negmerge.errors.FileError: .../row.json: is damaged: a: Input should be a valid number; ...

    kind: a `Record`, or any type that pydantic knows. remedy: what to do about a damaged file.
    infinite: whether numbers may be infinite.
    """
    tree = read_json_value(path, infinite=infinite)
    try:
        TypeAdapter(kind).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the content"
        told = printable(f"{place[:200]}: {first['msg'].removeprefix('Value error, ')}")
        raise FileError(f"{path}: is damaged: {told}; {remedy}") from None
    return tree
