"""The listings of `negmerge list`: registered names with a summary, as data and as tables."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from negmerge.support.terminal import escape_markup

if TYPE_CHECKING:
    from rich.console import RenderableType

    from negmerge.registry import Registry

Entry = dict[str, Any]
Table = dict[str, Entry]


def registered(place: str, describe: Callable[[Any], Entry]) -> Callable[[], Table]:
    """A function that lists a registry; entries of plug-ins also have the file of the plug-in.

    Args:
        place: module and name of the registry, which is imported by the function.
        describe: returns the columns of an entry; the first is `summary`.
    """

    def table() -> Table:
        module, _, name = place.rpartition(".")
        registry: Registry[Any] = getattr(import_module(module), name)
        found: Table = {}
        for name in registry:
            source = registry.source(name)
            found[name] = describe(registry.get(name)) | ({"plugin": source} if source else {})
        return found

    return table


def fields(*names: str, summary: str = "summary") -> Callable[[Any], Entry]:
    """A function from an entry to its columns: the attribute with the summary, and others."""
    return lambda entry: {
        "summary": getattr(entry, summary),
        **{name: getattr(entry, name) for name in names},
    }


def _rule(rule: Any) -> Entry:
    from negmerge.merging.rules import options_of, summary

    options = {
        k: {"takes": takes, "default": usual} for k, (takes, usual) in options_of(rule).items()
    }
    return {"summary": summary(rule), "paper": rule.paper, "options": options}


def _rival(rival: Any) -> Entry:
    settings = {"epochs": rival.settings.epochs, "lr": rival.settings.lr}
    options = {k: v for k, v in settings.items() if k in rival.accepts} | rival.defaults
    return {
        "summary": rival.summary,
        "paper": rival.paper,
        "splits": rival.splits,
        "models": "classifiers" if rival.texts is None else "classifiers and language models",
        "options": {k: {"takes": type(v).__name__, "default": v} for k, v in options.items()},
        "tuned": ", ".join(f"{k} {r.low:g} … {r.high:g}" for k, r in rival.search.items()),
    }


def _model(make: Any) -> Entry:
    return {"summary": (make.__doc__ or "").partition("\n")[0]}


def _data_set(source: Any) -> Entry:
    found = {
        "summary": source.summary,
        "hub": source.hub,
        "config": source.config,
        "columns": f"{source.image}, {source.label}",
        "splits": f"{source.train}, {source.test}",
        "size": source.size,
        "licence": source.licence,
    }
    return found | {"checked": source.checked or "unchecked"}


def selectors() -> Table:
    """Ways to choose members of a pool by their score."""
    from negmerge.merging.select import SELECTORS

    return {name: {"summary": summary} for name, summary in SELECTORS.items()}


def models() -> Table:
    """Networks, the language model of this package, and examples of CLIP models."""
    others = {
        "stories15m": "The small language model of this package (scenario text).",
        "desk_clip": "The small CLIP of this package, for computers without a GPU (section clip).",
        "ViT-B-32": "A CLIP; any architecture of open_clip or a folder also works (section clip).",
    }
    found = registered("negmerge.vision.networks.models", _model)()
    return found | {name: {"summary": summary} for name, summary in others.items()}


def recipes() -> Table:
    """Recipes of this package."""
    from negmerge.runs.recipe import load_recipe, shipped

    found: Table = {}
    for name in shipped():
        recipe = load_recipe(name)
        found[name] = {"summary": recipe.title}
        for part in ("data", "model"):  # some scenarios have neither
            found[name][part] = getattr(getattr(recipe.settings, part, None), "name", None)
        found[name]["members"] = len(recipe.pool.members())
    return found


def tables() -> Table:
    """Tables and figures of the paper, with the requirements of each."""
    from negmerge.paper.experiments import estimates, experiments, published

    found: Table = {}
    for name, entry in experiments().items():
        recipes = ", ".join(dict.fromkeys(part.recipe for part in entry.paper))
        desk_recipes = ", ".join(dict.fromkeys(part.recipe for part in entry.desk))
        data, desk_data = ", ".join(entry.data("paper")), ", ".join(entry.data("desk"))
        runs, takes = len(entry.runs("paper")) * entry.seeds, estimates()[name]
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
    "rules": registered("negmerge.merging.rules.rules", _rule),
    "selectors": selectors,
    "rivals": registered("negmerge.rivals.rivals", _rival),
    "metrics": registered(
        "negmerge.evaluation.metrics.metrics", fields("unit", "better", "in_gap", summary="label")
    ),
    "evidence": registered(
        "negmerge.evidence.registry.forgetting_tests", fields("tier", summary="title")
    ),
    "criteria": registered("negmerge.evaluation.criteria.criteria", fields("uses_reported_data")),
    "scenarios": registered("negmerge.scenarios.settings.scenarios", fields()),
    "datasets": registered("negmerge.vision.datasets.datasets", _data_set),
    "texts": registered("negmerge.text.library.texts", _model),
    "models": models,
    "recipes": recipes,
    "tables": tables,
}
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(KINDS)]

COLUMNS = {
    "tables": ("summary", "needs", "on_a_desk"),
    "datasets": ("summary", "hub", "size", "licence", "checked"),
}
"""The columns in the terminal of listings that have too many."""


def listing_table(kind: str, found: Table) -> RenderableType:
    """A listing as a table for the terminal."""
    from rich import table

    every = [field for field in next(iter(found.values())) if field not in ("paper", "plugin")]
    fields = COLUMNS.get(kind, every)
    shown = table.Table("name", *(f.replace("_", " ") for f in fields), title=kind)
    for name, entry in found.items():
        cells = [_cell(entry[field]) for field in fields]
        for about in ("paper", "plugin"):
            if entry.get(about):
                cells[0] += f"\n[dim]{escape_markup(entry[about])}[/]"
        shown.add_row(escape_markup(name), *cells, end_section=True)
    shown.columns[0].no_wrap = True
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        lines = [f"{k}={v['takes']} ({str(v['default']).lower()})" for k, v in value.items()]
    else:
        lines = "" if value is None else str(value).split("\n")
    return "\n".join(map(escape_markup, lines))
