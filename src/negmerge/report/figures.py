"""The figures: each a function from a table to drawings, with a name on every point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, MaxNLocator

from negmerge.criteria import Criterion, Reference
from negmerge.inspection import natural
from negmerge.report.charts import INK, Chart, paint
from negmerge.report.collect import Row, groups, records
from negmerge.report.colours import Looks

FEW_ROWS = 40
"""Of a figure by group; beyond, names on the axis would overlap."""


NEAR = 0.9
"""Methods that keep this share of the original's retain accuracy get a drawing of their own."""


def trade_off(
    scores: pd.DataFrame, members: pd.DataFrame | None, looks: Looks, first: str
) -> list[str]:
    """Retain accuracy against forget error for each pool member and each method (Figure 1a).

    Where some methods lose much and the first does not, a second drawing shows those like it.

    first: the run's own method, which lies above all others.
    """
    front = in_front(records(scores), first)
    rows = [row | {"look": row["method"], "name": row["method"]} for row in front]
    own = [] if members is None else records(members)
    alone = [row | {"look": "members", "name": f"member {row['member']}"} for row in own]
    rows = [*alone, *rows]
    least = NEAR * records(scores)[0]["acc_retain"]
    near = [row for row in rows if row["acc_retain"] >= least]
    title = "Retain accuracy against forget error, for each pool member and each method"
    drawings = [_scatter("trade-off", title, rows, looks, first)]
    if 3 < len(near) < len(rows) and any(row["name"] == first for row in near):
        share = f"those that keep {100 * NEAR:.0f} % of the original's retain accuracy"
        drawings.append(_scatter("trade-off-near", f"{title}: {share}", near, looks, first))
    return drawings


def _scatter(id: str, title: str, rows: list[Row], looks: Looks, first: str) -> str:
    forget = "forget error: 100 − accuracy on the forget set, %"
    chart = Chart(id, title, forget, "accuracy on the retain set, %", 4.2, looks)
    for row in rows:
        scale = f" (λ = {row['scale']:g})" if row.get("scale", np.nan) >= 0 else ""
        size = 9 if row["look"] == "members" else 10
        name = f"{row['name']}{scale}: {_both(row)}"
        if row["name"] == first:
            chart.ring(100 - row["acc_forget"], row["acc_retain"], first)
        chart.point(100 - row["acc_forget"], row["acc_retain"], row["look"], name, size=size)
    return chart.svg()


def in_front(rows: list[Row], first: str) -> list[Row]:
    """The rows in the order in which they are drawn: the references and the first method last.

    >>> [row["method"] for row in in_front([{"method": m} for m in ("original", "a", "b")], "a")]
    ['b', 'original', 'a']
    """
    above = ("original", "retrained", first)
    return sorted(rows, key=lambda r: above.index(r["method"]) if r["method"] in above else -1)


def spread(scores: pd.DataFrame, members: pd.DataFrame, looks: Looks, first: str) -> list[str]:
    """Forget accuracy over the pool, each member with its own λ (Figure 1b)."""
    chart = Chart(
        "spread",
        "Forget accuracy of the pool members, each with its own λ, and of the methods",
        "accuracy on the forget set, %",
        "",
        height=2.4,
        looks=looks,
    )
    values = members["acc_forget"]
    box = chart.axes.boxplot(
        [values],
        orientation="horizontal",
        positions=[1],
        widths=0.5,
        showfliers=False,
        patch_artist=False,
    )
    for part in (line for lines in box.values() for line in lines):
        part.set(color=paint(chart.look("members")), linewidth=1)
        chart.part(part, "members")
    for k, row in enumerate(records(members)):
        name = f"member {row['member']} (λ = {row['scale']:g}): {_both(row)}"
        chart.point(row["acc_forget"], 1 + 0.14 * ((k % 3) - 1), "members", name, size=9, alpha=0.8)
    for row in in_front(records(scores), first):
        chart.point(row["acc_forget"], 0.25, row["method"], f"{row['method']}: {_both(row)}")
    chart.axes.set_yticks([0.25, 1], ["methods", "members"])
    chart.axes.set_ylim(-0.1, 1.5)
    chart.axes.grid(axis="y", visible=False)
    return [chart.svg()]


def lambda_curves(
    sweeps: pd.DataFrame, criterion: Criterion, reference: Reference, looks: Looks
) -> list[str]:
    """Forget and retain accuracy by λ, with the chosen point and what the criterion aims at."""
    charts: list[str] = []
    for metric, what in (("acc_forget", "forget"), ("acc_retain", "retain")):
        if metric not in sweeps:
            continue  # a module of one's own may come without that set
        chart = Chart(
            f"sweep-{what}",
            f"Accuracy on the {what} set by λ, with the λ that was chosen",
            "λ",
            f"accuracy on the {what} set, %",
            looks=looks,
        )
        for title, rows in groups(sweeps, "method").items():
            _curve(chart, title, rows, metric, "%")
        aim = criterion.aim(what, records(sweeps)[0], reference)
        if aim is not None:
            chart.level(*aim)
        charts.append(chart.svg())
    if "avg_gap" in sweeps:
        title = "Avg. Gap to the retrained model by λ"
        chart = Chart("sweep-gap", title, "λ", "Avg. Gap, points", looks=looks)
        for title, rows in groups(sweeps, "method").items():
            _curve(chart, title, rows, "avg_gap", "points")
        charts.append(chart.svg())
    return charts


