"""Relearning: counted by hand, and on classifiers that know, suppress or never knew a class."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import sem
from scipy.stats import t as student
from torch import nn
from torch.utils.data import TensorDataset

from negmerge.evaluation.metrics.accuracy import interval
from negmerge.evidence import relearning
from negmerge.evidence.findings import ORIGINAL, RETRAINED, Finding
from negmerge.evidence.prototypes import find as find_prototypes
from negmerge.evidence.registry import Subject
from negmerge.evidence.relearning import NOTHING, STEPS, crossing, curve, finish, parts
from negmerge.evidence.verdicts import verdict
from negmerge.scenarios.module.scenario import ModuleScenario
from negmerge.scenarios.module.settings import ModuleSettings
from negmerge.support.files import file_digest
from negmerge.training.feeds import DatasetFeed
from negmerge.training.weights import save_model


@given(st.lists(st.floats(0, 100), min_size=2, max_size=8), st.floats(0.1, 100))
def test_a_crossing_is_where_the_line_between_two_points_reaches_the_target(values, target):
    points = list(zip(STEPS, values, strict=False))
    steps, reached = crossing(points, target)
    assert reached == (max(values) >= target)
    if not reached:
        assert steps == points[-1][0]
        return
    grid = [k / 256 * points[-1][0] for k in range(257)]
    for x in grid:
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if a[0] <= x <= b[0])
        if x < steps - 1e-6:
            assert y0 + (y1 - y0) * (x - x0) / (x1 - x0) < target + 1e-6


def row(*curves: list[tuple[float, float]]) -> dict[str, Finding]:
    return {
        f"repeat_{k}": Finding(value=90.0, curve=points, n=10) for k, points in enumerate(curves)
    }


def flat(value: float) -> list[tuple[float, float]]:
    return [(x, value) for x in STEPS]


def test_heights_steps_and_ratios_by_hand():
    slow = [(0, 0.0), (1, 0.0), (2, 0.0), (4, 0.0), (8, 100.0), (16, 100.0), (32, 100.0),
            (64, 100.0)]  # fmt: skip
    fast = [(0, 0.0), (1, 50.0), *((x, 100.0) for x in STEPS[2:])]
    # One order falls back below the line: only the mean curve is counted.
    up, down = [(0, 0.0), (1, 100.0), *((x, 40.0) for x in STEPS[2:])], flat(40.0)
    found = finish({
        ORIGINAL: row(flat(100.0), flat(100.0)),
        RETRAINED: row(slow, slow),
        "fast": row(fast, slow),
        "lucky": row(up, down),
        "never": row(flat(10.0), flat(10.0)),
    })  # fmt: skip
    assert found[ORIGINAL]["steps"].value == 0
    assert found[RETRAINED]["steps"].value == pytest.approx(4 + 0.9 * 4)
    assert found[RETRAINED]["height"].value == pytest.approx(400 / 7)
    fast_height = found["fast"]["height"]
    assert fast_height.value == pytest.approx((650 / 7 + 400 / 7) / 2)
    assert (fast_height.low, fast_height.high) == (0.0, 100.0)  # 12.7 × 17.9 is beyond both
    assert fast_height.curve[:3] == [(0, 0.0), (1, 25.0), (2, 50.0)]
    assert found["fast"]["steps"].value == pytest.approx(4 + 0.8 * 4)
    assert found["fast"]["ratio"].value == pytest.approx(7.2 / 7.6)
    assert (found["lucky"]["steps"].value, found["lucky"]["steps"].least) == (STEPS[-1], True)
    assert found["never"]["steps"].least
    assert found["never"]["ratio"].least


def test_the_interval_of_the_height_contains_that_of_the_orders():
    orders = [[(0, 0.0), (1, y), (2, 90.0), (4, 10.0)] for y in (50.0, 53.0, 56.0, 50.0, 56.0)]
    found = finish({ORIGINAL: row(*orders)})[ORIGINAL]["height"]
    means = [(100 + y) / 3 for y in (50.0, 53.0, 56.0, 50.0, 56.0)]
    expected = student.interval(0.95, 4, loc=np.mean(means), scale=sem(means))
    assert (found.low, found.high) == pytest.approx(expected)


def test_orders_that_change_nothing_leave_the_interval_of_the_held_out_samples():
    """If one batch holds all samples, their order has no effect; five held-out ones are few."""

    def found(height: float) -> Finding:
        low, high = interval(height, 5)
        repeat = Finding(value=90.0, low=low, high=high, curve=flat(height), n=5)
        own = {f"repeat_{k}": repeat for k in range(5)}
        return finish({ORIGINAL: own})[ORIGINAL]["height"]

    some, more = found(60.0), found(80.0)
    assert (some.low, some.high) == pytest.approx(interval(60.0, 5))
    assert verdict(more, some) == "alike"
    assert verdict(found(100.0), found(0.0)) == "above"
    assert found(100.0).high == 100


def test_a_retrained_model_that_needs_no_step_has_heights_only():
    known = row(flat(95.0), flat(95.0))
    found = finish({ORIGINAL: known, RETRAINED: known, "method": known})
    assert found["method"]["steps"].value is None
    assert found["method"]["steps"].why == found["method"]["ratio"].why == NOTHING
    assert found["method"]["height"].value == 95
    assert found["method"]["height"].curve


def test_the_reason_of_a_missing_ratio_is_that_of_the_missing_steps():
    known, slow = row([(0, 95.0), (1, 95.0)]), row([(0, 0.0), (1, 100.0)])
    broken = {"height": Finding(value=None, why="training diverged")}
    found = finish({ORIGINAL: known, RETRAINED: slow, "method": broken})
    assert found["method"]["ratio"].why == "training diverged"
    found = finish({ORIGINAL: known, RETRAINED: broken, "method": slow})
    assert found["method"]["ratio"].why == "the retrained model: training diverged"
    found = finish({ORIGINAL: known, "method": slow})
    assert found["method"]["ratio"].why == "no retrained model to compare with"


# ------------------------------------------------------------------------ classifiers in the plane


def clouds(count: int, *labels: int, seed: int = 0) -> TensorDataset:
    """Points around the corners of a square, one corner for each class."""
    draw = torch.Generator().manual_seed(seed)
    corners = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]])
    y = torch.tensor(labels).repeat_interleave(count)
    return TensorDataset(corners[y] + 0.3 * torch.randn(len(y), 2, generator=draw), y)


def network(known: bool = True, suppressed: bool = False) -> nn.Module:
    """A classifier whose features know four corners, or three of them."""
    found = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    with torch.no_grad():
        found[0].weight.copy_(corners)
        found[0].bias.fill_(-1.0)
        found[3].weight.copy_(2 * torch.eye(4))
        found[3].bias.zero_()
        if not known:
            found[0].weight[3], found[0].bias[3] = 0.0, 0.0
            found[3].weight[3] = 0.0
            found[3].bias[3] = -12.0
        if suppressed:
            found[3].bias[3] = -12.0
    return found.eval()


@pytest.fixture(scope="module")
def scenario(tmp_path_factory) -> ModuleScenario:
    splits = {"forget": clouds(60, 3), "retain": clouds(20, 0, 1, 2), "test": clouds(20, 0, 1, 2)}
    weights = tmp_path_factory.mktemp("module") / "given.safetensors"
    save_model(weights, network(), {})
    settings = ModuleSettings.model_validate({
        "data": {"name": "clouds"},
        "model": {"name": "square", "weights": weights},
        "train": {"batch": 20, "lr": 0.5},
    })  # fmt: skip
    names = list(splits)
    return ModuleScenario(settings, network(), splits, file_digest(weights), 0, names, names, None)


def subject(scenario: ModuleScenario, title: str, model: nn.Module) -> Subject:
    assert isinstance(scenario.settings.model.weights, Path)
    return Subject(title, scenario, model, scenario.settings.model.weights, 0, lambda count: None)


def test_suppressed_knowledge_comes_back_sooner_than_it_is_learned(scenario):
    models = {
        ORIGINAL: network(),
        RETRAINED: network(known=False),
        "suppressed": network(suppressed=True),
    }
    before = {title: copy.deepcopy(model.state_dict()) for title, model in models.items()}
    found = finish({
        title: relearning.find(subject(scenario, title, model)) for title, model in models.items()
    })  # fmt: skip
    steps = {title: own["steps"] for title, own in found.items()}
    assert steps[ORIGINAL].value == 0
    assert 0 < steps["suppressed"].value < steps[RETRAINED].value
    assert verdict(found["suppressed"]["height"], found[RETRAINED]["height"]) == "above"
    assert found["suppressed"]["ratio"].value < 1
    for title, model in models.items():
        assert all(torch.equal(v, before[title][k]) for k, v in model.state_dict().items())


def test_relearning_repeats_itself_and_never_measures_what_it_trains_on(scenario):
    feed, held_out = parts(scenario, 0)
    trained = feed.feeds[0].where
    assert not {*trained} & {*held_out.feed.where}
    assert len(feed.feeds[0]) == len(feed.feeds[1]) == 30
    one = subject(scenario, "suppressed", network(suppressed=True))
    points = curve(one, feed, held_out, 1)
    assert [x for x, _ in points] == [*STEPS]
    assert points == curve(one, feed, held_out, 1)


def test_statistics_of_batchnorm_stay_as_they_are(scenario):
    model = network(suppressed=True)
    objective = relearning.with_fixed_statistics(scenario.loss(scenario.training))
    batch = scenario.eval_sets("report")["forget"].test_batch(torch.arange(20).numpy())
    before = model[2].running_mean.clone()
    model.train()
    objective(model, batch, 0).backward()
    assert torch.equal(model[2].running_mean, before)
    assert model[0].weight.grad is not None


def test_prototypes_recover_a_suppressed_class_and_not_one_without_features(scenario):
    recovered = {
        title: find_prototypes(subject(scenario, title, model))["accuracy"].value
        for title, model in (
            ("suppressed", network(suppressed=True)),
            ("retrained", network(known=False)),
        )
    }
    assert recovered["suppressed"] == 100
    assert recovered["retrained"] <= 100  # the other features may still tell it apart


def test_a_single_forgotten_sample_is_not_relearned_and_measured_at_once(scenario):
    alone = copy.copy(scenario)
    alone.splits = {**scenario.splits, "forget": DatasetFeed(clouds(1, 3))}
    alone.chosen = {}
    found = relearning.find(subject(alone, "suppressed", network(suppressed=True)))
    assert found["height"].value is None
    assert found["height"].why == "the forget set has one sample, and no other one to measure"
