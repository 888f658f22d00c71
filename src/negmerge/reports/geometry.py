"""The section of a page about the space of the weights: lengths, distances, losses along paths."""

from __future__ import annotations

import pandas as pd

from negmerge.reports.charts import Chart
from negmerge.reports.frames import Cells, NotMeasured
from negmerge.reports.page_data import PageData
from negmerge.runs.geometry_record import Geometry, Placed
from negmerge.runs.result import RunResult


def _geometry(page: PageData) -> Geometry:
    if page.result.geometry is None:
        raise NotMeasured("this run did not measure it")
    return page.result.geometry


def style_name(model: Placed) -> str:
    """The name of the style and of the entry of the legend of a model."""
    return "members" if model.model.startswith("member-") else model.model


def shown_name(model: Placed, result: RunResult) -> str:
    """The name of a model; a member has its number in the pool."""
    keys = [f"member-{member.id}" for member in result.pool]
    return f"member {keys.index(model.model) + 1}" if model.model in keys else model.model


def legend(page: PageData) -> list[str]:
    """The names in the legend of the curves."""
    found = _geometry(page)
    return list(dict.fromkeys(style_name(model) for model in found.models if model.losses))


def geometry_frame(page: PageData) -> pd.DataFrame:
    """The length, the distances and the barriers of every model; the first row is the original."""
    geometry = _geometry(page)
    apart = geometry.models[0].separation
    rows: list[Cells] = [{"model": "original", "scale": 0.0, "length": 0.0, "distance": apart}]
    for model in geometry.models:
        row: Cells = {"model": shown_name(model, page.result), "scale": model.scale}
        row |= {"length": model.length, "distance": model.distance, "cosine": model.cosine}
        if apart is not None and model.distance is not None:
            row["nearer"] = apart - model.distance
        rows.append(row | {f"barrier_{name}": rise for name, rise in model.barriers.items()})
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def path_charts(page: PageData) -> list[str]:
    """The loss along the path of every model, one chart for each set."""
    geometry = _geometry(page)
    charts: list[str] = []
    for name in geometry.samples:
        title = f"Loss on the {name} set along θ − tλτ"
        label = f"mean loss on the {name} set"
        chart = Chart(f"path-{name}", title, "t, in units of λ", label, styles=page.styles)
        for model in reversed(geometry.models):  # the methods above the members
            style, shown = style_name(model), shown_name(model, page.result)
            known = [
                (t, loss)
                for t, loss in zip(geometry.path, model.losses.get(name, ()), strict=False)
                if loss is not None
            ]
            chart.line([t for t, _ in known], [loss for _, loss in known], style)
            for t, loss in known:
                text = f"{shown}: t = {t:g} (λ = {t * model.scale:.4g}), loss {loss:.4g}"
                chart.point(t, loss, style, text, size=6 if style == "members" else 7)
        target = geometry.retrained.get(name)
        if target is not None:
            chart.target_line(target, f"retrained: {target:.3g}")
        charts.append(chart.page_svg())
    return charts


def geometry_text(page: PageData) -> str:
    """What the figures and the table show."""
    geometry = _geometry(page)
    text = (
        "The length of a change is the Euclidean norm of λτ over all parameters, without buffers. "
    )
    if geometry.models[0].separation is not None:
        text += (
            "Distance is that to the retrained model, and a negative number in the column “nearer "
            "by” means that the change leads away from it. A cosine of 1 would mean that −τ points "
            "from the original straight to the retrained model, 0 that the two directions have "
            "nothing in common; networks trained from different random weights are far apart, "
            "however alike they behave. "
        )
    if geometry.missing is not None:
        return f"{text}Losses along paths were not measured: {geometry.missing}."
    sizes = ", ".join(f"{count:,} {name}" for name, count in geometry.samples.items())
    text += (
        "The curves go from the original (t = 0) through the unlearned model (t = 1) to twice the "
        f"change, on {sizes} samples that choose λ. A barrier is how far the loss between t = 0 "
        "and t = 1 rises above a straight line; without one, the two models are linearly connected."
    )
    unmoved = [shown_name(model, page.result) for model in geometry.models if not model.losses]
    if unmoved:
        text += f" Without a path, because λ is 0: {', '.join(unmoved)}."
    return text
