"""The parts of a recipe: each a small model that refuses what it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from negmerge.errors import OptionError, shown
from negmerge.hyperparameters import HyperParameters, Positive, Strict

T = TypeVar("T")
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MOST_MEMBERS = 10_000
"""Members of a pool, which is more than anybody trains."""
MOST_SCALES = 10_000
"""Values of λ in a search."""
MOST_TRIES = 1000
"""Trainings of a tuned rival."""
LARGEST_IMAGE = 4096
"""Height and width of an image, in pixels."""
FINEST_STEP = 1e-9
"""Between two values of λ, which are rounded to ten decimals."""


def usable_path(value: T) -> T:
    """Refuse what no file can be called, such as a name of 5,000 characters.

    >>> usable_path("x" * 5000)
    Traceback (most recent call last):
    ValueError: cannot be a path: File name too long
    """
    try:
        Path(str(value)).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot be a path: {why}") from None
    return value


File = Annotated[Path, AfterValidator(usable_path)]
Place = Annotated[str, AfterValidator(usable_path)]
"""A registered name, or a path."""


class Limit(Strict):
    """Use only so many images, the same share of each class."""

    train: Count | None = None
    test: Count | None = None


class Data(Strict):
    """The data set: a registered name, a Hub id, or a local folder or parquet file."""

    name: Place = "fashion_small"
    root: File | None = None
    """A folder with local copies; the environment variable NEGMERGE_DATA serves too."""
    revision: str | None = None
    size: Annotated[int, Field(ge=1, le=LARGEST_IMAGE)] | None = None
    config: str | None = None
    """The Hub's name for the part to take."""
    channels: Annotated[int, Field(ge=1, le=3)] | None = None
    mean: tuple[float, ...] | None = None
    """Of the pixels by channel, with `std`; the model takes them off."""
    std: tuple[Positive, ...] | None = None
    image: str | None = None
    label: str | None = None
    id: str | None = None
    train: str | None = None
    """The name of the training split, and of the test split."""
    test: str | None = None
    limit: Limit = Limit()
    words: str | None = None
    """Of a CLIP: the known set whose templates and class names are used, if the name is another."""

    def given(self) -> dict[str, Any]:
        """What it says of the images that the registry or the files would say otherwise.

        >>> Data(name="mnist", size=32).given()
        {'size': 32}
        """
        where = ("name", "root", "revision", "limit", "words")
        named = {k: getattr(self, k) for k in type(self).model_fields if k not in where}
        return {k: v for k, v in named.items() if v is not None}


class Forget(Strict):
    """What to forget, by exactly one of: a share, a class, a file of positions, a file of ids."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    class_: Annotated[int | str | None, Field(alias="class")] = None
    count: Count | None = None
    """Only so many records of the class."""
    indices: File | None = None
    ids: File | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Forget:
        ways = {
            "fraction": self.fraction,
            "class": self.class_,
            "indices": self.indices,
            "ids": self.ids,
        }
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"name exactly one of fraction, class, indices, ids; got "
                f"{' and '.join(given) or 'none'}; replace all of it, such as with "
                "--set 'split.forget={ids: FILE}'"
            )
        if self.count is not None and self.class_ is None:
            raise ValueError("count goes with class")
        return self


class Split(Strict):
    """How the data is cut."""

    forget: Forget = Forget(fraction=0.1)
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of each class held out of training; 0 is the paper's CIFAR-10, 0.1 SalUn's."""


class Model(Strict):
    """The network, and where its weights come from."""

    name: Place = "resnet_small"
    weights: File | None = None
    """The original model, used as it is. Not given: trained by the recipe."""
    init: File | None = None
    """Where training starts, such as ImageNet weights; a final layer of another size is new."""


class Clip(Strict):
    """A CLIP forgets a whole data set (`data`) and keeps another; it is given, never trained.

    `model.name` is an architecture of open_clip, a folder as open_clip writes it, or `desk_clip`.
    """

    pretrained: Place | None = None
    """Of an architecture: open_clip's tag, or a .safetensors file."""
    control: Data = Data(name="imagenet")
    """The data set whose accuracy is kept; `retain` in all scores."""
    freeze: Literal["attention", "nothing"] = "attention"
    """Beside heads and text side: the projections of attention, as in the paper."""
    linear: bool = False
    """Fine-tune, merge and measure in the tangent space of the given weights."""


class Retrain(Strict):
    """The reference that never saw the forget set."""

    weights: File | None = None
    """One from an earlier run. Not given: trained by the recipe."""


class Subset(Strict):
    """Some of a list, drawn at random.

    >>> Subset(count=2, seed=1).of("abcd")
    ['c', 'd']
    """

    count: Count
    seed: Natural = 0

    def of(self, items: Sequence[T]) -> list[T]:
        """The chosen ones, in their order."""
        if self.count > len(items):
            raise OptionError(f"subset.count {self.count}: there are {len(items)}")
        places = range(len(items))
        drawn = sorted(places, key=lambda k: blake2b(f"{self.seed} {k}".encode()).digest())
        return [items[k] for k in sorted(drawn[: self.count])]


