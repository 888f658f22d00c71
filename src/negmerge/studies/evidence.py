"""What tests of forgetting found over the seeds of a study, paired with the retrained models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from negmerge.evidence.findings import ORIGINAL, RETRAINED, Quantity, TestResult
from negmerge.reports.evidence import metric_for
from negmerge.reports.ranking import join_names
from negmerge.runs.result import RunResult
from negmerge.studies.comparison import Comparison
from negmerge.studies.statistics import LEVEL, PairedTest, differences, holm, mean_of, paired_test
from negmerge.studies.summary import difference_text, seeds_text
from negmerge.studies.tables import MainTable

Verdict = Literal["above", "below", "alike", "unknown"]
"""As of a single run, but decided by the differences of the seeds; `unknown` without a test."""


@dataclass(frozen=True)
class Found:
    """A number that a test found for one model in several seeds.

    Args:
        test: the name of the test.
        title: its title.
        model: the title of the model.
        by_seed: the number of the model for each seed that has both.
        null: the number of the retrained model for the same seeds.
        bound: whether a number of either model is only a lower or an upper bound.
        pairs: the tests of the differences from the retrained model; without p-values and interval
            where a number is only a bound.
        holm: the p-value of the t test after Holm's correction for the methods of the study; of the
            original, which is no method but shows whether the test sees anything, the p-value.
        against: the title of the model that others are compared with.
    """

    test: str
    title: str
    quantity: Quantity
    model: str
    by_seed: Mapping[int, float]
    null: Mapping[int, float]
    bound: bool
    pairs: PairedTest
    holm: float | None = None
    against: str = RETRAINED

    @property
    def verdict(self) -> Verdict:
        """Whether the model is told apart from the retrained one, at 5 % after the correction."""
        if self.holm is None:
            return "unknown"
        above = self.pairs.mean.mean > 0
        if self.holm >= LEVEL or not (self.quantity.above if above else self.quantity.below):
            return "alike"
        return "above" if above else "below"

    def tree(self) -> dict[str, Any]:
        """Return everything as values of a table."""
        mean = self.pairs.mean
        return {
            "test": self.test,
            "quantity": self.quantity.name,
            "method": self.model,
            "n": mean.n,
            "mean": mean_of(list(self.by_seed.values())).mean,
            "against": self.against,
            "against_mean": mean_of(list(self.null.values())).mean,
            "difference": mean.mean,
            "low": mean.low,
            "high": mean.high,
            "t_p": self.pairs.t_p,
            "t_holm": self.holm,
            "bound": self.bound,
            "verdict": self.verdict,
        }


def found_in(study: Comparison) -> list[Found]:
    """Return every number of every test for the original and each method, paired by seed."""
    tests: dict[str, TestResult] = {}
    for result in study.results.values():
        own = {} if result.evidence is None else result.evidence.tests
        tests |= {name: test for name, test in own.items() if test.missing is None}
    rows: list[Found] = []
    for name, test in tests.items():
        for quantity in test.quantities:
            found = {
                model: one
                for model in (ORIGINAL, *study.methods)
                if (one := _paired(study.results, name, test, quantity, model)) is not None
            }
            methods = [model for model in found if model != ORIGINAL]
            corrected = holm([found[model].pairs.t_p for model in methods])
            p_values = dict(zip(methods, corrected, strict=True))
            for model, one in found.items():
                rows.append(replace(one, holm=p_values.get(model, one.pairs.t_p)))
    return rows


def _paired(
    results: Mapping[int, RunResult], name: str, test: TestResult, quantity: Quantity, model: str
) -> Found | None:
    """Return a number of one model, for the seeds that measured it for both models."""
    own, null, bound = dict[int, float](), dict[int, float](), False
    for seed, result in results.items():
        found = None if result.evidence is None else result.evidence.tests.get(name)
        ours = None if found is None else found.finding(model, quantity.name)
        theirs = None if found is None else found.finding(found.null, quantity.name)
        if ours is None or theirs is None or ours.value is None or theirs.value is None:
            continue
        own[seed], null[seed] = ours.value, theirs.value
        bound |= any((ours.least, ours.most, theirs.least, theirs.most))
    if not own:
        return None
    values = differences(list(own.values()), list(null.values()))
    pairs = paired_test(values)
    if bound:  # the differences are no sample of anything
        mean = replace(pairs.mean, std=None, low=None, high=None)
        pairs = PairedTest(mean, None, None)
    return Found(name, test.title, quantity, model, own, null, bound, pairs, against=test.null)


def telling(rows: list[Found]) -> list[Found]:
    """Return the rows of the first quantity of each test, which decides what is said."""
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row.test, row.quantity.name)
    return [row for row in rows if row.quantity.name == first[row.test]]


def sentences(rows: list[Found]) -> list[str]:
    """Say of each test which methods it tells apart from the retrained model, and how."""
    lines: list[str] = []
    shown = telling(rows)
    for test in dict.fromkeys(row.test for row in shown):
        own = [row for row in shown if row.test == test]
        original = next((row for row in own if row.model == ORIGINAL), None)
        others = [row for row in own if row.model != ORIGINAL]
        words = {
            "above": own[0].quantity.above,
            "below": own[0].quantity.below,
            "alike": f"not told apart from the {own[0].against} model",
            "unknown": "no test is possible",
        }
        parts: list[str] = []
        for verdict, text in words.items():
            titles = [row.model for row in others if row.verdict == verdict]
            parts += [f"{join_names(titles, most=20)}: {text}"] if titles else []
        blind = original is not None and original.verdict == "alike"
        more = " The original, which knows the forget set, is not told apart either." * blind
        lines.append(f"“{own[0].title}”: {'; '.join(parts)}.{more}")
    return lines


def only_look_good(study: Comparison, rows: list[Found]) -> list[str]:
    """Name the methods that Avg. Gap calls better than doing nothing and a test tells apart."""
    gaps = study.values.get("avg_gap", {})
    nothing, lines = gaps.get(ORIGINAL, {}), list[str]()
    for method in study.methods:
        seeds = [seed for seed in gaps.get(method, {}) if seed in nothing]
        told = [
            f"“{row.title}”"
            for row in telling(rows)
            if row.model == method and row.verdict in ("above", "below")
        ]
        if not told or not seeds:
            continue
        own = mean_of([gaps[method][seed] for seed in seeds]).mean
        without = mean_of([nothing[seed] for seed in seeds]).mean
        if own < without:
            lines.append(
                f"{method}: Avg. Gap {own:.2f}, where doing nothing has {without:.2f}; yet told "
                f"apart from retraining by {join_names(told, most=20)}."
            )
    return lines


def evidence_table(study: Comparison, rows: list[Found]) -> MainTable:
    """The mean difference of every model from the retrained one in each test."""
    found: dict[str, dict[str, Any]] = {}
    for row in telling(rows):
        metric, mean = metric_for(row.quantity), row.pairs.mean
        text = difference_text(mean.mean, metric)
        if mean.low is not None and mean.high is not None:
            ends = (difference_text(end, metric) for end in (mean.low, mean.high))
            text += f" [{' to '.join(ends)}]"
        text += " *" if row.verdict in ("above", "below") else ""
        text += " (bound)" if row.bound else ""
        heading = f"{row.title}: {metric.heading}"
        found.setdefault(row.model, {"method": row.model})[heading] = text
    caption = f"Difference from the retrained model over {seeds_text(study.seeds)}"
    everything = pd.DataFrame([row.tree() for row in rows])
    return MainTable("evidence", caption, pd.DataFrame(list(found.values())), everything=everything)
