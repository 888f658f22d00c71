"""The recipes of each table, and the published numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from negmerge.errors import OptionError
from negmerge.registry import nearest
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.support.reading import MAX_YAML, parse_yaml, read_json, read_text
from negmerge.support.settings import Strict

TableScale = Literal["desk", "paper"]
"""`desk`: small recipes for a CPU; `paper`: the recipes of the paper."""
FOLDER = Path(str(resources.files("negmerge.paper")))


class PlannedRun(Strict):
    """A run that measures rows of a table.

    Args:
        set: changes of the recipe.
        over: data sets; each is a run of its own.
        where: the keys of the rows that the run measures.
        members: the published number of members that a number of members represents.
        names: the paper's names of methods that have another name here.
        only: the methods that count, by the paper's names; None: all.
        needs: fields of the scenario that only the user can set.
    """

    recipe: str
    set: dict[str, Any] = Field(default_factory=dict)
    over: tuple[str, ...] = ()
    where: dict[str, Any] = Field(default_factory=dict)
    members: dict[int, int] = Field(default_factory=dict)
    names: dict[str, str] = Field(default_factory=dict)
    only: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()

    def each(self) -> list[PlannedRun]:
        """One run for each data set.

        >>> [one.where for one in PlannedRun(recipe="clip_vit_b32", over=("cars", "dtd")).each()]
        [{'dataset': 'cars'}, {'dataset': 'dtd'}]
        """
        if not self.over:
            return [self]
        runs: list[PlannedRun] = []
        for name in self.over:
            own = {"set": self.set | {"data.name": name}, "where": self.where | {"dataset": name}}
            runs.append(self.model_copy(update=own | {"over": ()}))
        return runs

    def load(self, trial: int = 0, changes: Sequence[str] = ()) -> Recipe:
        """Load the recipe with its changes and others; `trial` is added to the seed after them.

        >>> PlannedRun(recipe="clip_vit_b32", over=("dtd",)).each()[0].load().title
        "CLIP ViT-B/32 keeps ImageNet, the paper's pool of 30, forgets dtd"
        """
        own = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        recipe = load_recipe(self.recipe, [*own, *changes])
        return recipe.model_copy(update={"seed": recipe.seed + trial})

    def missing(self, recipe: Recipe) -> list[str]:
        """The fields that only the user can set and that are not set."""
        return [field for field in self.needs if attrgetter(field)(recipe.settings) is None]


BUFFERS = {
    "merge": "merged like weights, as in the task-vector code, with variances clamped at zero",
    "keep": "those of the original are kept",
    "recalibrate": "computed again for each λ on held-out images without labels",
}


def facts(recipe: Recipe) -> dict[str, Any]:
    """Descriptions of the settings of a recipe that the paper does not state.

    >>> facts(load_recipe("desk_clip_mnist"))["grid"]
    'at most 12 values, up to the limit or around the optimum'
    >>> facts(load_recipe("clip_vit_b32"))["grid"]
    '21 values from 0 to 1'
    """
    members, search = recipe.pool.members(), recipe.search
    first = members[0]
    optimiser = f"SGD with momentum {first.momentum:g}" if first.optimizer == "sgd" else "AdamW"
    grid = search.grid()
    text = f"{len(grid)} values from 0 to {grid[-1]:g}"
    if search.limit is not None:
        text += f", up to {search.limit:g} while a larger one may be better"
    if search.strategy == "bracket":
        text += ", by bracketing"
    if search.strategy == "refine":
        text = f"at most {search.evaluations} values, up to the limit or around the optimum"
    return {
        "grid": text,
        "criterion": recipe.criterion,
        "members": len(members),
        "optimiser": f"{optimiser}, {first.schedule} rate",
        "buffers": BUFFERS[recipe.buffers],
        "clip": "none" if first.clip is None else f"{first.clip:g}",
        **first.model_dump(include={"epochs", "weight_decay", "warmup"}),
        **recipe.settings.facts(),
    }


class Experiment(Strict):
    """How a table or a figure is reproduced.

    Args:
        paper, desk: the runs at either scale.
        seeds: the number of trials at paper scale; desk scale has one.
        stands_in: what is smaller at desk scale; it may contain `facts` in braces.
        unstated: the names of the texts about details that the paper does not state; they may
            contain `facts` in braces.
        direction: `add` if task vectors are added.
        retain_on: the images of the retain accuracy; the validation images are those that choose λ.
        timed: the keys of the runs whose merges are timed, if the table has seconds.
        readings: methods that the paper's text allows to read in several ways: the names of each
            reading; the first one counts in the ranking.
        figure: the caption of a figure, with the place where it is shown.
        chart: the chart of all runs: `spread` in one axis, or `panels`, one for each data set.
    """

    paper: tuple[PlannedRun, ...]
    desk: tuple[PlannedRun, ...]
    seeds: int = 1
    stands_in: str
    unstated: tuple[str, ...]
    direction: Literal["negate", "add"] = "negate"
    retain_on: Literal["test", "validation"] = "test"
    timed: dict[str, Any] | None = None
    readings: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    figure: str | None = None
    chart: Literal["spread", "panels"] | None = None

    def runs(self, scale: TableScale) -> list[PlannedRun]:
        """The runs of one trial."""
        own = self.paper if scale == "paper" else self.desk
        return [one for planned in own for one in planned.each()]

    def data(self, scale: TableScale) -> list[str]:
        """The data sets that the runs need.

        >>> experiments()["T3"].data("desk")
        ['cifar10', 'fashion_mnist']
        """
        found: set[str] = set()
        for planned in self.runs(scale):
            first, *others = _shipped(planned.recipe).settings.data_names()
            found |= {planned.set.get("data.name", first), *others}
        return sorted(found)

    def smaller(self, changes: Sequence[str] = ()) -> str:
        """What replaces the paper's networks and data at desk scale.

        >>> experiments()["T2"].smaller()
        'a ResNet of 78 k weights on 11,200 images of CIFAR-10, a pool of 9'
        """
        return self.stands_in.format(**facts(self.runs("desk")[0].load(changes=changes)))

    def times(self, planned: PlannedRun) -> bool:
        """Whether the merges of a run are timed.

        >>> [one.where["dataset"] for one in experiments()["T1"].runs("paper")
        ...  if experiments()["T1"].times(one)]
        ['cars', 'cars']
        """
        return self.timed is not None and self.timed.items() <= planned.where.items()


_shipped = cache(load_recipe)


@cache
def _file() -> dict[str, Any]:
    path = FOLDER / "experiments.yaml"
    return parse_yaml(read_text(path, MAX_YAML), str(path))


@cache
def experiments() -> dict[str, Experiment]:
    """All tables and figures by name, in the order of the paper.

    >>> experiments()["B12"].paper[0].load().settings.data_names()
    ['cifar10']
    """
    return {k: Experiment.model_validate(v) for k, v in _file()["tables"].items()}


def experiment(table: str) -> Experiment:
    """The experiment of a table."""
    found = experiments()
    if table not in found:
        near = nearest(table.upper(), found)
        raise OptionError(f"unknown table {table!r}; wanted one of: {', '.join(found)}{near}")
    return found[table]


def unstated(table: str, scale: TableScale, changes: Sequence[str] = ()) -> list[str]:
    """Sentences about what the paper does not state about a table, and what is done here.

    >>> unstated("T4", "desk")[-1]
    'The paper does not state which members make n < 30; here: three random subsets of the 12.'
    """
    wanted, found = experiment(table), list[str]()
    known = facts(wanted.runs(scale)[0].load(changes=changes))
    for text in (_file()["unstated"][name] for name in wanted.unstated):
        ours = text.get("desk", text["ours"]) if scale == "desk" else text["ours"]
        found.append(f"The paper does not state {text['what']}; here: {ours.format(**known)}.")
    return found


@cache
def estimates() -> dict[str, dict[str, float]]:
    """What each table needs at paper scale, in GB and GPU-hours.

    The estimates are stored in a file, because computing them is too slow for `negmerge list`.

    >>> sorted(estimates()["T2"])
    ['disk', 'hours', 'memory']
    """
    return read_json(FOLDER / "estimates.json")


@cache
def published() -> dict[str, dict[str, Any]]:
    """The paper's tables as published; figures have a caption and no rows.

    >>> [row["avg_gap"] for row in published()["T2"]["rows"] if row["method"] == "negmerge"]
    [1.07]
    """
    tables = read_json(FOLDER / "published.json")["tables"]
    figures = {name: one.figure for name, one in experiments().items() if one.figure is not None}
    return tables | {name: {"caption": text, "rows": []} for name, text in figures.items()}
