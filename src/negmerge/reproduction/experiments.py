"""Which recipes make which table, and what the paper printed there."""

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
from negmerge.hyperparameters import Strict
from negmerge.reading import MAX_YAML, parse_yaml, read_json, read_text
from negmerge.recipe import Recipe, load_recipe

Scale = Literal["desk", "paper"]
HERE = Path(str(resources.files("negmerge.reproduction")))


class Part(Strict):
    """A recipe, what is changed in it, and the rows of the table it stands for.

    over: data sets, each a run of its own. members: which printed number of members the pool's own
    numbers stand for. only: the methods that count, if not all. needs: fields of the recipe that
    only the user can give.
    """

    recipe: str
    set: dict[str, Any] = Field(default_factory=dict)
    over: tuple[str, ...] = ()
    where: dict[str, Any] = Field(default_factory=dict)
    members: dict[int, int] = Field(default_factory=dict)
    only: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()

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

    def load(self, trial: int = 0, changes: Sequence[str] = ()) -> Recipe:
        """The recipe as it runs; its title names the data set that is forgotten.

        trial: added to the recipe's seed, so that trials differ whatever `changes` says of it.

        >>> Part(recipe="clip_vit_b32", over=("dtd",)).each()[0].load().title
        "CLIP ViT-B/32 keeps ImageNet, the paper's pool of 30, forgets dtd"
        """
        own = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        recipe = load_recipe(self.recipe, [*own, *changes])
        return recipe.model_copy(update={"seed": recipe.seed + trial})

    def missing(self, recipe: Recipe) -> list[str]:
        """The fields that the user must give and has not."""
        return [field for field in self.needs if attrgetter(field)(recipe) is None]


BUFFERS = {
    "merge": "merged like weights, as in the task-vector code; a variance is kept from going below "
    "zero",
    "keep": "the original's are kept",
}
FROZEN = {
    "attention": "input and output projections, weights and biases, in every mode and pool, as its "
    "47.55 % of zeros implies",
    "nothing": "none",
}


class Unstated(Strict):
    """What the paper leaves open, and what is done here, also on a desk if that is something else.

    Fields in braces are filled from the recipe.
    """

    what: str
    ours: str
    desk: str | None = None

    def told(self, scale: Scale, recipe: Recipe) -> str:
        """The sentence for a recipe.

        >>> one = Unstated(what="the number of members", ours="{members}")
        >>> one.told("desk", load_recipe("desk_cifar10"))
        'The paper does not state the number of members; here: 9.'
        """
        ours = self.desk if scale == "desk" and self.desk is not None else self.ours
        return f"The paper does not state {self.what}; here: {ours.format(**facts(recipe))}."


def facts(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the things that the paper leaves open.

    >>> facts(load_recipe("desk_clip_mnist"))["grid"]
    '21 values from 0 to 2, on to 8 while a larger one may be better, by bracketing'
    """
    members, search, train = recipe.pool.members(), recipe.search, recipe.train
    first = members[0]
    optimiser = f"SGD with momentum {first.momentum:g}" if first.optimizer == "sgd" else "AdamW"
    grid = search.grid()
    told = f"{len(grid)} values from 0 to {grid[-1]:g}"
    if search.limit is not None:
        told += f", on to {search.limit:g} while a larger one may be better"
    if search.strategy == "bracket":
        told += ", by bracketing"
    return {
        "grid": told,
        "criterion": recipe.criterion,
        "members": len(members),
        "training": f"{train.epochs} epochs at {train.lr:g}, {train.schedule}",
        "optimiser": f"{optimiser}, {first.schedule} rate",
        "images": "all" if recipe.data.limit.train is None else f"{recipe.data.limit.train:,}",
        "buffers": BUFFERS[recipe.buffers],
        "validation": "it is" if recipe.split.validation else "it is not",
        "frozen": FROZEN["attention" if recipe.clip is None else recipe.clip.freeze],
        "clip": "none" if first.clip is None else f"{first.clip:g}",
        **first.model_dump(include={"epochs", "weight_decay", "warmup"}),
    }


class Experiment(Strict):
    """How a table or a figure is made.

    seeds: trials at the paper's scale; on a desk there is one. stands_in: what is smaller there,
    with fields in braces (`smaller` fills them). direction: `add` if task vectors are added.
    figure: what a figure shows; it is on the pages.
    spread: whether a figure has all data sets in one drawing.
    """

    paper: tuple[Part, ...]
    desk: tuple[Part, ...]
    seeds: int = 1
    stands_in: str
    unstated: tuple[str, ...]
    direction: Literal["negate", "add"] = "negate"
    figure: str | None = None
    spread: bool = False

    def parts(self, scale: Scale) -> list[Part]:
        """The runs of one trial."""
        own = self.paper if scale == "paper" else self.desk
        return [one for part in own for one in part.each()]

    def data(self, scale: Scale, changes: Sequence[str] = ()) -> list[str]:
        """The data sets that must be there.

        >>> experiments()["T3"].data("desk")
        ['cifar10', 'fashion_mnist']
        """
        found: set[str] = set()
        for part in self.parts(scale):
            recipe = part.load(changes=changes) if changes else _shipped(part.recipe)
            found.add(recipe.data.name if changes else part.set.get("data.name", recipe.data.name))
            found |= set() if recipe.clip is None else {recipe.clip.control.name}
        return sorted(found)

    def smaller(self, changes: Sequence[str] = ()) -> str:
        """What stands in for the paper's networks and data on a desk.

        >>> experiments()["T2"].smaller()
        'a ResNet of 78 k weights on 11,200 images of CIFAR-10, a pool of 9'
        """
        return self.stands_in.format(**facts(self.parts("desk")[0].load(changes=changes)))

    def trials(self, scale: Scale) -> range:
        """The seeds."""
        return range(self.seeds if scale == "paper" else 1)


_shipped = cache(load_recipe)


@cache
def _file() -> dict[str, Any]:
    path = HERE / "experiments.yaml"
    return parse_yaml(read_text(path, MAX_YAML), str(path))


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
        near = f"did you mean {table.upper()}? " if table.upper() in found else ""
        raise OptionError(f"unknown table {table!r}; {near}there are: {', '.join(found)}")
    return found[table]


def unstated(table: str, scale: Scale, changes: Sequence[str] = ()) -> list[str]:
    """What the paper leaves open about a table, and what is done here.

    >>> unstated("T4", "desk")[-1]
    'The paper does not state which members make n < 30; here: three random subsets of the 12.'
    """
    texts, wanted = _file()["unstated"], experiment(table)
    recipe = wanted.parts(scale)[0].load(changes=changes)
    return [Unstated.model_validate(texts[name]).told(scale, recipe) for name in wanted.unstated]


@cache
def estimates() -> dict[str, dict[str, float]]:
    """What each table takes at the paper's scale, in GB and GPU-hours: kept, for `list` is quick.

    >>> sorted(estimates()["T2"])
    ['disk', 'hours', 'memory']
    """
    return read_json(HERE / "estimates.json")


@cache
def published() -> dict[str, dict[str, Any]]:
    """The paper's tables; of a figure there are no numbers.

    >>> [row["avg_gap"] for row in published()["T2"]["rows"] if row["method"] == "negmerge"]
    [1.07]
    """
    tables = read_json(HERE / "published.json")["tables"]
    figures = {name: one.figure for name, one in experiments().items() if one.figure is not None}
    return tables | {name: {"caption": text, "rows": []} for name, text in figures.items()}
