"""The runs of a table are divided among machines: alike everywhere, evenly, sharers together."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negmerge.cli.arguments import fraction
from negmerge.errors import OptionError
from negmerge.paper.division import divide, parts_of
from negmerge.paper.experiments import experiment
from negmerge.paper.needs import needs
from negmerge.paper.trials import trials_of
from negmerge.runs.estimate import total_of


def longest(hours: list[float], parts: tuple[int, ...] | list[int], count: int) -> float:
    """The hours of the part that has the most."""
    return max(
        sum(h for h, p in zip(hours, parts, strict=True) if p == k) for k in range(1, count + 1)
    )


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_no_division_is_a_third_better(hours: list[float], count: int):
    """Against all divisions; the bound is that of Graham (1969)."""
    ours = longest(hours, divide(hours, count), count)
    best = min(
        longest(hours, parts, count) for parts in product(range(1, count + 1), repeat=len(hours))
    )
    assert ours <= (4 / 3 - 1 / (3 * count)) * best * (1 + 1e-9)


def test_every_run_of_a_table_is_in_one_part():
    trials = trials_of("T3", "paper")
    recipes = [trial.recipe for trial in trials]
    parts = parts_of(recipes, 2)
    assert parts == parts_of(recipes, 2)
    hours = [total_of([recipe]).hours for recipe in recipes]
    assert longest(hours, parts, 2) == min(
        longest(hours, one, 2) for one in product((1, 2), repeat=len(hours))
    )
    own = [trials_of("T3", "paper", part=(k, 2)) for k in (1, 2)]
    assert [sum(t.mine for t in one) for one in zip(*own, strict=True)] == [1] * len(trials)
    assert "part 2 of 2, " in needs("T3", "paper", own[1], (2, 2))


def test_runs_that_share_trainings_stay_together():
    trials = trials_of("C1", "paper", part=(1, 8))
    parts: dict[str, set[int]] = {}
    for trial in trials:
        parts.setdefault(trial.planned.where["dataset"], set()).add(trial.part)
    assert all(len(found) == 1 for found in parts.values())
    assert set.union(*parts.values()) == set(range(1, 9))


def test_runs_of_unknown_size_are_divided_by_number():
    changes = ["clip.control.name=/data/imagenet"]
    trials = trials_of("B1", "paper", changes, part=(1, 4))
    assert sorted(trial.part for trial in trials) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_seeds_are_trials():
    trials = trials_of("T3", "paper", seeds=[0, 2])
    assert [trial.recipe.seed for trial in trials] == [0, 2] * len(experiment("T3").runs("paper"))
    for wrong in ([], [1, 1], [-1]):
        with pytest.raises(OptionError, match=r"--seeds: got .*, wanted different whole numbers"):
            trials_of("T3", "paper", seeds=wrong)


@pytest.mark.parametrize("text", ["0/5", "6/5", "2", "2/", "a/b", "1/0"])
def test_a_part_that_is_none(text: str):
    with pytest.raises(OptionError, match=r"--part .*: wanted K/N"):
        fraction(text, "--part")
