"""A merged task vector that is changed by a retain term, by Fisher weights and by factors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import negmerge as nm
from negmerge.errors import FileError, ValueRangeError
from negmerge.vectors.reshape import EPSILON, fisher_weighted, minus_retained, with_factors
from negmerge.vectors.task_vector import TaskVector

floats = st.floats(-100, 100, width=32)
information = npst.arrays(np.float32, 6, elements=st.floats(0, 1000, width=32))
values = npst.arrays(np.float32, 6, elements=floats)
weights = st.floats(0, 10)


def vector(first, second=(1, 2)) -> TaskVector:
    """A task vector of two tensors."""
    model = {"a.weight": np.array(first, np.float32), "b.weight": np.array(second, np.float32)}
    base = {name: np.zeros_like(value) for name, value in model.items()}
    return nm.merge(base, [model])


def arrays(tau: TaskVector) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tau.items()}


def same_bits(one: TaskVector, two: TaskVector) -> bool:
    return all(one[name].numpy().tobytes() == two[name].numpy().tobytes() for name in one)


def test_golden_the_retain_term_has_the_length_of_tau_times_its_weight():
    tau, retained = vector([3, 0, 0], [0, 4]), vector([0, 0, 2], [0, 0])
    found = minus_retained(tau, retained, 0.5)
    # ‖τ‖ = 5 and ‖τ_r‖ = 2: a half of 5 / 2 times the 2 of τ_r is taken away
    np.testing.assert_array_equal(found["a.weight"], [3, 0, -2.5])
    np.testing.assert_array_equal(found["b.weight"], [0, 4])
    assert found.origin.reshaped == {"retain": {"weight": 0.5, "norm": 5.0, "norm_retain": 2.0}}
    assert found.origin.base == tau.origin.base
    assert found.origin.rule == "consensus"


@given(values, values, weights)
def test_the_retain_term_is_that_of_numpy(first, second, weight):
    tau, retained = vector(first), vector(second)
    lengths = [np.sqrt(np.sum(np.float64(v) ** 2) + 5) for v in (first, second)]
    found = minus_retained(tau, retained, weight)
    wanted = np.float64(first) - weight * lengths[0] / lengths[1] * np.float64(second)
    np.testing.assert_allclose(found["a.weight"].numpy(), wanted, rtol=1e-5, atol=1e-4)


@given(values, values)
def test_without_weight_the_retain_term_leaves_every_bit(first, second):
    tau = vector(first)
    assert same_bits(minus_retained(tau, vector(second), 0.0), tau)


def test_a_retain_set_that_taught_nothing_is_an_error():
    with pytest.raises(ValueRangeError, match=r"^retain: .* changed no tensor of τ; raise "):
        minus_retained(vector([1, 2, 3]), 0.0 * vector([1, 2, 3]), 0.5)


@given(values, information, information, weights)
def test_fisher_weights_are_between_0_and_1_and_those_of_numpy(tau, forget, retain, weight):
    if not forget.any():
        forget[0] = 1
    plain = vector(tau)
    found = fisher_weighted(
        plain, lambda name: (forget, retain) if name == "a.weight" else None, weight
    )
    epsilon = EPSILON * np.float64(forget).mean()
    own = np.float64(forget) / (np.float64(forget) + weight * np.float64(retain) + epsilon)
    assert ((own >= 0) & (own <= 1)).all()
    np.testing.assert_allclose(found["a.weight"].numpy(), own * tau, rtol=1e-6, atol=1e-37)
    assert (np.abs(found["a.weight"].numpy()) <= np.abs(tau)).all()
    assert found["b.weight"].numpy().tobytes() == plain["b.weight"].numpy().tobytes()
    record = found.origin.reshaped["fisher"]
    assert 0 <= record["mean"] <= 1
    if tau.all():
        assert record["mean"] == pytest.approx(own.mean())


@given(values, information, information, weights, st.sampled_from([2.0**-20, 2.0**15]))
def test_the_unit_of_the_fisher_information_does_not_matter(tau, forget, retain, weight, unit):
    forget, retain = np.float64(forget) + 1, np.float64(retain)
    found = []
    for u in (1.0, unit):
        own = {"a.weight": (u * forget, u * retain)}
        found.append(fisher_weighted(vector(tau), own.get, weight)["a.weight"].numpy())
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_gradients_of_zero_are_an_error():
    nothing = np.zeros(3)
    with pytest.raises(ValueRangeError, match=r"^fisher: the gradients .* all zero; leave"):
        fisher_weighted(vector([1, 2, 3], [1, 2, 3]), lambda _: (nothing, nothing), 1.0)


@given(values, st.sampled_from([0.0, 0.25, 0.5, 2.0, 4.0]))
def test_a_factor_multiplies_exactly_the_tensors_of_its_group(tau, factor):
    plain, groups = vector(tau), {"x": ["a.weight"], "y": ["b.weight"]}
    found = arrays(with_factors(plain, groups, {"x": factor, "y": 1.0}))
    np.testing.assert_array_equal(found["a.weight"], np.float32(factor) * tau)
    np.testing.assert_array_equal(found["b.weight"], plain["b.weight"].numpy())


@given(values)
def test_factors_of_one_leave_every_bit(tau):
    plain, groups = vector(tau), {"x": ["a.weight"], "y": ["b.weight"]}
    assert same_bits(with_factors(plain, groups, {"x": 1.0, "y": 1.0}), plain)


def test_a_patch_keeps_what_was_done_and_a_damaged_record_is_an_error(tmp_path: Path):
    tau = minus_retained(vector([1, 2, 3]), vector([3, 2, 1]), 0.5)
    found = with_factors(
        tau, {"x" * 3000: ["a.weight"], "y": ["b.weight"]}, {"x" * 3000: 0.5, "y": 1.0}, by="depth"
    )
    found.save(tmp_path / "tau.safetensors")
    again = TaskVector.load(tmp_path / "tau.safetensors")
    assert again.origin == found.origin
    assert same_bits(again, found)
    assert "reshaped" not in vector([1, 2, 3]).origin.to_metadata()
    data = (tmp_path / "tau.safetensors").read_bytes()
    assert data.count(b"depth") == 1
    (tmp_path / "bad.safetensors").write_bytes(data.replace(b'\\"depth\\"', b"[1,2,3]  "))
    with pytest.raises(FileError, match="metadata 'reshaped' of the patch is missing or damaged"):
        TaskVector.load(tmp_path / "bad.safetensors")
