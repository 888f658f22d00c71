"""Every shipped recipe is valid; mistakes in a recipe are told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from negmerge.errors import NegMergeError
from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.scales import Search
from negmerge.merging.rules import rules
from negmerge.merging.select import SELECTORS
from negmerge.rivals import rivals
from negmerge.runs.checks import check_measured, check_methods
from negmerge.runs.executors.choose import largest_stage
from negmerge.runs.methods import Pool
from negmerge.runs.recipe import Recipe, check_recipe, load_recipe, shipped
from negmerge.scenarios.clip.settings import Clip
from negmerge.text.library import texts
from negmerge.training.hyperparameters import HyperParameters
from negmerge.vision.datasets import datasets
from negmerge.vision.networks import models
from negmerge.vision.settings import Data


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_whole(name):
    recipe = load_recipe(name)
    check_methods(recipe)
    assert recipe.title
    if recipe.scenario == "text":
        sets = recipe.settings.data_names()
        assert all(one in texts or one.count("/") == 1 for one in sets)  # or an id of the Hub
        assert recipe.settings.forget_metric in recipe.settings.order
    elif recipe.scenario == "classify":
        assert recipe.settings.data.name in datasets
        assert recipe.settings.model.name in models
    else:
        assert recipe.settings.data.name in datasets
        assert recipe.scenario == "clip"
        assert recipe.settings.clip.control.name in datasets
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
    settings = load_recipe("cifar10_resnet18").settings.train
    steps = 196 * 182  # batches of 256
    rates = [settings.rate(196 * epoch, steps) for epoch in (0, 90, 91, 135, 136, 181)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=" + 3000 * "[", "is not a YAML value"),
        ("methods=[{name: consensus, label: original}]", "the name 'original' is reserved"),
        ("methods=[{name: uniform, label: conflict}]", "the name 'conflict' is reserved"),
        ("methods=[{name: uniform, label: member-1}]", "the name 'member-1' is reserved"),
        ("data.words=cars", "data.words: only CLIP models have prompts; remove this field"),
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
    ],
)
def test_mistakes_are_told(change, message):
    with pytest.raises(NegMergeError) as caught:
        load_recipe("demo", [change])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["methods=[tees]"], "unknown method 'tees'; did you mean 'ties'"),
        (["methods=[{name: ties, options: {densty: 1}}]"], "densty"),
        (["search.criterion=guess"], "unknown criterion 'guess'"),
        (
            ["search.criterion=oracle", "retrain=null"],
            "search.criterion: oracle needs the retrained model, but retrain is null",
        ),
    ],
)
def test_what_does_not_fit_together_is_told_before_any_work(changes, message):
    with pytest.raises(NegMergeError) as caught:
        check_methods(load_recipe("demo", changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_criterion_of_other_metrics_is_told_before_any_work():
    recipe = load_recipe("demo", ["search.criterion=keep_perplexity"])
    with pytest.raises(NegMergeError) as caught:
        check_measured(recipe, recipe.make_scenario())
    assert str(caught.value).startswith(
        "search.criterion: keep_perplexity reads probability_forget, which scenario classify does "
        "not"
    )
    usual = load_recipe("demo")
    check_measured(usual, usual.make_scenario())


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
    assert {member.epochs for member in recipe.pool.members()} == {35}
    assert (recipe.search.samples, recipe.search.count) == (5000, 5)
    own = Pool(settings=HyperParameters(epochs=3))
    assert Recipe.model_validate(tree | {"pool": own}).pool.settings.epochs == 3


MIXED = [None, {"n": 1, "m": 5}]


@pytest.mark.parametrize(
    ("pool", "epochs"),
    [
        ({"grid": {"augment.randaugment.m": [1, 2]}}, 70),
        ({"grid": {"augment.randaugment": [{"n": 1, "m": 5}]}}, 70),
        ({"grid": {"augment": [{"flip": True}]}}, 35),
        ({"grid": {"augment": [{"randaugment": {"m": 2}}]}}, 70),
        ({"settings": {"augment": {"randaugment": {"m": 2}}}}, 70),
        ({"settings": {"augment": {"randaugment": {"m": 2}}}, "grid": {"augment": [{}]}}, 35),
        ({"settings": {"epochs": 4}, "grid": {"augment.randaugment": MIXED}}, 4),
    ],
)
def test_the_epochs_of_a_clip_follow_its_augmentation(pool, epochs):
    recipe = Recipe.model_validate({"clip": {}, "data": {"name": "cars"}, "pool": pool})
    assert {member.epochs for member in recipe.pool.members()} == {epochs}


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"grid": {"augment.randaugment": MIXED}}, "70 and 35 epochs; set pool.settings.epochs"),
        ({"grid": {"augment.randaugment.m": [11]}}, "m: got 11, wanted at most 10 for timm"),
        ({"settings": {"augment": {"crop": 4}}}, "augment.crop: got 4, but CLIP members crop"),
    ],
)
def test_what_a_clip_member_cannot_have_is_told(pool, message):
    tree = {"clip": {}, "data": {"name": "cars"}, "pool": pool}
    with pytest.raises(NegMergeError) as caught:
        check_recipe(tree, "a recipe")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchvisions_magnitudes_go_further():
    own = ["clip.augmentation=torchvision", "pool.grid={augment.randaugment.m: [30]}"]
    assert load_recipe("clip_vit_b32", own).pool.members()[0].augment.randaugment.m == 30


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
    assert largest_stage(Recipe.model_validate(tree)) == trainings


def test_a_title_follows_the_set_that_is_forgotten():
    assert load_recipe("clip_vit_b32").title.endswith("forgets cars")
    assert load_recipe("clip_vit_b32", ["data.name=dtd"]).title.endswith("forgets dtd")
    assert load_recipe("clip_vit_b32", ["data.name=dtd", "title=Mine"]).title == "Mine"
