"""The recipe: everything a run depends on, as checked data; no code, no import paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from negmerge.errors import FileError, NegMergeError, OptionError, printable
from negmerge.hyperparameters import HyperParameters, Positive, Strict
from negmerge.merge.select import SELECTORS
from negmerge.models.prompts import prompts_of

T = TypeVar("T")

LARGEST = 1 << 20
"""Bytes of a recipe file; anything larger is not a recipe."""

DEFAULT = "demo"
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
MERGING = ("consensus", "uniform", "ties", "magmax", "single_best")


class Limit(Strict):
    """Use only so many images, the same share of each class."""

    train: Count | None = None
    test: Count | None = None


class Data(Strict):
    """The data set: a registered name, a Hub id, or a local folder or parquet file."""

    name: str = "fashion_small"
    root: Path | None = None
    """A folder with local copies; the environment variable NEGMERGE_DATA serves too."""
    revision: str | None = None
    size: Count | None = None
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


class Forget(Strict):
    """What to forget, by exactly one of: a share, a class, a file of positions, a file of ids."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    class_: Annotated[int | str | None, Field(alias="class")] = None
    count: Count | None = None
    """Only so many records of the class."""
    indices: Path | None = None
    ids: Path | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Forget:
        ways = [self.fraction, self.class_, self.indices, self.ids]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("name exactly one of fraction, class, indices, ids")
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

    name: str = "resnet_small"
    weights: Path | None = None
    """The original model, used as it is. Not given: trained by the recipe."""
    init: Path | None = None
    """Where training starts, such as ImageNet weights; a final layer of another size is new."""


class Clip(Strict):
    """A CLIP forgets a whole data set (`data`) and keeps another; it is given, never trained.

    `model.name` is an architecture of open_clip, a folder as open_clip writes it, or `desk_clip`.
    """

    pretrained: str | None = None
    """Of an architecture: open_clip's tag, or a .safetensors file."""
    control: Data = Data(name="imagenet")
    """The data set whose accuracy is kept; `retain` in all scores."""
    freeze: Literal["attention", "nothing"] = "attention"
    """Beside heads and text side: the projections of attention, as in the paper."""
    linear: bool = False
    """Fine-tune, merge and measure in the tangent space of the given weights."""


class Retrain(Strict):
    """The reference that never saw the forget set."""

    weights: Path | None = None
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

    scales: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = None
    stop: Positive = 1.0
    count: Annotated[int, Field(ge=2)] = 21
    """λ runs over `count` even steps from 0 to `stop`, unless `scales` lists them."""
    limit: Positive | None = None
    """While the largest λ is as good as any, the grid grows up to here; not given: it does not."""
    strategy: Literal["grid", "bracket"] = "grid"
    """`bracket` halves the grid instead of walking it; for keep_retain."""
    criterion: str | None = None
    """Not given: match_holdout for records, keep_retain for a whole class or a CLIP."""
    samples: Count = 2000
    """At most so many of each set choose λ; they are not reported."""
    tries: Count = 5
    """How many trainings a tuned rival has, whichever it is."""

    def grid(self) -> tuple[float, ...]:
        """The λ to try, rising, 0 among them.

        >>> Search(stop=2.0, count=3).grid()
        (0.0, 1.0, 2.0)
        """
        if self.scales is not None:
            return tuple(sorted({0.0, *self.scales}))
        return tuple(round(self.stop * i / (self.count - 1), 10) for i in range(self.count))

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


