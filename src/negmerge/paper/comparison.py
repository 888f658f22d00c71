"""Measured and published rows: matching, differences, and the correlation of the rankings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from negmerge.evaluation.scores import avg_gap
from negmerge.paper.experiments import Experiment, PlannedRun
from negmerge.rivals import rivals
from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.runs.result import MethodRow, RunResult, Scored

PRINTED = ("sparsity", "acc_forget", "acc_retain", "acc_test", "mia", "avg_gap", "seconds")
"""The columns of the paper's tables."""
GAP = ("acc_retain", "acc_forget", "acc_test", "mia")
"""The metrics that the paper's Avg. Gap averages."""
RANKED = ("avg_gap", "acc_forget")
"""The methods of a table are ranked by the first of these that it prints; smaller is better."""

KEYS = ("backbone", "mode", "dataset", "pool", "n_models", "layer_group", "component")
"""Fields that, with the method and its data, identify the rows of a table."""
GROUPS = ("layer_group", "component")
DETERMINED = ("n_models", *GROUPS)
"""Fields of `KEYS` that the run determines."""
PRINTED_NAMES = {"consensus": "negmerge"}
PRINTED_GROUPS = {"early": "shallow", "middle": "middle", "late": "deep"}


@dataclass(frozen=True)
class MeasuredRow:
    """A row of a table as one run measured it.

    Args:
        method: the paper's name of the method.
        values: by column of the paper's tables; a list if it was measured several times.
        keys: fields of `KEYS` that the run determines.
        subset: whether only some members were merged.
        deviations: by column, standard deviations of the paper that are not those over trials.
    """

    method: str
    splits: str | None
    values: Mapping[str, float | Sequence[float]]
    keys: Mapping[str, Any] = field(default_factory=dict)
    subset: bool = False
    deviations: Mapping[str, float] = field(default_factory=dict)


@dataclass
class ComparedRow:
    """A row of a paper's table with its measured values.

    Args:
        measured: by column and by the number of the planned run, one value for each trial.
        deviations: by column, those of `MeasuredRow` of all trials; empty if only other rows of the
            table have them.
        reading: the number of the reading, if the paper's row can be read in several ways.
        reference: the row of the retrained model, if there is one.
    """

    printed: Mapping[str, Any]
    measured: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    deviations: dict[str, list[float]] = field(default_factory=dict)
    reading: int | None = None
    reference: ComparedRow | None = field(default=None, repr=False, compare=False)

    def value(self, column: str) -> float | None:
        """The mean over the trials, then over the runs; Avg. Gap is computed from such means."""
        found = self.measured.get(column)
        if not found:
            return None
        if column == "avg_gap" and self.reference is not None:
            own, retrained = ({m: one.value(m) for m in GAP} for one in (self, self.reference))
            return avg_gap(own, retrained)
        return mean(map(mean, found.values()))

    def spread(self, column: str) -> float | None:
        """The standard deviation over the trials, if all runs have the same number, above one.

        A column with deviations of its own has their mean, and none over the trials in any row.
        """
        if column in self.deviations:
            own = self.deviations[column]
            return mean(own) if own else None
        found = list(self.measured.get(column, {}).values())
        trials = {len(own) for own in found}
        if len(trials) != 1 or trials == {1}:
            return None
        return stdev(map(mean, zip(*found, strict=True)))


