"""Shadow models: their data, their recipe, what is refused, and a run that was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import negmerge as nm
from negmerge.errors import NegMergeError
from negmerge.evaluation.attacks.shadow_game import Role
from negmerge.evidence.shadow_margins import recorded_id
from negmerge.runs.executors.choose import largest_stage
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.shadows import (
    SAMPLE,
    Counted,
    ShadowModel,
    check_shadows,
    feeds_of,
    plan_shadows,
    recipe_of_shadows,
    samples_of,
    shadow_note,
    targets_of,
)
from negmerge.runs.store import Run
from negmerge.training.weights import save_model
from running import negmerge, negmerge_here, start

TINY: dict[str, Any] = {
    "data": {"name": "fashion_small", "limit": {"train": 300, "test": 200}},
    "split": {"forget": {"fraction": 0.2}, "validation": 0.1},
    "train": {"epochs": 3, "batch": 32, "lr": 0.1, "augment": {"crop": 0, "flip": False}},
    "pool": {
        "settings": {"batch": 16, "lr": 0.05, "augment": {"crop": 0, "flip": False}},
        "grid": {"epochs": [1, 2], "weight_decay": [1e-4, 1e-5]},
    },
    "methods": ["consensus"],
    "search": {"stop": 1.0, "count": 3},
    "evidence": "full",
    "shadows": {"count": 12, "members": 2},
}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(TINY)


@pytest.fixture(scope="module")
def scenario(recipe):
    return recipe.make_scenario()


def test_a_shadow_divides_the_forget_set(recipe, scenario):
    whole, parts = scenario.splits, scenario.parts
    for step in plan_shadows(recipe, scenario, Run("run")):
        own, roles = step.scenario(scenario), np.array(step.roles)
        targets = whole.forget[np.array(step.targets)]
        assert own.splits.forget.tolist() == targets[roles == Role.UNLEARNED].tolist()
        assert {*own.splits.retain} == {*whole.retain, *targets[roles == Role.IN]}
        seen = {*own.splits.train.tolist()}
        assert seen.isdisjoint(targets[roles == Role.OUT].tolist())
        assert {*own.splits.forget}.isdisjoint(own.splits.retain)
        # λ is chosen on the samples of the run, and nothing that is reported chooses it.
        assert own.parts.choose["retain"] is parts.choose["retain"]
        assert {*own.parts.choose["forget"]} <= {*own.splits.forget}
        assert {*own.parts.choose["retain"]}.isdisjoint(parts.report["retain"])
        assert own.splits.fingerprint != whole.fingerprint
        assert own.images is scenario.images
        assert len(own.train_set("retain")) == len(own.splits.retain)
    assert scenario.splits is whole


def test_each_shadow_has_a_key_and_every_target_each_role(recipe, scenario):
    steps = plan_shadows(recipe, scenario, Run("run"))
    assert len({step.key for step in steps}) == len(steps) == 12
    roles = np.array([step.roles for step in steps])
    for role in Role:
        assert ((roles == role).sum(0) == 4).all()
    again = plan_shadows(recipe, scenario, Run("run"))
    assert [step.key for step in again] == [step.key for step in steps]
    title = recipe.model_copy(update={"title": "other", "workers": 1})
    assert plan_shadows(title, scenario, Run("run"))[0].key == steps[0].key
    strong = recipe.model_copy(update={"search": recipe.search.model_copy(update={"count": 5})})
    assert plan_shadows(strong, scenario, Run("run"))[0].key != steps[0].key


def test_a_shadow_recalibrates_as_the_run_does(tmp_path):
    """The attack must meet the model that the run makes, with its statistics of BatchNorm."""
    recipe = Recipe.model_validate(TINY | {"buffers": "recalibrate"})
    scenario = recipe.make_scenario()
    base, tuned, patch = (tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "tau"))
    save_model(base, scenario.model(seed=0), {})
    save_model(tuned, scenario.model(seed=1), {})
    nm.merge(base, [tuned], "uniform").save(patch)

    def statistics(scale: float) -> list[torch.Tensor]:
        with ShadowModel(base, patch, scale).network(scenario) as network:
            return [v.clone() for k, v in network.state_dict().items() if "running_mean" in k]

    assert not all(map(torch.equal, statistics(0.5), statistics(0.0)))
    kept = recipe.model_copy(update={"buffers": "keep"})
    keys = {plan_shadows(one, scenario, Run("run"))[0].key for one in (recipe, kept)}
    assert len(keys) == 2


def test_the_recipe_of_a_shadow_has_the_first_method_and_few_members():
    tree = TINY | {"methods": ["ties", "consensus"]}
    own = recipe_of_shadows(Recipe.model_validate(tree))
    assert [method.title for method in own.methods] == ["ties"]
    assert len(own.pool.members()) == 2
    subset = {"name": "ties", "subset": {"count": 3}}
    deleted = Recipe.model_validate(tree | {"methods": ["uniform"], "pool": {"keep": False}})
    assert recipe_of_shadows(deleted).pool.keep
    assert (
        recipe_of_shadows(Recipe.model_validate(tree | {"methods": [subset]})).methods[0].subset
        is None
    )
    chosen = Recipe.model_validate(
        tree | {"pool": TINY["pool"] | {"subset": {"count": 3, "seed": 5}}}
    )
    own_members = recipe_of_shadows(chosen).pool.members()
    assert len(own_members) == 2
    assert all(member in chosen.pool.members() for member in own_members)


def test_what_is_observed_is_the_same_for_all_shadows(recipe, scenario):
    feeds = feeds_of(scenario, targets_of(recipe, scenario))
    assert {name: len(feed) for name, feed in feeds.items()} == {
        "targets": len(scenario.splits.forget),
        "retain": min(SAMPLE, len(scenario.parts.report["retain"])),
        "test": min(SAMPLE, len(scenario.parts.report["test"])),
    }
    half = recipe.model_copy(
        update={"shadows": recipe.shadows.model_copy(update={"fraction": 0.6})}
    )
    some = targets_of(half, scenario)
    assert len(some) == round(0.6 * len(scenario.splits.forget)) == len({*some})


def test_the_cost_is_announced(recipe, scenario):
    text, facts = shadow_note(recipe, scenario)
    assert text.startswith("evidence full: 12 shadows, each trains an original, a retrained model")
    assert "a pool of 2" in text
    own = plan_shadows(recipe, scenario, Run("run"))[0].scenario(scenario)
    forget, retain = len(own.splits.forget), len(own.splits.retain)
    (first, second) = recipe_of_shadows(recipe).pool.members()
    trained = 3 * (forget + 2 * retain) + (first.epochs + second.epochs) * forget
    measured = 3 * own.size("choose") + own.size("report")
    assert samples_of(recipe_of_shadows(recipe), own) == trained + measured
    assert facts["samples"] == pytest.approx(12 * (trained + measured), rel=0.1)
    assert largest_stage(recipe) == 12


def test_progress_counts_samples_up_to_what_was_announced():
    counts: list[int] = []
    progress = Counted(10, counts.append)
    progress.stage("training", 4, "samples")
    progress.advance(4)
    progress.stage("merging", 99, "bytes")
    progress.advance(99)
    progress.stage("searching", 3, "samples")
    progress.advance(8)
    progress.complete()
    assert (sum(counts), counts) == (10, [4, 6, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": {"forget": {"fraction": 0.05}}}, "15 records of the forget set are targets"),
        (
            {"shadows": {"fraction": 0.1}},
            "5 records of the forget set are targets; wanted at least",
        ),
        ({"model": {"weights": "base.safetensors"}}, "like the original, which is given"),
        ({"methods": [{"name": "consensus", "add": 1.0}]}, "the first method adds task vectors"),
    ],
)
def test_what_shadows_cannot_do_is_refused(changes, message):
    recipe = Recipe.model_validate(TINY | changes)
    with pytest.raises(NegMergeError, match=message):
        check_shadows(recipe, recipe.make_scenario())
    check_shadows(Recipe.model_validate(TINY | changes | {"evidence": "basic"}), None)  # pyright: ignore


def test_a_scenario_without_shadows_is_refused_before_any_training(tmp_path):
    words = ("unlearn", "demo_text", "--out", "run", "--set", "evidence=full")
    _, err = negmerge_here(tmp_path, *words, code=2)
    assert err.strip() == (
        "error: evidence full: trains shadow models, which scenario text does not; wanted evidence "
        "standard, or scenario classify"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [10, 9, 13])
def test_the_number_of_shadows_is_a_multiple_of_three(count):
    with pytest.raises(NegMergeError, match=r"shadows\.count"):
        load_recipe("demo", [f"shadows.count={count}"])


def test_recipes_without_shadows_are_written_as_before():
    assert "shadows" not in Recipe.model_validate(TINY | {"evidence": "basic"}).dump()
    tree = yaml.safe_load(Recipe.model_validate(TINY).dump())
    assert tree["shadows"] == {"count": 12, "members": 2, "fraction": 1.0}


# ------------------------------------------------------------------------------------ a whole run


def evidence_of(folder: Path) -> dict[str, Any]:
    tests = json.loads((folder / "scores.json").read_bytes())["evidence"]["tests"]
    return {name: tests[name] for name in ("shadow_attack", "klom", "unlearning_score")}


@pytest.mark.slow
def test_a_run_that_is_killed_among_its_shadows_continues(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    words = ("unlearn", "tiny.yaml", "--set", "workers=2")
    out, _ = negmerge(tmp_path, *words, "--out", "whole", "--dry-run")
    assert "shadows, each with an original, a pool and a retrained model: 12" in out
    negmerge(tmp_path, *words, "--out", "whole")
    whole = tmp_path / "whole"
    assert len([*whole.glob("shadows/*")]) == 12
    assert not (whole / ".state").exists()
    negmerge(tmp_path, "verify", "whole")
    for test in evidence_of(whole).values():
        assert [*test["models"]] == ["original", "retrained", "consensus"]

    killed = tmp_path / "killed"
    process = start(tmp_path, *words, "--out", "killed")
    deadline = time.monotonic() + 500
    while len([*killed.glob("shadows/*.safetensors")]) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(2)  # its workers end with it
    before = {path: path.stat().st_mtime_ns for path in killed.glob("shadows/*.safetensors")}
    assert len(before) < 12
    _, err = negmerge(tmp_path, *words, "--out", "killed")
    assert "note: evidence full: 12 shadows" in err
    recorded = json.loads((killed / "journal.json").read_bytes())
    kept = [path for path, stamp in before.items() if path.stat().st_mtime_ns == stamp]
    assert len(kept) >= len(before) - 2  # two may have been killed while they were recorded
    assert not (killed / ".state").exists()
    for path in whole.glob("shadows/*"):
        assert path.read_bytes() == (killed / "shadows" / path.name).read_bytes()
        assert recorded[f"shadows/{path.stem}"]["id"] == recorded_id(path)
    assert evidence_of(killed) == evidence_of(whole)
