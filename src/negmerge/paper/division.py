"""The division of the runs of a table among machines."""

from __future__ import annotations

from collections.abc import Sequence

from negmerge.errors import OptionError
from negmerge.runs.estimate import total_of
from negmerge.runs.recipe import Recipe
from negmerge.scenarios.base import identity

Part = tuple[int, int]
"""The number of a part, from 1, and the number of parts."""


def parts_of(recipes: Sequence[Recipe], count: int) -> list[int]:
    """The number of the part of each run, from 1, the same on every machine.

    Runs that share trainings are in one part. The parts have about the same estimated hours.

    >>> from negmerge.runs.recipe import load_recipe
    >>> recipes = [load_recipe("clip_vit_b32", [f"data.name={name}"]) for name in ("cars", "dtd")]
    >>> parts_of([*recipes, load_recipe("clip_ablations")], 2)
    [1, 2, 1]
    """
    groups: dict[str, list[int]] = {}
    for number, recipe in enumerate(recipes):
        groups.setdefault(_shared(recipe), []).append(number)
    members = list(groups.values())
    try:
        hours = [total_of([recipes[k] for k in group]).hours for group in members]
    except OptionError:  # the sizes of the data are not known: the number of runs must do
        hours = [float(len(group)) for group in members]
    parts = {k: p for group, p in zip(members, divide(hours, count), strict=True) for k in group}
    return [parts[number] for number in range(len(recipes))]


def divide(hours: Sequence[float], count: int) -> list[int]:
    """The number of the part of each piece of work, from 1.

    The longest pieces are given out first, each to the part that has the least work.

    >>> divide([1, 5, 3, 3], 2)
    [1, 1, 2, 2]
    """
    loads, parts = [0.0] * count, [0] * len(hours)
    for piece in sorted(range(len(hours)), key=lambda k: (-hours[k], k)):
        part = min(range(count), key=loads.__getitem__)
        loads[part] += hours[piece]
        parts[piece] = part + 1
    return parts


def _shared(recipe: Recipe) -> str:
    """A text that is equal for runs that share trainings."""
    try:
        shared = recipe.settings.workload(recipe.setup()).shared
    except OptionError:  # the sizes of the data are not known
        shared = None
    settings = recipe.settings.model_dump(mode="json", by_alias=True)
    return shared or identity(settings, recipe.seed)
