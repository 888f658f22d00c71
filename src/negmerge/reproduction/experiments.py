"""Which recipes make which table, and what the paper printed there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import Field

from negmerge.errors import OptionError
from negmerge.hyperparameters import Strict
from negmerge.recipe import Recipe, load_recipe

Scale = Literal["desk", "paper"]


class Part(Strict):
    """A recipe, what is changed in it, and the rows of the table it stands for.

    over: data sets, each a run of its own. members: which printed number of members the pool's own
    numbers stand for. only: the methods that count, if not all.
    """

    recipe: str
    set: dict[str, Any] = Field(default_factory=dict)
    over: tuple[str, ...] = ()
    where: dict[str, Any] = Field(default_factory=dict)
    members: dict[int, int] = Field(default_factory=dict)
    only: tuple[str, ...] | None = None

    def each(self) -> list[Part]:
        """One part for each data set.

        >>> [one.where for one in Part(recipe="clip_vit_b32", over=("cars", "dtd")).each()]
        [{'dataset': 'cars'}, {'dataset': 'dtd'}]
        """
        if not self.over:
            return [self]
        return [
            self.model_copy(
                update={
                    "over": (),
                    "set": self.set | {"data.name": name},
                    "where": self.where | {"dataset": name},
                }
            )
            for name in self.over
        ]

    def load(self, seed: int = 0, changes: Sequence[str] = ()) -> Recipe:
        """The recipe as it runs."""
        own = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        return load_recipe(self.recipe, [*own, f"seed={seed}", *changes])


class Unstated(Strict):
    """What the paper leaves open, and what is done here."""

    what: str
    ours: str


class Experiment(Strict):
    """How a table or a figure is made.

    seeds: trials at the paper's scale; on a desk there is one. stands_in: what is smaller there.
    direction: `add` if task vectors are added. figure: what a figure shows; it is on the pages.
    """

    paper: tuple[Part, ...]
    desk: tuple[Part, ...]
    seeds: int = 1
    stands_in: str
    unstated: tuple[str, ...]
    direction: Literal["negate", "add"] = "negate"
    figure: str | None = None

    def parts(self, scale: Scale) -> list[Part]:
        """The runs of one trial."""
        own = self.paper if scale == "paper" else self.desk
        return [one for part in own for one in part.each()]

    def trials(self, scale: Scale) -> range:
        """The seeds."""
        return range(self.seeds if scale == "paper" else 1)


@cache
def _file() -> dict[str, Any]:
    path = resources.files("negmerge.reproduction") / "experiments.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def experiments() -> dict[str, Experiment]:
    """Every table and figure that can be made, by name, in the order of the paper.

    >>> experiments()["B12"].paper[0].load().split.forget.fraction
    0.5
    """
    found = {k: Experiment.model_validate(v) for k, v in _file()["tables"].items()}
    return dict(sorted(found.items(), key=lambda kv: ("TBCDF".index(kv[0][0]), int(kv[0][1:]))))


def experiment(table: str) -> Experiment:
    """The experiment of a table; a miss names those there are."""
    found = experiments()
    if table not in found:
        raise OptionError(f"unknown table {table!r}; there are: {', '.join(found)}")
    return found[table]


def unstated(table: str) -> list[Unstated]:
    """What the paper leaves open about a table."""
    texts = _file()["unstated"]
    return [Unstated.model_validate(texts[name]) for name in experiment(table).unstated]


@cache
def published() -> dict[str, dict[str, Any]]:
    """The paper's tables; of a figure there are no numbers.

    >>> [row["avg_gap"] for row in published()["T2"]["rows"] if row["method"] == "negmerge"]
    [1.07]
    """
    path = resources.files("negmerge.reproduction") / "published.json"
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    figures = {name: one.figure for name, one in experiments().items() if one.figure is not None}
    return tables | {name: {"caption": text, "rows": []} for name, text in figures.items()}
