"""The JSON schema of recipes: valid itself, and in agreement with what a recipe accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from negmerge.errors import NegMergeError
from negmerge.runs.recipe import RECIPES, check_recipe, load_recipe, shipped
from negmerge.runs.schema import recipe_schema
from running import negmerge_here

FREE = ("options", "own", "grid")
"""Mappings whose keys are checked elsewhere, or by nobody."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


@pytest.fixture(scope="module")
def validator(schema) -> Draft7Validator:
    return Draft7Validator(schema)


def tree_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


def test_the_schema_is_valid_and_always_the_same(schema, tmp_path):
    Draft7Validator.check_schema(schema)
    printed, _ = negmerge_here(tmp_path, "schema")
    out, _ = negmerge_here(tmp_path, "schema", "-o", "a.json")
    assert "# yaml-language-server: $schema=a.json" in out
    assert (
        (tmp_path / "a.json").read_text()
        == printed
        == (json.dumps(schema, indent=1, ensure_ascii=False) + "\n")
    )


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_valid(name, validator):
    assert [error.message for error in validator.iter_errors(tree_of(name))] == []
    whole = yaml.safe_load(load_recipe(name).dump())  # as a run records it
    assert [error.message for error in validator.iter_errors(whole)] == []


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all mappings in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    if isinstance(tree, dict) and not any(part in FREE for part in path):
        yield path
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("name", ["demo", "demo_text", "clip_vit_b32", "clip_members"])
def test_an_unknown_field_is_refused_wherever_a_recipe_refuses_it(name, validator):
    found = [*places(tree_of(name))]
    assert len(found) > 5
    for path in found:
        tree = deepcopy(tree_of(name))
        inner: Any = tree
        for part in path:
            inner = inner[part]
        inner["colour"] = "red"
        with pytest.raises(NegMergeError, match="colour"):
            check_recipe(tree, "here")
        assert not validator.is_valid(tree), path


@pytest.mark.parametrize(
    ("name", "change", "valid"),
    [
        ("demo", {"seed": -1}, False),
        ("demo", {"seed": "three"}, False),
        ("demo", {"buffers": "kep"}, False),
        ("demo", {"scenario": "clasify"}, False),
        ("demo", {"scenario": "classify"}, True),
        ("demo", {"methods": ["consensus", {"name": "ties", "label": "t"}]}, True),
        ("demo", {"methods": [3]}, False),
        ("demo", {"methods": [{"label": "t"}]}, False),
        ("demo", {"retrain": None}, True),
        ("demo", {"pool": {"grid": {"lr": [0.1, 0.2], "augment.flip": [True]}}}, True),
        ("demo", {"pool": {"grid": {"speed": [0.1]}}}, False),
        ("demo", {"pool": {"grid": {"lr": ["fast"]}}}, False),
        ("demo", {"pool": {"grid": {"own.mine": ["fast"]}}}, True),
        ("demo", {"split": {"forget": {"class": "dog"}}}, True),
        ("demo", {"harness": {"tasks": ["a"]}}, False),
        ("demo_text", {"data": {"records": "persons"}}, True),
        ("demo_text", {"data": {"records": {"nam": "persons"}}}, False),
        ("demo_text", {"lora": {"rank": 8}}, True),
        ("demo_text", {"gradcam": {"classes": []}}, False),
    ],
)
def test_the_schema_agrees_with_the_recipe(name, change, valid, validator):
    tree = tree_of(name) | change
    assert validator.is_valid(tree) is valid
    try:
        check_recipe(tree, "here")
    except NegMergeError:
        assert not valid
    else:
        assert valid


def test_fields_have_descriptions_and_known_names(schema):
    defs = schema["$defs"]
    for kind in ("classify", "clip", "text"):
        fields = defs[f"recipe_{kind}"]["properties"]
        assert {"title", "seed", "pool", "methods"} <= fields.keys()
        assert fields["seed"]["description"] == "The seed of the splits and of all trainings"
    method, _ = defs["Method"]["anyOf"]
    assert {"consensus", "single_best", "salun"} <= {*method["examples"]}
    assert "cifar10" in defs["Data"]["properties"]["name"]["examples"]
    assert "keep_retain" in defs["Search"]["properties"]["criterion"]["examples"]
    described = [
        field
        for definition in defs.values()
        for field in definition.get("properties", {}).values()
        if "description" in field
    ]
    assert len(described) > 100
