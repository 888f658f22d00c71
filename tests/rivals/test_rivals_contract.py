"""What every rival must hold to; a new one is tested the moment it is registered."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import negmerge as nm
from negmerge.errors import OptionError, ValueRangeError
from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.metrics import metric_of
from negmerge.rivals import Task, rivals
from negmerge.rivals.registry import SETS
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import load_recipe
from negmerge.runs.records import Done
from negmerge.runs.rival_trainings import make_rival_training
from negmerge.runs.rivals import best_try
from negmerge.runs.trainings import Start
from negmerge.scenarios.classify.scenario import Classify
from negmerge.scenarios.classify.settings import ClassifySettings
from negmerge.scenarios.settings import Setup
from negmerge.training.feeds import DatasetFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.weights import load_tensors

SIZES = {"forget": 13, "retain": 22}
SHORT = {"epochs": 2, "batch": 8, "lr": 0.05}
VARIANTS = [(name, {}) for name in rivals] + [
    ("random_label", {"use_retain": False}),
    ("random_label", {"mixed": True}),
    ("salun", {"use_retain": False}),
    ("boundary_expand", {"keep_extra": False}),
]
variants = pytest.mark.parametrize(("name", "options"), VARIANTS)


class Net(nn.Module):
    """Every kind of state: convolution, BatchNorm, dropout, an integer table, a frozen weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
            self.drop = nn.Dropout(0.3)
            self.head = nn.Linear(4, 3)
        self.register_buffer("table", torch.tensor([3, 1, 2, 0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.body(x).mean((2, 3))[:, self.table])
        return self.head(self.drop(x))


class Forbidden:
    """A split that must not be looked at, not even at its size."""

    def __getattribute__(self, name: str):
        raise AssertionError(f"touched: {name}")

    def __len__(self) -> int:
        raise AssertionError("touched: its size")

    def __getitem__(self, index: int):
        raise AssertionError("touched: a sample")


def make_set(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(len(name))
    size = SIZES[name]
    return TensorDataset(torch.rand(size, 1, 6, 6, generator=generator), torch.arange(size) % 3)


class Problem(Classify):
    """The toy as a run sees it; every split but the allowed ones is forbidden."""

    identity = ("toy",)

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__(ClassifySettings(), Setup(seed=4))
        self.allowed = allowed

    def train_set(self, name: str):
        return DatasetFeed(make_set(name)) if name in self.allowed else Forbidden()

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        return Net()


def short(name: str, options: dict) -> dict:
    return {k: v for k, v in SHORT.items() if k in rivals.get(name).accepts} | options


def make_task(name: str, options: dict, seed: int = 1, model: nn.Module | None = None, **more):
    rival = rivals.get(name)
    settings, own = rival.resolve(short(name, options))
    feeds = {part: Forbidden() for part in SIZES}
    feeds |= {part: DatasetFeed(make_set(part)) for part in SETS[rival.used(own)]}
    return Task(model or Net(), feeds, settings, seed, **more), own


def run(name: str, options: dict, seed: int = 1, **more):
    task, own = make_task(name, options, seed, **more)
    return task.model, rivals.get(name).run(task, own)


def same(one: nn.Module, two: nn.Module) -> bool:
    there = two.state_dict()
    return all(torch.equal(v, there[k]) for k, v in one.state_dict().items())


@pytest.mark.parametrize("name", list(rivals))
def test_every_rival_explains_itself(name):
    rival = rivals.get(name)
    text = rival.function.__doc__ or ""
    assert rival.summary
    assert re.search(r"\d{4}", rival.paper) or name == "retrain"
    for option in rival.defaults:
        assert re.search(rf"\b{option}\b.*:", text), f"option {option} is not documented"
    assert rival.resolve({})[1] == rival.defaults
    for searched, where in rival.search.items():
        assert searched in rival.defaults or searched in HyperParameters.model_fields
        points = where.points(5)
        assert points == sorted(points)
        assert (points[0], points[-1]) == (where.low, where.high)
        for point in points:
            rival.resolve({searched: point})


@pytest.mark.parametrize(
    ("name", "splits", "epochs", "lr"),
    [
        ("retrain", "retain", 182, 0.1),
        ("finetune", "retain", 10, 0.01),
        ("gradient_ascent", "forget", 5, 5e-4),
        ("random_label", "all", 10, 0.01),
        ("salun", "all", 10, 0.013),
        ("l1_sparse", "retain", 10, 0.01),
        ("boundary_shrink", "forget", 10, 1e-5),
        ("boundary_expand", "forget", 10, 1e-5),
        ("influence", "all", None, None),
    ],
)
def test_the_published_settings(name, splits, epochs, lr):
    rival = rivals.get(name)
    assert rival.splits == splits
    if epochs is not None:
        settings = rival.settings
        assert (settings.epochs, settings.lr, settings.batch) == (epochs, lr, 256)
        assert (settings.optimizer, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 5e-4)
        assert settings.schedule == ("step" if name == "retrain" else "constant")


@variants
def test_it_changes_the_model_and_counts_what_it_does(name, options):
    seen: list[int] = []
    model, cost = run(name, options, advance=seen.append)
    rival = rivals.get(name)
    task, own = make_task(name, options)
    sizes = {part: SIZES[part] for part in SETS[rival.used(own)]}
    assert sum(seen) == cost.samples == rival.samples(sizes, task.settings)
    assert cost.seconds > 0
    assert not same(model, Net())
    assert model.head.out_features == (4 if own.get("keep_extra") else 3)


@variants
def test_integer_buffers_and_frozen_weights_stay(name, options):
    model, _ = run(name, options)
    before = Net().state_dict()
    for key, value in model.state_dict().items():
        if not value.is_floating_point() or key.startswith("frozen"):
            assert torch.equal(value, before[key]), key


@variants
def test_same_seed_same_bits(name, options):
    one, _ = run(name, options)
    torch.manual_seed(77)
    two, _ = run(name, options)
    other, _ = run(name, options, seed=2)
    assert same(one, two)
    assert not same(one, other)


@pytest.mark.parametrize("stop_after", [1, 5])
@pytest.mark.parametrize(("name", "options"), [v for v in VARIANTS if v[0] != "influence"])
def test_resumed_is_uninterrupted(name, options, stop_after, tmp_path):
    class Stop(Exception):
        pass

    rival = rivals.get(name)
    problem = Problem(SETS[rival.used(options)])

    def make(folder: Path):
        start = Start(folder / "base.safetensors", "the original")
        place = lambda name: folder / f"{name}.safetensors"  # noqa: E731
        given = short(name, options) | {"epochs": 4}
        return make_rival_training(problem, name, rival, given, None, place, folder, start)

    whole = make(tmp_path / "whole")
    whole.out.parent.mkdir()
    whole.run(problem, lambda count: None)

    halved = replace(make(tmp_path / "halved"), save_every=-1)
    halved.out.parent.mkdir()
    steps = 0

    def stop(count: int) -> None:
        nonlocal steps
        steps += halved.state.exists()
        if steps > stop_after:
            raise Stop

    with pytest.raises(Stop):
        halved.run(problem, stop)
    assert halved.state.exists()
    assert halved.find_cost() is None
    seen: list[int] = []
    done = halved.run(problem, seen.append)
    assert halved.find_cost() == done.value
    assert halved.key == whole.key
    assert halved.out.read_bytes() == whole.out.read_bytes()
    assert sum(seen) == halved.read_cost().samples == whole.read_cost().samples
    assert not halved.state.exists()


def all_sets() -> dict[str, TensorDataset]:
    unseen = TensorDataset(make_set("retain").tensors[0].flip(2), make_set("retain").tensors[1])
    return {part: make_set(part) for part in SIZES} | {"test": unseen}


@variants
def test_from_python(name, options):
    """The model is left alone; sets that a rival does not use are scored and change nothing."""
    model = Net()
    before = copy.deepcopy(model)
    parts = SETS[rivals.get(name).used(options)]
    given = short(name, options) | {"seed": 3}
    one = nm.unlearn(model, all_sets(), name, **given)
    assert same(model, before)
    assert model.training == before.training
    assert not same(one, model)
    copy.deepcopy(model).load_state_dict(one.state_dict())  # the result fits the user's module
    found = one.negmerge
    assert (found.method, found.scale, found.folder, found.page) == (name, None, None, None)
    for row in found.scores.values():
        assert all(0 <= row[f"acc_{part}"] <= 100 for part in (*SIZES, "test"))
        assert row["samples"] == {"forget": 13, "retain": 22, "test": 22}  # nothing chose a λ
    alone = nm.unlearn(model, {part: make_set(part) for part in parts}, name, **given)
    assert same(one, alone)
    measured = {
        part
        for part in (*SIZES, "test")
        if alone.negmerge.scores["original"][f"acc_{part}"] is not None
    }
    assert measured == {*parts}


@pytest.mark.parametrize("name", ["salun", "finetune"])
def test_from_python_in_a_folder(name, tmp_path):
    """It resumes; other data is another training; the page is about the forget set, if any."""
    parts = SETS[rivals.get(name).splits]
    splits: dict[str, Dataset] = {part: make_set(part) for part in parts}
    given = short(name, {}) | {"seed": 3, "out": tmp_path / "run"}
    model = Net()
    one = nm.unlearn(model, splits, name, **given)
    (made,) = tmp_path.glob(f"run/rivals/{name}/*.safetensors")
    changed = made.stat().st_mtime_ns
    two = nm.unlearn(model, splits, name, **given)
    assert made.stat().st_mtime_ns == changed
    assert same(one, two)
    assert load_tensors(made)[1]["id"] == made.stem
    assert one.negmerge == two.negmerge
    assert one.negmerge.folder == tmp_path / "run"
    if "forget" in parts:
        page = one.negmerge.page.read_text(encoding="utf-8")
        assert f"Net: {name}" in page
        assert "damaged" not in page
    else:
        assert one.negmerge.page is None
        assert not (tmp_path / "run/report/index.html").exists()
    (part, *_) = parts
    shifted = make_set(part).tensors[0].flip(0)
    other = splits | {part: TensorDataset(shifted, make_set(part).tensors[1])}
    nm.unlearn(model, other, name, **given)
    assert len(list(tmp_path.glob(f"run/rivals/{name}/*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("salun", {"kep": 0.5}, "salun: no option 'kep'; wanted one of keep, use_retain"),
        ("salun", {"keep": 1.5}, "salun: keep: .*less than or equal to 1, got 1.5"),
        ("finetune", {"lr": -1}, "finetune: lr: .*greater than 0, got -1"),
        ("influence", {"lr": 0.1}, "influence: no option 'lr'; wanted one of alpha, batch"),
        ("salun", {"pool": nm.Pool()}, "salun: pool and search are for merged task vectors"),
        ("l1_sparse", {"no_l1_epochs": 9, "epochs": 9}, "no_l1_epochs: got 9 of 9 epochs"),
    ],
)
def test_wrong_options_are_told(name, given, message):
    splits = {part: make_set(part) for part in SIZES}
    with pytest.raises(OptionError, match=message):
        nm.unlearn(Net(), splits, name, **given)


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("finetune", "forget", "finetune: splits has no retain set; wanted retain; add it$"),
        ("gradient_ascent", "retain", "no forget set; wanted forget"),
        ("salun", "forget", "no retain set; wanted forget and retain; .*or set use_retain=False"),
    ],
)
def test_a_missing_split_is_told(name, there, message):
    with pytest.raises(OptionError, match=message):
        nm.unlearn(Net(), {there: make_set(there)}, name)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("{name: salun, options: {kep: 1}}", "salun: no option 'kep'"),
        ("{name: salun, options: {keep: 2}}", "salun: keep: .*, got 2$"),
        ("{name: ties, tune: true}", "tune is for rivals"),
        ("retrain", "is the reference of every run"),
        ("{name: finetune, options: {lr: 1}, tune: true}", "nothing is left to tune"),
        ("salum", "unknown method 'salum'.*salun"),
    ],
)
def test_wrong_recipes_are_told(methods, message):
    with pytest.raises(OptionError, match=message):
        check_methods(load_recipe("demo", [f"methods=[{methods}]"]))


