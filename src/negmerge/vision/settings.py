"""Fields of a recipe for a data set of images and its splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator

from negmerge.support.settings import Count, File, NameOrPath, Positive, Strict


class Limit(Strict):
    """The largest numbers of images to use; classes keep their shares."""

    train: Count | None = None
    """Training images."""
    test: Count | None = None
    """Test images."""


class Data(Strict):
    """The data set: a registered name, a Hub id, or a folder or parquet file."""

    name: NameOrPath = "fashion_small"
    """The name, id, path or URL (`negmerge list datasets`)."""
    root: File | None = None
    """A folder with copies, or its URL; the environment variable NEGMERGE_DATA names one, too."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; a commit makes a run repeatable."""
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Height and width of the images; sets that are not registered need it."""
    config: str | None = None
    """The configuration (subset) on the Hub."""
    channels: Annotated[int, Field(ge=1, le=3)] | None = None
    """1 for grey images, 3 for colour."""
    mean: tuple[float, ...] | None = None
    """Mean of the pixels for each channel; the model normalises with `mean` and `std`."""
    std: tuple[Positive, ...] | None = None
    """Standard deviation of the pixels for each channel."""
    image: str | None = None
    """The column of the images."""
    label: str | None = None
    """The column of the labels."""
    id: str | None = None
    """The column of the ids."""
    train: str | None = None
    """The name of the training split."""
    test: str | None = None
    """The name of the test split."""
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For data without a test split: the share of each class that is the test set, and is never
    trained on."""
    limit: Limit = Limit()
    words: str | None = None
    """CLIP only: the known data set whose templates and class names are used."""

    @model_serializer(mode="wrap")
    def _without_new_fields(self, dump: Callable[[Data], dict[str, Any]]) -> dict[str, Any]:
        """Leave out `test_share` if it is not given: the recipes of older runs do not have it."""
        tree = dump(self)
        return {k: v for k, v in tree.items() if k != "test_share" or v is not None}

    def given(self) -> dict[str, Any]:
        """Return the fields that override those of the registered data set.

        >>> Data(name="mnist", size=32).given()
        {'size': 32}
        """
        others = {"name", "root", "revision", "limit", "words"}
        return self.model_dump(exclude=others, exclude_none=True)


class Forget(Strict):
    """What to forget: exactly one of a share, a class, a file of positions and a file of ids."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A share of the training records, drawn at random."""
    class_: Annotated[int | str | None, Field(alias="class")] = None
    """The name or number of a class."""
    count: Count | None = None
    """The number of records of the class to forget; None: the whole class."""
    indices: File | None = None
    """A file with the positions of records in the training set."""
    ids: File | None = None
    """A file with one id or file name per line."""

    @model_validator(mode="after")
    def _one_way(self) -> Forget:
        given = list(self.model_dump(exclude={"count"}, by_alias=True, exclude_none=True))
        if len(given) != 1:
            raise ValueError(
                f"wanted exactly one of fraction, class, indices, ids; got "
                f"{' and '.join(given) or 'none'}; replace the whole field, such as with "
                "--set 'split.forget={ids: FILE}'"
            )
        if self.count is not None and self.class_ is None:
            raise ValueError("count: wanted only together with class; remove count")
        return self


class Split(Strict):
    """How the data is split."""

    forget: Forget = Forget(fraction=0.1)
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of each class held out of training; the paper has 0 for CIFAR-10, SalUn 0.1."""
