"""Pools as methods of one run: equal norms, members chosen by retain loss, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from negmerge.errors import OptionError
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import Recipe, check_recipe
from negmerge.runs.store import Run
from negmerge.vectors.task_vector import TaskVector
from toys import SMALL, run_toy, toy_scenario

State = dict[str, np.ndarray]

CHECKPOINTS: dict[str, Any] = {
    "settings": {"batch": 16, "lr": 0.02, "epochs": 3},
    "grid": {"momentum": [0.0, 0.5]},
    "checkpoints": [1, 2, 3],
}
PLAIN = {k: v for k, v in CHECKPOINTS.items() if k != "checkpoints"}
METHODS: list[Any] = [
    "consensus",
    {"name": "consensus", "equalise": True},
    {"name": "consensus", "subset": {"count": 3, "by": "retain"}},
    {"name": "uniform", "subset": {"count": 2, "by": "retain"}, "equalise": True},
    {"name": "uniform", "members": "last"},
    {"name": "uniform", "members": "checkpoints"},
    {"name": "uniform", "members": "checkpoints", "subset": {"count": 1, "by": "retain"}},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with six members: three checkpoints of two trainings."""
    with toy_scenario():
        return run_toy(tmp_path_factory.mktemp("pools") / "run", pool=CHECKPOINTS, methods=METHODS)


def rows(run: Run) -> dict[str, Any]:
    return {row["method"]: row for row in json.loads(run.scores.read_text())["methods"]}


def changes(run: Run) -> dict[str, State]:
    """The task vectors of all members by id, in the order of the pool."""
    base, found = load_file(run.base), {}
    for member in json.loads(run.scores.read_text())["pool"]:
        own = load_file(run.member(member["id"]))
        found[member["id"]] = {k: own[k].astype(float) - base[k].astype(float) for k in base}
    return found


def norm(change: State) -> float:
    return float(np.sqrt(sum((value**2).sum() for value in change.values())))


def scaled(members: list[State]) -> list[State]:
    mean = np.mean([norm(member) for member in members])
    return [{k: v * mean / norm(member) for k, v in member.items()} for member in members]


def consensus(members: list[State]) -> State:
    found = {}
    for name in members[0]:
        every = np.stack([member[name] for member in members])
        agree = (every > 0).all(0) | (every < 0).all(0)
        found[name] = np.where(agree, every.mean(0), 0.0)
    return found


def uniform(members: list[State]) -> State:
    return {k: np.mean([member[k] for member in members], 0) for k in members[0]}


def assert_patch(run: Run, title: str, wanted: State) -> None:
    tau = TaskVector.load(run.patch(title))
    for name, value in wanted.items():
        entry = tau.entry_of(name)
        found = np.zeros(value.size) if entry is None else tau.scale * entry.dense()
        np.testing.assert_allclose(found, value.ravel(), rtol=1e-5, atol=1e-7, err_msg=name)


def best_by_retain(run: Run, ids: list[str], count: int) -> list[str]:
    """Choose by the squared error of a network that is written out by hand."""
    with toy_scenario():
        data = Recipe.model_validate(SMALL).make_scenario().eval_sets("choose")["retain"]
    x, y = data.x.double().numpy(), data.y.double().numpy()
    base, every = load_file(run.base), changes(run)
    losses = {}
    for own, change in zip(ids, scaled([every[one] for one in ids]), strict=True):
        w = {k: base[k].astype(float) - change[k] for k in base}
        hidden = np.tanh(x @ w["0.weight"].T + w["0.bias"])
        outputs = hidden @ w["2.weight"].T + w["2.bias"]
        losses[own] = float(((outputs - y) ** 2).mean())
    chosen = sorted(ids, key=losses.__getitem__)[:count]
    return [own for own in ids if own in chosen]


# ------------------------------------------------------------------------------------ equal norms


def test_one_method_scales_its_members_and_the_other_does_not(run: Run):
    members = list(changes(run).values())
    lengths = [norm(member) for member in members]
    assert max(lengths) > 1.1 * min(lengths)  # otherwise the two would hardly differ
    assert_patch(run, "consensus", consensus(members))
    assert_patch(run, "consensus-equalised", consensus(scaled(members)))
    assert TaskVector.load(run.patch("consensus")).origin.factors == []
    assert len(TaskVector.load(run.patch("consensus-equalised")).origin.factors) == 6


