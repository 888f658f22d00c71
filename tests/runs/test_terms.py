"""Patterns in a recipe: they reach every merge of a run, and runs without them keep their ids."""

from __future__ import annotations

import pytest

from negmerge.errors import OptionError
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import Recipe, check_recipe, load_recipe
from negmerge.runs.terms import Terms
from negmerge.vectors.task_vector import TaskVector
from toys import SMALL, run_toy, toy_scenario


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


def test_a_recipe_with_members_of_one_norm():
    recipe = load_recipe("demo", ["pool.equalise=true"])
    assert recipe.terms == Terms("keep", equalise=True)
    keys = [
        Terms(b, (), e, q).content()
        for b in ("keep", "merge")
        for e in ((), ("a",))
        for q in (0, 1)
    ]
    assert len({str(key) for key in keys}) == len(keys)
    assert "equalise: true" in recipe.dump()
    assert "equalise" not in load_recipe("demo").dump()
    assert load_recipe("demo").terms.content() == "keep"


def test_every_merge_of_a_run_scales_its_members(tmp_path):
    pool = SMALL["pool"] | {"equalise": True}
    with toy_scenario():
        run = run_toy(tmp_path / "run", pool=pool, methods=["consensus", "soft", "shrink"])
    for name in ("consensus", "soft", "shrink"):
        origin = TaskVector.load(run.patch(name)).origin
        assert origin.rule == name
        assert len(origin.factors) == 3
        assert min(origin.factors) < 1 < max(origin.factors)


def test_members_of_one_norm_are_needed_at_once():
    with pytest.raises(
        OptionError, match=r"pool: equalise: needs the norms of all members .* keep"
    ):
        check_recipe({"pool": {"equalise": True, "keep": False}}, "recipe")


@pytest.mark.parametrize("changes", [{}, {"subset": {"count": 1}}])
def test_a_rule_whose_pool_is_too_small_is_refused_before_training(changes):
    """The demo has more members than one; a subset of one is too small for a spread."""
    recipe = check_recipe({"methods": [{"name": "shrink", **changes}]}, "recipe")
    assert len(recipe.pool.members()) == 1 or changes
    with pytest.raises(
        OptionError, match="rule 'shrink': the pool has 1 member, wanted at least 2"
    ):
        check_methods(recipe)


def test_an_empty_pattern():
    with pytest.raises(OptionError, match="exclude '': wanted a pattern"):
        check_recipe({"pool": {"exclude": [""]}}, "recipe")
