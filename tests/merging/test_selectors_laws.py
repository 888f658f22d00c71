"""Selectors and the halving search, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.cli.listing import selectors
from negmerge.errors import NegMergeError
from negmerge.evaluation.bisection import bracket
from negmerge.evaluation.criteria import choose, criteria
from negmerge.merging.select import Greedy, single_best

losses = st.lists(st.floats(0, 10), min_size=1, max_size=8)


@given(losses, st.sampled_from(["paper", "soup"]), st.integers(0, 1000))
def test_greedy_keeps_what_lowers_the_loss(alone, order, salt):
    def score(members: list[int]) -> float:
        return (hash((salt, *sorted(members))) % 1000) / 100

    kept, tried = Greedy(order).walk(alone, score)
    assert len(tried) == len(alone) - 1  # with the ranking 2n − 1 evaluations
    edge = max(alone) if order == "paper" else min(alone)
    assert alone[kept[0]] == edge
    best, members = alone[kept[0]], [kept[0]]
    for candidate, loss in tried:
        assert candidate[:-1] == members
        assert loss == score(candidate)
        if loss < best:
            best, members = loss, candidate
    assert members == kept
    assert best <= alone[kept[0]]


@given(losses)
def test_single_best_is_the_first_minimum(alone):
    assert single_best(alone) == alone.index(min(alone))


@pytest.mark.parametrize("wrong", [{"order": "best"}, {"scale": 0.0}, {"scale": float("nan")}])
def test_greedy_refuses(wrong):
    with pytest.raises(NegMergeError, match=r"greedy: .*wanted"):
        Greedy(**wrong)


def test_selectors_are_listed():
    assert list(selectors()) == ["single_best", "greedy"]


def searched(rows: list[dict[str, float]]) -> tuple[float, int]:
    """λ by the halving search, and how many rows it looked at."""
    criterion = criteria.get("keep_retain")
    seen: dict[float, dict[str, float]] = {}
    by_scale = {row["scale"]: row for row in rows}

    def loss(scale: float) -> float | None:
        seen[scale] = by_scale[scale]
        return criterion.loss(by_scale[scale], rows[0], None)

    bracket(loss, [row["scale"] for row in rows])
    return choose(seen.values(), criterion).scale, len(seen)


steps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=21, max_size=21)


@given(steps)
def test_halving_finds_the_grids_choice_in_eight(falls):
    """Retain accuracy never rises with λ, forget accuracy falls."""
    rows, retain, forget = [], 100.0, 90.0
    for k, (lost, forgotten) in enumerate(falls):
        rows.append({"scale": k / 20, "acc_retain": retain, "acc_forget": forget})
        retain, forget = retain - lost / 4, forget - forgotten
    scale, looked = searched(rows)
    assert scale == choose(rows, criteria.get("keep_retain")).scale
    assert looked <= 8


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=21, max_size=21))
def test_of_equals_the_smallest_is_found_too(falls):
    """A floor in the forget accuracy costs a few more looks, never the choice."""
    rows, retain, forget = [], 100.0, 9.0
    for k, (lost, forgotten) in enumerate(falls):
        rows.append({"scale": k / 20, "acc_retain": retain, "acc_forget": forget})
        retain, forget = retain - lost / 4, max(forget - forgotten, 0.0)
    scale, looked = searched(rows)
    assert scale == choose(rows, criteria.get("keep_retain")).scale
    assert looked <= 12


def test_a_contradiction_walks_the_whole_grid():
    """Forgetting that gets worse with λ is seen, and then everything is looked at."""
    rows = [
        {"scale": k / 20, "acc_retain": 100.0 - k, "acc_forget": 50.0 + k * (k > 2) - 10 * (k == 1)}
        for k in range(21)
    ]
    scale, looked = searched(rows)
    assert looked == 21
    assert scale == choose(rows, criteria.get("keep_retain")).scale == 0.05