def test_a_try_may_diverge_but_a_single_training_must_not(tmp_path):
    rival, problem = rivals.get("finetune"), Problem(("retain",))

    def make(tried: dict[str, float] | None):
        start, given = Start(tmp_path / "base", "x"), {"lr": 1e30, "epochs": 3, "batch": 8}
        place = tmp_path / str(bool(tried))
        place.mkdir()
        out = lambda name: place / f"{name}.safetensors"  # noqa: E731
        return make_rival_training(problem, "one", rival, given, None, out, place, start, tried)

    with pytest.raises(ValueRangeError, match="one: training diverged"):
        make(None).run(problem, lambda count: None)
    bad = make({"lr": 1e30})
    done = bad.run(problem, lambda count: None)
    assert bad.find_cost() == done.value
    assert "diverged" in (done.value.failure or "")
    assert not bad.out.exists()
    good = replace(bad, key="good", out=tmp_path / "good.safetensors", tried={"lr": 0.1})
    good.cost_file.write_text(json.dumps({"id": "good", "samples": 1, "seconds": 1.0}))
    keep_retain = criteria.get("keep_retain")
    zero = {"acc_retain": 100.0, "acc_forget": 100.0}
    poor = {"acc_retain": 50.0, "acc_forget": 0.0}
    rest = (zero, keep_retain, None, metric_of("acc_retain"))
    for row, allowed in ((zero, True), (poor, False)):
        best = best_try([bad, good], [None, Done(row, 1.0)], *rest)
        assert best.chosen is good
        assert best.allowed == allowed
        assert best.seconds == 1.0
        assert "diverged" in best.tried[0].failure
        assert (best.tried[1].loss is not None) == allowed
        assert best.tried[1].measured() == row
    other = replace(good, key="other")
    broken = best_try([bad, good, other], [None, Done(None, 2.0), Done(zero, 1.0)], *rest)
    assert broken.tried[1].failure == "its outputs are not finite"
    assert broken.chosen is other
    with pytest.raises(ValueRangeError, match="all 2 tries diverged"):
        best_try([bad, bad], [None, None], *rest)


def test_a_model_that_is_one_linear_layer():
    data = TensorDataset(torch.rand(12, 4), torch.arange(12) % 2)
    for name in rivals:
        given = short(name, {})
        forgot = nm.unlearn(nn.Linear(4, 2), {"forget": data, "retain": data}, name, **given)
        assert forgot.weight.shape == (2, 4)


def test_the_documented_rival():
    """docs/extend.md adds a rival in one function; this runs that very text."""
    text = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    code = re.search(r"## A rival.*?```python\n(.*?)```", text, re.DOTALL).group(1)
    try:
        exec(compile(code, "extend.md", "exec"), {"__name__": "extend"})  # noqa: S102
        model, cost = run("noisy_retain", {"noise": 0.1})
        assert cost.samples == 2 * SIZES["retain"]
        assert not same(model, Net())
        assert np.isfinite(cost.loss)
        with pytest.raises(OptionError, match="noise"):
            rivals.get("noisy_retain").resolve({"noise": -1.0})
    finally:
        rivals.remove("noisy_retain")
