"""The names of methods as in the tables of the paper, and the groups of methods there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from negmerge.runs.methods import Method
from negmerge.runs.result import MethodRow

PAPER = {
    "consensus": "NegMerge",
    "uniform": "Uniform Merge",
    "greedy": "Greedy Merge",
    "ties": "TIES-Merging",
    "magmax": "MagMax",
    "conflict": "Conflict",
    "single_best": "Single Best Model",
    "random_label": "Random Labeling",
    "influence": "Influence",
    "salun": "SalUn",
    "finetune": "Finetune",
    "l1_sparse": "l1-sparse",
    "gradient_ascent": "Gradient Ascent",
    "boundary_shrink": "Boundary Shrink",
    "boundary_expand": "Boundary Expanding",
}
"""The names of the paper's tables by name of the rule, selector or rival; others have their own.
`single_best` is also printed as Task Arithmetic there."""

COMPARED = "Models to compare with"
MERGED = "Task vectors of the pool, which saw only the forget set"
RIVALS = {
    "all": "Other methods that train on forget and retain set",
    "retain": "Other methods that train on the retain set",
    "forget": "Other methods that train on the forget set",
}
ADDED = "Task vectors that are added, to learn"


class Named(NamedTuple):
    """How a page calls a method.

    Args:
        label: the name of the paper's tables, or that of the recipe if the recipe gives one.
        title: the name in files and recipes.
        note: the title if it is not the label, the method if the recipe names it, its options.
    """

    label: str
    title: str
    note: str = ""


def name_of(method: Method) -> Named:
    """Return how a page calls a method.

    >>> name_of(Method(name="consensus"))
    Named(label='NegMerge', title='consensus', note='consensus')
    >>> name_of(Method(name="consensus", label="most", options={"quorum": 0.7}))
    Named(label='most', title='most', note='NegMerge, quorum = 0.7')
    """
    known = PAPER.get(method.name, method.name)
    options = [f"{name} = {json.dumps(value)}" for name, value in method.options.items()]
    if method.label is not None:
        return Named(method.label, method.label, ", ".join([known, *options]))
    rest = method.title.removeprefix(method.name).strip("-")
    label = f"{known} ({rest})" if rest else known
    notes = [*([] if label == method.title else [method.title]), *options]
    return Named(label, method.title, ", ".join(notes))


def names_of(methods: Iterable[Method]) -> dict[str, Named]:
    """The names of methods by title, and of the line of random signs in a figure."""
    signs = Named("random signs", "random signs")
    return {"coin_flips": signs} | {method.title: name_of(method) for method in methods}


def group_of(row: MethodRow) -> str:
    """The title of the group of a method: by the data that it uses, as in the paper's Table 2."""
    if row.added:
        return ADDED
    return MERGED if row.merged else RIVALS.get(row.splits, row.splits)


def groups_of(rows: Iterable[MethodRow]) -> dict[str, list[str]]:
    """The titles of methods by group, in the order of a page; their order in a group is kept."""
    found: dict[str, list[str]] = {MERGED: [], **{name: [] for name in RIVALS.values()}}
    for row in rows:
        found.setdefault(group_of(row), []).append(row.method)
    return {name: own for name, own in found.items() if own}
