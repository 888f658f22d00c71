"""The figures of docs/results.md, from the records of benchmarks/results.

    python benchmarks/figures.py

Writes docs/figures/*.svg; the same records give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from text_study import by_seed, interval

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
LABELS = {"consensus-2-0": "consensus of two", "consensus-4-0": "consensus of four"}
BETTER, WORSE, UNDECIDED = "#1764ab", "#c4570e", "#6b7280"


class Row(NamedTuple):
    """A line of a figure: a mean difference with the ends of its interval."""

    label: str
    mean: float
    low: float
    high: float

    @property
    def colour(self) -> str:
        """Blue where consensus is better for certain, orange where it is worse."""
        return BETTER if self.high < 0 else WORSE if self.low > 0 else UNDECIDED


def forest(parts: dict[str, Sequence[Row]], axis: str, path: Path) -> None:
    """Draw paired differences with their intervals, one panel for each part."""
    sizes = [len(rows) for rows in parts.values()]
    matplotlib.rcParams.update({"svg.hashsalt": path.stem, "font.size": 9, "font.family": "sans"})
    figure, panels = plt.subplots(
        len(parts), 1, figsize=(7.2, 0.9 + 0.27 * sum(sizes) + 0.35 * len(parts)), squeeze=False,
        height_ratios=sizes, constrained_layout=True,
    )  # fmt: skip
    for axes, (title, rows) in zip(panels[:, 0], parts.items(), strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        for place, row in enumerate(rows):
            axes.plot([row.low, row.high], [place, place], color=row.colour, linewidth=2)
            axes.plot([row.mean], [place], "o", color=row.colour, markersize=5)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e5e7eb")
        axes.set_axisbelow(True)
    panels[-1, 0].set_xlabel(axis)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def text_figure() -> None:
    """Consensus less every other method, for a language model."""
    runs = json.loads((RESULTS / "text_study.json").read_text())["runs"]

    def rows(metric: str) -> list[Row]:
        found: list[Row] = []
        for method in next(iter(runs.values()))["rows"]:
            if method in ("original", "retrained", "consensus"):
                continue
            ours, theirs = by_seed(runs, "consensus", metric), by_seed(runs, method, metric)
            if theirs:
                pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
                found.append(Row(LABELS.get(method, method), *interval(pairs)))
        return found

    parts = {
        "gap to retraining at equal forgetting": rows("matched_gap"),
        "Avg. Gap to retraining at the chosen λ": rows("avg_gap"),
    }
    axis = "consensus less the method, points, with 95 % interval; left: consensus is better"
    forest(parts, axis, FIGURES / "text.svg")


if __name__ == "__main__":
    text_figure()