def _curve(chart: Chart, title: str, rows: list[Row], metric: str, unit: str) -> None:
    chart.line([row["scale"] for row in rows], [row[metric] for row in rows], title)
    for row in rows:
        name = f"{title}: λ = {row['scale']:g}, {row[metric]:.2f} {unit}"
        if row["chosen"]:
            chart.point(row["scale"], row[metric], title, f"{name}, chosen", size=11, zorder=4)
        else:
            chart.point(row["scale"], row[metric], title, name, size=5)


def sparsity_by_members(prefixes: pd.DataFrame) -> list[str]:
    """Zeros of the consensus against the number of members."""
    chart = Chart(
        "prefixes",
        "Sparsity of the consensus against the number of members",
        "members merged",
        "zeros, %",
    )
    chart.line(prefixes["members"], prefixes["coin_flips"], "coin_flips")
    chart.line(prefixes["members"], prefixes["sparsity"], "consensus")
    for row in records(prefixes):
        n = row["members"]
        chart.point(
            n, row["coin_flips"], "coin_flips", f"coin flips of {n}: {row['coin_flips']:.2f} %"
        )
        name = f"consensus of {n}: {row['sparsity']:.2f} % zero"
        chart.point(n, row["sparsity"], "consensus", name)
    chart.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return [chart.svg()]


def sparsity_by(frame: pd.DataFrame, by: str, looks: Looks) -> list[str]:
    """Zeros by depth or by component, one marker for each method that leaves any."""
    sparse = with_zeros(frame)
    places = sorted(groups(frame, by), key=natural)[:FEW_ROWS]
    height = 1.1 + 0.22 * len(places)
    zeros = "zeros, % of the elements"
    chart = Chart(f"by-{by}", f"Sparsity by {by}", zeros, "", height, looks)
    for row in records(frame):
        if row["method"] in sparse and row[by] in places:
            name = f"{row['method']}, {by} {row[by]}: {row['sparsity']:.2f} % zero"
            name += f" of {row['elements']:,} elements"
            chart.point(row["sparsity"], places.index(row[by]), row["method"], name)
    chart.axes.set_yticks(range(len(places)), places)
    chart.axes.set_ylim(len(places) - 0.5, -0.5)
    chart.axes.set_xlim(-2, 102)
    return [chart.svg()]


def with_zeros(frame: pd.DataFrame) -> list[str]:
    """The methods that leave zeros."""
    found = groups(frame, "method")
    return [title for title, rows in found.items() if any(row["sparsity"] > 0 for row in rows)]


def dissent(frame: pd.DataFrame) -> list[str]:
    """How often each member was the only one to disagree."""
    height = 1.1 + 0.2 * len(frame)
    chart = Chart(
        "dissent",
        "Share of elements at which a member alone disagrees with all others",
        "only dissenter, % of the elements",
        "member",
        height=height,
    )
    for place, row in enumerate(records(frame)):
        name = f"member {row['member']}: only dissenter at {row['sole_dissent']:.3f} %"
        chart.bar(place, row["sole_dissent"], "members", name)
    chart.axes.set_yticks(range(len(frame)), [str(name) for name in frame["member"]])
    chart.axes.set_ylim(len(frame) - 0.5, -0.5)
    chart.axes.grid(axis="y", visible=False)
    return [chart.svg()]


def attack(frame: pd.DataFrame, shown: Sequence[str]) -> list[str]:
    """Probability of the true class on forget, retain and test; shaded where it means member."""
    charts: list[str] = []
    models = groups(frame, "model")
    for number, model in enumerate(shown):
        chart = Chart(
            f"attack-{number}",
            f"Probability of the true class under {model}, by set",
            "probability of the true class",
            f"{model}: % of the set",
            height=2.9,
        )
        sets: dict[str, list[Row]] = {}
        for row in models[model]:
            sets.setdefault(row["set"], []).append(row)
        for name, rows in sets.items():
            total = sum(row["count"] for row in rows)
            edges = [rows[0]["low"], *(row["high"] for row in rows)]
            shares = [100 * row["count"] / total for row in rows]
            artist = chart.axes.stairs(shares, edges, color=paint(chart.look(name)), linewidth=1.6)
            top = rows[int(np.argmax(shares))]
            told = f"{name} under {model}: {total:,} images, {max(shares):.1f} % of them between "
            chart.part(artist, name, told + f"{top['low']:g} and {top['high']:g}")
        for row in next(iter(sets.values())):
            if row["member"]:
                chart.axes.axvspan(row["low"], row["high"], color=INK, alpha=0.07, linewidth=0)
        chart.axes.set_xlim(0, 1)
        chart.axes.set_yscale("log")  # most images are at the right end
        chart.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        charts.append(chart.svg())
    return charts


def _both(row: Row) -> str:
    kept = f"retain {row['acc_retain']:.2f} %, " if "acc_retain" in row else ""
    return f"{kept}forget {row['acc_forget']:.2f} %"
