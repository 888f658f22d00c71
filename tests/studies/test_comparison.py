"""Methods paired by seed: directions, references, gaps in the data, verdicts, orders."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negmerge.errors import OptionError
from negmerge.evaluation.metrics import metrics
from negmerge.runs.result import Matching, MethodRow
from negmerge.studies.comparison import Comparison, Difference, numbers_of
from negmerge.studies.statistics import power_of
from negmerge.studies.summary import decided_texts, undecided_texts, warnings_of
from negmerge.studies.tables import differences_table
from paired import Values, recipe_of, results_of

ACCURACIES: Values = {
    "acc_retain": {
        "original": [99.0] * 4, "retrained": [98.0] * 4,
        "consensus": [95.0, 96.0, 95.5, 96.5], "uniform": [90.1, 90.8, 90.5, 91.4],
        "ties": [95.2, 95.9, 95.4, 96.7],
    },
    "acc_forget": {
        "original": [99.0] * 4, "retrained": [70.0] * 4,
        "consensus": [80.0, 82.0, 81.0, 83.0], "uniform": [75.2, 77.0, 75.9, 78.1],
        "ties": [80.0, 82.0, 81.0, 83.0],
    },
    "mia": {
        "original": [10.0] * 4, "retrained": [40.0, 41.0, 39.0, 40.0],
        "consensus": [30.0, 31.0, 29.0, 30.0], "uniform": [60.0, 61.5, 58.9, 60.1],
        "ties": [50.0, 51.0, 49.0, 50.0],
    },
}  # fmt: skip


def compared(values: Values = ACCURACIES, against: str | None = None, **fields: Any) -> Comparison:
    recipe = recipe_of("consensus", "uniform", "ties", **fields)
    return Comparison(recipe, results_of(values), against)


def one(study: Comparison, metric: str, method: str) -> Difference:
    return next(found for found in study.of(metric) if found.method == method)


def test_the_direction_of_a_metric_decides_what_is_better():
    study = compared()
    lower = one(study, "acc_forget", "uniform")
    assert lower.test.mean.mean == pytest.approx(-4.95)
    assert (lower.better, lower.verdict, lower.better_seeds) == ("lower", "better", 4)
    higher = one(study, "acc_retain", "uniform")
    assert (higher.better, higher.verdict, higher.better_seeds) == ("higher", "worse", 0)
    assert higher.seeds_needed is None


def test_a_metric_with_a_reference_is_compared_by_the_distance_from_it():
    study = compared()
    further = one(study, "mia", "uniform")
    assert further.by_seed == pytest.approx({0: 10.0, 1: 10.5, 2: 9.9, 3: 10.1})
    assert (further.better, further.verdict) == ("lower", "worse")
    other_side = one(study, "mia", "ties")  # as far above as consensus is below
    assert set(other_side.by_seed.values()) == {0.0}
    assert (other_side.test.t_p, other_side.verdict) == (1.0, "undecided")


def test_to_forget_more_than_the_retrained_model_is_not_better():
    knows = {"consensus": [86.0, 85.0, 86.5, 86.0], "uniform": [19.0, 18.0, 20.0, 19.5]}
    reference = {"retrained": [88.0, 87.5, 88.0, 88.5]}

    def found(**models: list[float]) -> Difference:
        return one(compared({**ACCURACIES, "acc_forget": models}), "acc_forget", "uniform")

    assert (found(**knows).better, found(**knows).verdict) == ("lower", "better")
    ruined = found(**knows, **reference)
    assert ruined.by_seed == pytest.approx({0: 67.0, 1: 67.0, 2: 66.5, 3: 66.5})
    assert (ruined.better, ruined.verdict, ruined.better_seeds) == ("lower", "worse", 0)


def test_the_gap_at_equal_forgetting_is_compared_beside_avg_gap():
    gaps = {"consensus": [3.0, 3.5, 3.1, 3.2], "uniform": [4.0, 4.6, 4.1, 4.15]}
    values = {**ACCURACIES, "avg_gap": gaps | {"original": [9.0] * 4}}
    results = results_of(values)
    for seed, result in results.items():
        for row in result.methods:
            row.matched = {"scale": 1.0, "matched_gap": gaps.get(row.method, [5.0] * 4)[seed]}
    study = Comparison(recipe_of("consensus", "uniform", "ties"), results)
    found = one(study, "matched.matched_gap", "uniform")
    assert found.test.mean.mean == pytest.approx(1.0125)
    assert (found.better, found.verdict) == ("lower", "worse")
    assert study.metrics["matched.matched_gap"].heading == "gap, matched points"
    assert study.main[-2:] == study.drawn[-2:] == ["avg_gap", "matched.matched_gap"]


def test_without_a_retrained_model_such_a_metric_has_no_verdict():
    study = Comparison(recipe_of("consensus", "uniform"), results_of(ACCURACIES, retrained=False))
    found = one(study, "mia", "uniform")
    assert found.by_seed[0] == 30.0
    assert (found.better, found.verdict, found.better_seeds) == (None, "", None)
    assert "mia" not in study.main


def test_the_correction_is_over_the_methods_of_one_metric():
    study = compared()
    for metric in ("acc_forget", "acc_retain"):
        found = study.of(metric)
        raw = sorted(row.test.t_p for row in found if row.test.t_p is not None)
        assert min(row.t_holm or 0 for row in found) == pytest.approx(2 * raw[0])
        assert {row.comparisons for row in found} == {2}


def test_the_detectable_difference_is_that_of_the_test_that_decides():
    """The table has the number of the sentence: two comparisons halve the level of the test."""
    study = compared()
    found = one(study, "acc_retain", "ties")
    assert power_of(found.tree()["detectable"] / found.test.mean.std, 4, 0.025) == pytest.approx(
        0.8
    )
    table = differences_table(study)
    (shown,) = [
        row["detectable"]
        for row in table.frame.to_dict("records")
        if (row["metric"], row["method"]) == (study.metrics["acc_retain"].heading, "ties")
    ]
    assert f"a difference of {shown:.2f} points could have been seen" in undecided_texts(study)[1]


def test_another_method_to_compare_with():
    study = compared(against="uniform")
    assert [row.method for row in study.of("acc_forget")] == ["consensus", "ties"]
    assert one(study, "acc_forget", "consensus").verdict == "worse"


def test_a_method_that_is_missing_in_some_seeds_is_paired_over_the_others():
    values = {m: dict(found) for m, found in ACCURACIES.items()}
    for found in values.values():
        found["ties"] = [None, found["ties"][1], None, found["ties"][3]]
    study = compared(values)
    found = one(study, "acc_retain", "ties")
    assert found.by_seed == pytest.approx({1: -0.1, 3: 0.2})
    assert found.test.mean.n == 2
    assert one(study, "acc_retain", "uniform").test.mean.n == 4
    assert any("ties (2)" in line for line in warnings_of(study))
    for metric in values.values():
        metric["ties"] = [None] * 4
    assert [row.method for row in compared(values).of("mia")] == ["uniform"]


def test_the_warning_names_the_metric_that_is_missing_in_some_seeds():
    values = {m: dict(found) for m, found in ACCURACIES.items()}
    values["acc_forget"]["ties"] = [80.0, None, 81.0, 83.0]
    (line,) = warnings_of(compared(values))
    assert line == "accuracy on the forget set: compared in fewer than 4 seeds: ties (3)."


def test_values_at_equal_forgetting_are_compared_with_retraining_on_the_same_samples():
    results = results_of(ACCURACIES)
    for seed, result in results.items():
        matching = Matching(metric="acc_forget", level=70.0, stated=False, retrained={"mia": 20.0})
        rows = [
            row.model_copy(update={"matched": {"mia": 20.0 + place}})
            for place, row in enumerate(result.methods)
        ]
        results[seed] = result.model_copy(update={"matching": matching, "methods": rows})
    study = Comparison(recipe_of("consensus", "uniform", "ties"), results)
    assert {*one(study, "matched.mia", "ties").by_seed.values()} == {2.0}
    assert one(study, "matched.mia", "ties").better == "lower"


def test_one_seed_has_no_verdict_and_says_so():
    values = {m: {k: v[:1] for k, v in found.items()} for m, found in ACCURACIES.items()}
    study = compared(values)
    assert {row.verdict for row in study.differences} == {"undecided", ""}
    assert any(line.startswith("One seed:") for line in warnings_of(study))
    assert all("no test is possible" in line for line in undecided_texts(study))
    json.dumps([row.tree() for row in study.differences], allow_nan=False)


def test_the_order_is_that_of_reports_and_everything_is_there():
    study = compared()
    assert list(study.values)[:3] == ["acc_forget", "acc_retain", "mia"]
    assert study.main == ["acc_forget", "acc_retain", "mia"]
    assert {"scale", "evaluations"} <= set(study.values)
    assert "seconds" not in study.values
    assert one(study, "scale", "uniform").verdict == ""
    assert study.drawn == ["acc_forget", "acc_retain"]  # what match_holdout reads: forget, test


def test_fields_that_map_names_to_numbers_become_numbers():
    row = results_of(ACCURACIES)[0].methods[0]
    fields = row.model_dump() | {"validation": {"acc_retain": 90.0}, "agreement": 60.0}
    found = numbers_of(MethodRow.model_validate(fields))
    assert found["validation.acc_retain"] == 90.0
    assert found["agreement"] == 60.0
    assert not {"looked", "edge", "seconds", "samples"} & found.keys()
    results = results_of(ACCURACIES)
    for result in results.values():
        for place, method in enumerate(result.methods):
            change = {"validation": {"mia": float(place), "own": 1.0}}
            result.methods[place] = method.model_copy(update=change)
    study = Comparison(recipe_of("consensus", "uniform", "ties"), results)
    # The retrained model was not measured on these samples: there is nothing to be near to.
    assert not {"validation.mia", "validation.own"} & study.directed.keys()
    assert study.metrics["validation.mia"].short == f"{metrics.get('mia').short}, validation"
    assert study.compared("validation.mia")["uniform"][1] == 1.0
    assert "validation.mia" not in study.main


@pytest.mark.parametrize(
    ("methods", "against", "told"),
    [
        (["consensus"], None, r"methods: got consensus, wanted at least two to compare"),
        (["consensus", "uniform"], "uniforn", r"--against: unknown method .* mean 'uniform'\?"),
        (["consensus", "uniform"], "", r"--against: unknown method ''"),
        (
            ["consensus", {"name": "uniform", "add": 0.5}],
            None,
            r"methods: got consensus, wanted at least two",
        ),
    ],
)
def test_what_cannot_be_compared(methods, against, told):
    with pytest.raises(OptionError, match=told):
        Comparison(recipe_of(*methods), {}, against)


def test_the_sentences_of_a_study():
    study = compared()
    assert decided_texts(study) == [
        "Accuracy on the forget set: uniform is better than consensus; ties is undecided.",
        "Accuracy on the retain set: uniform is worse than consensus; ties is undecided.",
    ]
    first, second = undecided_texts(study)
    assert "no number of seeds decides a difference of zero" in first
    needed = one(study, "acc_retain", "ties").seeds_needed
    assert "+0.05 points; a difference of 0.47 points" in second
    assert f"about {needed} seeds would be needed" in second


@settings(max_examples=30)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.fixed_dictionaries(
            {
                name: st.lists(st.integers(0, 20).map(float), min_size=n, max_size=n)
                for name in ("retrained", "consensus", "uniform", "ties")
            }
        )
    ),
    st.sampled_from(["acc_forget", "acc_retain", "mia"]),
)
def test_laws_of_every_comparison(found: dict[str, list[float]], metric: str):
    """No NaN anywhere; two methods compared the other way round have the opposite verdict."""
    study = compared({metric: found})
    turned = compared({metric: found}, against="uniform")
    json.dumps([row.tree() for row in study.differences], allow_nan=False)
    ours, theirs = one(study, metric, "uniform"), one(turned, metric, "consensus")
    assert ours.test.mean.mean == pytest.approx(-theirs.test.mean.mean)
    assert ours.test.t_p == pytest.approx(theirs.test.t_p)
    assert ours.better_seeds is not None
    assert theirs.better_seeds is not None
    assert ours.better_seeds + theirs.better_seeds <= len(found["uniform"])
    for row in study.of(metric):
        assert row.t_holm is None or row.t_holm >= (row.test.t_p or 0)
        gain = row.test.mean.mean * (-1 if row.better == "lower" else 1)
        if row.verdict != "undecided":
            assert math.copysign(1, gain) == (1 if row.verdict == "better" else -1)
