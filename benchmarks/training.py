"""Training, sweep and pool beside the plainest way to do the same, in one run.

    python benchmarks/training.py

The embedded data and the small ResNet. Each pair is measured in turns, several times; ratios are of
the best times. Writes benchmarks/results/training.json and .md.
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
from machine import describe
from torch import nn

import negmerge as nm
from negmerge.criteria import criteria
from negmerge.data.feeds import ImageFeed
from negmerge.evaluation.predictions import BATCH, predict
from negmerge.executors import InProcess, LocalProcesses, keep_memory
from negmerge.models.weights import save_model
from negmerge.parallel import available_workers
from negmerge.pool import make_job, run_job
from negmerge.recipe import Search, load_recipe
from negmerge.scenario import Scenario
from negmerge.search import search_scale
from negmerge.training import train

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
    """The best times of two pieces of work, measured one after the other, again and again."""
    pairs = [(seconds(one, clock), seconds(two, clock)) for _ in range(times)]
    return min(p[0] for p in pairs), min(p[1] for p in pairs)


def loop_speed(scenario: Scenario, augments: bool) -> dict[str, Any]:
    """Our loop, from stored pixels, beside a bare one on floats that lie ready.

    augments: whether ours crops and flips as well, which the bare one never does.
    """
    settings = scenario.recipe.train.model_copy(update={"epochs": 1, "schedule": "constant"})
    own = {"crop": 2, "flip": True} if augments else {"crop": 0, "flip": False}
    ours_settings = settings.model_copy(update={"augment": settings.augment.model_copy(update=own)})
    images = scenario.images[0]
    indices = scenario.splits.train[:3200]
    feed = ImageFeed(images, indices)
    x, y = feed.test_batch(np.arange(len(feed)))
    state = Path(tempfile.mkdtemp()) / "state"

    def bare() -> None:
        model = scenario.network().to(memory_format=torch.channels_last).train()
        optimizer = torch.optim.SGD(
            model.parameters(), settings.lr, momentum=settings.momentum, weight_decay=5e-4
        )
        for picked in torch.randperm(len(x)).split(settings.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[picked]), y[picked]).backward()
            optimizer.step()

    def ours() -> None:
        train(scenario.network(), feed, ours_settings, seed=0, state=state)

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


def sweep_cost(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """20 λ with accuracies and membership inference, beside 20 bare forward passes.

    In one thread, as a run's workers do it, and in seconds of the processor.
    """
    torch.set_num_threads(1)
    keep_memory()
    model = scenario.network().eval()
    base, tuned = folder / "base.safetensors", folder / "tuned.safetensors"
    save_model(base, model, {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    save_model(tuned, model, {})
    model = scenario.network(base)
    tau = nm.TaskVector.between(base, tuned)  # dense: the most that can be added and undone
    sizes = {"retain": 1500, "forget": 300, "test": 1500}
    feeds = {
        name: ImageFeed(feed.images, feed.indices[: sizes[name]])
        for name, feed in scenario.scoring_feeds("report").items()
    }
    batches = [
        feed.test_batch(np.arange(start, min(start + BATCH, len(feed))))[0]
        for feed in feeds.values()
        for start in range(0, len(feed), BATCH)
    ]

    def forward() -> None:
        model.eval()
        with torch.inference_mode():
            for _ in SCALES:
                for batch in batches:
                    model(batch)

    def ours() -> None:
        search_scale(model, tau, Search(scales=SCALES), criteria.get("oracle"), None, feeds)

    predict(model, feeds["test"])
    plain, full = in_turns(forward, ours, 5, time.process_time)
    torch.set_num_threads(available_workers(None))
    return {
        "what": "sweep of 20 λ with MIA, times its 20 bare forward passes",
        "measured": full / plain,
        "wanted": "≤ 1.1",
        "reached": full / plain <= 1.1,
        "details": {"forward_seconds": plain, "sweep_seconds": full},
    }


def pool_throughput(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Four members in two processes of one thread, beside one after another with two threads."""
    base = folder / "base.safetensors"
    save_model(base, scenario.network(), {})
    settings = scenario.recipe.pool.members()[0].model_copy(update={"epochs": 10})
    serial = InProcess(scenario)
    make = partial(Scenario, scenario.recipe)
    with LocalProcesses(make, 2, 2) as processes:

        def members(round_: str) -> list[Any]:
            return [
                make_job(
                    scenario,
                    "member",
                    "forget",
                    settings.model_copy(update={"lr": 0.01 * (k + 1)}),
                    out=lambda name: folder / round_ / f"{name}.safetensors",
                    states=folder,
                    start=(base, "base"),
                )
                for k in range(4)
            ]

        def work(executor: Any, round_: str) -> None:
            for _ in executor.map(run_job, members(round_), lambda count: None):
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


def main() -> None:
    begun = time.monotonic()
    scenario = Scenario(load_recipe("demo"))
    rows = [loop_speed(scenario, augments=False), loop_speed(scenario, augments=True)]
    with tempfile.TemporaryDirectory() as folder:
        rows.append(sweep_cost(scenario, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        rows.append(pool_throughput(scenario, Path(folder)))
    minutes = (time.monotonic() - begun) / 60
    record = {"machine": describe(), "minutes": round(minutes, 1), "rows": rows}
    (RESULTS / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# Training, sweep and pool, measured",
        "",
        f"`python benchmarks/training.py` on {describe()}, {minutes:.1f} minutes.",
        "",
        "| what | measured | wanted | reached | details |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        details = ", ".join(f"{k} {v:.3g}" for k, v in row["details"].items())
        reached = ("yes" if row["reached"] else "no") if row["wanted"] else ""
        lines.append(
            f"| {row['what']} | {row['measured']:.3f} | {row['wanted']} | {reached} | {details} |"
        )
    (RESULTS / "training.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
