"""The table of scores: original, retrained, then every method with its distance to retraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from negmerge.errors import printable
from negmerge.report.ranking import bracketed, nearest
from negmerge.terminal import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = {
    "acc_retain": "retain %",
    "acc_forget": "forget %",
    "acc_test": "test %",
    "mia": "MIA %",
}


def scores_table(scores: Mapping[str, Any]) -> list[RenderableType]:
    """Tables for the terminal, with the 95 % interval beside each number."""
    from rich.table import Table

    table = Table(title=plain(scores["title"]) or None, title_justify="left")
    table.add_column("method")
    table.add_column("data")
    measured = [metric for metric in COLUMNS if scores["original"][metric] is not None]
    for name in ("λ", *(COLUMNS[m] for m in measured), "Avg. Gap", "zero %", "seconds"):
        table.add_column(name, justify="right")
    table.add_row(*_row("original", scores["original"], measured))
    if scores["retrain"] is not None:
        table.add_row(*_row("retrained", scores["retrain"], measured), end_section=True)
    best = nearest(scores)
    for group in grouped(scores["methods"]):
        for method in group:
            style = "bold" if best == (method["method"], []) else ""
            last = method is group[-1]
            cells = _row(method["method"], method, measured)
            table.add_row(*cells, style=style, end_section=last)
    shown: list[RenderableType] = [table]
    for line in (*notes(scores), *(f"warning: {text}" for text in scores["warnings"])):
        shown.append(printable(line))
    return shown


def grouped(methods: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Methods by the data they use, as in the paper's Table 2; merged task vectors come last.

    >>> rows = [dict(method=m, splits=s, scale=x) for m, s, x in (
    ...     ("consensus", "forget", 0.5), ("salun", "all", None), ("finetune", "retain", None))]
    >>> [[row["method"] for row in group] for group in grouped(rows)]
    [['salun'], ['finetune'], ['consensus']]
    """
    merged = [row for row in methods if row["scale"] is not None]
    rivals = [row for row in methods if row["scale"] is None]
    groups = [[r for r in rivals if r["splits"] == s] for s in ("all", "retain", "forget")]
    return [group for group in (*groups, merged) if group]


def run_tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """A run for the terminal: the scores, or how far it is."""
    if found["finished"]:
        return scores_table(found["scores"])
    return [f"not finished: no manifest; there are {how_far(found)}"]


def how_far(found: Mapping[str, Any]) -> str:
    """What there is of an unfinished run."""
    have = [name for name in ("base", "retrain") if found[name]]
    have.append(f"{found['members']} of {found['members_planned']} members")
    have += [f"{len(found[kind])} {kind}" for kind in ("patches", "sweeps", "rivals")]
    return ", ".join(have)


def notes(scores: Mapping[str, Any]) -> list[str]:
    """What must be known to read the table."""
    sizes = scores["original"]["samples"]
    found = [
        "In brackets: the 95 % interval; numbers are of "
        + ", ".join(f"{count:,} {name}" for name, count in sizes.items())
        + " samples."
    ]
    merged = [row for row in scores["methods"] if row["scale"] is not None]
    methods = [row for row in merged if row["criterion"] is not None]
    if methods:
        criterion = methods[0]["criterion"]
        if methods[0]["looked"]:
            found.append(f"λ by {criterion}: chosen on the reported data (it looked).")
        else:
            chosen = ", ".join(f"{n:,} {k}" for k, n in scores["splits"]["chosen_on"].items())
            found.append(f"λ by {criterion}, on {chosen} samples that are not reported.")
        if methods[0]["cost_ratio"] is not None:
            ratio = methods[0]["cost_ratio"]
            found.append(f"The pool processed {ratio:.2f} × the samples of retraining.")
    for row in scores["methods"]:
        if row.get("tried"):
            names = row["tried"][0]["options"]
            values = row["settings"] | row["options"]
            chosen = ", ".join(f"{name} = {values[name]:g}" for name in names)
            count, criterion = len(row["tried"]), row["criterion"]
            found.append(f"{row['method']}: {chosen}, the best of {count} tries by {criterion}.")
    return found


def _row(name: str, row: Mapping[str, Any], measured: Sequence[str]) -> list[str]:
    scale = row.get("scale")
    cells = [name, row.get("splits", ""), "" if scale is None else f"{scale:g}"]
    for metric in measured:
        if row[metric] is None:
            cells.append("")
        else:
            cells.append(f"{row[metric]:.2f} {bracketed(row['intervals'][metric])}")
    gap, sparsity = row.get("avg_gap"), row.get("sparsity")
    cells.append("" if gap is None else f"{gap:.2f}")
    cells.append("" if sparsity is None else f"{sparsity:.1f}")
    cells.append(f"{row['seconds']:.1f}")
    return cells
