"""The parts of a recipe for the pool and for the methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, TypeVar

from pydantic import Field, model_serializer, model_validator

from negmerge.errors import OptionError, quoted
from negmerge.merging.patterns import make_patterns
from negmerge.support.settings import Count, Natural, Positive, Strict, set_dotted
from negmerge.training.hyperparameters import HyperParameters

T = TypeVar("T")

MOST_MEMBERS = 10_000
"""The largest number of members of a pool."""


class Subset(Strict):
    """A random subset of a list.

    >>> Subset(count=2, seed=1).of("abcd")
    ['c', 'd']
    """

    count: Count
    """The number of items."""
    seed: Natural = 0
    """The seed of the choice."""

    def of(self, items: Sequence[T]) -> list[T]:
        """Return the subset, in the order of the items."""
        if self.count > len(items):
            raise OptionError(f"subset.count {self.count}: there are {len(items)} members")
        shuffled = sorted(
            range(len(items)), key=lambda k: blake2b(f"{self.seed} {k}".encode()).digest()
        )
        return [items[k] for k in sorted(shuffled[: self.count])]


class Pool(Strict):
    """The pool: the settings of fine-tuning, and a grid of the settings that vary.

    >>> pool = Pool(settings={"batch": 64}, grid={"epochs": [10, 15], "lr": [0.05, 0.02]})
    >>> len(pool.members())
    4

    Args:
        settings: the hyper-parameters that all members share.
        grid: lists of values by hyper-parameter; every combination is a member.
        subset: the members of the grid to train; all if not given.
        keep: False: each member is added to the accumulator when it is trained, then deleted.
        include: patterns of the names of tensors that merges change; by default all.
        exclude: patterns of the names of tensors that merges leave as they are.
        equalise: scale the members to one norm before every merge; needs `keep`.
    """

    settings: HyperParameters = HyperParameters()
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    subset: Subset | None = None
    keep: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    equalise: bool = False

    @model_validator(mode="after")
    def _check_grid(self) -> Pool:
        for name, values in self.grid.items():
            if name.split(".")[0] not in HyperParameters.model_fields:
                raise ValueError(f"grid.{name}: no such hyper-parameter")
            if not values:
                raise ValueError(f"grid.{name}: wanted at least one value")
        count = prod(len(values) for values in self.grid.values())
        if count > MOST_MEMBERS:
            factors = " × ".join(str(len(values)) for values in self.grid.values())
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
        members = [json.dumps(m.content()) for m in self.members()]
        if len(set(members)) < len(members):
            raise ValueError("grid: a value is listed twice, two members would be the same")
        return self

    @model_serializer(mode="wrap")
    def _without_new_fields(self, dump: Callable[[Pool], dict[str, Any]]) -> dict[str, Any]:
        """Leave out fields that are not given and that the recipes of older runs do not have."""
        tree = dump(self)
        return {k: v for k, v in tree.items() if v or k not in ("include", "exclude", "equalise")}

    def members(self) -> list[HyperParameters]:
        """Return the settings of every member; the last field of the grid varies fastest.

        >>> pool = Pool(grid={"epochs": [1, 2], "lr": [0.1, 0.2]})
        >>> [(m.epochs, m.lr) for m in pool.members()]
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
    add: Positive | None = None
    """For a rule or selector: add τ with this λ, to learn instead of to forget; no search."""

    @property
    def title(self) -> str:
        """The name in files and tables."""
        if self.label is not None:
            return self.label
        subset = "" if self.subset is None else f"-{self.subset.count}-{self.subset.seed}"
        return f"{self.name}{subset}{'' if self.add is None else '-added'}"

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
