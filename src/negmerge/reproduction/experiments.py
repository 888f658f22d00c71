"""Which recipes make which table, and what the paper printed there."""

from __future__ import annotations

import json
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
    """A recipe, what is changed in it, and the rows of the table it stands for."""

    recipe: str
    set: dict[str, Any] = Field(default_factory=dict)
    where: dict[str, Any] = Field(default_factory=dict)

    def load(self, seed: int = 0, changes: tuple[str, ...] = ()) -> Recipe:
        """The recipe as it runs."""
        own = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        return load_recipe(self.recipe, [*own, f"seed={seed}", *changes])


class Unstated(Strict):
    """What the paper leaves open, and what is done here."""

    what: str
    ours: str


class Experiment(Strict):
    """How a table is made.

    seeds: trials at the paper's scale; on a desk there is one. stands_in: what is smaller there.
    """

    paper: tuple[Part, ...]
    desk: tuple[Part, ...]
    seeds: int = 1
    stands_in: str
    unstated: tuple[str, ...]

    def parts(self, scale: Scale) -> tuple[Part, ...]:
        return self.paper if scale == "paper" else self.desk

    def trials(self, scale: Scale) -> range:
        return range(self.seeds if scale == "paper" else 1)


@cache
def _file() -> dict[str, Any]:
    path = resources.files("negmerge.reproduction") / "experiments.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def experiments() -> dict[str, Experiment]:
    """Every table that can be made, by name.

    >>> experiments()["B12"].paper[0].load().split.forget.fraction
    0.5
    """
    return {k: Experiment.model_validate(v) for k, v in _file()["tables"].items()}


def experiment(table: str) -> Experiment:
    """The experiment of a table; a miss names those there are."""
    found = experiments()
    if table not in found:
        known = ", ".join(found)
        if table in published():
            raise OptionError(f"table {table!r} has no recipe here yet; there are: {known}")
        raise OptionError(f"unknown table {table!r}; there are: {known}")
    return found[table]


def unstated(table: str) -> list[Unstated]:
    """What the paper leaves open about a table."""
    texts = _file()["unstated"]
    return [Unstated.model_validate(texts[name]) for name in experiment(table).unstated]


@cache
def published() -> dict[str, dict[str, Any]]:
    """The paper's tables.

    >>> [row["avg_gap"] for row in published()["T2"]["rows"] if row["method"] == "negmerge"]
    [1.07]
    """
    path = resources.files("negmerge.reproduction") / "published.json"
    return json.loads(path.read_text(encoding="utf-8"))["tables"]
