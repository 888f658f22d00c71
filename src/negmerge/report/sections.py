"""The parts of the page, in their order: words, drawings with a legend, a table, pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from negmerge.criteria import Criterion, criteria
from negmerge.progress import Progress
from negmerge.recipe import Recipe
from negmerge.report import collect, figures
from negmerge.report.colours import Looks, looks_of
from negmerge.report.export import Table
from negmerge.report.ranking import listed, losses
from negmerge.report.tables import notes
from negmerge.rundir import Run


@dataclass
class Section:
    """A part of the page.

    legend: the methods (or sets) whose colours and markers are explained below the drawings.
    open: whether its table is shown at once. notes: what must be known to read it.
    """

    id: str
    title: str
    text: str
    drawings: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    table: Table | None = None
    open: bool = False
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Any] | None = None
    lines: bool = False
    """Whether methods are told apart by the dashes of lines too."""


@dataclass
class Material:
    """What the sections are made from."""

    run: Run
    recipe: Recipe
    scores: dict[str, Any]
    progress: Progress

    @property
    def criterion(self) -> Criterion:
        return criteria.get(self.recipe.criterion)

    @cached_property
    def frame(self) -> pd.DataFrame:
        return collect.scores_frame(self.scores, self.criterion)

    @cached_property
    def members(self) -> pd.DataFrame:
        return collect.members_frame(self.scores, self.recipe)

    @property
    def methods(self) -> list[str]:
        return [str(name) for name in self.frame["method"]]

    @property
    def first(self) -> str:
        """The method that made the unlearned model."""
        return self.scores["methods"][0]["method"]

    @cached_property
    def looks(self) -> Looks:
        rows = self.scores["methods"]  # in the recipe's order, whatever was measured
        return looks_of(["original", "retrained", *(row["method"] for row in rows)])

    @property
    def searched(self) -> list[str]:
        rows = self.scores["methods"]
        return [r["method"] for r in rows if r["scale"] is not None and r["criterion"] is not None]


def all_methods(given: Material) -> Section:
    text = (
        "Every method beside the original and, where there is one, the model retrained without "
        "the forget set. “Data” is what a method may see; in brackets is the 95 % interval."
    )
    loss = losses(given.scores, given.criterion)
    if loss:
        text += (
            f" Sorted by {given.criterion.name} on the reported data: {given.criterion.summary}."
        )
    refused = [name for name, value in loss.items() if value is None]
    if refused:
        text += f" There it would not allow {listed(refused)}: these come last."
    added = [row["method"] for row in given.scores["methods"] if row.get("direction") == "add"]
    if added:
        text += f" Added, to learn the set instead of forgetting it: {', '.join(added)}."
    table, lines = Table("scores", "Scores of all methods", given.frame), notes(given.scores)
    return Section("scores", "All methods", text, table=table, open=True, notes=lines)


def tries(given: Material) -> Section:
    text = (
        "What was tried for each tuned rival, on the samples that choose; the smallest loss by "
        "the criterion wins. Samples and seconds of a tuned rival are those of all its tries."
    )
    table = Table("tries", "Tries of the tuned rivals", collect.tries_frame(given.scores))
    return Section("tries", "How rivals were tuned", text, table=table, open=True)


def trade_off(given: Material) -> Section:
    if "acc_retain" not in given.frame:
        raise collect.Missing("there is no retain set")
    text = (
        "To the right more is forgotten, upwards more is kept. Retraining is the aim where it was "
        "measured: forgetting more than it is not better. The ring is about the method that made "
        "the unlearned model."
    )
    try:
        members, names = given.members, ["members"]
    except collect.Missing as missing:
        members, names = None, []
        text += f" Without the pool: {missing}."
    drawings = figures.trade_off(given.frame, members, given.looks, given.first)
    if len(drawings) > 1:
        share = f"{100 * figures.NEAR:.0f} %"
        text += (
            f" The second drawing has those that keep {share} of the original's retain accuracy."
        )
    return Section("trade-off", "Kept against forgotten", text, drawings, [*given.methods, *names])


def pool(given: Material) -> Section:
    text = (
        "Each pool member unlearns alone, by its own task vector and its own λ. How far they "
        "differ is what choosing one of them would leave to chance."
    )
    if not any(m.name == "single_best" and m.add is None for m in given.recipe.methods):
        text += " Their λ come from a coarse grid, every fourth value of the methods' own."
    drawings = figures.spread(given.frame, given.members, given.looks, given.first)
    table = Table("members", "Pool members, each with its own λ", given.members)
    return Section("pool", "The pool", text, drawings, [*given.methods, "members"], table)


def sweeps(given: Material) -> Section:
    text = (
        "What was measured at each λ, on the samples that choose it; large markers are the λ that "
        "were chosen, the straight dashed line is what the criterion aims at."
    )
    frame = collect.sweeps_frame(given.run, given.scores)
    reference = given.scores["retrain"]
    drawings = figures.lambda_curves(frame, given.criterion, reference, given.looks)
    table, title = Table("sweeps", "Accuracy by λ", frame), "How λ was chosen"
    return Section("sweeps", title, text, drawings, given.searched, table, lines=True)


def prefixes(given: Material) -> Section:
    text = (
        "Zeros of the consensus of the first n members. The dashed line is what n coin flips for "
        "each element that the first member moved would leave: the distance below it is what the "
        "members have in common."
    )
    frame = collect.prefixes_frame(given.run, given.scores, given.recipe, given.progress)
    table = Table("prefixes", "Zeros of the consensus of the first n members", frame)
    title = "Sparsity against the number of members"
    drawings = figures.sparsity_by_members(frame)
    return Section(
        "prefixes", title, text, drawings, ["consensus", "coin_flips"], table, lines=True
    )


def by_depth(given: Material) -> Section:
    text = (
        "The depth is the number of a tensor's layer, with the way to it where layers are counted "
        "in several places; “none” are tensors outside."
    )
    return _sparsity(given, "depth", text)


def by_component(given: Material) -> Section:
    text = "The component is a tensor's name within its layer."
    return _sparsity(given, "component", text)


def _sparsity(given: Material, by: str, text: str) -> Section:
    frame = collect.sparsity_frame(given.run, given.scores, by)
    drawings = figures.sparsity_by(frame, by, given.looks)
    if len(set(frame[by])) > figures.FEW_ROWS:
        text += f" The drawing has the first {figures.FEW_ROWS}, the table all."
    table = Table(by, f"Zeros by {by}", frame)
    legend = figures.with_zeros(frame)
    return Section(f"by-{by}", f"Sparsity by {by}", text, drawings, legend, table)


def dissent(given: Material) -> Section:
    text = (
        "How often a member alone kept all others from agreeing. One that stands out costs the "
        "consensus most, and deserves a look at its settings."
    )
    frame = collect.dissent_frame(given.run, given.scores)
    table = Table("dissent", "Share of elements at which a member alone disagrees", frame)
    return Section("dissent", "Who dissents alone", text, figures.dissent(frame), table=table)


def attack(given: Material) -> Section:
    text = (
        "The attack sees one number per image, the probability of its true class; where it is "
        "shaded it takes the image for one that was trained on. A model that forgot gives the "
        "forget set the curve of the test set, not of the retain set. The scale is logarithmic."
    )
    frame = collect.attack_frame(given.run, given.scores)
    there = set(frame["model"])
    shown = [model for model in ("original", "retrained", given.first) if model in there]
    drawings, sets = figures.attack(frame, shown), ["forget", "retain", "test"]
    rows = collect.bins_side_by_side(frame, shown)
    table = Table("attack", "Images by the probability of their true class", rows)
    return Section("attack", "Membership inference", text, drawings, sets, table)


def look(given: Material) -> Section:
    found = collect.pictures(given.run)
    title = "Where the models look"
    return Section("gradcam", title, found["text"], pictures=found)


SECTIONS: dict[str, Callable[[Material], Section]] = {
    "the table of scores": all_methods,
    "retain accuracy against forget error": trade_off,
    "the tries of rivals": tries,
    "the pool's spread": pool,
    "λ curves": sweeps,
    "sparsity against the number of members": prefixes,
    "sparsity by depth": by_depth,
    "sparsity by component": by_component,
    "who dissents alone": dissent,
    "membership inference": attack,
    "Grad-CAM": look,
}
