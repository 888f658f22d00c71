"""Write docs/recipe.md: every field of a recipe, with its default and its description.

    python scripts/recipe_page.py

The descriptions are those of the source: the text under a field, or the `Args:` of its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.scenarios.settings import scenarios
from negmerge.support.descriptions import described

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
INTRODUCTION = """# The fields of a recipe

A recipe is a YAML file; `negmerge list recipes` shows those that come with the package, and the
`recipe.yaml` of any run has every field with its value. `--set KEY=VALUE` changes a field by its
dotted name, such as `--set pool.settings.lr=0.01`; the value is YAML. This page is made from the
source by `scripts/recipe_page.py`.
"""
LISTED_ELSEWHERE = {
    "pool.settings": "the hyper-parameters that all members share: the fields of a training",
    "train": "how the original and the retrained model are trained: the fields of a training",
    "clip.control": "the data set whose accuracy is kept, called `retain` in scores: the fields of "
    "`data`; `name` is `imagenet` by default",
}
"""Fields whose own fields stand in another table."""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that has fields of its own."""
    kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def rows(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, default and description of every field."""
    texts = described(kind)
    for name, field in kind.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if key == "settings":
            continue  # the fields of the scenario
        text = texts.get(name, "")
        section = section_of(field)
        if key in LISTED_ELSEWHERE:
            yield key, "", LISTED_ELSEWHERE[key]
        elif section is None or key == "methods":
            yield key, default(field), "; ".join(filter(None, (text, choices(field))))
        else:
            summary = (inspect.getdoc(section) or "").partition("\n")[0].rstrip(".")
            empty = "`null`" if field.get_default(call_default_factory=True) is None else ""
            yield key, empty, text or summary
            yield from rows(section, f"{key}.")


def choices(field: FieldInfo) -> str:
    """Return the values of a field that has few of them; "" for others."""
    kinds = [field.annotation, *get_args(field.annotation)]
    found = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return " or ".join(f"`{value}`" for value in found)


def default(field: FieldInfo) -> str:
    """Return the default of a field as YAML."""
    if field.is_required():
        return "must be given"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value and isinstance(value[0], Method):
        value = [method.name for method in value]
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return f"`{text.removesuffix('...').strip()}`"


def table(found: Iterator[tuple[str, str, str]]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for row in found:
        name, usual, text = (cell.replace("|", "\\|") for cell in row)
        text = text.rstrip(".").replace("None", "`null`")
        lines.append(f"| `{name}` | {usual} | {text[:1].upper()}{text[1:]} |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of the page."""
    from negmerge.training.hyperparameters import HyperParameters

    parts = [INTRODUCTION, "## Every recipe\n", table(rows(Recipe))]
    for name in scenarios:
        kind = scenarios.get(name)
        if not kind.in_memory:
            summary = f"{kind.summary[0].upper()}{kind.summary[1:]}.\n"
            parts += [f"\n## `scenario: {name}`\n", summary]
            parts.append(table(rows(kind)))
    parts += ["\n## A training: `train`, `pool.settings`, and the keys of `pool.grid`\n"]
    parts += [table(rows(HyperParameters)), "\n## A method: an entry of `methods`\n"]
    parts += [table(rows(Method))]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
