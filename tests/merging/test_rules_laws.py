"""The rules against a naive stacked implementation, and the laws they must obey."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import negmerge as nm
import oracle
from negmerge.errors import OptionError, ValueRangeError
from negmerge.merging.rules import rules
from storage import dense, store

FAST = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
VARIANTS = [
    ("uniform", {}),
    ("consensus", {}),
    ("consensus", {"zeros": "abstain"}),
    ("consensus", {"quorum": 0.7}),
    ("consensus", {"quorum": 0.6, "zeros": "abstain"}),
    ("consensus", {"reduce": "min"}),
    ("consensus", {"reduce": "max"}),
    ("consensus", {"reduce": "max", "quorum": 0.6}),
    ("consensus", {"reduce": "min", "quorum": 0.6, "zeros": "abstain"}),
    ("consensus", {"reduce": "min", "signed": True}),
    ("consensus", {"reduce": "max", "signed": True}),
    ("conflict", {}),
    ("conflict", {"quorum": 0.7, "zeros": "abstain"}),
    ("magmax", {}),
    ("ties", {}),
    ("ties", {"density": 0.5}),
    ("ties", {"density": 1.0}),
    ("ties", {"density": 0.4, "scope": "tensor"}),
    ("localize", {}),
    ("localize", {"density": 0.5, "scope": "tensor"}),
    ("tall", {}),
    ("tall", {"factor": 1.5, "agree": 3}),
    ("soft", {}),
    ("soft", {"power": 1}),
    ("soft", {"power": 3}),
    ("soft", {"power": 4}),
    ("shrink", {}),
    ("shrink", {"errors": 1.5}),
    ("shrink", {"by": "james_stein"}),
]
IDS = [f"{rule}-{'-'.join(f'{k}={v}' for k, v in o.items())}" for rule, o in VARIANTS]


@st.composite
def pools(draw, least=1, most=7):
    """A base and members on a grid that every format holds exactly, with many zeros and ties."""
    shapes = draw(
        st.lists(st.sampled_from([(), (1,), (3,), (2, 5), (0, 3), (17,)]), min_size=1, max_size=3)
    )
    n = draw(st.integers(least, most))
    seed = draw(st.integers(0, 2**32 - 1))
    coarse = draw(st.sampled_from([1, 3]))
    rng = np.random.default_rng(seed)
    base = {f"t{j}.weight": rng.integers(-4, 5, shape) / 4 for j, shape in enumerate(shapes)}
    shared = {name: rng.integers(-coarse, coarse + 1, b.shape) for name, b in base.items()}
    members = [
        {
            name: b + (shared[name] + rng.integers(-coarse, coarse + 1, b.shape)) / 8
            for name, b in base.items()
        }
        for _ in range(n)
    ]
    return base, members


def enough(rule, members):
    """The members; a single one twice if the rule needs two."""
    return members if len(members) >= rules.get(rule).least_members else members * 2


def deltas(base, members):
    return [{name: m[name] - base[name] for name in base} for m in members]


def merged(base, members, rule, options, dtype="F32", **more):
    with tempfile.TemporaryDirectory() as folder:
        paths = [store(Path(folder) / f"m{k}.safetensors", m, dtype) for k, m in enumerate(members)]
        origin = store(Path(folder) / "base.safetensors", base, dtype)
        return nm.merge(origin, paths, rule, options, allow_duplicates=True, **more)


def rounded(model, dtype):
    kind = np.float64 if dtype == "F64" else np.float32
    return {name: values.astype(kind).astype(np.float64) for name, values in model.items()}


def equal(left, right, tolerance=0.0):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], tolerance, 0, err_msg=name)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize(("rule", "options"), VARIANTS, ids=IDS)
@settings(FAST, max_examples=12)
@given(pool=pools())
def test_streaming_equals_stacked(rule, options, dtype, pool):
    base, members = pool[0], enough(rule, pool[1])
    wanted = oracle.merge(deltas(base, members), rule, **options)
    # The oracle of shrink rounds once, in rational numbers.
    tolerance = 1e-15 if rule == "shrink" and dtype == "F64" else 0.0
    equal(dense(merged(base, members, rule, options, dtype)), rounded(wanted, dtype), tolerance)


@pytest.mark.parametrize(("rule", "options"), VARIANTS, ids=IDS)
@settings(FAST, max_examples=8)
@given(pool=pools())
def test_torch_gives_the_same(rule, options, pool):
    base, members = pool[0], enough(rule, pool[1])
    cpu = merged(base, members, rule, options)
    other = merged(base, members, rule, options, device="torch-cpu")
    equal(dense(cpu), dense(other))
    assert cpu.origin == other.origin


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_votes_are_counted_in_float64(device):
    """0.6 · 25 in float32 is more than 15, which fifteen votes of 25 would not reach."""
    votes = np.arange(26.0)
    members = [{"w": np.where(k < votes, 1.0, -1.0)} for k in range(25)]
    options = {"quorum": 0.6, "zeros": "abstain"}
    tau = merged({"w": np.zeros(26)}, members, "consensus", options, device=device)
    kept = (votes >= 15) | (votes <= 10)
    np.testing.assert_array_equal(dense(tau)["w"] != 0, kept)


@pytest.mark.parametrize("rule", list(rules))
@FAST
@given(pool=pools(), seed=st.integers(0, 2**32 - 1), exponents=st.integers(0, 60))
def test_order_does_not_matter(rule, pool, seed, exponents):
    """Also for values of such different size that a sum depends on its order."""
    rng = np.random.default_rng(seed)
    base, members = pool[0], enough(rule, pool[1])
    wild = [
        {
            name: np.ldexp(v, rng.integers(-exponents, exponents + 1, v.shape)).astype(np.float32)
            for name, v in m.items()
        }
        for m in members
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [store(Path(folder) / f"m{k}.safetensors", m) for k, m in enumerate(wild)]
        origin = store(Path(folder) / "base.safetensors", base)
        results = []
        for k in range(2):
            out = Path(folder) / f"out{k}.safetensors"
            nm.merge(origin, paths, rule, out=out, allow_duplicates=True)
            results.append(out.read_bytes())
            rng.shuffle(paths)
    assert results[0] == results[1]


@FAST
@given(
    pool=pools(),
    quorum=st.sampled_from([0.6, 0.75, 1.0]),
    zeros=st.sampled_from(["strict", "abstain"]),
)
def test_consensus_and_conflict_add_up_to_uniform(pool, quorum, zeros):
    options = {"quorum": quorum, "zeros": zeros}
    both = merged(*pool, "consensus", options) + merged(*pool, "conflict", options)
    equal(dense(both), dense(merged(*pool, "uniform", {})))


@pytest.mark.parametrize("rule", [r for r in rules if r not in ("conflict", "localize", "ties")])
@FAST
@given(pool=pools(most=1), copies=st.integers(2, 6))
def test_copies_of_one_member_give_its_task_vector(rule, pool, copies):
    base, members = pool
    own = dense(merged(base, members, "uniform", {}))
    equal(dense(merged(base, members * copies, rule, {})), own)


@pytest.mark.parametrize("rule", list(rules))
@FAST
@given(pool=pools(), power=st.integers(-3, 3))
def test_positive_scaling_passes_through(rule, pool, power):
    base, members = pool[0], enough(rule, pool[1])
    zero = {name: np.zeros_like(b) for name, b in base.items()}
    changes = deltas(base, members)
    scaled = [{name: d[name] * 2.0**power for name in d} for d in changes]
    one, two = merged(zero, changes, rule, {}), merged(zero, scaled, rule, {})
    equal({name: v * 2.0**power for name, v in dense(one).items()}, dense(two))


@pytest.mark.parametrize("rule", [r for r in rules if r not in ("magmax", "ties")])
@FAST
@given(pool=pools())
def test_negated_members_give_the_negated_vector(rule, pool):
    base, members = pool[0], enough(rule, pool[1])
    zero = {name: np.zeros_like(b) for name, b in base.items()}
    changes = deltas(base, members)
    mirrored = [{name: -d[name] for name in d} for d in changes]
    one, two = merged(zero, changes, rule, {}), merged(zero, mirrored, rule, {})
    equal({name: 0 - v for name, v in dense(one).items()}, dense(two))


@pytest.mark.parametrize("power", [1, 2, 3, 4])
@FAST
@given(pool=pools())
def test_soft_is_the_mean_where_all_agree_and_less_elsewhere(power, pool):
    """To the last bit; higher powers are never farther from zero."""
    zero, changes = {n: np.zeros_like(b) for n, b in pool[0].items()}, deltas(*pool)
    found, lower, unanimous, mean = (
        dense(merged(zero, changes, rule, options, "F64"))
        for rule, options in (
            ("soft", {"power": power}),
            ("soft", {"power": max(1, power - 1)}),
            ("consensus", {}),
            ("uniform", {}),
        )
    )
    for name in zero:
        kept = unanimous[name] != 0
        np.testing.assert_array_equal(found[name][kept], unanimous[name][kept])
        assert np.all(abs(found[name]) <= abs(lower[name]))
        assert np.all(abs(found[name]) <= abs(mean[name]))
        assert np.all(found[name] * mean[name] >= 0)


@FAST
@given(pool=pools(least=2))
def test_shrink_lies_between_zero_and_the_mean(pool):
    uniform = dense(merged(*pool, "uniform", {}))
    equal(dense(merged(*pool, "shrink", {"errors": 0})), uniform)
    shrunk = dense(merged(*pool, "shrink", {"by": "james_stein"}))
    kept = dense(merged(*pool, "shrink", {"errors": 1}))
    for name, mean in uniform.items():
        assert np.all(abs(shrunk[name]) <= abs(mean))
        assert np.all(shrunk[name] * mean >= 0)
        np.testing.assert_array_equal(shrunk[name] != 0, kept[name] != 0)
        assert np.all((kept[name] == 0) | (kept[name] == mean))


@FAST
@given(st.integers(2, 9), st.floats(0.01, 100), st.floats(1e-9, 1e-3), st.integers(0, 2**32 - 1))
def test_the_spread_of_nearly_equal_changes(n, size, apart, seed):
    """A difference of sums loses digits of the spread, and none that the result shows."""
    rng = np.random.default_rng(seed)
    members = [{"w": size * (1 + apart * rng.standard_normal(50))} for _ in range(n)]
    tau = merged({"w": np.zeros(50)}, members, "shrink", {"by": "james_stein"}, "F64")
    wanted = oracle.merge(members, "shrink", by="james_stein")["w"]
    np.testing.assert_allclose(dense(tau)["w"], wanted, 1e-14 * n)


@pytest.mark.parametrize("size", [1e160, 1e-170])
@pytest.mark.parametrize("by", ["threshold", "james_stein"])
@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_squares_that_do_not_fit_float64(size, by, device):
    """Too large ones are refused; too small ones have no signal."""
    members = [{"w": np.array([size])}, {"w": np.array([1.01 * size])}]
    given = ({"w": np.zeros(1)}, members, "shrink", {"by": by}, "F64")
    if size > 1:
        with pytest.raises(ValueRangeError, match="'w': the merged change does not fit F64"):
            merged(*given, device=device)
    else:
        assert merged(*given, device=device).nonzero == 0


@pytest.mark.parametrize("options", [{}, {"by": "james_stein"}])
def test_the_spread_of_one_member_is_not_known(options):
    one = {"w": np.ones(3)}
    for device in ("cpu", "torch-cpu"):
        with pytest.raises(OptionError, match="rule 'shrink': the pool has 1 member, wanted at le"):
            merged({"w": np.zeros(3)}, [one], "shrink", options, device=device)


@FAST
@given(pool=pools(least=2))
def test_support_shrinks_as_members_join(pool):
    base, members = pool
    fewer, more = (dense(merged(base, m, "consensus", {})) for m in (members[:-1], members))
    for name in base:
        assert not np.any((more[name] != 0) & (fewer[name] == 0))


@pytest.mark.parametrize(
    ("quorum", "n", "needed"), [(0.7, 10, 7), (0.6, 5, 3), (0.9, 10, 9), (0.51, 3, 2)]
)
def test_quorum_counts_whole_members(quorum, n, needed):
    """0.7 · 10 is 7.000000000000001 in binary; seven of ten are enough all the same."""
    for voters, kept in ((needed, True), (needed - 1, False)):
        base = {"w": np.zeros(1)}
        members = [{"w": np.array([1.0 if k < voters else 0.0])} for k in range(n)]
        tau = merged(base, members, "consensus", {"quorum": quorum})
        assert bool(tau.nonzero) is kept


def test_a_rule_that_refers_to_a_name_follows_its_value():
    """Compiled code holds the values that names had; it is another code when they change."""
    space: dict = {}
    exec("def finish(c, total): return total * K", space)  # noqa: S102 as at a prompt

    class Scaled(rules.get("uniform")):
        finish = staticmethod(space["finish"])

    rules.register("scaled", Scaled)
    base = {"w": np.arange(6.0)}
    members = [{"w": base["w"] + 1}, {"w": base["w"] + 3}]
    try:
        found = []
        for value in (1.0, 5.0):
            space["K"] = value
            found.append(dense(merged(base, members, "scaled", {}))["w"].tolist())
    finally:
        rules.remove("scaled")
    assert found == [[2.0] * 6, [10.0] * 6]
