"""Measured beside published: rows matched, differences, and whether the ranking agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from negmerge.evaluation.scores import METRICS as GAP
from negmerge.evaluation.scores import avg_gap
from negmerge.recipe import Recipe
from negmerge.reproduction.experiments import Part
from negmerge.rivals import rivals

Row = dict[str, Any]

METRICS = ("sparsity", "acc_forget", "acc_retain", "acc_test", "mia", "avg_gap", "seconds")
RANKED = ("avg_gap", "acc_forget")
"""The first of these that a table prints is what its methods are ranked by; smaller is better."""

WHERE = ("backbone", "mode", "dataset", "pool", "n_models", "layer_group", "component")
OWN = ("n_models", "layer_group", "component")
"""Fields that say of which part of a run a row is."""

PRINTED_NAMES = {"consensus": "negmerge"}
GROUPS = {"early": "shallow", "middle": "middle", "late": "deep"}


@dataclass
class Line:
    """One row of a paper's table, and what each run measured of it, by the number of its part."""

    printed: Mapping[str, Any]
    measured: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    reference: Line | None = field(default=None, repr=False, compare=False)
    """The retrained model's, if there is one."""

    def value(self, metric: str) -> float | None:
        """The mean over the trials, then over the parts; the Avg. Gap is that of the means."""
        found = self.measured.get(metric)
        if not found:
            return None
        if metric == "avg_gap" and self.reference is not None:
            own, retrained = ({m: one.value(m) for m in GAP} for one in (self, self.reference))
            return avg_gap(own, retrained)
        return mean(map(mean, found.values()))

    def spread(self, metric: str) -> float | None:
        """The standard deviation over the trials, if every part has the same."""
        found = list(self.measured.get(metric, {}).values())
        trials = {len(own) for own in found}
        if len(trials) != 1 or trials == {1}:
            return None
        return stdev(map(mean, zip(*found, strict=True)))


def measured_rows(
    scores: Mapping[str, Any], recipe: Recipe, part: Part, direction: str = "negate"
) -> list[Row]:
    """The rows of a run under the paper's names, with the fields that tell its rows apart.

    direction: `add` for the task vectors that are added; the others are left out then.
    """
    methods = {method.title: method for method in recipe.methods}
    rows: list[Row] = [{"splits": None} | scores["original"] | {"method": "pretrained"}]
    if scores["retrain"] is not None:
        rows.append(scores["retrain"] | {"method": "retrain", "splits": "retain"})
    for row in scores["methods"]:
        if row.get("direction", "negate") != direction:
            continue
        method = methods[row["method"]]
        name = PRINTED_NAMES.get(method.name, method.name)
        reduce = method.options.get("reduce", "mean")
        own = row | {"method": name if reduce == "mean" else f"{name}_{reduce}"}
        own["seconds"] = row.get("seconds_merge")  # what the paper's seconds are
        if "members" in row:
            own["n_models"] = part.members.get(row["members"], row["members"])
        if method.name not in rivals and method.options.keys() - {"reduce"}:
            continue  # a rule that the paper does not have
        if method.subset is None:
            rows.append(own)
            rows += _anatomy(own)
        else:
            rows.append(own | {"subset": True})
    return [row for row in rows if part.only is None or row["method"] in part.only]


def _anatomy(row: Row) -> list[Row]:
    """Rows for the groups of layers and the components; sparsity is the mean over tensors."""
    found: list[Row] = []
    for name, shares in row.get("anatomy", {}).items():
        key = "layer_group" if name in GROUPS else "component"
        own = {"method": row["method"], "splits": row["splits"], "sparsity": shares["tensors"]}
        found.append(own | {key: GROUPS.get(name, name)})
    return found


