"""What the settings of every scenario must hold to; a new one is tested when it is registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from negmerge.errors import NegMergeError, OptionError
from negmerge.evaluation.criteria import Criterion, criteria
from negmerge.evaluation.metrics import metrics
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import Recipe, check_recipe, load_recipe
from negmerge.runs.result import RunResult
from negmerge.scenarios.clip.settings import Clip
from negmerge.scenarios.settings import Description, ScenarioSettings, scenarios
from running import negmerge

IN_MEMORY = {"data": {"name": "own-1"}, "model": {"name": "Net", "weights": "w.safetensors"}}
LEAST: dict[str, dict[str, Any]] = {
    "clip": {"data": {"name": "mnist"}},
    "module": IN_MEMORY,
    "functions": IN_MEMORY,
    "text": {"data": {"records": "facts.jsonl"}},
}
"""The fields that a recipe must say, where it must say some."""
every = pytest.mark.parametrize("kind", list(scenarios))


def recipe_of(kind: str, **more: Any) -> Recipe:
    return Recipe.model_validate({"scenario": kind} | LEAST.get(kind, {}) | more)


@every
def test_a_scenario_says_what_it_is(kind: str):
    settings = scenarios.get(kind)
    assert issubclass(settings, ScenarioSettings)
    assert settings.kind == kind
    assert settings.summary.strip() == settings.summary != ""
    assert "\n" not in settings.summary
    assert settings.__doc__
    assert len({panel.id for panel in settings.panels}) == len(settings.panels)
    for panel in settings.panels:
        assert panel.id.isidentifier()
        assert panel.title


@every
def test_what_is_forgotten_and_what_is_kept_are_two_metrics(kind: str):
    settings = recipe_of(kind).settings
    assert settings.forget_metric != settings.retain_metric
    forget, retain = (settings.metric(n) for n in (settings.forget_metric, settings.retain_metric))
    assert (forget.name, retain.name) == (settings.forget_metric, settings.retain_metric)
    assert {forget.better, retain.better} == {"lower", "higher"}
    for name in settings.order:
        assert name in metrics
    if settings.order:
        assert {settings.forget_metric, settings.retain_metric} <= {*settings.order}


@every
def test_the_default_criterion_is_there_and_reads_what_is_measured(kind: str):
    recipe = recipe_of(kind)
    criterion = recipe.settings.criterion(recipe.criterion)
    assert isinstance(criterion, Criterion)
    assert criterion.name == recipe.criterion == recipe.settings.default_criterion
    recipe.settings.check_criterion(criterion)
    assert recipe.settings.forget_metric in criterion.reads
    assert criterion.name in criteria or kind == "functions"
    check_methods(recipe)
    zero = dict.fromkeys(criterion.reads, 50.0) | {"scale": 0.0}
    assert criterion.loss(zero, zero, None) is not None, "the original keeps what it has"


@every
def test_a_recipe_is_written_and_read_again(kind: str, tmp_path: Path):
    recipe = recipe_of(kind, title="Again – λ", seed=4, methods=["ties"], search={"count": 7})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.dump())
    again = load_recipe(path)
    assert again == recipe
    assert again.dump() == recipe.dump()
    tree = yaml.safe_load(recipe.dump())
    assert tree["scenario"] == kind
    left_out = {"settings", "executor", "threads"}  # where it is computed; only if it is set
    left_out |= {"evidence", "shadows", "track"}  # only if they are not the defaults
    assert tree.keys() == {*Recipe.model_fields} - left_out | {*scenarios.get(kind).model_fields}
    assert Recipe.model_validate(recipe.model_dump()) == recipe, "as Python's own values"
    assert load_recipe(path, ["search.count=9"]).search.count == 9


@every
def test_a_field_of_nobody_is_one_line(kind: str):
    for name, value in (("colour", "red"), ("settings", "red"), ("settings", {"seed": 1})):
        with pytest.raises(NegMergeError, match=f"{name}: there is no such field") as caught:
            check_recipe({"scenario": kind} | LEAST.get(kind, {}) | {name: value}, "a recipe")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="settings: wanted the fields of the scenario"):
        recipe_of(kind, settings="red")


@every
def test_what_was_forgotten_is_told_in_words(kind: str):
    sizes = {"forget": 1000, "retain": 9000, "train": 1000}
    about = Description(
        data="some-data", sizes=sizes, chosen_on=sizes, control="others", model={"name": "a model"}
    )
    told = recipe_of(kind).settings.forgotten(about)
    assert told.strip() == told != ""
    assert "None" not in told


@pytest.mark.parametrize("kind", [k for k in scenarios if LEAST.get(k) is IN_MEMORY])
def test_a_scenario_in_memory_cannot_be_begun_from_its_recipe(kind: str, tmp_path: Path):
    recipe = recipe_of(kind, title="In memory")
    with pytest.raises(
        OptionError, match=f"scenario {kind}: its model and data are in memory only"
    ):
        recipe.make_scenario()
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    _, err = negmerge(tmp_path, "unlearn", "recipe.yaml", "--out", "run", code=2)
    assert err.startswith(f"error: scenario {kind}: its model and data are in memory only")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["clasify", "", "os.system", "clip.settings"])
def test_an_unknown_scenario_lists_the_known_ones(name: str):
    with pytest.raises((OptionError, ValueError), match=r"unknown scenario .*classify, clip"):
        Recipe.model_validate({"scenario": name})


@pytest.mark.parametrize("name", [5, ["clip"], {"clip": 1}])
def test_a_scenario_is_a_name(name: Any):
    with pytest.raises(ValueError, match="scenario: wanted a name"):
        Recipe.model_validate({"scenario": name})


@pytest.mark.parametrize(
    ("clip", "freeze"),
    [
        ({}, "attention"),
        ({"linear": False}, "attention"),
        ({"linear": True}, "nothing"),
        ({"linear": True, "freeze": None}, "nothing"),
        ({"linear": True, "freeze": "attention"}, "attention"),
        ({"linear": False, "freeze": "nothing"}, "nothing"),
    ],
)
def test_a_linearised_clip_freezes_nothing_unless_it_is_told_to(clip: Any, freeze: str):
    recipe = recipe_of("clip", clip=clip)
    assert recipe.settings.clip.freeze == freeze
    assert Recipe.model_validate(yaml.safe_load(recipe.dump())).settings.clip.freeze == freeze
    assert recipe_of("clip", clip=Clip(**clip)).settings.clip.freeze == freeze


def test_a_description_may_hold_more_than_is_listed():
    """A scenario of another package describes its data in fields of its own."""
    about = Description.model_validate({"data": "x", "sizes": {}, "chosen_on": {}, "tokens": 7})
    assert about.model_dump()["tokens"] == 7
    assert RunResult.model_fields["splits"].annotation is Description
