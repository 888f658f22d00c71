"""The tangent space: against finite differences, and every λ from one pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import negmerge as nm
from clips import NORM, random_clip
from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.observations import Observations
from negmerge.evaluation.passes import observe_all
from negmerge.evaluation.scales import Search
from negmerge.evaluation.scores import score
from negmerge.evaluation.search import Curve, search_scale
from negmerge.scenarios.clip.classifier import ClipClassifier, freeze_parts
from negmerge.scenarios.clip.linearized import LinearEvaluator, LinearizedClassifier
from negmerge.scenarios.clip.scenario import ClipScenario
from negmerge.scenarios.clip.settings import ClipSettings
from negmerge.scenarios.settings import Setup
from negmerge.training.feeds import DatasetFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import train
from negmerge.training.weights import save_model

IMAGES = 60


def make(kind: type[ClipClassifier]) -> ClipClassifier:
    torch.manual_seed(1)
    heads = {
        name: 10 * nn.functional.normalize(torch.randn(count, 16), dim=1)
        for name, count in (("forget", 5), ("retain", 3))
    }
    network = kind(random_clip(), heads, NORM["mean"], NORM["std"])
    freeze_parts(network, "attention")
    return network.linearise() if isinstance(network, LinearizedClassifier) else network


def moved(network: nn.Module, amount: float) -> dict[str, torch.Tensor]:
    """Add to what trains; the change by name."""
    generator = torch.Generator().manual_seed(2)
    change = {
        name: amount * torch.randn(p.shape, generator=generator)
        for name, p in network.named_parameters()
        if p.requires_grad
    }
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name in change:
                p += change[name]
    return change


def test_the_slope_is_that_of_finite_differences():
    linear = make(LinearizedClassifier)
    change = moved(linear, 0.02)
    pixels = torch.rand(6, 3, 16, 16)
    with torch.no_grad():
        at_start, slope = linear.parts(pixels)
        ordinary = make(ClipClassifier).double()
        assert torch.allclose(at_start, ordinary.features(pixels.double()).float(), atol=1e-5)
        sides = []
        for sign in (1, -1):
            shifted = make(ClipClassifier).double()
            for name, p in shifted.named_parameters():
                if name in change:
                    p += sign * 1e-4 * change[name].double()
            sides.append(shifted.features(pixels.double()))
        expected = (sides[0] - sides[1]) / 2e-4
    error = (slope - expected).norm() / expected.norm()
    assert error < 1e-3


def test_features_are_linear_in_the_weights():
    pixels = torch.rand(4, 3, 16, 16)
    found = []
    for amount in (0.0, 0.01, 0.02):
        linear = make(LinearizedClassifier)
        moved(linear, amount)
        with torch.no_grad():
            found.append(linear.features(pixels))
    assert torch.allclose(found[2] - found[1], found[1] - found[0], atol=1e-4)
    assert not torch.allclose(found[1], found[0], atol=1e-3)


def test_training_moves_only_what_is_free_and_keeps_the_names():
    linear, plain = make(LinearizedClassifier), make(ClipClassifier)
    assert linear.state_dict().keys() == plain.state_dict().keys()
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    data = TensorDataset(torch.rand(24, 3, 16, 16), torch.arange(24) % 5)
    settings = HyperParameters(
        epochs=2, batch=8, lr=3e-3, optimizer="adamw", weight_decay=0.1, clip=1.0
    )
    cost = train(linear, DatasetFeed(data), settings, seed=0)
    again = train(linear, DatasetFeed(data), settings, seed=0)
    assert again.loss < cost.loss
    for name, tensor in linear.state_dict().items():
        free = name.startswith("visual.") and ".attn." not in name
        assert torch.equal(tensor, before[name]) != free, name


class Held(ClipScenario):
    """A CLIP whose sets are those of the test."""

    def __init__(self, feeds: dict[str, DatasetFeed]) -> None:
        super().__init__(ClipSettings.model_validate({"data": {"name": "mnist"}}), Setup())
        self.feeds = feeds

    def eval_sets(self, use: str) -> dict[str, DatasetFeed]:
        return self.feeds

    def observations(self, model: nn.Module) -> dict[str, Observations]:
        columns = ("correct", "confidence")
        return observe_all(lambda *batch: self.observe(*batch, columns), model, self.feeds)


@pytest.fixture
def problem(tmp_path: Path):
    linear = make(LinearizedClassifier)
    save_model(tmp_path / "base.safetensors", linear, {})
    moved(linear, 0.03)
    save_model(tmp_path / "tuned.safetensors", linear, {})
    tau = nm.merge(tmp_path / "base.safetensors", [tmp_path / "tuned.safetensors"])
    model = make(LinearizedClassifier)
    rng = torch.Generator().manual_seed(3)
    feeds = {}
    for name in ("retain", "forget"):
        pixels = 3 * torch.randn(IMAGES, 3, 2, 2, generator=rng).repeat_interleave(8, 2)
        pixels = pixels.repeat_interleave(8, 3)
        with torch.no_grad():  # what it says itself is right, so that every change is seen
            feeds[name] = DatasetFeed(TensorDataset(pixels, model(pixels, name).argmax(1)))
    return model, tau, Held(feeds)


class Counting:
    """Counts the images that run through the encoder."""

    def __init__(self, model: nn.Module) -> None:
        self.images = 0
        model.visual.register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self.images += len(inputs[0])


def test_a_sweep_is_one_pass_and_agrees_with_the_slow_way(problem):
    model, tau, scenario = problem
    counting = Counting(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scales = tuple(k / 5 for k in range(21))
    evaluator = scenario.evaluator(model, tau)
    assert isinstance(evaluator, LinearEvaluator)
    curve = Curve(evaluator, scenario.size("choose"))
    rows = [curve.at(scale) for scale in scales]
    assert counting.images == 2 * IMAGES  # each image once, for 21 λ
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    slow = []
    some = scales[::4]
    for scale in some:
        with tau.applied(model, -scale):
            slow.append(scenario.observations(model))
    assert counting.images == 2 * IMAGES * 7
    for row, found in zip(rows[::4], slow, strict=True):
        for metric, value in score(found, scenario.metrics).row().items():
            assert row[metric] == pytest.approx(value, abs=100 / IMAGES)  # one image on the edge
    assert len({row["acc_forget"] for row in rows}) > 3, "λ must matter"
    for scale, found in zip(some, slow, strict=True):
        for name, expected in evaluator.observations(scale).items():
            np.testing.assert_allclose(expected["confidence"], found[name]["confidence"], atol=1e-4)
    assert counting.images == 2 * IMAGES * 7


def test_a_search_beyond_the_edge_is_still_one_pass(problem):
    model, tau, scenario = problem
    counting = Counting(model)
    search = Search(stop=0.01, count=3, limit=4.0)
    curve = Curve(scenario.evaluator(model, tau), scenario.size("choose"))
    rows = search_scale(curve, search, criteria.get("keep_retain"))
    assert curve.evaluations == 1
    assert len(rows) > 3, "it went beyond the edge"
    assert counting.images == 2 * IMAGES


def test_the_encoder_stays_in_evaluation_while_it_is_trained():
    linear = make(LinearizedClassifier).train()
    assert linear.training
    assert not any(module.training for module in linear.visual.modules())
