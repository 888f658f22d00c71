"""Training, sweep and pool, compared with the simplest code that does the same.

    python benchmarks/training.py

Uses the embedded data and the small ResNet. Both sides are measured alternately, several times;
ratios are computed from the best times. Writes benchmarks/results/training.json and .md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, markdown_table
from torch import nn

import negmerge as nm
from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.passes import batches
from negmerge.evaluation.scales import Search
from negmerge.evaluation.search import Curve, InPlace, search_scale
from negmerge.runs.executors import Cores, InProcess, LocalProcesses
from negmerge.runs.executors.worker import keep_freed_memory
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.trainings import Start, Training, make_training
from negmerge.runs.watch import Unit, Watch
from negmerge.scenarios.classify.scenario import Classify
from negmerge.support.parallel import worker_count
from negmerge.training.feeds import CachedFeed
from negmerge.training.loop import train
from negmerge.training.weights import save_model
from negmerge.vision.feed import ImageFeed

RESULTS = Path(__file__).parent / "results"
SCALES = tuple(k / 20 for k in range(20))


Clock = Callable[[], float]


def seconds(work: Callable[[], Any], clock: Clock) -> float:
    begun = clock()
    work()
    return clock() - begun


def in_turns(
    one: Callable[[], Any], two: Callable[[], Any], times: int, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """The best times of two functions that are measured alternately."""
    pairs = [(seconds(one, clock), seconds(two, clock)) for _ in range(times)]
    return min(p[0] for p in pairs), min(p[1] for p in pairs)


def loop_speed(scenario: Classify, augments: bool) -> dict[str, Any]:
    """The training loop on stored pixels, compared with a minimal loop on prepared floats.

    Args:
        scenario: the data and the model.
        augments: whether the training loop crops and flips; the minimal loop never does.
    """
    settings = scenario.settings.train.model_copy(update={"epochs": 1, "schedule": "constant"})
    own = {"crop": 2, "flip": True} if augments else {"crop": 0, "flip": False}
    ours_settings = settings.model_copy(update={"augment": settings.augment.model_copy(update=own)})
    images = scenario.images[0]
    indices = scenario.splits.train[:3200]
    feed = ImageFeed(images, indices)
    x, y = feed.test_batch(np.arange(len(feed)))
    state = Path(tempfile.mkdtemp()) / "state"

    def bare() -> None:
        model = scenario.model().to(memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(
            model.parameters(), settings.lr, momentum=settings.momentum, weight_decay=5e-4
        )
        for picked in torch.randperm(len(x)).split(settings.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[picked]), y[picked]).backward()
            optimizer.step()

    def ours() -> None:
        train(scenario.model(), feed, ours_settings, seed=0, state=state)

    bare(), ours()
    plain, full = in_turns(bare, ours, 9)
    return {
        "what": f"training loop{', cropping and flipping too' if augments else ''}, "
        "share of a bare loop's speed",
        "measured": plain / full,
        "wanted": "" if augments else "≥ 0.95",
        "reached": augments or plain / full >= 0.95,
        "details": {"bare_images_per_second": len(x) / plain, "images_per_second": len(x) / full},
    }


def sweep_cost(scenario: Classify, folder: Path) -> dict[str, Any]:
    """A sweep of 20 λ with accuracies and membership inference, compared with 20 forward passes.

    Measured in one thread, as in the workers of a run, in processor time.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    model = scenario.model().eval()
    base, tuned = folder / "base.safetensors", folder / "tuned.safetensors"
    save_model(base, model, {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    save_model(tuned, model, {})
    model = scenario.model(base)
    tau = nm.merge(base, [tuned])  # dense: the most that can be added and undone
    sizes = {"retain": 1500, "forget": 300, "test": 1500}
    feeds = {
        name: ImageFeed(feed.images, feed.indices[: sizes[name]])
        for name, feed in scenario.eval_sets("report").items()
        if isinstance(feed, ImageFeed)
    }
    inputs = [
        feed.test_batch(picked)[0] for feed in feeds.values() for picked in batches(len(feed))
    ]

    def forward() -> None:
        model.eval()
        with torch.inference_mode():
            for _ in SCALES:
                for batch in inputs:
                    model(batch)

    def ours() -> None:
        kept = {name: CachedFeed(feed) for name, feed in feeds.items()}
        evaluator = InPlace(model, tau, partial(scenario.measure_on, kept))
        search_scale(Curve(evaluator, 0), Search(scales=SCALES), criteria.get("keep_retain"))

    scenario.measure_on(feeds, model)
    plain, full = in_turns(forward, ours, 5, time.process_time)
    torch.set_num_threads(worker_count(None))
    return {
        "what": "sweep of 20 λ with MIA, times its 20 bare forward passes",
        "measured": full / plain,
        "wanted": "≤ 1.1",
        "reached": full / plain <= 1.1,
        "details": {"forward_seconds": plain, "sweep_seconds": full},
    }


def pool_throughput(recipe: Recipe, scenario: Classify, folder: Path) -> dict[str, Any]:
    """Four members in two processes of one thread, compared with one process of two threads."""
    base = folder / "base.safetensors"
    save_model(base, scenario.model(), {})
    settings = recipe.pool.members()[0].model_copy(update={"epochs": 10})
    serial = InProcess(scenario)
    with LocalProcesses(partial(Recipe.make_scenario, recipe), 2, Cores(2, 2)) as processes:

        def members(round_: str) -> list[Training]:
            return [
                make_training(
                    scenario,
                    "member",
                    "forget",
                    settings.model_copy(update={"lr": 0.01 * (k + 1)}),
                    out=lambda name: folder / round_ / f"{name}.safetensors",
                    states=folder,
                    start=Start(base, "base"),
                )
                for k in range(4)
            ]

        def work(executor: Any, round_: str) -> None:
            steps = members(round_)
            for _ in executor.run(steps, Watch([Unit(name=step.label, size=1) for step in steps])):
                pass

        work(processes, "warm")
        one, two = in_turns(
            lambda: work(serial, f"s{time.time()}"), lambda: work(processes, f"p{time.time()}"), 3
        )
    return {
        "what": "pool in two processes of one thread, times the speed of one after another",
        "measured": one / two,
        "wanted": "> 1",
        "reached": one / two > 1,
        "details": {"one_after_another_seconds": one, "processes_seconds": two},
    }


def goal(row: dict[str, Any]) -> dict[str, str]:
    """A row of the record."""
    return {
        "what": row["what"],
        "measured": f"{row['measured']:.3f}",
        "wanted": row["wanted"],
        "reached": ("yes" if row["reached"] else "no") if row["wanted"] else "",
        "details": ", ".join(f"{k} {v:.3g}" for k, v in row["details"].items()),
    }


def main() -> None:
    begun = time.monotonic()
    recipe = load_recipe("demo")
    scenario = recipe.make_scenario()
    assert isinstance(scenario, Classify)
    rows = [loop_speed(scenario, augments=False), loop_speed(scenario, augments=True)]
    with tempfile.TemporaryDirectory() as folder:
        rows.append(sweep_cost(scenario, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        rows.append(pool_throughput(recipe, scenario, Path(folder)))
    minutes = (time.monotonic() - begun) / 60
    record = {"machine": describe(), "minutes": round(minutes, 1), "rows": rows}
    (RESULTS / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# Training, sweep and pool, measured",
        "",
        f"`python benchmarks/training.py` on {describe()}, {minutes:.1f} minutes.",
        "",
        markdown_table([goal(row) for row in rows]),
    ]
    (RESULTS / "training.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