class Pool(Strict):
    """Fine-tuning on the forget set: common settings, and a grid of those that vary."""

    settings: HyperParameters = HyperParameters()
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    subset: Subset | None = None
    """Train only so many members of the grid."""
    keep: bool = True
    """False: each member is folded into the merge when it is trained, then deleted."""

    @model_validator(mode="after")
    def _fields(self) -> Pool:
        for name, values in self.grid.items():
            if name.split(".")[0] not in HyperParameters.model_fields:
                raise ValueError(f"grid.{name}: no such hyper-parameter")
            if not values:
                raise ValueError(f"grid.{name}: wanted at least one value")
        count = prod(len(values) for values in self.grid.values())
        if count > MOST_MEMBERS:
            factors = " × ".join(str(len(values)) for values in self.grid.values())
            raise ValueError(
                f"grid: {factors} = {shown(count)} members, wanted at most {MOST_MEMBERS:,}; list "
                "fewer values"
            )
        members = [m.model_dump_json() for m in self.members()]
        if len(set(members)) < len(members):
            raise ValueError("grid: a value is listed twice, two members would be the same")
        return self

    def members(self) -> list[HyperParameters]:
        """The settings of every member, the last field of the grid varying fastest.

        >>> pool = Pool(grid={"epochs": [1, 2], "lr": [0.1, 0.2]})
        >>> [(m.epochs, m.lr) for m in pool.members()]
        [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]
        """
        found: list[HyperParameters] = []
        for values in product(*self.grid.values()):
            tree = self.settings.model_dump(mode="json")
            for name, value in zip(self.grid, values, strict=True):
                set_in(tree, name, value)
            found.append(HyperParameters.model_validate(tree))
        return found if self.subset is None else self.subset.of(found)


class Method(Strict):
    """One way to unlearn: a merge rule with its options, a selector, or a rival with its own."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    label: str | None = None
    """How it is called in files and tables, if not by its name."""
    tune: bool = False
    """Of a rival: try several values of what its authors tuned, and take the best."""
    subset: Subset | None = None
    """Of a rule: merge only so many members of the pool."""
    add: Positive | None = None
    """Of a rule or selector: θ + λτ with this λ, to learn instead of to forget; no search."""

    @property
    def title(self) -> str:
        if self.label is not None:
            return self.label
        drawn = "" if self.subset is None else f"-{self.subset.count}-{self.subset.seed}"
        return f"{self.name}{drawn}{'' if self.add is None else '-added'}"

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Search(Strict):
    """Which λ are tried, and which is taken."""

    scales: Annotated[tuple[Scale, ...], Field(max_length=MOST_SCALES)] | None = None
    stop: Positive = 1.0
    count: Annotated[int, Field(ge=2, le=MOST_SCALES)] = 21
    """λ runs over `count` even steps from 0 to `stop`, unless `scales` lists them."""
    limit: Positive | None = None
    """While a larger λ may be better, the grid grows up to here; not given: it does not."""
    strategy: Literal["grid", "bracket"] = "grid"
    """`bracket` halves the grid instead of walking it; for keep_retain."""
    criterion: str | None = None
    """Not given: match_holdout for records, keep_retain for a whole class or a CLIP."""
    samples: Count = 2000
    """At most so many of each set choose λ; they are not reported."""
    tries: Annotated[int, Field(ge=1, le=MOST_TRIES)] = 5
    """How many trainings a tuned rival has, whichever it is."""

    @model_validator(mode="after")
    def _steps(self) -> Search:
        if self.scales is None and self.stop / (self.count - 1) < FINEST_STEP:
            raise ValueError(f"stop: steps of less than {FINEST_STEP:g} are not told apart")
        return self

    def grid(self) -> tuple[float, ...]:
        """The λ to try, rising, 0 among them.

        >>> Search(stop=2.0, count=3).grid()
        (0.0, 1.0, 2.0)
        """
        if self.scales is not None:
            return tuple(sorted({0.0, *self.scales}))
        return tuple(round(self.stop * i / (self.count - 1), 10) for i in range(self.count))

    def coarse(self) -> Search:
        """Every fourth λ, for what is shown and decides nothing.

        >>> Search(stop=1.0, count=11).coarse().grid()
        (0.0, 0.4, 0.8)
        """
        return self.model_copy(update={"scales": self.grid()[::4]})

    def passes(self) -> int:
        """How many λ are measured, about."""
        return min(len(self.grid()), 8) if self.strategy == "bracket" else len(self.grid())

    def beyond(self, scales: tuple[float, ...]) -> tuple[float, ...]:
        """The λ to try after these: up to twice as far in steps twice as long, within the limit.

        >>> search = Search(stop=1.0, count=5, limit=3.0)
        >>> search.beyond(search.grid()), search.beyond((0.0, 1.0, 1.5, 2.0))
        ((1.5, 2.0), (3.0,))
        """
        if self.scales is not None or self.limit is None:
            return ()
        last, step = scales[-1], 2 * (scales[-1] - scales[-2])
        count = max(round(last / step), 1)
        more = (round(last + step * k, 10) for k in range(1, count + 1))
        return tuple(scale for scale in more if scale <= self.limit)


def set_in(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a tree, making mappings on the way.

    >>> tree = {"a": {"b": 1}}
    >>> set_in(tree, "a.c", 2); tree
    {'a': {'b': 1, 'c': 2}}
    """
    *path, last = key.split(".")
    for part in path:
        below = tree.get(part)
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    tree[last] = value