def measured_rows(
    result: RunResult,
    recipe: Recipe,
    planned: PlannedRun,
    wanted: Experiment,
    seconds: Mapping[str, Sequence[float]],
) -> list[MeasuredRow]:
    """The rows of a run, with the paper's names of the methods.

    Args:
        result, recipe: of the run.
        planned: selects the rows that count, and may rename them.
        wanted: the table.
        seconds: the times of the merge of each method, by title.
    """
    on_validation = wanted.retain_on == "validation"
    methods = {method.title: method for method in recipe.methods}
    rows = [MeasuredRow("pretrained", None, _values(result.original, on_validation))]
    if result.retrain is not None:
        rows.append(MeasuredRow("retrain", "retain", _values(result.retrain, on_validation)))
    for row in result.methods:
        method = methods[row.method]
        not_in_paper = method.name not in rivals and method.options.keys() - {"reduce", "signed"}
        if row.added != (wanted.direction == "add") or not_in_paper:
            continue
        name = printed_name(method)
        name = planned.names.get(name, name)
        count, subset = row.members, method.subset is not None
        keys = {} if count is None else {"n_models": planned.members.get(count, count)}
        values: dict[str, float | Sequence[float]] = {**_values(row, on_validation)}
        if row.method in seconds:
            values["seconds"] = seconds[row.method]
        rows.append(MeasuredRow(name, row.splits, values, keys, subset))
        rows += [] if subset else _sparsity_rows(rows[-1], row)
    return [row for row in rows if planned.only is None or row.method in planned.only]


def printed_name(method: Method) -> str:
    """The paper's name of a method; its minimum and maximum can be read in two ways.

    >>> printed_name(Method(name="consensus", options={"reduce": "min", "signed": True}))
    'negmerge_min_signed'
    """
    name, reduce = PRINTED_NAMES.get(method.name, method.name), method.options.get("reduce")
    if method.name in rivals or reduce in (None, "mean"):
        return name
    return f"{name}_{reduce}_{'signed' if method.options.get('signed') else 'magnitude'}"


def _values(row: Scored, on_validation: bool) -> dict[str, float]:
    """The values by column; `on_validation`: the retain accuracy is that on what chooses λ."""
    found: dict[str, float | None] = row.metrics | {"avg_gap": row.avg_gap}
    if on_validation:
        found["acc_retain"] = row.validation.get("acc_retain")
    if isinstance(row, MethodRow):
        found["sparsity"] = row.sparsity
    return {column: value for column, value in found.items() if value is not None}


def _sparsity_rows(measured: MeasuredRow, row: MethodRow) -> list[MeasuredRow]:
    """Rows of groups of layers and of components; their sparsity is the mean over tensors.

    The standard deviation is over the tensors of all layers; the paper prints it as a share of one.
    """
    found: list[MeasuredRow] = []
    for name, zeros in row.anatomy.items():
        key = "layer_group" if name in PRINTED_GROUPS else "component"
        keys = {key: PRINTED_GROUPS.get(name, name)}
        spread = {} if zeros.tensors_std is None else {"sparsity": zeros.tensors_std / 100}
        values = {"sparsity": zeros.tensors}
        found.append(replace(measured, values=values, keys=keys, deviations=spread))
    return found


def compare(
    printed: Sequence[Mapping[str, Any]],
    runs: Sequence[tuple[int, Mapping[str, Any], list[MeasuredRow]]],
    readings: Mapping[str, Sequence[str]] | None = None,
) -> list[ComparedRow]:
    """Match the published rows of a table with the measured ones.

    Args:
        printed: the rows as published.
        runs: for each run the number of the planned run, the keys of its rows, and the rows.
        readings: the names of each reading of a method that can be read in several ways.
    """
    lines: list[ComparedRow] = []
    for row in printed:
        names = (readings or {}).get(row["method"], ())
        lines += [ComparedRow({**row, "method": n}, reading=k) for k, n in enumerate(names)]
        lines += [] if names else [ComparedRow(row)]
    for number, where, rows in runs:
        for line in lines:
            for row in (row for row in rows if matches(line.printed, where, row)):
                for column in row.values.keys() & line.printed.keys() & {*PRINTED}:
                    values = line.measured.setdefault(column, {}).setdefault(number, [])
                    found = row.values[column]
                    values += found if isinstance(found, Sequence) else [found]
                    if column in row.deviations and f"{column}_std" in line.printed:
                        line.deviations.setdefault(column, []).append(row.deviations[column])
    reference = next((line for line in lines if line.printed["method"] == "retrain"), None)
    own = {column for line in lines for column in line.deviations}
    for line in lines:
        line.deviations |= {column: [] for column in own - line.deviations.keys()}
        line.reference = reference if reference and reference.measured else None
    return lines


