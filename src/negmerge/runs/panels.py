"""The data that only the page of a run shows: histograms of metrics and panels of the scenario."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from negmerge.evaluation.criteria import choose
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import read_rows
from negmerge.runs.context import Context
from negmerge.runs.measurements import Drawing
from negmerge.runs.merges import Merge
from negmerge.runs.scales import plan_sweep
from negmerge.runs.scores import Models, score_reference
from negmerge.scenarios.base import PanelModel, identity
from negmerge.support.files import write_file


def draw_panels(context: Context, models: Models, scores: Mapping[str, Scores]) -> list[Path]:
    """Write the histograms of metrics and the panels of the scenario; return the files."""
    folder = context.store.data
    folder.mkdir(parents=True, exist_ok=True)
    files = [member.step.out for member in models.members]
    titles = ["original", "retrained", *(method.title for method in context.recipe.methods)]
    for metric in context.scenario.metrics:
        bins = {t: scores[t].bins.get(metric.name, []) for t in titles if t in scores}
        if metric.histogram is not None and any(bins.values()):
            files.append(folder / metric.histogram.file)
            write_bins(files[-1], bins)
    shown = tuple(models_to_show(context, models))
    for panel in context.recipe.settings.panels:
        step = Drawing(panel.id, shown, folder / f"{panel.id}.json")
        (done,) = context.run(f"drawing: {panel.title}", [step], unit="models")
        tree = json.dumps(done.value.tree, indent=1, ensure_ascii=False)
        contents = {folder / name: content for name, content in done.value.files.items()}
        for path, content in {**contents, step.out: tree.encode()}.items():
            write_file(path, content)
            files.append(path)
    return files


def write_bins(path: Path, bins: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the histograms of all models as one CSV file."""
    text = io.StringIO()
    fields = ["model", "set", "low", "high", "count", "member"]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"model": model} | dict(row) for model, rows in bins.items() for row in rows)
    write_file(path, text.getvalue().encode())


def models_to_show(context: Context, models: Models) -> list[PanelModel]:
    """Return the original, the reference, and consensus with conflict or else the first method."""
    base, names = context.store.base, {m.title: m.name for m in context.recipe.methods}
    shown = [PanelModel("original", base)]
    if models.reference is not None:
        shown.append(PanelModel("retrained", models.reference.out))
    consensus = [t for t, m in models.merged.items() if names[t] == "consensus" and not m.added]
    title = consensus[0] if consensus else next(iter(names))
    if title in models.rivals:
        return [*shown, PanelModel(title, models.rivals[title].chosen.out)]
    method = models.merged[title]
    if "conflict" in models.merged:  # the title is reserved for the rule
        conflict = models.merged["conflict"]
        shown.append(PanelModel("conflict", base, conflict.patch, conflict.scale))
    elif consensus and context.recipe.pool.keep:
        shown.append(conflict_of(context, models, title))
    return [*shown, PanelModel(title, base, method.patch, method.scale)]


def conflict_of(context: Context, models: Models, consensus: str) -> PanelModel:
    """Merge the conflicting elements of the members of a consensus, and find their own λ.

    A coarse search is enough for a picture; a recipe that compares `conflict` has it searched as
    finely as the other methods.
    """
    recipe, base = context.recipe, context.store.base
    patch = context.store.states / "conflict.safetensors"
    terms = next(recipe.terms_of(m) for m in recipe.methods if m.title == consensus)
    members = models.merged[consensus].members
    key = identity("conflict", [step.key for step in members], terms.content())
    files = tuple(step.out for step in members)
    merged = Merge(key, base, files, "conflict", terms, patch)
    context.run("merging conflict", [merged], unit="bytes")
    reference = score_reference(context, models.reference)
    step = plan_sweep(context, reference, "conflict", patch, search=recipe.search.coarse())
    context.run("searching λ of conflict", [step])
    choice = choose(read_rows(step.out), context.criterion, reference)
    return PanelModel("conflict", base, patch, choice.scale)