# ---------------------------------------------------------------------------- chosen by retain loss


@pytest.mark.parametrize(
    ("title", "count", "merged"),
    [
        ("consensus-3-retain", 3, consensus),
        ("uniform-2-retain-equalised", 2, lambda members: uniform(scaled(members))),
    ],
)
def test_the_members_with_the_lowest_retain_loss_are_merged(run: Run, title, count, merged):
    every, row = changes(run), rows(run)[title]
    wanted = best_by_retain(run, [*every], count)
    assert row["kept"] == wanted != [*every][:count]
    assert_patch(run, title, merged([every[one] for one in wanted]))


def test_a_guided_pool_says_what_it_used_and_what_it_cost(run: Run):
    plain, guided = rows(run)["consensus"], rows(run)["consensus-3-retain"]
    assert (plain["splits"], guided["splits"]) == ("forget", "all")
    with run.sweep("consensus-3-retain").open() as file:
        swept = len(file.readlines()) - 1
    assert guided["evaluations"] == swept + 6  # every member was measured once
    assert guided["samples_processed"] == plain["samples_processed"]  # and trained


def test_a_guided_pool_of_the_checkpoints_of_one_training(run: Run):
    ids = [*changes(run)][:3]
    kept = rows(run)["uniform-checkpoints-1-retain"]["kept"]
    assert kept == best_by_retain(run, ids, 1)


# ------------------------------------------------------------------------------------- checkpoints


def test_methods_use_all_members_the_last_ones_or_those_of_one_training(run: Run):
    members = list(changes(run).values())
    assert_patch(run, "uniform-last", uniform([members[2], members[5]]))
    assert_patch(run, "uniform-checkpoints", uniform(members[:3]))


