"""The JSON schema of recipes, for editors: fields, types, defaults, descriptions and known names.

The schema is of draft 7, which all editors understand. It allows what a recipe may say, and in
places more: `negmerge unlearn RECIPE --dry-run` has the last word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from negmerge.extras import MissingExtraError
from negmerge.runs.methods import Method, Pool
from negmerge.runs.recipe import DEFAULT_SCENARIO, Recipe
from negmerge.scenarios.settings import scenarios
from negmerge.support.descriptions import described
from negmerge.training.hyperparameters import HyperParameters

DRAFT = "http://json-schema.org/draft-07/schema#"
Names = Callable[[], Iterable[str]]


def _methods() -> list[str]:
    from negmerge.merging.rules import rules
    from negmerge.merging.select import SELECTORS
    from negmerge.rivals import rivals

    return [*rules, *SELECTORS, *(name for name in rivals if name != "retrain")]


def _models() -> list[str]:
    from negmerge.vision.networks import models

    return [*models]


def _data_sets() -> list[str]:
    from negmerge.vision.datasets import datasets

    return [*datasets]


def _texts() -> list[str]:
    from negmerge.text.library import texts

    return [*texts]


def _criteria() -> list[str]:
    from negmerge.evaluation.criteria import criteria

    return [*criteria]


EXAMPLES: dict[tuple[str, str], Names] = {
    ("Method", "name"): _methods,
    ("Network", "name"): _models,
    ("ClipModel", "name"): lambda: ["ViT-B-32", "ViT-B-16", "ViT-L-14", "desk_clip"],
    ("LanguageModel", "name"): lambda: ["stories15m"],
    ("Data", "name"): _data_sets,
    ("Records", "name"): _texts,
    ("Search", "criterion"): _criteria,
}
"""Names that a field may have beside others, such as paths, by class and field."""
SHORT = {"Method": "name", "Records": "name"}
"""Classes that may be written as a text, which is the value of this field."""


class Schema(GenerateJsonSchema):
    """Adds the descriptions of the source, and the names of registries."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """Return the schema of a class."""
        kind: type[BaseModel] = schema["cls"]
        found = super().model_schema(schema)
        found["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
        texts = described(kind)
        for name, field in kind.model_fields.items():
            own = found.get("properties", {}).get(field.alias or name)
            if own is None:
                continue
            own.pop("title", None)
            if name in texts:
                own["description"] = texts[name]
            if (names := EXAMPLES.get((kind.__name__, name))) is not None:
                own["examples"] = _known(names)
        return found


def _known(names: Names) -> list[str]:
    """Return names; none if the library that they need is not installed."""
    try:
        return list(names())
    except MissingExtraError:
        return []


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of recipes with all scenarios that are registered.

    >>> recipe_schema()["properties"]["scenario"]["enum"]
    ['classify', 'clip', 'text']
    """
    kinds = {kind: scenarios.get(kind) for kind in scenarios if not scenarios.get(kind).in_memory}
    classes: list[Any] = [(one, "validation") for one in (Recipe, HyperParameters, *kinds.values())]
    refs, found = models_json_schema(classes, schema_generator=Schema)
    defs: dict[str, Any] = found["$defs"]

    def taken(one: type[BaseModel]) -> dict[str, Any]:
        return defs.pop(refs[one, "validation"]["$ref"].rpartition("/")[2])

    common = taken(Recipe)["properties"]
    common.pop("settings")
    common["scenario"] = {
        "enum": [*kinds],
        "default": DEFAULT_SCENARIO,
        "description": common["scenario"]["description"],
    }
    _finish_definitions(defs)
    for kind, settings in kinds.items():
        own = taken(settings)
        own["title"] = f"scenario: {kind}"
        own["description"] = settings.summary
        own["properties"] = common | own["properties"]
        own.pop("required", None)  # `data` has its own message, and a recipe may be incomplete
        defs[f"recipe_{kind}"] = own
    return _for_draft_7(
        {
            "$schema": DRAFT,
            "title": "negmerge recipe",
            "description": "The settings of a run of `negmerge unlearn`.",
            "type": "object",
            "properties": {"scenario": common["scenario"]},
            **_by_scenario(list(kinds)),
            "$defs": defs,
        }
    )


def _by_scenario(kinds: list[str]) -> dict[str, Any]:
    """Return the condition that chooses the fields; without `scenario`, a section `clip` tells."""
    chosen: dict[str, Any] = {"$ref": f"#/$defs/recipe_{DEFAULT_SCENARIO}"}
    for kind in kinds:
        if kind == DEFAULT_SCENARIO:
            continue
        says: dict[str, Any] = {
            "properties": {"scenario": {"const": kind}}, "required": ["scenario"]
        }  # fmt: skip
        if kind == "clip":
            has = {
                "required": ["clip"],
                "properties": {"clip": {"type": "object"}},
                "not": {"required": ["scenario"]},
            }
            says = {"anyOf": [says, has]}
        chosen = {"if": says, "then": {"$ref": f"#/$defs/recipe_{kind}"}, "else": chosen}
    return chosen


def _finish_definitions(defs: dict[str, Any]) -> None:
    """Add what validators accept beside the declared types."""
    for name, field in SHORT.items():
        if name in defs:
            whole = defs[name]
            text = whole["properties"][field] | {"type": "string"}
            defs[name] = {"description": whole["description"], "anyOf": [text, whole]}
    if Pool.__name__ in defs:
        fields = defs[Pool.__name__]["properties"]
        fields["grid"] = {
            "type": "object",
            "description": fields["grid"].get("description", ""),
            "properties": {
                name: {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{place}"}}
                for name, place in _grid_fields(defs, HyperParameters.__name__)
            },
            "patternProperties": {r"^own\.": {"type": "array"}},
            "additionalProperties": False,
        }
    assert Method.__name__ in defs


def _grid_fields(defs: dict[str, Any], name: str, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield the dotted fields of a section, and the place of the schema of each."""
    for field, own in defs[name]["properties"].items():
        yield f"{prefix}{field}", f"{name}/properties/{field}"
        for one in (own, *own.get("anyOf", [])):
            if inner := one.get("$ref"):
                yield from _grid_fields(defs, inner.rpartition("/")[2], f"{prefix}{field}.")


def _for_draft_7(tree: Any) -> Any:
    """Return a schema whose references stand alone: in draft 7 what is beside them is ignored."""
    if isinstance(tree, list):
        return [_for_draft_7(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    found = {key: _for_draft_7(value) for key, value in tree.items()}
    if isinstance(found.get("$ref"), str) and len(found) > 1:
        found = {"allOf": [{"$ref": found.pop("$ref")}], **found}
    return found
