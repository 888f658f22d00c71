"""The part of a page about tests of forgetting: figures, tables, and what was shown and what not.

Sentences are made from the findings alone. A model that a test does not tell apart from the
retrained one has not been shown to have forgotten, and no sentence says so.
"""

from __future__ import annotations

from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

from negmerge.evaluation.metrics import OF_EVIDENCE, Measured, Metric, Observed
from negmerge.evidence.findings import (
    NO_REFERENCE,
    ORIGINAL,
    RETRAINED,
    TIERS,
    Finding,
    Quantity,
    TestResult,
)
from negmerge.evidence.verdicts import Verdict, verdict
from negmerge.reports.charts import Chart
from negmerge.reports.export import DataTable
from negmerge.reports.frames import Cells, scores_frame
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import interval_text, join_names

WIDEST = 44
"""The number of characters after which the label of an axis is broken."""


def metric_for(quantity: Quantity) -> Metric:
    """Return a metric that formats a quantity."""

    def value(found: Observed) -> Measured | None:
        return None

    return Metric(
        quantity.name,
        quantity.label,
        quantity.short,
        quantity.better,
        (),
        (),
        value,
        unit=quantity.unit,
    )


def number(found: Finding, quantity: Quantity) -> str:
    """Return a finding as text, with its interval.

    >>> auc = Quantity(name="auc", label="AUC", short="AUC")
    >>> number(Finding(value=61.0, low=58.0, high=64.0), auc)
    '61.00 % [58.0–64.0]'
    >>> number(Finding(value=64.0, least=True), Quantity(name="s", label="s", short="s", unit=""))
    'at least 64'
    """
    if found.value is None:
        return f"not measured ({found.why})" if found.why else "not measured"
    metric = metric_for(quantity)
    bound = "at least " if found.least else "at most " if found.most else ""
    text = bound + metric.text(found.value)
    if found.low is None or found.high is None or found.low == found.high:
        return text
    return f"{text} {interval_text((found.low, found.high), metric)}"


def models(page: PageData, test: TestResult) -> list[str]:
    """Return the models of a test in the order of the table of scores."""
    order = [str(name) for name in scores_frame(page)["method"]]
    return [name for name in order if name in test.models] + [
        name for name in test.models if name not in order
    ]


def methods(page: PageData, test: TestResult) -> list[str]:
    """Return the methods of a test, without the models that they are compared with."""
    return [one for one in models(page, test) if one not in (ORIGINAL, RETRAINED, test.null)]


# ---------------------------------------------------------------------------------------- sentences


def _verdict(test: TestResult, model: str) -> Verdict:
    """Compare a model with the null; a difference that means nothing tells them not apart."""
    first = test.quantities[0]
    found = verdict(test.finding(model, first.name), test.finding(test.null, first.name))
    means = {"above": first.above, "below": first.below}
    return found if means.get(found, found) else "alike"


def _blind(test: TestResult) -> bool:
    """Whether a test does not even tell the original, which knows the forget set, apart."""
    return _verdict(test, ORIGINAL) == "alike"


def about(page: PageData, test: TestResult) -> str:
    """Say what a test found for the method that made the unlearned model, beside the null."""
    quantity, first = test.quantities[0], page.first
    found, null = test.finding(first, quantity.name), test.finding(test.null, quantity.name)
    if found is None:
        return f"{first}: not tested."
    text = f"{first}: {quantity.label}: {number(found, quantity)}"
    if found.value is None:
        return f"{text}."
    if null is None or null.value is None:
        return f"{text}; {NO_REFERENCE}."
    text += f"; the {test.null} model: {number(null, quantity)}"
    words = {
        "above": quantity.above or "more than the retrained model",
        "below": quantity.below or "less than the retrained model",
        "alike": "this test does not tell the two apart, which is no proof that they are alike",
        "unknown": "not comparable",
    }
    if _blind(test):
        words["alike"] = (
            "this test does not tell them apart, nor the original, which knows the forget set: it "
            "shows nothing here"
        )
    return f"{text}: {words[_verdict(test, first)]}."


def others(page: PageData, test: TestResult) -> list[str]:
    """Say the same of the other methods, in groups."""
    quantity = test.quantities[0]
    groups: dict[Verdict, list[str]] = {}
    for model in methods(page, test):
        if model != page.first:
            groups.setdefault(_verdict(test, model), []).append(model)
    words = {
        "above": quantity.above or "more than the retrained model",
        "below": quantity.below or "less than the retrained model",
        "alike": f"not told apart from the {test.null} model",
    }
    said = [f"{join_names(groups[key])}: {words[key]}" for key in words if key in groups]
    return [f"Other methods: {'; '.join(said)}."] if said else []


