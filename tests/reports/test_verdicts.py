"""The verdicts of the first screen: golden cases of every rule, and what no rule may do."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.evidence.findings import Finding, Quantity, TestResult
from negmerge.reports.questions import outcome_of
from negmerge.reports.verdicts import (
    Numbers,
    Outcome,
    can_be_trusted,
    is_forgotten,
    what_it_cost,
)


def number(value: float | None, half: float | None = 2.0) -> Finding | None:
    if value is None or half is None:
        return None if value is None else Finding(value=value)
    return Finding(value=value, low=value - half, high=value + half)


def metric(original, unlearned, retrained, better="lower", half: float | None = 2.0) -> Numbers:
    values = (number(one, half) for one in (original, unlearned, retrained))
    return Numbers(f"metric {better}", better, *values)


TELLS = Outcome("an attack", told=True, sees=True)
ALIKE = Outcome("another attack", told=False, sees=True)
BLIND = Outcome("a blind attack", told=False, sees=False)


@pytest.mark.parametrize(
    ("values", "tests", "rule", "standing"),
    [
        ((100, 84, 85), [ALIKE], "matches", "good"),
        ((100, 84, 85), [ALIKE, TELLS], "told_apart", "mixed"),  # the level alone is not enough
        ((100, 84, 85), [BLIND], "untested", "mixed"),
        ((100, 84, 85), [], "untested", "mixed"),
        ((100, 92, 85), [ALIKE], "knows_more", "mixed"),
        ((100, 60, 85), [ALIKE], "overdone", "mixed"),
        ((100, 99, 85), [ALIKE], "unchanged", "bad"),
        ((100, 99, None), [], "unchanged", "bad"),
        ((100, 103, None), [], "unchanged", "bad"),  # it knows even more
        ((100, 40, None), [], "no_control", "unknown"),
        ((86, 85, 85), [ALIKE], "blind", "unknown"),
        ((88, 86, 84), [ALIKE], "too_few", "unknown"),
        ((100, None, 85), [ALIKE], "not_measured", "unknown"),
        ((None, 85, 85), [ALIKE], "not_measured", "unknown"),
    ],
)
def test_is_it_forgotten(values, tests, rule, standing):
    found = is_forgotten(metric(*values), tests)
    assert (found.rule, found.standing) == (rule, standing)
    mirrored = [None if value is None else -value for value in values]  # an error instead
    assert is_forgotten(metric(*mirrored, better="higher"), tests).rule == rule
    assert is_forgotten(metric(*values), tests, added=True).rule == "added"


def test_numbers_without_intervals_are_alike_only_if_they_are_equal():
    def rule(*values: float) -> str:
        return is_forgotten(metric(*values, half=None), [ALIKE]).rule

    assert rule(100, 85, 85) == "matches"
    assert rule(100, 85.01, 85) == "knows_more"
    assert rule(100, 100, 85) == "unchanged"


def test_few_samples_do_not_make_a_yes():
    """The model lies half-way: 10 ± √(8² + 8²) of the 20 points may be left."""
    forget = Numbers("", "lower", number(100, 2), number(90, 8), number(80, 8))
    found = is_forgotten(forget, [ALIKE])
    assert (found.rule, found.standing, found.word) == ("coarse", "mixed", "Partly shown")
    assert "100 % of the difference may be left" in found.text
    forget = Numbers("", "lower", number(100, 2), number(82, 4), number(80, 3))
    assert is_forgotten(forget, [ALIKE]).rule == "matches"  # 2 ± 5 of 20 points
    forget = Numbers("", "lower", number(100, 2), number(85, 4), number(80, 3))
    found = is_forgotten(forget, [ALIKE])  # 5 ± 5: the half is not enough
    assert "50 % of the difference" not in found.text
    assert found.rule == "matches"
    forget = Numbers("", "lower", number(100, 2), number(85, 4), number(80, 3.1))
    assert is_forgotten(forget, [ALIKE]).rule == "coarse"
    retain = Numbers("", "higher", number(100, 0), number(70, 40), number(90, 2))
    found = what_it_cost(retain)
    assert (found.rule, found.standing) == ("too_few", "unknown")
    assert what_it_cost(Numbers("", "higher", number(100), number(50, 60), number(100))).rule == (
        "too_few"
    )
    assert what_it_cost(Numbers("", "higher", *map(number, (100, 99, 99)))).rule == "nothing"
    assert what_it_cost(Numbers("", "higher", *map(number, (100, 97.8, 99)))).rule == "too_few"


def test_the_words_of_the_answers():
    found = is_forgotten(metric(100, 84, 85), [ALIKE, TELLS, BLIND])
    assert found.word == "Partly"
    assert found.text == (
        "this number is that of the retrained model, but the two are told apart by 1 of 2 tests"
    )
    found = is_forgotten(metric(100, 40, None), [])
    assert found.word == "Not measured"
    assert "no retrained model: whether it is enough was not measured" in found.text
    assert is_forgotten(metric(100, 92, 85), [TELLS]).text == (
        "it knows less than before, but more than the retrained model; it is also told from the "
        "retrained model by 1 test"
    )


@pytest.mark.parametrize(
    ("retain", "others", "rule", "standing"),
    [
        ((90, 89, 90), [], "nothing", "good"),  # at worst 86.2, and 95 % are 85.5
        ((90, 88, 90), [], "too_few", "unknown"),
        ((90, 95, 90), [], "nothing", "good"),
        ((90, 89, None), [], "nothing", "unknown"),  # without a control nothing passes
        ((90, 89, 96), [], "behind", "mixed"),
        ((90, 89.5, 86), [], "nothing", "good"),
        ((90, 86, 87), [], "as_retraining", "good"),
        ((90, 86.5, 90), [], "some", "mixed"),
        ((90, 86.5, None), [], "some", "mixed"),
        ((90, 80, 90), [], "much", "bad"),
        ((90, 80, None), [], "much", "bad"),
        ((90, 80, 81), [], "as_retraining", "good"),
        ((90, 90, 90), [(80, 75, 80)], "much", "bad"),  # the worst metric decides
        ((90, 90, 90), [(80, None, 80)], "nothing", "good"),
        ((90, None, 90), [], "not_measured", "unknown"),
    ],
)
def test_what_it_cost(retain, others, rule, standing):
    found = what_it_cost(
        metric(*retain, better="higher"), [metric(*one, better="higher") for one in others]
    )
    assert (found.rule, found.standing) == (rule, standing)


def test_a_loss_that_grows_is_a_cost():
    found = what_it_cost(metric(1.0, 1.4, 1.0, better="lower", half=0.05))
    assert (found.rule, found.text) == (
        "much", "keeps less than 95 % of the original: metric lower",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "rule", "standing"),
    [
        ({}, "one_run", "good"),
        ({"tests": [TELLS]}, "one_run", "good"),  # the verdict is "partly", and can be trusted
        ({"tests": [BLIND]}, "doubts", "mixed"),
        ({"tests": []}, "doubts", "mixed"),
        ({"looked": True}, "doubts", "mixed"),
        ({"warnings": ["λ = 0 did best"]}, "doubts", "mixed"),
        ({"control": False}, "no_control", "unknown"),
        ({"control": False, "looked": True}, "no_control", "unknown"),
        ({"damaged": ["The files of the run"]}, "damaged", "bad"),
        ({"damaged": ["The scores"], "control": False}, "damaged", "bad"),
    ],
)
def test_can_it_be_trusted(given, rule, standing):
    found = can_be_trusted(**({"tests": [ALIKE], "control": True} | given))
    assert (found.rule, found.standing) == (rule, standing)


values = st.none() | st.floats(0, 100)


@given(st.tuples(values, values), st.tuples(values, values), st.sampled_from([None, 0.0, 5.0]))
def test_nothing_passes_without_a_retrained_model(forget, retain, half):
    tests = [ALIKE, TELLS, BLIND]
    assert is_forgotten(metric(*forget, None, half=half), tests).standing in ("unknown", "bad")
    for better in ("higher", "lower"):
        assert what_it_cost(metric(*retain, None, better, half)).standing != "good"
    assert can_be_trusted(tests, control=False).standing == "unknown"


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 20))
def test_a_test_that_tells_the_models_apart_never_leaves_a_yes(before, after, control, half):
    found = is_forgotten(metric(before, after, control, half=half), [ALIKE, TELLS])
    assert found.standing != "good"
    fewer = is_forgotten(metric(before, after, control, half=half), [ALIKE])
    assert found == fewer or fewer.rule in ("matches", "coarse", "knows_more", "overdone")


def test_what_a_test_of_forgetting_shows():
    quantity = Quantity(name="auc", label="AUC", short="AUC", above="still known")
    common = {"title": "Known?", "text": "", "tier": "basic", "quantities": [quantity]}
    for own, original, null in product((50.0, 60.0, 40.0, None), (70.0, 50.0), (50.0, None)):
        values = {"consensus": own, "original": original, "retrained": null}
        models = {
            name: {"auc": number(value) or Finding(value=None)} for name, value in values.items()
        }
        found = outcome_of(TestResult(models=models, **common), "consensus")
        if own is None or null is None:
            assert found is None
        else:  # a difference downwards means nothing here
            assert found == Outcome("Known?", own == 60.0, original == 70.0)


def test_answers_do_not_depend_on_blind_tests():
    numbers = metric(100, 84, 85)
    assert is_forgotten(numbers, [ALIKE, BLIND]) == is_forgotten(numbers, [ALIKE])
