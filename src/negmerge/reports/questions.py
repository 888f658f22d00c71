"""The four questions of the first screen of a page: the numbers behind them, and the verdicts.

The rules are in `verdicts`. What a metric is about comes from the metric itself: one of the forget
set without a direction of its own is a test of forgetting, one of other sets with a direction is
something to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from negmerge.evaluation.metrics import Metric
from negmerge.evidence.findings import ORIGINAL, Finding, TestResult
from negmerge.evidence.verdicts import verdict
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import interval_text
from negmerge.reports.summary import cost_ratio
from negmerge.reports.verdicts import (
    Answer,
    Numbers,
    Outcome,
    can_be_trusted,
    is_forgotten,
    what_it_cost,
)
from negmerge.runs.result import Scored

TRUST = "Can it be trusted?"


@dataclass(frozen=True)
class Question:
    """A question of a reader, its verdict, and what is behind it.

    Args:
        id: of its element on the page.
        answer: None for the question that has no verdict.
        numbers: the number behind the verdict.
        control: what the number is compared with.
    """

    id: str
    question: str
    answer: Answer | None
    numbers: str
    control: str = ""


def questions(page: PageData, damaged: Sequence[str] = ()) -> list[Question]:
    """What was to be forgotten, is it, what did it cost, can this be trusted.

    Args:
        damaged: files that were changed, or could not be read.
    """
    return [asked(page), forgotten(page), cost(page), trust(page, damaged)]


def asked(page: PageData) -> Question:
    """What was to be forgotten, and which method made the unlearned model."""
    what = page.recipe.settings.forgotten(page.result.splits)
    made = f"Method: {page.label(page.first)}."
    return Question("asked", "What was to be forgotten?", None, f"{_upper(what)}.", made)


def forgotten(page: PageData) -> Question:
    """Whether the forget set is forgotten."""
    numbers = numbers_of(page, page.forget)
    answer = is_forgotten(numbers, tests_of(page), page.result.first.added)
    return Question("forgotten", "Is it forgotten?", answer, *compared(page, page.forget))


def cost(page: PageData) -> Question:
    """What the model lost, and how much was computed."""
    answer = what_it_cost(numbers_of(page, page.retain), kept_metrics(page))
    numbers, control = compared(page, page.retain)
    control = f"{control} Computation: {cost_ratio(page)}".lstrip()
    return Question("cost", "What did it cost?", answer, numbers, control)


def trust(page: PageData, damaged: Sequence[str]) -> Question:
    """How far the verdicts can be trusted."""
    tests, result = tests_of(page), page.result
    others = tuple(f"{row.method}: " for row in result.methods if row.method != page.first)
    warnings = [text for text in result.warnings if not text.startswith(others)]
    control = result.retrain is not None
    answer = can_be_trusted(tests, control, damaged, warnings, result.first.looked)
    if not tests:
        why = "none was run" if control else "none could be compared with a retrained model"
        return Question("trust", TRUST, answer, f"Tests of forgetting: {why}.")
    told, sees = sum(test.told for test in tests), sum(test.sees for test in tests)
    numbers = f"{told} of {len(tests)} tests tell the unlearned model from the retrained one;"
    sure = f"{sees} of {len(tests)} tell the original, which knows the data, from it."
    return Question("trust", TRUST, answer, numbers, sure)


def numbers_of(page: PageData, metric: Metric) -> Numbers:
    """A metric of the original, the unlearned and the retrained model."""
    result = page.result
    rows = (result.original, result.first, result.retrain)
    return Numbers(metric.label, metric.better, *(finding(row, metric.name) for row in rows))


def finding(row: Scored | None, name: str) -> Finding | None:
    """A metric of a model with its interval; None if it was not measured."""
    value = None if row is None else row.value(name)
    if row is None or value is None:
        return None
    low, high = row.intervals.get(name, (None, None))
    return Finding(value=value, low=low, high=high)


def tests_of(page: PageData) -> list[Outcome]:
    """What the tests of forgetting of a run show, those of its metrics first."""
    attacks = [
        numbers_of(page, metric).outcome
        for metric in page.metrics.values()
        if "forget" in metric.sets and metric.better == "reference" and metric.reported
    ]
    evidence = page.result.evidence
    tests = [] if evidence is None else evidence.tests.values()
    found = [*attacks, *(outcome_of(test, page.first) for test in tests if test.missing is None)]
    return [outcome for outcome in found if outcome is not None]


def outcome_of(test: TestResult, model: str) -> Outcome | None:
    """What a test of forgetting shows of a model; None if one of the numbers is missing."""
    first = test.quantities[0]
    means = {"above": first.above, "below": first.below, "unknown": "unknown"}
    null, told = test.finding(test.null, first.name), list[str]()
    for name in (model, ORIGINAL):
        told.append(means.get(verdict(test.finding(name, first.name), null), ""))
    return None if "unknown" in told else Outcome(test.title, bool(told[0]), bool(told[1]))


def kept_metrics(page: PageData) -> list[Numbers]:
    """The metrics of other data than the forget set that have a direction."""
    return [
        numbers_of(page, metric)
        for metric in page.metrics.values()
        if metric.sets and "forget" not in metric.sets and metric.better != "reference"
        if metric.reported and metric.name != page.retain.name
    ]


def compared(page: PageData, metric: Metric) -> tuple[str, str]:
    """A metric of the original and the unlearned model, and of the control."""
    result, first = page.result, page.result.first
    value, before = first.value(metric.name), result.original.value(metric.name)
    if value is None:
        return f"{_upper(metric.label)}: not measured.", ""
    bounds = first.intervals.get(metric.name)
    text = f"{_upper(metric.label)}: "
    text += "" if before is None else f"{metric.text(before)} before, "
    text += f"{metric.text(value)} after"
    text += "." if bounds is None else f" {interval_text(bounds, metric)}."
    control = None if result.retrain is None else result.retrain.value(metric.name)
    if control is None:
        return text, "No retrained model: not measured."
    return text, f"Retrained without the forget set: {metric.text(control)}."


def _upper(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
