"""The parts of a recipe for the pool and for the methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_serializer, model_validator

from negmerge.errors import OptionError, quoted
from negmerge.merging.patterns import make_patterns
from negmerge.support.mistakes import fields_at, suggestion
from negmerge.support.settings import Count, Natural, Positive, Strict, set_dotted
from negmerge.training.hyperparameters import HyperParameters

T = TypeVar("T")

MOST_MEMBERS = 10_000
"""The largest number of members of a pool."""
RESHAPES = ("retain", "fisher", "groups")
"""The fields of a method that change τ after merging, in the order in which they do."""
Weight = Annotated[float, Field(ge=0)]


class Subset(Strict):
    """Some members of a pool, by default chosen at random.

    >>> Subset(count=2, seed=1).of("abcd")
    ['c', 'd']
    """

    count: Count
    """The number of members."""
    seed: Natural = 0
    """The seed of the random choice."""
    by: Literal["random", "retain"] = "random"
    """`retain`, for a method: the members that, scaled to one length and subtracted with λ = 1,
    raise the loss of the retain samples that choose λ the least."""

    @model_validator(mode="after")
    def _check_seed(self) -> Subset:
        if self.by == "retain" and self.seed:
            raise ValueError("seed: by retain chooses nothing at random; leave seed out")
        return self

    @model_serializer(mode="wrap")
    def _without_new_fields(self, dump: Callable[[Subset], dict[str, Any]]) -> dict[str, Any]:
        """Leave out `by` if it is the only choice that older versions had."""
        return {k: v for k, v in dump(self).items() if k != "by" or v != "random"}

    @property
    def title(self) -> str:
        """The part of the title of a method that names its subset."""
        return f"{self.count}-{self.by if self.by == 'retain' else self.seed}"

    def of(self, items: Sequence[T]) -> list[T]:
        """Return the random subset, in the order of the items."""
        self.check(len(items))
        shuffled = sorted(
            range(len(items)), key=lambda k: blake2b(f"{self.seed} {k}".encode()).digest()
        )
        return [items[k] for k in sorted(shuffled[: self.count])]

    def check(self, members: int) -> None:
        """Raise if there are too few members to choose from."""
        if self.count > members:
            raise OptionError(f"subset.count {self.count}: there are {members} members")


class Pool(Strict):
    """The pool: the settings of fine-tuning, and a grid of the settings that vary.

    >>> pool = Pool(settings={"batch": 64}, grid={"epochs": [10, 15], "lr": [0.05, 0.02]})
    >>> len(pool.members())
    4

    >>> len(Pool(settings={"epochs": 6}, checkpoints=[2, 4, 6], grid={"lr": [0.1, 0.2]}).members())
    6

    Args:
        settings: the hyper-parameters that all members share.
        grid: lists of values by hyper-parameter; every combination is a training.
        subset: the trainings of the grid to do; all if not given.
        checkpoints: rising epochs; every training gives a member after each of them. The last one
            is `epochs` of the settings. Without them a training gives one member, at its end.
        keep: False: each member is added to the accumulator when it is trained, then deleted.
        include: patterns of the names of tensors that merges change; by default all.
        exclude: patterns of the names of tensors that merges leave as they are.
        equalise: scale the members to one norm before every merge; needs `keep`.
    """

    settings: HyperParameters = HyperParameters()
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    subset: Subset | None = None
    checkpoints: tuple[Count, ...] = ()
    keep: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    equalise: bool = False

    @model_validator(mode="after")
    def _check_grid(self) -> Pool:
        for name, values in self.grid.items():
            *above, last = name.split(".")
            known = fields_at(HyperParameters, above)
            if last not in known and above[:1] != ["own"]:
                near = suggestion(last, known or [*HyperParameters.model_fields])
                raise ValueError(f"grid.{name}: no such hyper-parameter{near}")
            if not values:
                raise ValueError(f"grid.{name}: wanted at least one value")
        sizes = [
            *map(len, self.grid.values()),
            *([len(self.checkpoints)] if self.checkpoints else []),
        ]
        count = prod(sizes)
        if count > MOST_MEMBERS:
            factors = " × ".join(map(str, sizes))
            raise ValueError(
                f"grid: {factors} = {quoted(count)} members, wanted at most {MOST_MEMBERS:,}; list "
                "fewer values"
            )
        make_patterns(self.include, self.exclude)
        if self.equalise and not self.keep:
            raise ValueError(
                "equalise: needs the norms of all members before it merges one, and keep: false "
                "deletes them; set keep to true"
            )
        if self.subset is not None and self.subset.by == "retain":
            raise ValueError(
                "subset.by: got retain, which needs members that are trained; wanted random here, "
                "or by: retain in the subset of a method"
            )
        members = [json.dumps(m.content()) for m in self.trainings()]
        if len(set(members)) < len(members):
            raise ValueError("grid: a value is listed twice, two members would be the same")
        return self

    @model_validator(mode="after")
    def _check_checkpoints(self) -> Pool:
        epochs = self.checkpoints
        if not epochs:
            return self
        if list(epochs) != sorted({*epochs}):
            raise ValueError(f"checkpoints: got {list(epochs)}, wanted rising epochs; sort them")
        if "epochs" in self.grid:
            raise ValueError(
                "checkpoints: are epochs of one schedule, and grid.epochs has several; move epochs "
                "to settings"
            )
        if epochs[-1] != self.settings.epochs:
            raise ValueError(
                f"checkpoints: the last one is {epochs[-1]}, wanted settings.epochs = "
                f"{self.settings.epochs}; make them equal"
            )
        if not self.keep:
            raise ValueError(
                "checkpoints: keep: false folds one model of each training and deletes it; set "
                "keep to true, or leave checkpoints out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_new_fields(self, dump: Callable[[Pool], dict[str, Any]]) -> dict[str, Any]:
        """Leave out fields that are not given and that the recipes of older runs do not have."""
        tree = dump(self)
        later = ("include", "exclude", "equalise", "checkpoints")
        return {k: v for k, v in tree.items() if v or k not in later}

    @property
    def per_training(self) -> int:
        """The number of members that one training gives."""
        return max(len(self.checkpoints), 1)

    def members(self) -> list[HyperParameters]:
        """Return the settings of the training of every member; checkpoints follow each other."""
        return [one for one in self.trainings() for _ in range(self.per_training)]

    def trainings(self) -> list[HyperParameters]:
        """Return the settings of every training; the last field of the grid varies fastest.

        >>> pool = Pool(grid={"epochs": [1, 2], "lr": [0.1, 0.2]})
        >>> [(m.epochs, m.lr) for m in pool.trainings()]
        [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]
        """
        found: list[HyperParameters] = []
        for values in product(*self.grid.values()):
            tree = self.settings.model_dump(mode="json")
            for name, value in zip(self.grid, values, strict=True):
                set_dotted(tree, name, value)
            found.append(HyperParameters.model_validate(tree))
        return found if self.subset is None else self.subset.of(found)


class Method(Strict):
    """A method: a merge rule, a selector or a rival, with its options."""

    name: str
    """A rule, a selector or a rival (`negmerge list rules`, `selectors`, `rivals`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The options of the method; the listings show them."""
    label: str | None = None
    """The name in files and tables; the name of the method if not given."""
    tune: bool = False
    """For a rival: try several values of the options that its authors tuned; take the best."""
    subset: Subset | None = None
    """For a rule: the members of the pool to merge; all if not given."""
    members: Literal["all", "last", "checkpoints"] = "all"
    """For a rule, with `pool.checkpoints`: `all` members, only the `last` one of each training, or
    the `checkpoints` of the first training of the grid; `subset` chooses among these."""
    equalise: bool = False
    """For a rule: scale the members to one norm before the merge, as `pool.equalise` does for all
    methods."""
    add: Positive | None = None
    """For a rule or selector: add τ with this λ, to learn instead of to forget; no search."""
    retain: Weight | None = None
    """For a rule: subtract from τ this many times the task vector of one epoch on the retain set,
    scaled to the length of τ."""
    fisher: Weight | None = None
    """For a rule: multiply each element of τ by F_f / (F_f + α·F_r), with α the value of this field
    and F the diagonal Fisher information of the forget and of the retain set."""
    groups: Literal["depth", "component"] | None = None
    """For a rule: multiply groups of tensors of τ by factors that are found on samples of their
    own."""

    @property
    def title(self) -> str:
        """The name in files and tables."""
        if self.label is not None:
            return self.label
        parts = [
            self.name,
            "" if self.members == "all" else self.members,
            "" if self.subset is None else self.subset.title,
            "equalised" if self.equalise else "",
            "" if self.add is None else "added",
        ]
        plain = "-".join(part for part in parts if part)
        return plain + "".join(map(self._suffix, self.reshaped_by))

    def candidates(self, members: Sequence[T], per_training: int) -> list[T]:
        """Return those members of a pool that `members` allows; `subset` may choose among them.

        >>> Method(name="consensus", members="last").candidates("abABxy", per_training=2)
        ['b', 'B', 'y']

        Args:
            members: all members; those of one training follow each other.
            per_training: as in `Pool`.
        """
        if self.members == "last":
            return list(members[per_training - 1 :: per_training])
        return list(members[:per_training] if self.members == "checkpoints" else members)

    @property
    def reshaped_by(self) -> list[str]:
        """The fields that change τ after merging, in the order in which they do."""
        return [name for name in RESHAPES if getattr(self, name) is not None]

    def _suffix(self, field: str) -> str:
        """Return what a field that changes τ adds to the title, which is the name of a file."""
        value = getattr(self, field)
        if isinstance(value, str):
            return f"-{value}"
        return f"-{field}{value:g}".replace(".", "_").replace("+", "")

    @model_serializer(mode="wrap")
    def _without_new_fields(self, dump: Callable[[Method], dict[str, Any]]) -> dict[str, Any]:
        """Leave out fields that have their default and that the recipes of older runs lack."""
        later = {"members": "all", "equalise": False} | dict.fromkeys(RESHAPES)
        return {k: v for k, v in dump(self).items() if k not in later or v != later[k]}

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
