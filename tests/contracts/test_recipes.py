"""Every shipped recipe is valid; mistakes in a recipe are told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from negmerge.checking import check_methods
from negmerge.criteria import criteria
from negmerge.data.datasets import datasets
from negmerge.errors import NegMergeError
from negmerge.hyperparameters import HyperParameters
from negmerge.merge.rules import rules
from negmerge.merge.select import SELECTORS
from negmerge.models.classifiers import models
from negmerge.pipeline import most_at_once
from negmerge.recipe import Clip, Data, Pool, Recipe, Search, load_recipe, shipped
from negmerge.rivals import rivals


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_whole(name):
    recipe = load_recipe(name)
    check_methods(recipe)
    assert recipe.title
    assert recipe.data.name in datasets
    if recipe.clip is None:
        assert recipe.model.name in models
    else:
        assert recipe.clip.control.name in datasets
    assert recipe.criterion in criteria
    assert all(m.name in {*rules, *SELECTORS, *rivals} for m in recipe.methods)
    assert Recipe.model_validate(yaml.safe_load(recipe.dump())) == recipe


@pytest.mark.parametrize(
    ("name", "members", "batch", "lr", "epochs"),
    [
        ("cifar10_resnet18", 27, 256, 0.05, {40, 50, 60}),
        ("cifar10_vgg16", 27, 64, 0.01, {40, 50, 60}),
        ("cub200_resnet18", 27, 64, 0.01, {5, 10, 20}),
    ],
)
def test_the_papers_pools(name, members, batch, lr, epochs):
    pool = load_recipe(name).pool.members()
    assert len(pool) == len(set(pool)) == members
    assert {(m.batch, m.lr) for m in pool} == {(batch, lr)}
    assert {m.epochs for m in pool} == epochs
    assert {m.weight_decay for m in pool} == {1e-4, 5e-5, 1e-5}
    assert {m.label_smoothing for m in pool} == {0.0, 0.05, 0.1}


def test_the_randaugment_pool():
    pool = load_recipe("cifar10_resnet18_randaugment").pool.members()
    found = [m.augment.randaugment for m in pool]
    assert [(r.n, r.m) for r in found if r] == [(1, m) for m in range(1, 6)]


def test_the_steps_of_the_original_training():
    """The learning rate falls by ten after epochs 91 and 136 of 182."""
    settings = load_recipe("cifar10_resnet18").train
    steps = 196 * 182  # batches of 256
    rates = [settings.rate(196 * epoch, steps) for epoch in (0, 90, 91, 135, 136, 181)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=" + 3000 * "[", "is not a YAML value"),
        ("methods=[{name: consensus, label: original}]", "calls something else 'original'"),
        ("methods=[{name: uniform, label: conflict}]", "calls something else 'conflict'"),
        ("methods=[{name: uniform, label: member-1}]", "calls something else 'member-1'"),
        ("data.words=cars", "data.words: a classifier needs none"),
        ("seed=-1", "seed: Input should be greater than or equal to 0"),
        ("colour=red", "colour: there is no such field"),
        ("train.lr=nan", "train.lr"),
        ("train.lr=0", "train.lr"),
        ("pool.grid={speed: [1]}", "grid.speed: no such hyper-parameter"),
        ("pool.grid={lr: []}", "grid.lr: wanted at least one value"),
        ("pool.grid={lr: [0.1, 0.1]}", "grid: a value is listed twice"),
        ("pool.grid={lr: [fast]}", "lr"),
        ("split.forget={fraction: 0.1, class: 1}", "exactly one of fraction"),
        ("split.forget={}", "exactly one of fraction"),
        ("split.forget.fraction=1.5", "fraction"),
        ("methods=[]", "methods: wanted at least one"),
        ("methods=[ties, ties]", "two have the same name"),
        ("methods=[{name: ties, label: ../x}]", "must be letters, digits"),
        (f"methods=[{{name: ties, label: {'x' * 101}}}]", "wanted at most 100 characters"),
        ("pool.keep=false", "single_best needs the members"),
        ("seed=[", "is not a YAML value"),
        ("seed", "wanted key=value"),
        ("search={criterion: oracle}\0retrain=null", "oracle needs the retrained model"),
    ],
)
def test_mistakes_are_told(change, message):
    with pytest.raises(NegMergeError) as caught:
        load_recipe("demo", change.split("\0"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["tees", "{name: ties, options: {densty: 1}}"])
def test_unknown_methods_and_options(method):
    with pytest.raises(NegMergeError, match=r"tees|densty"):
        check_methods(load_recipe("demo", [f"methods=[{method}]"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- 1", "wanted a mapping"),
        ("!!python/object/apply:os.system [ls]", "not YAML"),
        ("x" * (2 << 20), "larger than"),
    ],
)
def test_bad_files(tmp_path: Path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(NegMergeError, match=message):
        load_recipe(path)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(NegMergeError, match=r"did you mean .demo"):
        load_recipe("dmo")


def test_the_default_criterion():
    assert load_recipe("demo").criterion == "match_holdout"
    assert load_recipe("demo", ["split.forget={class: 2}"]).criterion == "keep_retain"
    assert load_recipe("demo", ["split.forget={class: 2, count: 5}"]).criterion == "match_holdout"


@pytest.mark.parametrize("pool", [None, {}, Pool(), {"grid": {"lr": [1e-4]}}])
def test_a_clip_has_the_papers_epochs_however_its_recipe_is_written(pool):
    tree = {"clip": Clip(), "data": Data(name="cars"), "search": Search(count=5)}
    recipe = Recipe.model_validate(tree if pool is None else tree | {"pool": pool})
    assert {member.epochs for member in recipe.pool.members()} == {70}
    assert (recipe.search.samples, recipe.search.count) == (5000, 5)
    own = Pool(settings=HyperParameters(epochs=3))
    assert Recipe.model_validate(tree | {"pool": own}).pool.settings.epochs == 3


@pytest.mark.parametrize(
    ("methods", "trainings"),
    [
        (["consensus"], 4),
        (["finetune", "salun"], 2),
        (["consensus", {"name": "salun", "tune": True}], 5),
        (["consensus", "finetune"], 4),
    ],
)
def test_as_many_processes_as_the_largest_stage_can_use(methods, trainings):
    pool = {"grid": {"epochs": [1, 2, 3, 4]}, "keep": True}
    tree = {"methods": methods, "pool": pool, "search": {"tries": 5}}
    assert most_at_once(Recipe.model_validate(tree)) == trainings


def test_a_title_follows_the_set_that_is_forgotten():
    assert load_recipe("clip_vit_b32").title.endswith("forgets cars")
    assert load_recipe("clip_vit_b32", ["data.name=dtd"]).title.endswith("forgets dtd")
    assert load_recipe("clip_vit_b32", ["data.name=dtd", "title=Mine"]).title == "Mine"
