"""Tests that are computed from observations, on models of which the truth is known."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from negmerge.evaluation.scores import Scores, tug_of_war
from negmerge.evidence import distance, membership, rmia, strata
from negmerge.evidence.findings import ORIGINAL, RETRAINED, SECOND, Evidence, Finding, TestResult
from negmerge.evidence.registry import Exhibits, Seen, forgetting_tests, named
from negmerge.evidence.verdicts import overdone, verdict
from negmerge.reports.charts import Chart
from negmerge.runs.recipe import load_recipe
from toys import toy_scenario

SIZE = 900


def seen_of(
    rng: np.random.Generator, difficulty: np.ndarray, lift: np.ndarray | float, noise: float = 0.5
) -> Seen:
    """A model whose margins are those of the samples, plus noise, plus what it memorised."""
    margins = {
        "forget": difficulty[:SIZE] + lift + rng.normal(0, noise, SIZE),
        "unseen": difficulty[SIZE:] + rng.normal(0, noise, len(difficulty) - SIZE),
    }
    sets = {name: {"margin": own, "correct": own > 0} for name, own in margins.items()}
    return Seen({**sets, "retain": sets["forget"], "test": sets["unseen"]}, Scores({}))


@pytest.fixture(scope="module")
def exhibits() -> Exhibits:
    rng = np.random.default_rng(5)
    difficulty = rng.normal(1, 3, 5 * SIZE)
    lift = np.where(np.arange(SIZE) < SIZE // 3, 3.0, 0.3)  # a third is memorised
    none = np.zeros(SIZE)
    models = {
        ORIGINAL: seen_of(rng, difficulty, lift),
        RETRAINED: seen_of(rng, difficulty, none),
        SECOND: seen_of(rng, difficulty, none),
        "suppressed": seen_of(rng, difficulty, none - 4),
    }
    return Exhibits(models, "acc_forget")


def test_the_attack_finds_what_is_memorised_and_nothing_in_the_retrained_model(exhibits):
    found = {title: rmia.find(exhibits, title) for title in exhibits.models if title != SECOND}
    null = found[RETRAINED]["auc"]
    assert null.value == pytest.approx(50, abs=4)
    assert found[ORIGINAL]["auc"].low > null.high
    # An attack that does not know how hard a record is finds less.
    plain = {title: membership.find(exhibits, title)["auc"] for title in found}
    assert plain[ORIGINAL].value < found[ORIGINAL]["auc"].value
    assert found[ORIGINAL]["worst"].value > found[ORIGINAL]["auc"].value
    assert verdict(found[ORIGINAL]["worst"], found[RETRAINED]["worst"]) == "above"
    assert verdict(found["suppressed"]["auc"], null) == "below"
    # 3,600 unseen samples: 2,400 non-members, of which 1 % is more than ten.
    assert found[RETRAINED]["tpr"].value is not None
    assert found[ORIGINAL]["tpr"].value > found[RETRAINED]["tpr"].value


def test_a_rate_that_cannot_be_resolved_is_refused(exhibits):
    few = {
        title: Seen(
            {name: {k: v[:500] for k, v in own.items()} for name, own in one.sets.items()},
            one.scores,
        )
        for title, one in exhibits.models.items()
    }
    found = rmia.find(Exhibits(few, "acc_forget"), ORIGINAL)["tpr"]
    assert found.value is None
    assert found.why == "not resolvable with 333 negatives"


@given(st.integers(3, 500), st.integers(0, 50))
def test_population_and_non_members_are_disjoint(unseen, seed):
    population, others = rmia.divide(unseen, seed)
    assert sorted([*population, *others]) == list(range(unseen))
    assert len(population) >= 1


def test_records_that_nobody_saw_are_not_found_by_choosing_them_with_the_original():
    """What the original knows by chance is not memorised; all three models are alike here."""
    difficulty = np.random.default_rng(0).normal(1, 3, 5 * SIZE)
    apart = {"high": 0, "worst": 0}
    for seed in range(20):
        rng = np.random.default_rng([7, seed])
        titles = (ORIGINAL, RETRAINED, SECOND)
        models = {title: seen_of(rng, difficulty, 0.0, noise=2.0) for title in titles}
        seen = Exhibits(models, "acc_forget", seed)
        for test, name in ((strata, "high"), (rmia, "worst")):
            ours, null = (test.find(seen, title)[name] for title in (ORIGINAL, RETRAINED))
            apart[name] += verdict(ours, null) != "alike"
    assert max(apart.values()) <= 4, apart  # of 20, where chance alone has one


def test_strata_are_thirds_by_memorisation(exhibits):
    thirds = strata.memorised(exhibits)
    assert [len(part) for part in thirds] == [SIZE // 3] * 3
    second = [exhibits.models[SECOND].sets["forget"]["margin"][part].mean() for part in thirds]
    assert second[0] > second[1] > second[2]
    high = {title: strata.find(exhibits, title)["high"] for title in (ORIGINAL, RETRAINED)}
    assert verdict(high[ORIGINAL], high[RETRAINED]) == "above"
    found = strata.find(exhibits, RETRAINED)
    correct = exhibits.models[RETRAINED].sets["forget"]["correct"]
    for name, part in zip(strata.STRATA, thirds, strict=True):
        assert found[name].value == pytest.approx(100 * correct[part].mean())
        assert found[name].n == SIZE // 3


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", "<b>", "x\n", 'q" onload="x'])
def test_tests_are_called_by_names_that_files_can_have(name):
    result = TestResult(title="t", text="", tier="basic", quantities=[], missing="no data")
    with pytest.raises(ValidationError, match="pattern"):
        Evidence.model_validate({"tier": "basic", "tests": {name: result.model_dump()}})
    chart = Chart(f"path-{name}", "title", "x", "y")
    chart.point(1.0, 2.0, "consensus", "a point")
    assert not re.search(r'id="[^"]*[^\w."-]', chart.page_svg())
    assert "onload" not in re.sub(r'"[^"]*"', "", chart.page_svg())


def test_tug_of_war_by_hand():
    theirs = {"acc_forget": 90.0, "acc_retain": 100.0, "acc_test": 90.0}
    assert tug_of_war(theirs, theirs) == 1
    ours = {"acc_forget": 100.0, "acc_retain": 95.0, "acc_test": 70.0}
    assert tug_of_war(ours, theirs) == pytest.approx(0.9 * 0.95 * 0.8)
    assert tug_of_war(ours | {"acc_test": None}, theirs) is None
    assert tug_of_war({"loss": 1.0}, {"loss": 1.0}) is None


def test_the_distance_of_two_retrained_models_by_hand():
    def scores(forget: float, retain: float, test: float) -> Scores:
        values = {"acc_forget": forget, "acc_retain": retain, "acc_test": test}
        return Scores(values, {name: (value - 3, value + 3) for name, value in values.items()})

    models = {
        ORIGINAL: Seen({}, scores(100, 100, 90)),
        RETRAINED: Seen({}, scores(80, 96, 90)),
        SECOND: Seen({}, scores(83, 96, 90)),
    }
    exhibits = Exhibits(models, "acc_forget")
    found = distance.find(exhibits, SECOND)
    assert found["avg_gap"].value == pytest.approx(1.0)
    # Three differences, each with half an interval of √(3² + 3²).
    assert found["avg_gap"].high == pytest.approx(1 + (6 * 9) ** 0.5 / 3)
    assert found["avg_gap"].low == 0
    assert found["tow"].value == pytest.approx(0.97)
    assert found["tow"].high == 1
    assert distance.find(exhibits, ORIGINAL)["avg_gap"].value == pytest.approx(8.0)
    assert distance.find(exhibits, RETRAINED) == {}


@given(st.tuples(*[st.floats(0, 100)] * 2), st.tuples(*[st.floats(0, 20)] * 2), st.booleans())
def test_a_verdict_is_symmetric_and_needs_more_than_the_intervals(values, halves, known):
    one, two = (
        Finding(value=v, low=v - h, high=v + h) if known else Finding(value=v)
        for v, h in zip(values, halves, strict=True)
    )
    opposite = {"above": "below", "below": "above", "alike": "alike"}
    assert verdict(two, one) == opposite[verdict(one, two)]
    reach = (halves[0] ** 2 + halves[1] ** 2) ** 0.5 if known else 0
    gap = abs(values[0] - values[1])
    if abs(gap - reach) > 1e-9:
        assert (verdict(one, two) == "alike") == (gap < reach)
    assert verdict(one, None) == verdict(Finding(value=None), one) == "unknown"


def test_over_unlearning_is_a_warning_only_well_below_chance():
    def evidence(auc: float, null: float | None, original: float = 60.0) -> Evidence:
        test = forgetting_tests.get("membership")
        about = {"title": test.title, "text": test.text, "tier": "basic"}
        models = {"consensus": {"auc": Finding(value=auc, low=auc - 3, high=auc + 3)}}
        if null is not None:
            models[RETRAINED] = {"auc": Finding(value=null, low=null - 3, high=null + 3)}
        models[ORIGINAL] = {"auc": Finding(value=original, low=original - 3, high=original + 3)}
        found = TestResult(**about, quantities=list(test.quantities), models=models)
        return Evidence(tier="basic", tests={"membership": found})

    (text,) = overdone(evidence(30.0, 50.0))
    assert text.startswith("consensus: over-unlearned: the attack membership has AUC 30.0 %")
    assert overdone(evidence(30.0, None))  # also without a retrained model
    assert not overdone(evidence(43.0, 50.0))  # the interval reaches above 45 %
    assert not overdone(evidence(30.0, 31.0))  # the retrained model is there, too
    assert not overdone(evidence(70.0, 50.0))
    assert not overdone(evidence(30.0, 50.0, 30.0))  # the original is there, too: not unlearned


def test_the_meaning_of_a_larger_error_is_that_less_is_known():
    quantity = next(one for one in forgetting_tests.get("precision").quantities if one.above)
    with toy_scenario() as toy:
        found = named(quantity, toy.NumbersSettings())
    assert (found.above, found.below) == (quantity.below, quantity.above)
    same = named(quantity, load_recipe("demo").settings)
    assert (same.above, same.below) == (quantity.above, quantity.below)