def compare(
    table: Mapping[str, Any], runs: Sequence[tuple[int, Mapping[str, Any], list[Row]]]
) -> list[Line]:
    """Every printed row with what was measured of it.

    table: as published. runs: the number of the part, which rows it stands for, and its rows.
    """
    lines = [Line(row) for row in table["rows"]]
    for number, where, rows in runs:
        for line in lines:
            for row in rows:
                if fits(line.printed, where, row):
                    for metric in METRICS:
                        if metric in line.printed and row.get(metric) is not None:
                            own = line.measured.setdefault(metric, {})
                            own.setdefault(number, []).append(row[metric])
    references = [line for line in lines if line.printed["method"] == "retrain"]
    for line in lines:
        line.reference = references[0] if references and references[0].measured else None
    return lines


def fits(printed: Mapping[str, Any], where: Mapping[str, Any], row: Row) -> bool:
    """Whether a measured row is one of a printed row's.

    >>> fits({"method": "ties", "dataset": "dtd"}, {"dataset": "cars"}, {"method": "ties"})
    False
    """
    if row["method"] != printed["method"]:
        return False
    if printed.get("splits") is not None and printed["splits"] != row["splits"]:
        return False
    if any(k in printed and k in where and printed[k] != where[k] for k in WHERE):
        return False
    if row.get("subset") and "n_models" not in printed:
        return False
    needed = [k for k in OWN if k in printed]
    groups = [k for k in ("layer_group", "component") if k in row]
    return all(row.get(k) == printed[k] for k in needed) and all(k in printed for k in groups)


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """The table: measured, published, difference."""
    rows: list[Row] = []
    for line in lines:
        row = {k: line.printed[k] for k in ("method", "splits", *WHERE) if k in line.printed}
        for metric in METRICS:
            if metric not in line.printed:
                continue
            found, printed = line.value(metric), line.printed[metric]
            row |= {metric: found, f"{metric}_std": line.spread(metric)}
            row |= {f"{metric}_paper": printed}
            row |= {f"{metric}_paper_std": line.printed.get(f"{metric}_std")}
            row[f"{metric}_difference"] = None if found is None else found - printed
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def beside(row: Mapping[Any, Any], metric: str) -> str:
    """Measured, and what was printed in brackets, each with its spread if it has one.

    >>> beside({"mia": 12.5, "mia_std": 0.25, "mia_paper": 13.0, "mia_paper_std": None}, "mia")
    '12.50 ± 0.25 (13.00)'
    >>> beside({"mia": None, "mia_paper": 13.0}, "mia")
    '– (13.00)'
    """

    def told(name: str) -> str:
        value, spread = row.get(name), row.get(f"{name}_std")
        if value is None or value != value:
            return ""
        return (
            f"{value:.2f}" if spread is None or spread != spread else f"{value:.2f} ± {spread:.2f}"
        )

    own, printed = told(metric), told(f"{metric}_paper")
    return f"{own or '–'} ({printed})" if printed else own


def agreement(lines: Sequence[Line]) -> tuple[str, float, int] | None:
    """Kendall's τ between the published and the measured ranking: by what, τ, of how many rows.

    Rows are ranked among those of the same data set, backbone and mode, and the τ averaged; the
    reference and the original, to which the others are compared, are not ranked.

    >>> lines = [Line({"method": m, "avg_gap": p}, {"avg_gap": {0: [x]}})
    ...          for m, p, x in (("a", 1, 10), ("b", 2, 30), ("c", 3, 20))]
    >>> agreement(lines)
    ('avg_gap', 0.333..., 3)
    """
    by = next((m for m in RANKED if any(m in line.printed for line in lines)), None)
    if by is None:
        return None
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for line in lines:
        found = line.value(by)
        if found is not None and line.printed["method"] not in ("retrain", "pretrained"):
            place = tuple(line.printed.get(k) for k in ("dataset", "backbone", "mode"))
            groups.setdefault(place, []).append((line.printed[by], found))
    ranked = [rows for rows in groups.values() if len(rows) > 1]
    taus = [float(_kendall(rows)) for rows in ranked]
    known = [tau for tau in taus if tau == tau]
    return (by, mean(known), sum(map(len, ranked))) if known else None


def _kendall(rows: list[tuple[float, float]]) -> Any:
    found: Any = kendalltau([printed for printed, _ in rows], [own for _, own in rows])
    return found.statistic
