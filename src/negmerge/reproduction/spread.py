"""Figure 1 over all data sets at once: how far the members of each pool differ, and the methods."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from negmerge.report.colours import PAIRS, look_of, looks_of

SHOWN = ("consensus", "single_best", "uniform", "greedy", "ties", "magmax")
"""The methods of the paper's figure."""


def alone_and_merged(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """Every member with its own λ, the original and every method, for each data set.

    runs: the name of a data set and the scores of a run.
    """
    rows: list[dict[str, Any]] = []
    for data, scores in runs:
        named = [(f"member {k}", one) for k, one in enumerate(scores["pool"], 1)]
        named += [("original", scores["original"])]
        named += [(one["method"], one) for one in scores["methods"]]
        for name, one in named:
            row = {"dataset": data, "seed": scores["seed"], "method": name}
            rows.append(row | {k: one.get(k) for k in ("scale", "acc_forget", "acc_retain")})
    return pd.DataFrame(rows)


def drawn(frame: pd.DataFrame) -> str:
    """The figure as SVG: for each data set the members' forget accuracy, and the methods beside.

    >>> rows = [{"dataset": "mnist", "method": m, "acc_forget": 40.0} for m in ("member 1", "ties")]
    >>> "mnist" in drawn(pd.DataFrame(rows))
    True

    frame: from `alone_and_merged`.
    """
    rows = frame.dropna(subset=["acc_forget"]).to_dict("records")
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    looks = looks_of(SHOWN)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "negmerge"}):
        figure = Figure(figsize=(2.2 + 1.3 * len(sets), 4.2), layout="constrained")
        axes = figure.add_subplot()
        grey = PAIRS[look_of("members")[0]][0]
        for place, data in enumerate(sets):
            own = [row for row in rows if row["dataset"] == data]
            members = [r["acc_forget"] for r in own if r["method"].startswith("member ")]
            line = {"color": grey}
            axes.boxplot(
                [members],
                positions=[place],
                widths=0.5,
                showfliers=False,
                boxprops=line,
                whiskerprops=line,
                capprops=line,
                medianprops=line,
            )
            for k, value in enumerate(members):
                axes.plot(place + 0.08 * (k % 3 - 1), value, ".", color=grey, markersize=5)
            for row in own:
                if row["method"] in SHOWN:
                    colour, marker, _ = looks[row["method"]]
                    axes.plot(place + 0.36, row["acc_forget"], marker, color=PAIRS[colour][0])
        for name in SHOWN:
            colour, marker, _ = looks[name]
            axes.plot([], [], marker, color=PAIRS[colour][0], label=name)
        axes.plot([], [], ".", color=grey, label="members")
        axes.set_xticks(range(len(sets)), sets)
        axes.set_ylabel("accuracy on the forget set, %")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(out, metadata=nothing)
    return out.getvalue()