class Recipe(Strict):
    """A run of `negmerge unlearn`.

    >>> Recipe().model.name
    'resnet_small'
    """

    title: str = ""
    seed: Natural = 0
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    clip: Clip | None = None
    """Given: a CLIP forgets a data set. Not given: a classifier forgets records or a class."""
    train: HyperParameters = HyperParameters()
    retrain: Retrain | None = Retrain()
    pool: Pool = Pool()
    buffers: Literal["keep", "merge"] = "keep"
    methods: tuple[Method, ...] = tuple(Method(name=name) for name in MERGING)
    """The first one makes the unlearned model."""
    search: Search = Search()
    workers: Count | None = None
    """Processes that train at once; the cores are shared among them."""
    save_every: Annotated[float, Field(ge=0)] = 15.0
    """Seconds between two saves of a training in progress."""

    @model_validator(mode="before")
    @classmethod
    def _clip_defaults(cls, tree: Any) -> Any:
        """A CLIP cannot be retrained; its pool has the paper's epochs for the data set."""
        if not isinstance(tree, dict) or tree.get("clip") is None:
            return tree
        tree = {"retrain": None} | tree
        data, pool = tree.get("data"), tree.get("pool")
        name = data.get("name") if isinstance(data, dict) else None
        epochs = prompts_of(name).epochs if isinstance(name, str) else None
        if epochs is not None and isinstance(pool, dict):
            settings, grid = pool.get("settings", {}), pool.get("grid", {})
            if isinstance(settings, dict) and isinstance(grid, dict) and "epochs" not in grid:
                tree["pool"] = pool | {"settings": {"epochs": epochs} | settings}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        titles = [method.title for method in self.methods]
        if not titles:
            raise ValueError("methods: wanted at least one")
        if len(set(titles)) < len(titles):
            raise ValueError("methods: two have the same name; give one a label")
        for title in titles:
            if not title.replace("_", "").replace("-", "").isalnum() or not title.isascii():
                raise ValueError(f"methods: {title!r} must be letters, digits, - and _")
        if self.search.criterion == "oracle" and self.retrain is None:
            raise ValueError("search.criterion oracle needs the retrained model: retrain is off")
        for method in self.methods:
            if not self.pool.keep and (method.name in SELECTORS or method.subset is not None):
                raise ValueError(
                    f"{method.title} needs the members: set pool.keep to true or leave it out"
                )
        if self.clip is not None:
            self._fits_clip()
        return self

    def _fits_clip(self) -> None:
        for field, usual in (("split", Split()), ("retrain", None), ("train", HyperParameters())):
            if getattr(self, field) != usual:
                raise ValueError(
                    f"{field}: a CLIP is given, and forgets a whole data set; leave it out"
                )
        if self.model.weights is not None or self.model.init is not None:
            raise ValueError("model: clip.pretrained names the weights of a CLIP")
        if self.clip is not None and self.clip.control.limit.train is not None:
            raise ValueError("clip.control.limit.train: nothing is trained on the control set")

    @property
    def criterion(self) -> str:
        """The criterion that is used."""
        if self.search.criterion is not None:
            return self.search.criterion
        if self.clip is not None:
            return "keep_retain"
        whole = self.split.forget.class_ is not None and self.split.forget.count is None
        return "keep_retain" if whole else "match_holdout"

    def dump(self) -> str:
        """The recipe as YAML, with every default written out."""
        tree = self.model_dump(mode="json", by_alias=True)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


# -------------------------------------------------------------------------------------------- files


def load_recipe(name: str | Path | None = None, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe by path or shipped name, and change fields of it.

    >>> load_recipe(changes=["seed=3", "pool.keep=true"]).seed
    3

    changes: `key=value` with a dotted key; the value is YAML.
    """
    where, tree = read_recipe(name)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise OptionError(f"--set {change!r}: wanted key=value")
        try:
            set_in(tree, key, yaml.safe_load(text))
        except (yaml.YAMLError, ValueError):
            raise OptionError(f"--set {key}: {text!r} is not a YAML value") from None
    return check_recipe(tree, where)


def read_recipe(name: str | Path | None) -> tuple[str, dict[str, Any]]:
    """The tree of a recipe file, and what to call it in errors."""
    if name is None or (str(name) in shipped() and not Path(name).is_file()):
        path: Any = resources.files("negmerge") / "recipes" / f"{name or DEFAULT}.yaml"
        where = f"recipe {name or DEFAULT}"
    else:
        path, where = Path(name), str(name)
    try:
        raw = path.read_bytes()
    except OSError as error:
        known = ", ".join(shipped())
        raise FileError(
            f"{where}: cannot be read: {error.strerror}; wanted a YAML file or one of: {known}"
        ) from None
    if len(raw) > LARGEST:
        raise FileError(f"{where}: {len(raw):,} bytes is too large for a recipe")
    try:
        tree = yaml.safe_load(raw.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise FileError(f"{where}: wanted a mapping of settings, got {type(tree).__name__}")
    return where, tree


def check_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Validate a tree; the first mistake is told in one line."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the recipe"
        got = first.get("input")
        told = "" if isinstance(got, dict | list | tuple | Strict) else f", got {got!r}"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        message = first["msg"].removeprefix("Value error, ")
        raise OptionError(printable(f"{where}: {place}: {message}{told}{more}")) from None
    except NegMergeError as error:
        raise OptionError(f"{where}: {error}") from None


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


def shipped() -> list[str]:
    """The names of the recipes that come with the package."""
    folder = resources.files("negmerge") / "recipes"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )
