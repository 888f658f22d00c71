"""A rule of one's own, in one file: new statistics, any number of them, everywhere a merge runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import pytest

import negmerge as nm
from negmerge.errors import NegMergeError
from negmerge.merging import fast_folds, folds
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.folds import STRIP, compiled_fold
from negmerge.merging.rules import Rule, rule, rules
from negmerge.merging.statistics import (
    GAIN,
    GAINS,
    LOSS,
    LOSSES,
    NEGATIVE,
    POSITIVE,
    TOTAL,
    Statistic,
    where,
)
from negmerge.merging.thresholds import Threshold
from storage import dense, store

SQUARES = Statistic("squares", lambda delta: delta * delta)
LARGE = Statistic("large", lambda delta, limit: abs(delta) >= limit, count=True)
LONGEST = Statistic("longest", abs, lambda one, two: where(two > one, two, one))
PRODUCT = Statistic("product", lambda delta: 1 + delta, lambda one, two: one * two, start=1.0)
BOUND = 0.25


@dataclass(frozen=True)
class Four(Rule):
    """Keep the mean where many members are large and their squares are small."""

    statistics = (TOTAL, SQUARES, LARGE, LONGEST)

    def limits(self):
        return (BOUND,)

    @staticmethod
    def finish(c, total, squares, large, longest):
        return total / c[0] * ((squares < 2 * longest * longest) & (large >= 2))


@dataclass(frozen=True)
class Seven(Rule):
    """A bit of everything."""

    statistics = (PRODUCT, NEGATIVE, SQUARES, POSITIVE, LONGEST, TOTAL, LARGE)

    def limits(self):
        return (BOUND,)

    @staticmethod
    def finish(c, product, negative, squares, positive, longest, total, large):
        few = positive + negative + large < 2 * c[0]
        return where(few, total - product, squares * longest)


def four(stack):
    squares, longest = (stack**2).sum(0), abs(stack).max(0)
    kept = (squares < 2 * longest**2) & ((abs(stack) >= BOUND).sum(0) >= 2)
    return np.where(kept, stack.sum(0) / len(stack), 0)


def seven(stack):
    votes = (stack != 0).sum(0) + (abs(stack) >= BOUND).sum(0)
    total, product = stack.sum(0), np.prod(1 + stack, axis=0)
    return np.where(votes < 2 * len(stack), total - product, (stack**2).sum(0) * abs(stack).max(0))


@pytest.fixture
def registered():
    """Register rules; they and their folds are removed again."""
    before, compiled = set(rules), dict(folds.FOLDS)
    yield rule
    for name in set(rules) - before:
        rules.remove(name)
    folds.FOLDS.clear()
    folds.FOLDS.update(compiled)


@pytest.fixture
def pool(tmp_path):
    """Models on a grid where every sum and product is exact, and their stacked task vectors."""
    rng = np.random.default_rng(3)
    base = {"a": rng.integers(-8, 9, (41, 63)) / 8, "b": rng.integers(-8, 9, 7) / 8}
    deltas = [{k: rng.integers(-4, 5, v.shape) / 8 for k, v in base.items()} for _ in range(4)]
    paths = [
        store(tmp_path / f"m{k}.safetensors", {n: base[n] + d[n] for n in base})
        for k, d in enumerate(deltas)
    ]
    stacks = {name: np.stack([delta[name] for delta in deltas]) for name in base}
    return store(tmp_path / "base.safetensors", base), paths, stacks


def everywhere(base, paths, name):
    """A rule in a streaming merge, with torch, and member by member, saved and loaded between."""
    yield nm.merge(base, paths, name)
    yield nm.merge(base, paths, name, device="torch-cpu")
    acc = nm.Accumulator(base, rules=[name])
    for path in paths[:2]:
        acc.add(path)
    acc.save(base.with_name("state"))
    acc = nm.Accumulator.load(base.with_name("state"), base)
    for path in paths[2:]:
        acc.add(path)
    yield acc.finish(name)


@dataclass(frozen=True)
class Fixed(Rule):
    """The mean of the changes above a fixed limit, from the statistics of ties."""

    statistics = (TOTAL, GAIN, LOSS, GAINS, LOSSES)

    def limits(self):
        return (BOUND,)

    @staticmethod
    def finish(c, total, gain, loss, gains, losses):
        return (gain + loss) / where(gains + losses == 0, 1, gains + losses)


def fixed(stack):
    kept = abs(stack) >= BOUND
    return (stack * kept).sum(0) / np.maximum(kept.sum(0), 1)


@pytest.mark.parametrize(("cls", "naive"), [(Four, four), (Seven, seven), (Fixed, fixed)])
def test_a_rule_may_bring_statistics_of_its_own(registered, pool, cls, naive):
    registered(cls)
    base, paths, stacks = pool
    for tau in everywhere(base, paths, cls.__name__.lower()):
        assert tau.nonzero
        for name, found in dense(tau).items():
            np.testing.assert_array_equal(found, naive(stacks[name]).astype(np.float32))


# A statistic that needs all members at once: the distance of the members from their mean.
SCATTER = Statistic(
    "scatter",
    lambda deltas, limits: abs(deltas - TOTAL.over(deltas, limits) / len(deltas)).sum(0),
    all_members=True,
)


@dataclass(frozen=True)
class Close(Rule):
    """Keep the mean where the members are close to it."""

    statistics = (TOTAL, SCATTER)

    @staticmethod
    def finish(c, total, scatter):
        return total / c[0] * (scatter <= 1)


def fold_scatter(rows, s, limits, state, flags, edges):
    total, scatter = state
    fast_folds.add_total(rows, s, total)
    n = rows.shape[0] - 1
    for i in range(STRIP):
        scatter[i] = 0.0
    for k in range(1, n + 1):
        for i in range(STRIP):
            delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
            scatter[i] += abs(delta - total[i] / n)
    return folds.finite(total)


def test_a_statistic_of_all_members_at_once_brings_its_fold(registered, pool):
    registered(Close)
    base, paths, stacks = pool
    with pytest.raises(NegMergeError, match=r"^statistic 'scatter': .* compiled_fold") as told:
        nm.merge(base, paths, "close")
    assert "\n" not in str(told.value)
    with pytest.raises(NegMergeError, match="'close' needs all members at once"):
        nm.Accumulator(base, ["close"])
    compiled_fold(TOTAL, SCATTER)(fold_scatter)
    for device in ("cpu", "torch-cpu"):
        for name, found in dense(nm.merge(base, paths, "close", device=device)).items():
            stack = stacks[name]
            mean = stack.sum(0) / len(stack)
            wanted = np.where(abs(stack - mean).sum(0) <= 1, mean, 0)
            np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_an_accumulator_keeps_no_two_statistics_of_one_name(registered, pool):
    @registered
    @dataclass(frozen=True)
    class Other(Rule):
        statistics = (Statistic("total", lambda delta: 2 * delta),)
        finish = staticmethod(lambda c, total: total)

    with pytest.raises(NegMergeError, match=r"'other': another rule .* statistic 'total'"):
        nm.Accumulator(pool[0], ["uniform", "other"])
    acc = nm.Accumulator(pool[0], ["uniform"])
    acc.add(pool[1][0])
    with pytest.raises(NegMergeError, match="cannot finish 'other'"):
        acc.finish("other")


# What must be known of the whole vectors: a first pass before the merge, tallies during it.


@dataclass(frozen=True)
class Median(Rule):
    """Average the elements of each member that are above the median of its magnitudes."""

    statistics = (LARGE, GAIN, LOSS)

    def first_pass(self):
        return Threshold(0.5, of="members")

    @staticmethod
    def finish(c, large, gain, loss):
        return (gain + loss) / where(large == 0, 1, large)


def median(vectors):
    least = [np.sort(abs(vector))[vector.size - vector.size // 2 - 1] for vector in vectors]
    kept = abs(vectors) >= np.array(least)[:, None]
    return (vectors * kept).sum(0) / np.maximum(kept.sum(0), 1)


@dataclass(frozen=True)
class Norm(FirstPass):
    """The length of a vector."""

    def find(self, changes):
        squares = np.zeros(changes.width)
        for block in changes.blocks():
            squares += (block * block).sum(1)
        return np.sqrt(squares)


SCALED = Statistic("scaled", lambda delta, norm: delta / norm)


@dataclass(frozen=True)
class Directions(Rule):
    """The mean of the directions of all members."""

    statistics = (SCALED,)

    def first_pass(self):
        return Norm(of="members")

    @staticmethod
    def finish(c, scaled):
        return scaled / c[0]


def directions(vectors):
    return sum(vector / sqrt((vector**2).sum()) for vector in vectors) / len(vectors)


@dataclass(frozen=True)
class OfUnitLength(Rule):
    """The mean, as a vector of length one."""

    statistics = (POSITIVE, TOTAL)

    def first_pass(self):
        return Norm(of="mean")

    @staticmethod
    def finish(c, positive, total):
        return total / c[0] / c[1]


def of_unit_length(vectors):
    mean = vectors.sum(0) / len(vectors)
    return mean / sqrt((mean**2).sum())


def _up(c, total):
    return total > 0


def _down(c, total):
    return total < 0


@dataclass(frozen=True)
class OneSided(Rule):
    """Keep the sign that more elements of the sum have."""

    statistics = (TOTAL,)
    tallies = (_up, _down)

    def final_constants(self, sums):
        up, down = sums
        return (1.0 if up >= down else -1.0,)

    @staticmethod
    def finish(c, total):
        return total * (total * c[1] > 0)


def one_sided(vectors):
    total = vectors.sum(0)
    sign = 1 if (total > 0).sum() >= (total < 0).sum() else -1
    return np.where(np.sign(total) == sign, total, 0)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    ("cls", "naive"),
    [
        (Median, median),
        (Directions, directions),
        (OfUnitLength, of_unit_length),
        (OneSided, one_sided),
    ],
)
def test_a_rule_may_ask_about_the_whole_vectors(registered, pool, tmp_path, cls, naive, mirrored):
    registered(cls)
    base, paths, stacks = pool
    if mirrored:
        origin = {name: np.zeros(stack.shape[1:]) for name, stack in stacks.items()}
        base = store(tmp_path / "zero.safetensors", origin)
        stacks = {name: -stack for name, stack in stacks.items()}
        for k, path in enumerate(paths):
            store(path, {name: stack[k] for name, stack in stacks.items()})
    names, n = sorted(stacks), len(paths)
    wanted = naive(np.concatenate([stacks[name].reshape(n, -1) for name in names], axis=1))
    for tau in everywhere(base, paths, cls.__name__.lower()):
        found = np.concatenate([dense(tau)[name].reshape(-1) for name in names])
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert np.count_nonzero(found) > 0


def test_an_accumulator_keeps_no_two_limits_of_one_statistic(registered, pool):
    registered(Median)
    base, paths, _ = pool
    with pytest.raises(NegMergeError, match=r"'median': .* statistic 'gain' .* has other limits"):
        nm.Accumulator(base, ["ties", "median"])
    acc = nm.Accumulator(base, {"ties": {"density": 0.5}})
    acc.add(paths[0])
    with pytest.raises(NegMergeError, match="cannot finish 'median'"):
        acc.finish("median")
    acc = nm.Accumulator(base, {"ties": {"density": 0.5}, "median": {}, "uniform": {}})
    for path in paths:
        acc.add(path)
    for rule_, options in (("ties", {"density": 0.5}), ("median", {}), ("uniform", {})):
        wanted = dense(nm.merge(base, paths, rule_, options))
        for name, found in dense(acc.finish(rule_)).items():
            np.testing.assert_array_equal(found, wanted[name])
