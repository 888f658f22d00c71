"""Tables as people read them, and as Markdown, CSV and LaTeX (booktabs)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from negmerge.report.ranking import bracketed
from negmerge.report.tables import COLUMNS

LABELS = COLUMNS | {
    "scale": "λ",
    "avg_gap": "Avg. Gap",
    "sparsity": "zero %",
    "sparsity_tensor_mean": "zero %, tensor mean",
    "samples_processed": "samples",
    "cost_ratio": "× retraining",
    "acc_holdout": "held-out %",
    "sole_dissent": "only dissenter %",
    "coin_flips": "coin flips %",
    "low": "from",
    "high": "to",
    "forget": "forget, images",
    "retain": "retain, images",
    "test": "test, images",
    "taken_for_member": "taken for member",
}
PLACES = {"seconds": 1, "sparsity": 1, "sole_dissent": 3, "low": 3, "high": 3}
PLAIN = {"scale", "weight_decay", "lr", "label_smoothing", "epochs"}


@dataclass(frozen=True)
class Cell:
    """What is shown, what it is sorted by, and the interval of a number, if it has one."""

    text: str
    value: Any
    interval: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


@dataclass(frozen=True)
class Table:
    """A table of the page.

    name: of its files. frame: all its numbers; `x_low` and `x_high` are the interval of x.
    """

    name: str
    caption: str
    frame: pd.DataFrame

    @cached_property
    def columns(self) -> list[str]:
        return [c for c in map(str, self.frame) if not c.endswith(("_low", "_high"))]

    @cached_property
    def labels(self) -> list[str]:
        return [LABELS.get(name, name.replace("_", " ")) for name in self.columns]

    @cached_property
    def numeric(self) -> list[bool]:
        return [self.frame[name].dtype.kind in "iuf" for name in self.columns]

    @cached_property
    def rows(self) -> list[list[Cell]]:
        """The cells, formatted.

        >>> frame = pd.DataFrame({"data": ["all"], "mia": [1.0], "mia_low": 0.5, "mia_high": 2.5})
        >>> [str(cell) for cell in Table("scores", "", frame).rows[0]]
        ['all', '1.00 [0.5–2.5]']
        """
        found = self.frame.to_dict("records")
        return [[self._cell(row, name) for name in self.columns] for row in found]

    def _cell(self, row: dict[Any, Any], name: str) -> Cell:
        value = row[name]
        if value is None or value is pd.NA or value != value:
            return Cell("", "")
        if isinstance(value, bool):
            return Cell("yes" if value else "", int(value))
        if isinstance(value, int) or (isinstance(value, float) and name in self._whole):
            return Cell(f"{int(value):,}", value)
        if isinstance(value, float):
            if name in PLAIN:
                return Cell(f"{value:.4g}", value)
            bounds = [row.get(f"{name}_{end}", np.nan) for end in ("low", "high")]
            known = all(end is not None and end == end for end in bounds)
            text = f"{value:.{PLACES.get(name, 2)}f}"
            return Cell(text, value, bracketed(bounds) if known else "")
        return Cell(str(value), str(value))

    @cached_property
    def _whole(self) -> set[str]:
        """Columns of counts, which are floats only where some are missing."""
        counts = {"evaluations", "samples_processed", "elements", "nonzero"}
        return counts & set(self.columns)

    # -------------------------------------------------------------------------------------- formats

    def csv(self) -> str:
        """Every number at full precision."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """A Markdown table.

        >>> print(Table("t", "", pd.DataFrame({"method": ["a|b"], "scale": [0.5]})).markdown())
        | method | λ |
        |---|---:|
        | a\\|b | 0.5 |
        """
        lines = [self.labels, *([str(cell) for cell in row] for row in self.rows)]
        text = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines]
        rule = "|" + "|".join("---:" if n else "---" for n in self.numeric) + "|"
        return "\n".join([text[0], rule, *text[1:]])

    def latex(self) -> str:
        """A LaTeX table for the package booktabs.

        >>> "toprule" in Table("t", "A & B", pd.DataFrame({"scale": [0.5]})).latex()
        True
        """
        columns = "".join("r" if n else "l" for n in self.numeric)
        lines = [" & ".join(map(_tex, self.labels)) + r" \\", r"\midrule"]
        lines += [" & ".join(_tex(str(cell)) for cell in row) + r" \\" for row in self.rows]
        return "\n".join(
            [
                r"% \usepackage{booktabs}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def files(self) -> dict[str, str]:
        """The exports by file name."""
        return {
            f"{self.name}.csv": self.csv(),
            f"{self.name}.md": self.markdown() + "\n",
            f"{self.name}.tex": self.latex() + "\n",
        }


_TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {"λ": r"$\lambda$", "–": "--", "×": r"$\times$", "−": r"$-$"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in text)
