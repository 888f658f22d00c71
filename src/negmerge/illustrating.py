"""What the page of a run shows beside the scores, measured while the models are at hand: how each
member does alone, how the attack sees each model, and where the models look."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.criteria import Choice
from negmerge.data.feeds import Indices
from negmerge.errors import MismatchError
from negmerge.evaluation.gradcam import grad_cam, picture
from negmerge.evaluation.scores import avg_gap
from negmerge.executors import Advance
from negmerge.files import write_file
from negmerge.measuring import Evaluation
from negmerge.merge.engine import merge
from negmerge.models.linearized import LinearizedClassifier
from negmerge.outcome import Outcome
from negmerge.scenario import Problem
from negmerge.task_vector import TaskVector
from negmerge.workshop import Workshop

IMAGES = 4
"""How many forget images Grad-CAM shows."""


def scored_alone(shop: Workshop) -> list[Evaluation]:
    """Every member that was swept, with its own λ, to be scored on the reported data."""
    base, buffers = shop.folder.base, shop.recipe.buffers
    return [
        shop.evaluation(base, sweep.vector, choice.scale, member=buffers)
        for sweep, choice in shop.alone
    ]


def add_members(
    scores: dict[str, Any], choices: Sequence[Choice], measured: Sequence[dict[str, Any]]
) -> None:
    """Put what members did alone beside what their trainings cost."""
    for row, choice, own in zip(scores["pool"], choices, measured, strict=False):
        kept = {k: v for k, v in own.items() if k not in ("bins", "samples")}
        gap = None if scores["retrain"] is None else avg_gap(own, scores["retrain"])
        row |= {"scale": choice.scale} | kept | {"avg_gap": gap}


def illustrate(shop: Workshop, outcome: Outcome) -> list[Path]:
    """Make and write what the page shows beside the scores; the files."""
    folder = shop.folder.data
    folder.mkdir(parents=True, exist_ok=True)
    files = [sweep.out for sweep, _ in shop.alone]
    if any(shop.bins.values()):
        files.append(folder / "attack.csv")
        write_attack(files[-1], shop.bins)
    jobs = looks_of(shop, outcome)
    shop.progress.stage("looking through the models", len(jobs), "models")
    ((_, seen),) = shop.executor.map(run_looks, [jobs], shop.progress.advance)
    return files + write_looks(folder, jobs, seen, shop.problem.class_names)


def write_attack(path: Path, bins: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The histograms of all models as one CSV."""
    text = io.StringIO()
    fields = ["model", "set", "low", "high", "count", "member"]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"model": model} | dict(row) for model, rows in bins.items() for row in rows)
    write_file(path, text.getvalue().encode())


@dataclass(frozen=True)
class Look:
    """A model to look through: a file, less λ times a patch; without a model, the image itself."""

    title: str
    model: Path | None = None
    patch: Path | None = None
    scale: float = 0.0


def looks_of(shop: Workshop, outcome: Outcome) -> list[Look]:
    """Original, reference, and consensus beside conflict; without a consensus the first method."""
    base, names = shop.folder.base, {m.title: m.name for m in shop.recipe.methods}
    looks = [Look("image"), Look("original", base)]
    if outcome.retrained is not None:
        looks.append(Look("retrained", outcome.retrained.out))
    plain = [t for t, one in outcome.found.items() if names[t] == "consensus" and not one.added]
    title = plain[0] if plain else next(iter(names))
    if title in outcome.contenders:
        return [*looks, Look(title, outcome.contenders[title].job.out)]
    own = outcome.found[title]
    if plain and shop.recipe.pool.keep:
        conflict = shop.folder.states / "conflict.safetensors"
        members = [job.out for job in own.pool]
        merge(base, members, "conflict", out=conflict, buffers=shop.recipe.buffers)
        looks.append(Look("conflict", base, conflict, own.scale))
    return [*looks, Look(title, base, own.patch, own.scale)]


@dataclass(frozen=True)
class Seen:
    """One picture, and what the model says of the image."""

    png: bytes
    label: int
    said: int | None = None
    confidence: float | None = None


