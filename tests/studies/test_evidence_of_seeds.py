"""Tests of forgetting over seeds: paired with the retrained model of the same seed."""

from __future__ import annotations

from typing import Any

import pytest
from scipy.stats import ttest_1samp

from negmerge.evidence.findings import Evidence, Finding, Quantity, TestResult
from negmerge.studies.comparison import Comparison
from negmerge.studies.evidence import evidence_table, found_in, only_look_good, sentences
from negmerge.studies.page import evidence
from paired import recipe_of, results_of

AUC = Quantity(name="auc", label="AUC", short="AUC", above="still leaks", below="overdone")
STEPS = Quantity(name="steps", label="steps", short="steps", unit="steps", below="relearns fast")
FOUND: dict[str, dict[str, list[float | None]]] = {
    "auc": {
        "original": [80.0, 82.0, 81.0, 83.0],
        "retrained": [50.0, 53.0, 49.0, 52.0],
        "consensus": [60.0, 64.0, 58.0, 62.0],  # 10, 11, 9, 10 above
        "uniform": [51.0, 52.0, 50.0, 51.0],  # 1, -1, 1, -1
        "ties": [None, 60.0, None, None],
    },
    "steps": {
        "original": [0.0, 0.0, 1.0, 0.0],
        "retrained": [10.0, 12.0, 11.0, 13.0],
        "consensus": [20.0, 23.0, 22.0, 23.0],  # more is no sign of anything
        "uniform": [3.0, 4.0, 4.0, 5.0],
        "ties": [3.0, 4.0, 4.0, 5.0],
    },
}
GAPS: dict[str, dict[str, list[float]]] = {
    "avg_gap": {
        "original": [9.0] * 4, "consensus": [3.0, 4.0, 3.5, 3.5], "uniform": [4.0] * 4,
        "ties": [12.0] * 4,
    },
    "acc_forget": {title: [90.0] * 4 for title in ("original", "retrained", "consensus",
                                                   "uniform", "ties")},
}  # fmt: skip


def evidence_of(seed: int, least: bool) -> Evidence:
    def models(name: str) -> dict[str, dict[str, Finding]]:
        return {
            title: {name: Finding(value=values[seed], least=least and title == "consensus")}
            for title, values in FOUND[name].items()
        }

    about: dict[str, Any] = {"text": "", "tier": "standard"}
    attack = TestResult(title="Attack", quantities=[AUC], models=models("auc"), **about)
    relearning = TestResult(title="Relearning", quantities=[STEPS], models=models("steps"), **about)
    absent = TestResult(title="Absent", quantities=[AUC], missing="no data", **about)
    found = {"attack": attack, "relearning": relearning, "absent": absent}
    return Evidence(tier="standard", tests=found)


def study_of(seeds: int = 4, least: bool = False) -> Comparison:
    recipe = recipe_of("consensus", "uniform", "ties")
    results = results_of(GAPS)
    for seed, result in results.items():
        result.evidence = evidence_of(seed, least)
    return Comparison(recipe, {seed: results[seed] for seed in range(seeds)})


def test_differences_are_paired_with_the_retrained_model_of_the_seed():
    rows = {(row.test, row.model): row for row in found_in(study_of())}
    assert "absent" not in {test for test, _ in rows}
    consensus = rows["attack", "consensus"]
    assert consensus.pairs.mean.mean == pytest.approx(10.0)
    assert consensus.pairs.t_p == pytest.approx(ttest_1samp([10, 11, 9, 10], 0).pvalue)
    assert consensus.verdict == "above"
    assert rows["attack", "uniform"].verdict == "alike"
    assert rows["attack", "uniform"].pairs.mean.mean == 0
    assert rows["attack", "ties"].by_seed == {1: 60.0}
    assert rows["attack", "ties"].verdict == "unknown"
    assert rows["relearning", "uniform"].verdict == "below"
    # The steps of consensus differ more than by chance, but more steps mean nothing.
    assert rows["relearning", "consensus"].holm is not None
    assert rows["relearning", "consensus"].holm < 0.05
    assert rows["relearning", "consensus"].verdict == "alike"


def test_p_values_are_corrected_for_the_methods_of_a_test():
    own = {row.model: row for row in found_in(study_of()) if row.test == "relearning"}
    original = own.pop("original")  # no method
    assert original.holm == original.pairs.t_p
    raw = sorted(row.pairs.t_p for row in own.values() if row.pairs.t_p is not None)
    corrected = sorted(row.holm for row in own.values() if row.holm is not None)
    assert corrected[0] == pytest.approx(3 * raw[0])


def test_bounds_are_not_tested():
    rows = {(row.test, row.model): row for row in found_in(study_of(least=True))}
    bound = rows["attack", "consensus"]
    assert bound.pairs.mean.mean == pytest.approx(10.0)
    assert (bound.pairs.t_p, bound.pairs.mean.low, bound.verdict) == (None, None, "unknown")


def test_what_is_said_of_each_test_and_of_methods_that_only_look_good():
    study = study_of()
    rows = found_in(study)
    attack, relearning = sentences(rows)
    assert attack == (
        "“Attack”: consensus: still leaks; uniform: not told apart from the retrained model; ties: "
        "no test is possible."
    )
    assert relearning.startswith("“Relearning”: uniform and ties: relearns fast; consensus: not")
    assert only_look_good(study, rows) == [  # ties is worse than doing nothing already
        "consensus: Avg. Gap 3.50, where doing nothing has 9.00; yet told apart from retraining "
        "by “Attack”.",
        "uniform: Avg. Gap 4.00, where doing nothing has 9.00; yet told apart from retraining "
        "by “Relearning”.",
    ]


def test_the_table_marks_verdicts_and_bounds():
    study = study_of(least=True)
    table = evidence_table(study, found_in(study))
    cells = {row["method"]: row for row in table.frame.to_dict("records")}
    text = cells["consensus"]["Attack: AUC %"]
    assert text == "+10.00 (bound)"
    marked = evidence_table(study_of(), found_in(study_of())).frame.to_dict("records")
    (text,) = [row["Attack: AUC %"] for row in marked if row["method"] == "consensus"]
    assert text.startswith("+10.00 [+8.70 to +11.30] *")
    assert "bound" not in cells["uniform"]["Attack: AUC %"]
    assert "*" not in cells["uniform"]["Attack: AUC %"]
    assert len(table.everything) == 8


def test_one_seed_decides_nothing_and_no_tests_make_no_section():
    study = study_of(seeds=1)
    assert {row.verdict for row in found_in(study)} == {"unknown"}
    assert only_look_good(study, found_in(study)) == []
    section = evidence(study)
    assert section is not None
    assert section.table is not None
    for result in study.results.values():
        result.evidence = None
    assert evidence(study) is None