def overview(page: PageData) -> str:
    """Say in how many tests the unlearned model can be told from the retrained one."""
    evidence, first = page.result.evidence, page.first
    assert evidence is not None
    tests = {name: test for name, test in evidence.tests.items() if test.missing is None}
    text = (
        "Tests beyond the metrics above, each beside the same test on the retrained model, which "
        "never saw the forget set: its value is the line to reach."
    )
    if page.result.retrain is None:
        return f"{text} This run has {NO_REFERENCE}."
    found: dict[Verdict, list[str]] = {}
    for test in tests.values():
        what = _verdict(test, first)
        what = "unknown" if what == "alike" and _blind(test) else what
        found.setdefault(what, []).append(f"“{test.title}”")
    told = found.get("above", []) + found.get("below", [])
    alike, unknown = found.get("alike", []), found.get("unknown", [])
    if told:
        text += f" A sceptic can tell {first} from it by {join_names(told)}."
    if alike:
        more = "" if told else f" {first} from it"
        text += f" No difference was found{more} by {join_names(alike)}"
        text += ", which does not prove that there is none."
    if unknown:
        text += f" Nothing was shown by {join_names(unknown)}."
    return text


def missing(page: PageData) -> list[str]:
    """Say what was not shown: tests that were not possible, and tiers that were not asked for."""
    evidence = page.result.evidence
    assert evidence is not None
    found = [
        f"Not measured: “{test.title}”: {test.missing}."
        for test in evidence.tests.values()
        if test.missing is not None
    ]
    later = TIERS[TIERS.index(evidence.tier) + 1 :]
    if later:
        found.append(
            f"Not run: the tests of {join_names(later)} evidence; --set evidence={later[0]} "
            "runs them (negmerge list evidence)."
        )
    if evidence.tests:
        found.append(
            "Other attacks may succeed where these fail, and one run says nothing about other "
            "seeds."
        )
    return found


# ------------------------------------------------------------------------------- figures and tables

GLANCE = (
    "A filled mark: the test tells the model from the retrained one. An open mark: it does not, "
    "which is no proof that the two are alike. A dash: nothing was shown, because the test tells "
    "not even the original, which knows the forget set, from the retrained model, or did not "
    "measure the model."
)
MARKS: dict[Verdict, tuple[str, dict[str, Any]]] = {
    "above": ("told apart", {"size": 9}),
    "below": ("told apart", {"size": 9}),
    "alike": ("not told apart", {"size": 9, "fillstyle": "none"}),
    "unknown": ("nothing was shown", {"size": 5, "marker": "_"}),
}
"""What the figure of all tests says of a model, and how it draws this."""


def charts(page: PageData, name: str, test: TestResult) -> list[str]:
    """The figures of a test: curves if it has some, or else a chart of each telling quantity."""
    found = [one for own in test.models.values() for one in own.values()]
    if any(one.curve for one in found):
        return [_curves(page, name, test)]
    telling = [one for one in test.quantities if one.above or one.below]
    drawn = [_dots(page, name, test, one) for one in telling]
    return [chart for chart in drawn if chart is not None]


def _said(page: PageData) -> dict[str, dict[str, Verdict]]:
    """What every test says of every model, by title of the test.

    A test that tells not even the original from the retrained model shows nothing about models that
    it does not tell apart either.
    """
    evidence = page.result.evidence
    assert evidence is not None
    found: dict[str, dict[str, Verdict]] = {}
    for test in (test for test in evidence.tests.values() if test.missing is None):
        own = found.setdefault(test.title, {})
        for model in (one for one in models(page, test) if one not in (RETRAINED, test.null)):
            what = _verdict(test, model)
            own[model] = "unknown" if what == "alike" and _blind(test) else what
    return found


