"""Members scaled to one norm: against a naive oracle, the same bytes however it is computed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import negmerge as nm
import oracle
from negmerge.checkpoints.names import is_statistic
from negmerge.cli import main
from negmerge.errors import MismatchError, OptionError, ValueRangeError
from negmerge.merging import assembly, engine, tiles
from negmerge.merging.estimate import estimate
from negmerge.merging.rules import rules
from small_pools import VARIANTS, make_pool
from storage import dense, loaded, store

FAST = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@pytest.fixture
def two(tmp_path):
    """Members of norm 5 and 10, by hand: their factors are 1.5 and 0.75."""
    base = store(tmp_path / "base.safetensors", {"w": np.array([1.0, 2.0, 3.0])})
    changes = [[3.0, 4.0, 0.0], [0.0, 6.0, -8.0]]
    members = [
        store(tmp_path / f"m{k}.safetensors", {"w": np.array([1.0, 2.0, 3.0]) + change})
        for k, change in enumerate(changes)
    ]
    return base, members


@pytest.mark.parametrize(
    ("rule", "options", "wanted"),
    [
        ("uniform", {}, [2.25, 5.25, -3.0]),
        ("consensus", {}, [0, 5.25, 0]),
        ("consensus", {"reduce": "max"}, [0, 6, 0]),
        ("magmax", {}, [4.5, 6, -6]),
        ("soft", {"power": 1}, [1.125, 5.25, -1.5]),
        # Changes 6 and 4.5: mean 5.25, standard error .75.
        ("shrink", {"errors": 6.9}, [0, 5.25, 0]),
        ("shrink", {"errors": 7}, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_worked_by_hand(two, rule, options, wanted, device):
    tau = nm.merge(*two, rule, options, equalise=True, device=device)
    np.testing.assert_array_equal(dense(tau)["w"], wanted)
    names = [member["name"] for member in tau.origin.members]
    factors = dict(zip(names, tau.origin.factors, strict=True))
    assert factors == {"m0.safetensors": 1.5, "m1.safetensors": 0.75}


@FAST
@given(
    variant=st.sampled_from(VARIANTS),
    n=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["F32", "F64", "BF16"]),
    buffers=st.sampled_from(["keep", "merge"]),
)
def test_streaming_equals_stacked(variant, n, seed, dtype, buffers):
    rule, options = variant
    with tempfile.TemporaryDirectory() as folder:
        base, models = make_pool(Path(folder), dtype, n, seed)
        start = loaded(base)
        merged = [name for name in start if buffers == "merge" or not is_statistic(name)]
        deltas = []
        for model in models:
            own = loaded(model)
            deltas.append({name: own[name] - start[name] for name in merged})
        scaled = oracle.equalised(deltas, lambda name: not is_statistic(name))
        wanted = oracle.merge(scaled, rule, **options)
        tau = nm.merge(base, models, rule, options, buffers=buffers, equalise=True)
        # A last bit of a factor moves few changes over a threshold of a share of the elements.
        for name, values in dense(tau).items():
            near = np.isclose(values, wanted[name], 1e-6 if dtype != "F64" else 1e-12, 1e-30)
            assert np.sum(~near) <= max(1, 0.001 * near.size), name


@pytest.mark.parametrize("rule", ["consensus", "uniform", "ties", "localize", "shrink"])
def test_the_same_bytes_however_it_is_computed(rule, tmp_path, monkeypatch):
    base, models = make_pool(tmp_path, n=4)
    given = {"buffers": "merge", "equalise": True}
    out = tmp_path / "out"
    nm.merge(base, models, rule, out=out, workers=1, **given)
    wanted = out.read_bytes()
    for workers, segment, memory, device in (
        (2, 4096, 1, "cpu"),
        (1, 8192, 10**6, "cpu"),
        (2, 4096, 10**6, "torch-cpu"),
    ):
        for module in (tiles, assembly, engine):
            monkeypatch.setattr(module, "SEGMENT", segment)
        monkeypatch.setattr(tiles, "TILES", memory)
        nm.merge(base, models[::-1], rule, out=out, workers=workers, device=device, **given)
        assert out.read_bytes() == wanted
    states = [load_file(path) for path in (base, *models)]
    tau = nm.merge(states[0], states[1:], rule, **given)
    for name, values in dense(nm.TaskVector.load(out)).items():
        np.testing.assert_array_equal(dense(tau)[name], values)


@pytest.mark.parametrize("rule", list(rules))
def test_longer_steps_give_no_more_say(rule, tmp_path):
    """Members whose changes are multiplied by powers of two point where they did before."""
    rng = np.random.default_rng(0)
    zero = {"w": torch.zeros(3000, dtype=torch.float64)}
    changes = [torch.from_numpy(rng.standard_normal(3000)) for _ in range(4)]
    longer = [change * 2.0**k for k, change in enumerate(changes)]
    one, other = (
        nm.merge(zero, [{"w": c} for c in pool], rule, equalise=True) for pool in (changes, longer)
    )
    sizes = [np.mean([float(change.norm()) for change in pool]) for pool in (changes, longer)]
    first, second = dense(one)["w"] / sizes[0], dense(other)["w"] / sizes[1]
    # The order of the members in sums may be another one, and thresholds are computed again.
    assert np.mean(~np.isclose(first, second, 1e-9, 1e-15)) < 0.001
    assert np.any(first)


def test_one_member_keeps_its_length(two):
    base, (first, _) = two
    alone = nm.merge(base, [first], "uniform", equalise=True)
    np.testing.assert_array_equal(dense(alone)["w"], [3, 4, 0])
    assert alone.origin.factors == [1.0]


def test_statistics_do_not_count_and_are_scaled(tmp_path):
    base = {"w": np.zeros(2, np.float32), "bn.running_mean": np.zeros(1, np.float32)}
    one = {"w": np.array([3, 4], np.float32), "bn.running_mean": np.ones(1, np.float32)}
    two = {"w": np.array([6, 8], np.float32), "bn.running_mean": np.full(1, 1000, np.float32)}
    tau = nm.merge(base, [one, two], "uniform", buffers="merge", equalise=True)
    assert sorted(tau.origin.factors) == [0.75, 1.5]
    assert dense(tau)["w"].tolist() == [4.5, 6]
    assert dense(tau)["bn.running_mean"].tolist() == [(1.5 + 750) / 2]


def test_a_model_in_one_pass(tmp_path):
    base, models = make_pool(tmp_path)
    tau = nm.merge(base, models, equalise=True)
    wanted = nm.apply(base, -0.7 * tau, tmp_path / "two.safetensors")
    found = nm.merge_and_apply(base, models, -0.7, tmp_path / "one.safetensors", equalise=True)
    assert found.out.read_bytes() == wanted.out.read_bytes()


def test_the_origin_of_sums(two):
    base, members = two
    scaled, plain = nm.merge(base, members, equalise=True), nm.merge(base, members)
    assert (plain + plain).origin.factors == []
    assert "factors" not in plain.origin.to_metadata()
    both = (plain + scaled).origin
    assert both.factors == [1.0, 1.0, *scaled.origin.factors]
    assert len(both.members) == 4


# ----------------------------------------------------------------------------------- wrong input


def test_a_member_without_a_norm(two, tmp_path):
    base, members = two
    (tmp_path / "same.safetensors").write_bytes(base.read_bytes())
    pool = [*members, tmp_path / "same.safetensors"]
    for more in ({}, {"allow_duplicates": True}):
        with pytest.raises(MismatchError, match=r"same\.safetensors: its weights do not differ"):
            nm.merge(base, pool, equalise=True, **more)


def test_values_that_are_not_finite_are_named(two, tmp_path):
    base, members = two
    save_file({"w": torch.tensor([1.0, float("nan"), 2.0])}, members[1])
    with pytest.raises(ValueRangeError, match=r"m1\.safetensors 'w': 1 of 3 values are NaN or inf"):
        nm.merge(base, members, equalise=True)


def test_a_pool_that_is_too_small_is_refused_before_it_is_read(two):
    base, members = two
    with pytest.raises(OptionError, match="rule 'shrink': the pool has 1 member, wanted at least"):
        nm.merge(base, members[:1], "shrink", equalise=True)
    with pytest.raises(OptionError, match="rule 'shrink': the pool has 1 member, wanted at least"):
        estimate(base, members[:1], "shrink")


# ---------------------------------------------------------------------------------- command line


def test_the_command_line(two, tmp_path, capsys):
    base, members = two
    patch, out = tmp_path / "patch.safetensors", tmp_path / "model"
    words = ["merge", str(base), *map(str, members)]
    main([*words, "-o", str(patch), "--equalise", "--rule", "soft", "--option", "power=1"])
    np.testing.assert_array_equal(dense(nm.TaskVector.load(patch))["w"], [1.125, 5.25, -1.5])
    capsys.readouterr()
    main(["inspect", str(patch)])
    shown = capsys.readouterr().out
    assert "the members were scaled to one norm, by factors from 0.75 to 1.5" in shown
    assert "factor" in shown
    assert "soft (power=1)" in shown
    main(["inspect", str(patch), "--json"])
    assert sorted(json.loads(capsys.readouterr().out)["factors"]) == [0.75, 1.5]
    main([*words, "-o", str(tmp_path / "plain.safetensors")])
    main(["inspect", str(tmp_path / "plain.safetensors")])
    assert "factor" not in capsys.readouterr().out
    main([*words, "-o", str(out), "--equalise", "--negate", "0.5"])
    assert "--equalise" in (out / "README.md").read_text()
    main([*words, "-o", str(patch), "--equalise", "--dry-run", "--json"])
    need = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert need["elements"] == 3
    with pytest.raises(SystemExit) as ended:
        main([*words[:3], "-o", str(patch), "--rule", "shrink"])
    assert ended.value.code == 2
    assert "rule 'shrink': the pool has 1 member, wanted at least 2" in capsys.readouterr().err
