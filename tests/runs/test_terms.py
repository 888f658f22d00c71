"""Patterns in a recipe: they reach every merge of a run, and runs without them keep their ids."""

from __future__ import annotations

import pytest

from negmerge.errors import OptionError
from negmerge.runs.recipe import Recipe, check_recipe, load_recipe
from negmerge.runs.terms import Terms


def test_a_recipe_without_patterns_is_as_before():
    recipe = load_recipe("demo")
    assert "include" not in recipe.dump()
    assert "exclude" not in recipe.dump()
    assert recipe.terms.content() == recipe.buffers == "keep"


def test_a_recipe_with_patterns():
    recipe = load_recipe("demo", ["pool.exclude=['*.bias']"])
    assert recipe.terms == Terms("keep", (), ("*.bias",))
    assert recipe.terms.content() != Recipe().terms.content()
    assert load_recipe("demo").pool.exclude == ()
    assert "exclude:\n  - '*.bias'" in recipe.dump()


def test_an_empty_pattern():
    with pytest.raises(OptionError, match="exclude '': wanted a pattern"):
        check_recipe({"pool": {"exclude": [""]}}, "recipe")
