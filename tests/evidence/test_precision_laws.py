"""Rounding to bfloat16, int8 and int4, against plain loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from negmerge.evidence.precision import FORMATS, after_rounding, rounded, survival

NUMBERS = st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
MATRICES = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=NUMBERS)


def plain(rows: np.ndarray, levels: int, like: np.ndarray) -> np.ndarray:
    """Each number by itself: the nearest whole multiple of the step of its row."""
    found = np.zeros_like(rows)
    for r, row in enumerate(rows):
        step = np.float32(max(abs(float(x)) for x in like[r])) / np.float32(levels)
        for k, x in enumerate(row):
            if step > 0:
                whole = min(max(round(float(x / step)), -levels), levels)  # halves to even
                found[r, k] = np.float32(whole) * step
    return found


@given(MATRICES, st.sampled_from([7, 127]))
def test_a_weight_is_rounded_as_each_number_by_itself(rows, levels):
    weight = torch.from_numpy(rows)
    np.testing.assert_allclose(rounded(weight, levels).numpy(), plain(rows, levels, rows), 1e-6)
    assert torch.equal(rounded(rounded(weight, None), None), rounded(weight, None))


@given(MATRICES, st.data(), st.sampled_from([*FORMATS.values()]))
def test_survival_counts_elements_one_by_one(before, data, levels):
    after = data.draw(arrays(np.float32, before.shape, elements=NUMBERS))
    old, new = torch.from_numpy(before), torch.from_numpy(after)
    if levels is None:
        first, second = old.bfloat16().float().numpy(), new.bfloat16().float().numpy()
    else:
        first, second = rounded(old, levels, old).numpy(), rounded(new, levels, old).numpy()
    changed = kept = 0
    for place in np.ndindex(before.shape):
        changed += before[place] != after[place]
        kept += before[place] != after[place] and first[place] != second[place]
    assert survival(old, new, levels) == (changed, kept)


def test_a_channel_of_zeros_and_a_convolution():
    weight = torch.zeros(2, 3, 2, 2)
    weight[1] = torch.linspace(-7, 7, 12).reshape(3, 2, 2)
    assert torch.equal(rounded(weight, 7)[0], torch.zeros(3, 2, 2))
    assert torch.equal(rounded(weight, 7)[1], weight[1].round())


def test_a_change_below_half_a_step_does_not_survive():
    before = torch.tensor([[7.0, 3.0, -2.0]])  # the step of int4 is 1
    assert survival(before, before + torch.tensor([[0.0, 0.4, -0.4]]), 7) == (2, 0)
    assert survival(before, before + torch.tensor([[0.0, 0.6, -0.4]]), 7) == (2, 1)


@pytest.mark.parametrize("levels", FORMATS.values())
def test_the_weights_are_restored_bit_by_bit(levels):
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with after_rounding(network, levels):
        inside = network.state_dict()
        assert torch.equal(inside["2.weight"], rounded(before["2.weight"], levels))
        assert not torch.equal(inside["0.weight"], before["0.weight"])
        bias = inside["2.bias"]
        assert torch.equal(bias, before["2.bias"]) == (levels is not None)
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