def glance(page: PageData) -> str:
    """The figure of all tests: which of them tells which model from the retrained one."""
    said = _said(page)
    shown = list(dict.fromkeys(model for own in said.values() for model in own))
    names = [fill(title, 30) for title in said]
    height = 1.2 + 0.17 * sum(2 + name.count("\n") for name in names)
    title = "Which tests tell which models from the retrained one"
    chart = Chart("evidence-glance", title, "", "", height, page.styles)
    for row, (title, own) in enumerate(said.items()):
        for model, what in own.items():
            words, options = MARKS[what]
            chart.point(shown.index(model), row, model, f"{title} {model}: {words}", **options)
    axes = chart.axes
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks(range(len(shown)), shown, rotation=45, ha="left")
    axes.set_xlim(-0.5, len(shown) - 0.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    return chart.page_svg()


def verdicts_table(page: PageData) -> DataTable:
    """What every test says of every model, in words."""
    rows: dict[str, Cells] = {}
    for title, own in _said(page).items():
        for model, what in own.items():
            rows.setdefault(model, {"method": model})[title] = MARKS[what][0]
    frame = pd.DataFrame(list(rows.values()))
    return DataTable(f"{OF_EVIDENCE}verdicts", "What each test says of each model", frame)


def _dots(page: PageData, name: str, test: TestResult, quantity: Quantity) -> str | None:
    """The value of every model with its interval, and the value to reach."""
    rows = [
        (model, found)
        for model in models(page, test)
        if (found := test.finding(model, quantity.name)) is not None and found.value is not None
    ]
    if not rows:
        return None
    metric, height = metric_for(quantity), 1.0 + 0.21 * len(rows)
    label = fill(metric.axis, WIDEST)
    chart = Chart(
        f"evidence-{name}-{quantity.name}", f"{quantity.label}, for every model", label, "",
        height + 0.17 * label.count("\n"), page.styles, width=4.2,
    )  # fmt: skip
    null = test.finding(test.null, quantity.name)
    if null is not None and null.value is not None:
        chart.reach_line(null.value, null.low, null.high)
    for place, (model, found) in enumerate(rows):
        assert found.value is not None
        if found.low is not None and found.high is not None:
            chart.interval(found.low, found.high, place, model)
        text = f"{model}: {quantity.short} {number(found, quantity)}"
        if model == page.first:
            chart.ring(found.value, place, model)
        chart.point(found.value, place, model, text)
    chart.axes.set_yticks(range(len(rows)), [model for model, _ in rows])
    chart.axes.set_ylim(len(rows) - 0.4, -0.6)
    chart.axes.grid(axis="y", visible=False)
    return chart.page_svg()


def _curves(page: PageData, name: str, test: TestResult) -> str:
    """The curve of every model."""
    quantity = test.quantities[0]
    metric = page.forget
    chart = Chart(f"evidence-{name}", test.title, test.axis, test.y_axis, 3.6, page.styles)
    places: set[float] = set()
    last = [model for model in (ORIGINAL, RETRAINED, page.first) if model in test.models]
    order = [model for model in models(page, test) if model not in last] + last
    for model in order:
        found = test.finding(model, quantity.name)
        if found is None or not found.curve:
            continue
        chart.line([x for x, _ in found.curve], [y for _, y in found.curve], model)
        for x, y in found.curve:
            text = f"{model}: {test.axis} {x:g}, {metric.text(y)}"
            chart.point(x, y, model, text, size=9 if model in last else 6)
        places |= {x for x, _ in found.curve}
    chart.axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
    chart.axes.xaxis.set_major_locator(FixedLocator(sorted(places)))
    chart.axes.xaxis.set_minor_locator(NullLocator())
    chart.axes.set_xticklabels([f"{x:g}" for x in sorted(places)])
    return chart.page_svg()


def table(page: PageData, name: str, test: TestResult) -> DataTable:
    """Every number of a test: a row for each model, and why a number is missing."""
    rows: list[Cells] = []
    for model in models(page, test):
        cells: Cells = {"method": model}
        notes: list[str] = []
        for quantity in test.quantities:
            found = test.finding(model, quantity.name)
            if found is None:
                continue
            cells[quantity.name] = found.value
            cells[f"{quantity.name}_low"] = found.low
            cells[f"{quantity.name}_high"] = found.high
            if found.value is None and found.why:
                notes.append(f"{quantity.short}: {found.why}")
            elif found.least or found.most:
                notes.append(f"{quantity.short}: at {'least' if found.least else 'most'}")
        rows.append(cells | {"note": "; ".join(notes) or None})
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    metrics = {quantity.name: metric_for(quantity) for quantity in test.quantities}
    return DataTable(f"{OF_EVIDENCE}{name}", test.title, frame, metrics)