def test_three_checkpoints_cost_one_training(run: Run):
    found, records = rows(run), SMALL["records"]
    assert found["uniform-checkpoints"]["samples_processed"] == 3 * records
    for title in ("consensus", "uniform-last", "consensus-3-retain"):
        assert found[title]["samples_processed"] == 2 * 3 * records
    pool = json.loads(run.scores.read_text())["pool"]
    assert [member["samples"] // records for member in pool] == [1, 2, 3, 1, 2, 3]
    assert [member.get("epoch") for member in pool] == [1, 2, None, 1, 2, None]
    ends = [pool[2]["id"]] * 2 + [pool[5]["id"]] * 2
    assert [member["training"] for member in pool if "training" in member] == ends


def test_the_last_checkpoint_is_the_member_of_a_training_without(run: Run, tmp_path: Path):
    with toy_scenario():
        plain = run_toy(tmp_path / "plain", pool=PLAIN)
    ids = [*changes(plain)]
    assert ids == [*changes(run)][2::3]
    for own in ids:
        assert plain.member(own).read_bytes() == run.member(own).read_bytes()


def test_checkpoints_of_a_finished_training_are_trained_again_if_one_is_lost(run, tmp_path):
    """A run without checkpoints gets some, then one is lost, then one is damaged."""
    with toy_scenario():
        run_toy(tmp_path / "run", pool=PLAIN)
        again = run_toy(tmp_path / "run", pool=CHECKPOINTS, methods=METHODS)
        files = {p: p.read_bytes() for p in again.folder.glob("pool/*/*.safetensors")}
        first, second, *_ = [*changes(again)]
        again.member(first).unlink()
        run_toy(tmp_path / "run", pool=CHECKPOINTS, methods=METHODS)
        again.member(second).write_bytes(b"x" + files[again.member(second)][1:])
        run_toy(tmp_path / "run", pool=CHECKPOINTS, methods=METHODS)
        raw = bytearray(files[again.member(second)])
        raw[-1] ^= 1  # a weight: only the hash tells
        again.member(second).write_bytes(raw)
        last = run_toy(tmp_path / "run", pool=CHECKPOINTS, methods=METHODS)
    assert {p: p.read_bytes() for p in files} == files
    assert last.read_manifest().result == run.read_manifest().result


def test_checkpoints_of_another_run_are_used_again(run: Run, tmp_path: Path):
    from negmerge.runs.context import Context
    from negmerge.runs.executors import InProcess
    from negmerge.runs.pipeline import unlearn
    from negmerge.support.progress import Quiet

    with toy_scenario():
        recipe = Recipe.model_validate(SMALL | {"pool": CHECKPOINTS, "methods": METHODS})
        scenario, store = recipe.make_scenario(), Run(tmp_path / "run", [run.folder])
        scenario.train = None  # pyright: ignore (nothing may be trained)
        with store.locked():
            unlearn(Context(recipe, scenario, store, InProcess(scenario), Quiet()))
    assert store.read_manifest().result == run.read_manifest().result


def test_a_scenario_that_trains_without_checkpoints_is_refused(tmp_path: Path):
    with toy_scenario() as toy, pytest.MonkeyPatch.context() as patch:

        def train(self, model, on, settings, seed, **options):
            options.pop("checkpoints", None)
            return super(toy.Numbers, self).train(model, on, settings, seed, **options)

        patch.setattr(toy.Numbers, "train", train)
        with pytest.raises(OptionError, match=r"pool.checkpoints: .*scenario numbers does not"):
            run_toy(tmp_path / "run", pool=CHECKPOINTS)


# ---------------------------------------------------------------------------------------- recipes


def test_new_fields_are_left_out_of_recipes_that_do_not_use_them():
    recipe = check_recipe({"methods": [{"name": "ties", "subset": {"count": 1}}]}, "recipe")
    method = yaml.safe_load(recipe.dump())["methods"][0]
    assert method.keys() == {"name", "options", "label", "tune", "subset", "add"}
    assert method["subset"] == {"count": 1, "seed": 0}
    assert "checkpoints" not in recipe.dump()
    with toy_scenario():
        used = Recipe.model_validate(SMALL | {"pool": CHECKPOINTS, "methods": METHODS})
        assert check_recipe(yaml.safe_load(used.dump()), "dump") == used
    titles = [method.title for method in used.methods]
    assert titles[2:5] == ["consensus-3-retain", "uniform-2-retain-equalised", "uniform-last"]


def wrong(methods: list[Any] | None = None, **pool: Any) -> dict[str, Any]:
    return {"methods": methods or ["consensus"], "pool": {"settings": {"epochs": 4}, **pool}}


def one(name: str = "consensus", **fields: Any) -> list[Any]:
    return [{"name": name, **fields}]


REFUSED = {
    "rising epochs": wrong(checkpoints=[4, 2]),
    "the last one is 3, wanted settings.epochs = 4": wrong(checkpoints=[1, 3]),
    "grid.epochs has several": wrong(checkpoints=[2, 4], grid={"epochs": [2, 4]}),
    "checkpoints: keep: false": wrong(checkpoints=[2, 4], keep=False),
    "greater than or equal to 1": wrong(checkpoints=[0, 4]),
    "subset.by: got retain": wrong(grid={"lr": [1, 2]}, subset={"count": 1, "by": "retain"}),
    "leave seed out": wrong(one(subset={"count": 1, "by": "retain", "seed": 3})),
    "needs the members; set pool.keep to true": wrong(one(equalise=True), keep=False),
    "equalise is for merge rules": wrong(one("single_best", equalise=True)),
    "'salun-equalised': equalise is for merge rules": wrong(one("salun", equalise=True)),
    "members is for merge rules": wrong(one("greedy", members="last"), checkpoints=[2, 4]),
    "members last needs pool.checkpoints": wrong(one(members="last")),
    "subset.count 3: there are 2 members": wrong(
        one(members="checkpoints", subset={"count": 3}), checkpoints=[2, 4], grid={"lr": [1, 2]}
    ),
    "subset.by retain is for τ that is subtracted": wrong(
        one(subset={"count": 1, "by": "retain"}, add=0.5)
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_had_is_one_line_before_any_work(text: str):
    with pytest.raises(OptionError) as raised:
        check_methods(check_recipe(REFUSED[text], "recipe"))
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_equal_losses_keep_the_order_of_the_pool(tmp_path: Path):
    """A network without weights in use: every member has the same loss."""
    with toy_scenario() as toy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.Numbers, "mean_loss", lambda *arguments: 1.0)
        methods = one(subset={"count": 2, "by": "retain"})
        found = run_toy(tmp_path / "run", pool=CHECKPOINTS, methods=methods)
    assert rows(found)["consensus-2-retain"]["kept"] == [*changes(found)][:2]