def run_looks(problem: Problem, jobs: list[Look], advance: Advance) -> list[list[Seen]] | str:
    """The pictures of all models, or why there are none."""
    feed = problem.scoring_feeds("report")["forget"]
    inputs, labels = feed.test_batch(spaced(len(feed)))
    argument = None
    if isinstance(inputs, dict):
        if len(inputs) > 1:
            return f"the model has several inputs: {', '.join(inputs)}"
        ((argument, inputs),) = inputs.items()
    if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        return f"the inputs are not images, their shape is {tuple(inputs.shape[1:])}"
    found: list[list[Seen]] = []
    for job in jobs:
        try:
            found.append(look(problem, job, inputs, labels, argument))
        except MismatchError as error:
            return str(error)
        except Exception as error:  # a network may do anything, and pictures decide nothing
            return f"Grad-CAM failed: {type(error).__name__}: {error}"
        advance(1)
    return found


def plain(network: nn.Module, argument: str | None) -> None:
    """Let a network be called with one tensor, and answer with logits alone.

    argument: the name that the tensor is handed on by; None: it is the first argument.
    """

    def by_name(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given[1:], named | {argument: given[0]}

    if argument is not None:
        network.register_forward_pre_hook(by_name, with_kwargs=True)
    network.register_forward_hook(lambda module, given, said: getattr(said, "logits", None))


def look(
    problem: Problem, job: Look, inputs: Tensor, labels: Tensor, argument: str | None
) -> list[Seen]:
    """The pictures of one model."""
    if job.model is None:
        return [Seen(picture(i), int(k)) for i, k in zip(inputs, labels, strict=True)]
    network = problem.network(job.model)
    if isinstance(network, LinearizedClassifier):
        raise MismatchError("a linearised network has no gradient that Grad-CAM could show")
    plain(network, argument)
    with ExitStack() as stack:
        if job.patch is not None:
            stack.enter_context(TaskVector.load(job.patch).applied(network, -job.scale))
        device = next(network.parameters()).device
        maps = grad_cam(network, inputs.to(device), labels)
        with torch.inference_mode():
            shares = network(inputs.to(device)).float().softmax(1).cpu()
    return [
        Seen(picture(pixels, heat), int(label), int(share.argmax()), float(share[label]))
        for pixels, heat, label, share in zip(inputs, maps, labels, shares, strict=True)
    ]


def spaced(size: int) -> Indices:
    """A few positions, evenly spaced.

    >>> spaced(100), spaced(2)
    (array([ 0, 33, 66, 99]), array([0, 1]))
    """
    return np.unique(np.linspace(0, size - 1, min(IMAGES, size)).astype(np.int64))


def write_looks(
    folder: Path, jobs: Sequence[Look], looks: list[list[Seen]] | str, names: Sequence[str]
) -> list[Path]:
    """The pictures and their index, `gradcam.json`, which says why if there are none.

    names: of the classes; empty if they are not known.
    """
    index, files = folder / "gradcam.json", [folder / "gradcam.json"]
    if isinstance(looks, str):
        write_file(index, json.dumps({"missing": looks}, indent=1).encode())
        return files

    def name(label: int) -> str:
        return names[label] if label < len(names) else f"class {label}"

    rows: list[dict[str, Any]] = []
    for k in range(len(looks[0])):
        cells: list[dict[str, Any]] = []
        for job, found in zip(jobs, looks, strict=True):
            seen = found[k]
            path = folder / f"gradcam-{k + 1}-{job.title}.png"
            write_file(path, seen.png)
            files.append(path)
            caption, alt = name(seen.label), f"forget image {k + 1}, {name(seen.label)}"
            if seen.said is not None:
                caption = f"says {name(seen.said)}; {name(seen.label)}: {seen.confidence:.2f}"
                alt = f"Grad-CAM of {job.title} on {alt}: {caption}"
            cells.append({"file": path.name, "caption": caption, "alt": alt})
        rows.append({"cells": cells})
    columns = [job.title for job in jobs if job.model is not None]
    tree = {"text": EXPLAINED, "columns": columns, "rows": rows}
    write_file(index, json.dumps(tree, indent=1, ensure_ascii=False).encode())
    return files


EXPLAINED = (
    "Grad-CAM for the true class on images of the reported forget set, evenly spaced in it; red is "
    "where a model looks most, each map scaled to itself. Conflict subtracts the elements whose "
    "signs disagree, consensus those whose signs agree, with the same λ."
)
