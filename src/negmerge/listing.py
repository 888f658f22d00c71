"""What can be chosen by name, as data: for `negmerge list`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = dict[str, dict[str, Any]]


def rules() -> Table:
    """Merge rules with their options."""
    from negmerge.merge.rules import choices, rules, summary

    return {
        name: {
            "summary": summary(rules.get(name)),
            "paper": rules.get(name).paper,
            "options": {
                key: {"takes": takes, "default": default}
                for key, (takes, default) in choices(rules.get(name)).items()
            },
        }
        for name in rules
    }


def selectors() -> Table:
    """Choices among members, which need a score."""
    from negmerge.merge.select import SELECTORS

    return {name: {"summary": summary} for name, summary in SELECTORS.items()}


def rivals() -> Table:
    """Methods of others, with the data they use, their options and what tuning tries."""
    from negmerge.rivals import rivals

    found: Table = {}
    for name in rivals:
        rival = rivals.get(name)
        settings = {"epochs": rival.settings.epochs, "lr": rival.settings.lr}
        shown = {k: v for k, v in settings.items() if k in rival.accepts} | rival.defaults
        found[name] = {
            "summary": rival.summary,
            "paper": rival.paper,
            "splits": rival.splits,
            "options": {
                key: {"takes": type(default).__name__, "default": default}
                for key, default in shown.items()
            },
            "tuned": ", ".join(f"{k} {r.low:g} … {r.high:g}" for k, r in rival.search.items()),
        }
    return found


def criteria() -> Table:
    """Ways to choose λ."""
    from negmerge.criteria import criteria

    return {
        name: {"summary": criteria.get(name).summary, "looks": criteria.get(name).looks}
        for name in criteria
    }


def datasets() -> Table:
    """Named data sets."""
    from negmerge.data.datasets import datasets

    return {
        name: {
            "summary": datasets.get(name).summary,
            "hub": datasets.get(name).hub,
            "size": datasets.get(name).size,
            "licence": datasets.get(name).licence,
        }
        for name in datasets
    }


def models() -> Table:
    """Named networks."""
    from negmerge.models.classifiers import models

    found = {name: {"summary": (models.get(name).__doc__ or "").splitlines()[0]} for name in models}
    clips = {
        "desk_clip": "The small CLIP of this package, for desks without a GPU (section clip).",
        "ViT-B-32": "A CLIP, as are all architectures of open_clip and folders (section clip).",
    }
    return found | {name: {"summary": summary} for name, summary in clips.items()}


def recipes() -> Table:
    """Shipped recipes."""
    from negmerge.recipe import load_recipe, shipped

    found: Table = {}
    for name in shipped():
        recipe = load_recipe(name)
        found[name] = {
            "summary": recipe.title,
            "data": recipe.data.name,
            "model": recipe.model.name,
            "members": len(recipe.pool.members()),
        }
    return found


def tables() -> Table:
    """Tables and figures of the paper, and what each needs."""
    from negmerge.reproduction.experiments import estimates, experiments, published

    found: Table = {}
    for name, entry in experiments().items():
        recipes = ", ".join(dict.fromkeys(part.recipe for part in entry.paper))
        desk_recipes = ", ".join(dict.fromkeys(part.recipe for part in entry.desk))
        data, desk_data = ", ".join(entry.data("paper")), ", ".join(entry.data("desk"))
        runs, takes = len(entry.parts("paper")) * entry.seeds, estimates()[name]
        found[name] = {
            "summary": published()[name]["caption"],
            "needs": f"{data}; {takes['hours']:,.0f} GPU-hours, {takes['memory']:.0f} GB of GPU "
            f"memory, {takes['disk']:,.0f} GB of disk\nruns: {runs} ({recipes})",
            "on_a_desk": f"{desk_data}; {entry.smaller()}\n({desk_recipes})",
            "recipes": recipes,
            "runs": runs,
            "data": data,
            **takes,
            "desk_recipes": desk_recipes,
            "desk_data": desk_data,
            "stands_in": entry.smaller(),
        }
    return found


KINDS: dict[str, Callable[[], Table]] = {
    "rules": rules,
    "selectors": selectors,
    "rivals": rivals,
    "criteria": criteria,
    "datasets": datasets,
    "models": models,
    "recipes": recipes,
    "tables": tables,
}

SHOWN = {"tables": ("summary", "needs", "on_a_desk")}
"""Columns for the terminal, where not all fit."""
