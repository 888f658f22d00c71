"""Measured beside published: rows matched, differences, and whether the ranking agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from negmerge.recipe import Recipe

METRICS = ("sparsity", "acc_forget", "acc_retain", "acc_test", "mia", "avg_gap")
RANKED = ("avg_gap", "acc_forget", "sparsity")
"""The first of these that a table prints is what its methods are ranked by; smaller is better."""

WHERE = ("backbone", "mode", "dataset", "n_models", "pool", "layer_group", "component")
PUBLISHED_NAMES = {"consensus": "negmerge", "original": "pretrained"}


@dataclass
class Line:
    """One row of a paper's table, and what was measured of it in each trial."""

    printed: Mapping[str, Any]
    measured: dict[str, list[float]] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """The mean over the trials."""
        found = self.measured.get(metric)
        return mean(found) if found else None

    def spread(self, metric: str) -> float | None:
        """The standard deviation over the trials."""
        found = self.measured.get(metric, [])
        return stdev(found) if len(found) > 1 else None


def measured_rows(scores: Mapping[str, Any], recipe: Recipe) -> list[dict[str, Any]]:
    """The rows of a run, under the names the paper has for the methods."""
    names = {method.title: method for method in recipe.methods}
    rows = [{"splits": None} | scores["original"] | {"method": "pretrained"}]
    if scores["retrain"] is not None:
        rows.append(scores["retrain"] | {"method": "retrain", "splits": "retain"})
    for row in scores["methods"]:
        method = names[row["method"]]
        name = PUBLISHED_NAMES.get(method.name, method.name)
        reduce = method.options.get("reduce", "mean")
        rows.append(row | {"method": name if reduce == "mean" else f"{name}_{reduce}"})
    return rows


def compare(
    table: Mapping[str, Any], runs: Sequence[tuple[Mapping[str, Any], list[dict[str, Any]]]]
) -> list[Line]:
    """Every printed row with what was measured of it.

    table: as published. runs: for each trial of each part, which rows it stands for, and its rows.
    """
    lines = [Line(row) for row in table["rows"]]
    for where, rows in runs:
        for line in lines:
            if any(
                where.get(name, line.printed.get(name)) != line.printed.get(name) for name in WHERE
            ):
                continue
            for row in rows:
                same = row["method"] == line.printed["method"]
                if same and line.printed.get("splits") in (None, row["splits"]):
                    for metric in METRICS:
                        if metric in line.printed and row.get(metric) is not None:
                            line.measured.setdefault(metric, []).append(row[metric])
    return lines


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """The table: measured, published, difference."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        row = {k: line.printed[k] for k in ("method", "splits", *WHERE) if k in line.printed}
        for metric in METRICS:
            if metric not in line.printed:
                continue
            found, printed = line.value(metric), line.printed[metric]
            row |= {metric: found, f"{metric}_std": line.spread(metric)}
            row |= {f"{metric}_paper": printed}
            row[f"{metric}_difference"] = None if found is None else found - printed
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def agreement(table: Mapping[str, Any], lines: Sequence[Line]) -> tuple[str, float, int] | None:
    """Kendall's τ between the published and the measured ranking: by what, τ, of how many rows.

    The reference, to which the others are compared, is not ranked.

    >>> table = {"decimals": {"avg_gap": 2}}
    >>> lines = [Line({"method": m, "avg_gap": p}, {"avg_gap": [x]})
    ...          for m, p, x in (("a", 1, 10), ("b", 2, 30), ("c", 3, 20))]
    >>> agreement(table, lines)
    ('avg_gap', 0.333..., 3)
    """
    by = next(metric for metric in RANKED if metric in table["decimals"])
    ranked = [
        (line.printed[by], line.value(by))
        for line in lines
        if line.printed["method"] not in ("retrain", "pretrained") and by in line.printed
    ]
    known = [(printed, found) for printed, found in ranked if found is not None]
    if len(known) < 2:
        return None
    found: Any = kendalltau([p for p, _ in known], [f for _, f in known])
    return by, float(found.statistic), len(known)
