"""bfloat16 against float32 on the CLIP of the package: the same pool with the same random numbers.

    NEGMERGE_DATA=FOLDER python benchmarks/precision.py [--seeds 0 1 2]

A pool of two members of a shortened `desk_clip_mnist` is trained in each number format, in one
thread, with the same batches and augmentation. Writes benchmarks/results/precision.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe, markdown_table

import negmerge as nm
from negmerge.evaluation.criteria import choose
from negmerge.evaluation.search import Curve, search_scale
from negmerge.runs.executors.worker import keep_freed_memory
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.scenarios.base import Scenario
from negmerge.training.seeds import seed_of
from negmerge.training.weights import save_model

RESULTS = Path(__file__).parent / "results"
FORMATS = ("float32", "bfloat16")
CHANGES = (
    "data.limit={train: 1000, test: 1000}",
    "clip.control.limit={test: 1000}",
    "search.samples=500",
    "pool.grid={augment.randaugment.n: [1, 3], augment.randaugment.m: [7]}",
)
MERGED = {"unlearned by the consensus of two": 2}
"""Rows of the record, and the number of members each merges."""


def unlearned(recipe: Recipe, scenario: Scenario, base: Path, members: list[Path]) -> dict:
    """The merge of some members: λ, and the accuracies on the reported data."""
    criterion = recipe.settings.criterion(recipe.criterion)
    tau, model = nm.merge(base, members), scenario.model(base)
    rows = search_scale(Curve(scenario.evaluator(model, tau), 0), recipe.search, criterion)
    scale = choose(rows, criterion).scale
    with tau.applied(model, -scale):
        found = scenario.measure(model, "report").row()
    return {"λ": scale, "zero %": 100 * tau.sparsity(), **accuracies(found)}


def accuracies(found: dict[str, float]) -> dict[str, float]:
    """The two accuracies of a measurement."""
    return {"forget %": found["acc_forget"], "retain %": found["acc_retain"]}


def measure(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """One seed: by number format, the fine-tuned member and the unlearned models."""
    recipe = load_recipe("desk_clip_mnist", [f"seed={seed}", *CHANGES])
    scenario = recipe.make_scenario()
    base = folder / f"base-{seed}.safetensors"
    save_model(base, scenario.model(), {})
    found: dict[str, dict[str, Any]] = {}
    for precision in FORMATS:
        begun, paths = time.monotonic(), []
        for number, settings in enumerate(recipe.pool.members()):
            model = scenario.model(base)
            own = settings.model_copy(update={"precision": precision})
            scenario.train(model, "forget", own, seed_of("precision", seed, number))
            paths.append(folder / f"{precision}-{seed}-{number}.safetensors")
            save_model(paths[-1], model, {})
        seconds = time.monotonic() - begun
        tuned = scenario.measure(scenario.model(paths[0]), "report").row()
        found[precision] = {"seconds": seconds, "fine-tuned member": accuracies(tuned)}
        for title, count in MERGED.items():
            found[precision][title] = unlearned(recipe, scenario, base, paths[:count])
        print(seed, precision, found[precision], flush=True)
    return found


def paired(runs: list[dict[str, dict[str, Any]]]) -> list[dict[str, str]]:
    """A row for each model and number: both means, and the paired difference over the seeds."""
    rows: list[dict[str, str]] = []
    for title in ("fine-tuned member", *MERGED):
        for name in runs[0]["float32"][title]:
            values = {f: [run[f][title][name] for run in runs] for f in FORMATS}
            pairs = zip(values["bfloat16"], values["float32"], strict=True)
            changes = [b - f for b, f in pairs]
            means = {f: f"{statistics.mean(values[f]):.2f}" for f in FORMATS}
            spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
            listed = ", ".join(f"{change:+.2f}" for change in changes)
            difference = f"{statistics.mean(changes):+.2f} ± {spread:.2f}"
            rows.append(
                {"model": title, "number": name, **means}
                | {"bfloat16 − float32": difference, "by seed": listed}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds: list[int] = parser.parse_args().seeds
    torch.set_num_threads(1)
    keep_freed_memory()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs: list[dict[str, dict[str, Any]]] = []
        for seed in seeds:
            runs.append(measure(seed, Path(folder)))
            write(runs, seeds[: len(runs)], (time.monotonic() - begun) / 60)


def write(runs: list[dict[str, dict[str, Any]]], seeds: list[int], minutes: float) -> None:
    """Write the record of the seeds that are done."""
    record = {"machine": describe(), "minutes": round(minutes, 1), "seeds": seeds, "runs": runs}
    (RESULTS / "precision.json").write_text(json.dumps(record, indent=1) + "\n")
    epochs = load_recipe("desk_clip_mnist", CHANGES).pool.members()[0].epochs
    slower = statistics.mean(run["bfloat16"]["seconds"] / run["float32"]["seconds"] for run in runs)
    lines = [
        "# bfloat16 against float32",
        "",
        f"`NEGMERGE_DATA=FOLDER python benchmarks/precision.py` on {describe()}, {minutes:.0f} "
        f"minutes, seeds {', '.join(map(str, seeds))}. The CLIP of the package forgets MNIST and "
        "keeps CIFAR-10 (`desk_clip_mnist` with 1,000 training images, two "
        f"members of {epochs} epochs, "
        "1,000 test images of each set); both formats have the same batches and augmentation. "
        "Mean over the seeds, and mean ± standard deviation of the paired "
        "differences, in points. The pool took "
        f"{slower:.2f} times as long in bfloat16 on this CPU, with other work beside it.",
        "",
        markdown_table(paired(runs)),
    ]
    (RESULTS / "precision.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
