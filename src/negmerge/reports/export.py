"""A data frame formatted for the page, and as CSV, Markdown and LaTeX (booktabs)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from negmerge.evaluation.metrics import Metric, metrics
from negmerge.reports.ranking import AVG_GAP, TOW, interval_text

HEADINGS = {
    "scale": "λ",
    "avg_gap": "Avg. Gap",
    "sparsity": "zero %",
    "sparsity_tensor_mean": "zero %, tensor mean",
    "samples_processed": "samples",
    "cost_ratio": "× retraining",
    "sole_dissent": "only dissenter %",
    "coin_flips": "random signs %",
    "low": "from",
    "high": "to",
    "length": "‖λτ‖",
    "distance": "distance to retrained",
    "nearer": "nearer by",
}
"""The headings of columns that are not metrics; other columns are headed by their names."""
DECIMALS = {"cost_ratio": 2, "seconds": 1, "sparsity": 1, "sparsity_tensor_mean": 2}
DECIMALS |= {"coin_flips": 2, "sole_dissent": 3, "low": 3, "high": 3, "cosine": 4}
"""Decimal places of columns that are not metrics; others have four significant digits."""
COUNTS = {"evaluations", "samples_processed", "elements", "nonzero"}
"""Columns of whole numbers, which pandas reads as floats if a value is missing."""
LATEX_SYMBOLS = {"λ": r"$\lambda$", "–": "--", "×": r"$\times$", "−": "$-$"}
LATEX_SYMBOLS |= {"τ": r"$\tau$", "‖": r"$\|$"}


@dataclass(frozen=True)
class Cell:
    """A formatted cell: its content, its sort key, and the 95 % interval if there is one."""

    text: str
    value: Any = ""
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


@dataclass(frozen=True)
class DataTable:
    """A data frame with a caption; `x_low` and `x_high` are the interval of column `x`.

    `name` is the stem of the file names, `metrics` are beside the registered ones, and `groups` are
    the values of the first column by title of a group of rows, for the page.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> list[str]:
        names = [str(name) for name in self.frame]
        ends = {f"{name}_{end}" for name in names for end in ("low", "high")}
        return [name for name in names if name not in ends]

    @cached_property
    def headings(self) -> list[str]:
        """The headings of the columns.

        >>> frame = pd.DataFrame(columns=["method", "scale", "mia", "mia_paper", "weight_decay"])
        >>> DataTable("", "", frame).headings
        ['method', 'λ', 'MIA %', 'MIA %, paper', 'weight decay']
        """
        return [_line(self._heading(column)) for column in self.columns]

    @cached_property
    def numeric(self) -> list[bool]:
        return [self.frame[name].dtype.kind in "iuf" for name in self.columns]

    @cached_property
    def rows(self) -> list[list[Cell]]:
        """The formatted cells.

        >>> frame = pd.DataFrame({"data": ["all"], "mia": [1.0], "mia_low": 0.5, "mia_high": 2.5})
        >>> [str(cell) for cell in DataTable("scores", "", frame).rows[0]]
        ['all', '1.00 [0.5–2.5]']
        """
        found = self.frame.to_dict("records")
        return [[self._cell(row, name) for name in self.columns] for row in found]

    @cached_property
    def bodies(self) -> list[tuple[str, list[list[Cell]]]]:
        """The rows by title of their group; all under "" if there are no groups.

        >>> table = DataTable("t", "", pd.DataFrame({"method": ["a", "b"]}), groups={"one": ["b"]})
        >>> [(title, [str(row[0]) for row in rows]) for title, rows in table.bodies]
        [('', ['a']), ('one', ['b'])]
        """
        titles = {value: title for title, own in self.groups.items() for value in own}
        found: dict[str, list[list[Cell]]] = {title: [] for title in ("", *self.groups)}
        for row in self.rows:
            found[titles.get(row[0].text, "")].append(row)
        return [(title, rows) for title, rows in found.items() if rows]

    def _heading(self, column: str) -> str:
        name, metric = _stem(column), self._metric(column)
        heading = HEADINGS.get(name, metric and metric.heading)
        if heading is None:
            return column.replace("_", " ")
        rest = column.removeprefix(name).replace("_", " ").strip()
        return f"{heading}, {rest}" if rest else heading

    def _metric(self, column: str) -> Metric | None:
        name = _stem(column)
        if name in self.metrics:
            return self.metrics[name]
        return metrics.get(name) if name in metrics else {"avg_gap": AVG_GAP, "tow": TOW}.get(name)

    def _cell(self, row: dict[Any, Any], name: str) -> Cell:
        value = row[name]
        if _missing(value):
            return Cell("")
        if isinstance(value, bool):
            return Cell("yes" if value else "", int(value))
        if not isinstance(value, int | float):
            return Cell(str(value), str(value))
        if isinstance(value, int) or name in COUNTS:
            return Cell(f"{int(value):,}", value)
        metric = self._metric(name)
        if metric is None:
            format = f".{DECIMALS[name]}f" if name in DECIMALS else ".4g"
            return Cell(f"{value:{format}}", value)
        bounds: list[Any] = [row.get(f"{name}_{end}") for end in ("low", "high")]
        interval = "" if any(map(_missing, bounds)) else interval_text(bounds, metric)
        return Cell(metric.number(value), value, interval)

    # -------------------------------------------------------------------------------------- formats

    def csv(self) -> str:
        """The frame as CSV, at full precision."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """The table in Markdown.

        >>> print(DataTable("t", "", pd.DataFrame({"method": ["a|b"], "scale": [0.5]})).markdown())
        | method | λ |
        |---|---:|
        | a\\|b | 0.5 |
        """
        lines = [self.headings, *([_line(str(cell)) for cell in row] for row in self.rows)]
        text = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines]
        rule = "|" + "|".join("---:" if n else "---" for n in self.numeric) + "|"
        return "\n".join([text[0], rule, *text[1:]])

    def latex(self) -> str:
        """The table in LaTeX, for the package booktabs.

        >>> print(DataTable("t", "", pd.DataFrame({"data": ["a & b"], "scale": [0.5]})).latex())
        % \\usepackage{booktabs}
        \\begin{tabular}{lr}
        \\toprule
        data & $\\lambda$ \\\\
        \\midrule
        a \\& b & 0.5 \\\\
        \\bottomrule
        \\end{tabular}
        """
        cells = [[_line(str(cell)) for cell in row] for row in self.rows]
        columns = "".join("r" if n else "l" for n in self.numeric)
        shown = pd.DataFrame(cells, columns=self.headings)
        text = shown.to_latex(index=False, escape=True, column_format=columns)
        for symbol, command in LATEX_SYMBOLS.items():
            text = text.replace(symbol, command)
        return f"% \\usepackage{{booktabs}}\n{text.rstrip()}"

    def files(self) -> dict[str, str]:
        """The contents of the exported files by name."""
        return {
            f"{self.name}.csv": self.csv(),
            f"{self.name}.md": self.markdown() + "\n",
            f"{self.name}.tex": self.latex() + "\n",
        }


def _line(text: str) -> str:
    """A text without line breaks, which would end the row of a table.

    >>> _line("two\\n lines")
    'two lines'
    """
    return " ".join(text.split())


def _stem(column: str) -> str:
    """The column without the suffixes of published values, deviations and differences."""
    return re.sub(r"(_paper)?(_std|_difference)?$", "", column)


def _missing(value: object) -> bool:
    return value is None or value is pd.NA or value != value