def matches(printed: Mapping[str, Any], where: Mapping[str, Any], row: MeasuredRow) -> bool:
    """Whether a measured row belongs to a published row.

    >>> row = MeasuredRow("ties", "forget", {})
    >>> matches({"method": "ties", "dataset": "dtd"}, {"dataset": "cars"}, row)
    False

    `where` has the keys of all rows of the run.
    """
    if row.method != printed["method"] or printed.get("splits") not in (None, row.splits):
        return False
    if any(printed[key] != where[key] for key in KEYS if key in printed and key in where):
        return False
    if row.subset and "n_models" not in printed:
        return False
    if any(key in row.keys and key not in printed for key in GROUPS):
        return False
    return all(row.keys.get(key) == printed[key] for key in DETERMINED if key in printed)


def comparison_frame(lines: Sequence[ComparedRow]) -> pd.DataFrame:
    """The table of measured values, published values and differences."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        row = {k: line.printed[k] for k in ("method", "splits", *KEYS) if k in line.printed}
        for column in (column for column in PRINTED if column in line.printed):
            found, printed = line.value(column), line.printed[column]
            row |= {column: found, f"{column}_std": line.spread(column), f"{column}_paper": printed}
            row[f"{column}_paper_std"] = line.printed.get(f"{column}_std")
            row[f"{column}_difference"] = None if found is None else found - printed
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def both_values(row: Mapping[Any, Any], column: str) -> str:
    """The measured value, and in brackets the published one, with standard deviations if known.

    >>> both_values({"mia": 12.5, "mia_std": 0.25, "mia_paper": 13.0, "mia_paper_std": None}, "mia")
    '12.50 ± 0.25 (13.00)'
    >>> both_values({"mia": None, "mia_paper": 13.0}, "mia")
    '– (13.00)'
    """
    texts: list[str] = []
    for name in (column, f"{column}_paper"):
        values = [row.get(key) for key in (name, f"{name}_std")]
        known = [f"{value:.2f}" for value in values if value is not None and value == value]
        texts.append(" ± ".join(known))
    measured, printed = texts
    return f"{measured or '–'} ({printed})" if printed else measured


def rank_correlation(
    lines: Sequence[ComparedRow], reading: int = 0
) -> tuple[str, float, int] | None:
    """Kendall's τ between the published and the measured ranking.

    Rows of the same data set, backbone and mode are ranked, and the τ of these groups averaged. The
    retrained and the original model are not ranked. Of rows with several readings one counts.

    Returns:
        The column that ranks, τ and the number of ranked rows; None if nothing can be ranked.

    >>> lines = [ComparedRow({"method": m, "avg_gap": p}, {"avg_gap": {0: [x]}})
    ...          for m, p, x in (("a", 1, 10), ("b", 2, 30), ("c", 3, 20))]
    >>> rank_correlation(lines)
    ('avg_gap', 0.333..., 3)
    """
    by = next((m for m in RANKED if any(m in line.printed for line in lines)), None)
    if by is None:
        return None
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for line in lines:
        found = line.value(by)
        counts = line.reading in (None, reading)
        counts = counts and line.printed["method"] not in ("retrain", "pretrained")
        if found is not None and counts:
            group = tuple(line.printed.get(key) for key in ("dataset", "backbone", "mode"))
            groups.setdefault(group, []).append((line.printed[by], found))
    ranked = [rows for rows in groups.values() if len(rows) > 1]
    taus = [kendalltau(*zip(*rows, strict=True)).statistic for rows in ranked]  # pyright: ignore
    known = [float(tau) for tau in taus if tau == tau]
    return (by, mean(known), sum(map(len, ranked))) if known else None
