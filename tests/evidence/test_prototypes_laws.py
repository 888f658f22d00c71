"""Prototypes: by hand, and against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from negmerge.errors import MismatchError
from negmerge.evidence.prototypes import SHOTS, prototypes, recovered
from negmerge.training.outputs import last_features


@given(st.integers(0, 1000))
def test_the_nearest_prototype_is_that_of_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    features, labels = rng.normal(size=(30, 3)), rng.integers(0, 4, 30)
    centres, classes = prototypes(features, labels)
    for c, centre in zip(classes, centres, strict=True):
        mean = np.zeros(3)
        for row, label in zip(features, labels, strict=True):
            if label == c:
                mean += row / sum(x * x for x in row) ** 0.5
        np.testing.assert_allclose(centre, mean / np.linalg.norm(mean), atol=1e-12)


def test_separated_features_are_recovered_and_equal_ones_are_not():
    labels = np.repeat([0, 1], 20)
    apart = np.eye(2)[labels]
    rng = np.random.default_rng(0)
    assert recovered({"forget": (apart, labels)}, rng) == (1.0, 40 - 2 * SHOTS)
    same = np.ones((40, 2))
    accuracy, _ = recovered({"forget": (same, labels)}, rng)
    assert accuracy == pytest.approx(0.5)  # all are taken for the first class


def test_a_forgotten_class_is_asked_for_on_unseen_samples_only():
    forget = np.tile([1.0, 0.0], (20, 1)), np.full(20, 3)
    retain = np.tile([0.0, 1.0], (20, 1)), np.repeat([0, 1], 10)
    unseen = np.tile([0.0, 1.0], (7, 1)), np.full(7, 3)
    sets = {"forget": forget, "retain": retain, "unseen": unseen}
    assert recovered(sets, np.random.default_rng(0)) == (0.0, 7)


def test_a_forget_set_of_shots_alone_says_nothing():
    few = np.eye(2)[[0]], np.array([0])
    assert recovered({"forget": few}, np.random.default_rng(0)) is None


def test_a_class_with_few_forgotten_samples_has_a_prototype_of_those():
    """Without one, no unseen sample of the class could be recognised, and 0 % would look like
    forgetting."""
    forget = np.tile([1.0, 0.0], (4, 1)), np.full(4, 3)
    retain = np.tile([0.0, 1.0], (20, 1)), np.repeat([0, 1], 10)
    unseen = np.tile([1.0, 0.0], (7, 1)), np.full(7, 3)
    sets = {"forget": forget, "retain": retain, "unseen": unseen}
    assert recovered(sets, np.random.default_rng(0)) == (1.0, 7)


def test_samples_of_a_class_without_a_prototype_are_not_asked_for():
    labels = np.array([0] * 12 + [1] * 12 + [2] * 3)
    found = recovered({"forget": (np.eye(3)[labels], labels)}, np.random.default_rng(0))
    assert found == (1.0, 2 * (12 - SHOTS))


def test_a_single_class_says_nothing():
    labels = np.zeros(20, int)
    assert recovered({"forget": (np.ones((20, 2)), labels)}, np.random.default_rng(0)) is None


def test_features_are_the_input_of_the_layer_that_computes_the_logits():
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs = torch.randn(4, 2)
    assert torch.equal(last_features(network, inputs), network[:2](inputs))
    with pytest.raises(MismatchError, match="are not the logits"):
        last_features(nn.Sequential(network, nn.Softmax(1)), inputs)
