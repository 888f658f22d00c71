"""The training loop at the size of ViT-B/32: speed, memory, and bytes written for states.

    python benchmarks/training_scale.py

Random weights and random images in memory; AdamW and clipping as in the CLIP recipes. The loop and
a bare loop of torch are measured alternately. Writes benchmarks/results/training_scale.json and
.md.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, markdown_table
from torch import nn
from torch.utils.data import TensorDataset

from negmerge.scenarios.clip.classifier import ClipClassifier, freeze_parts
from negmerge.scenarios.clip.library import open_clip
from negmerge.training.feeds import DatasetFeed, batches_of
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import cross_entropy, make_optimizer, train
from negmerge.training.memory import StepMemory, measure_step
from negmerge.training.states import SHARE, Position, StateSaver, named_state

RESULTS = Path(__file__).parent / "results"
CLASSES = 196  # of Cars
OLD_INTERVAL = 15.0
"""Seconds after which every training was saved before."""
ROUNDS, BATCH = 3, 4


def make_model(name: str) -> ClipClassifier:
    """The image encoder of a CLIP with random weights and a random head; attention is frozen."""
    torch.manual_seed(0)
    clip = open_clip().create_model(name, pretrained=None)
    width = int(clip.visual.output_dim)
    head = {"forget": torch.randn(CLASSES, width)}
    network = ClipClassifier(clip, head, [0.5] * 3, [0.25] * 3)
    freeze_parts(network, "attention")
    return network


def settings_of(**changes: Any) -> HyperParameters:
    return HyperParameters(
        epochs=1, batch=BATCH, lr=1e-5, optimizer="adamw", weight_decay=0.1, clip=1.0
    ).model_copy(update=changes)


class Pixels(DatasetFeed):
    """Prepared images in memory: what the feed costs is measured elsewhere."""

    def __init__(self, count: int) -> None:
        images = torch.rand(count, 3, 224, 224)
        super().__init__(TensorDataset(images, torch.arange(count) % CLASSES))
        self.images, self.labels = images, torch.arange(count) % CLASSES

    def train_batch(self, picked: Any, seed: int, augment: Any) -> Any:
        where = torch.from_numpy(picked)
        return self.images[where], self.labels[where]

    def test_batch(self, picked: Any) -> Any:
        return self.train_batch(picked, 0, None)


def speed(model: nn.Module) -> dict[str, Any]:
    """Seconds of a few steps by the loop and by a bare loop, in turns."""
    feed, settings = Pixels(8 * BATCH), settings_of()

    def bare() -> None:
        model.train()
        optimizer = make_optimizer(model, settings)
        for picked in batches_of(len(feed), settings, 0, 0):
            inputs, labels = feed.train_batch(picked, 0, None)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            train(model, feed, settings, seed=0, state=Path(folder) / "state")

    def seconds(work: Any) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    bare()
    ours()
    pairs = [(seconds(bare), seconds(ours)) for _ in range(ROUNDS)]
    plain, full = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(one / two for one, two in pairs)
    return {"bare": plain, "ours": full, "ratio": ratio, "images": len(feed), "pairs": pairs}


def memory(name: str, model: nn.Module, accumulate: int) -> list[dict[str, str]]:
    """The need of a step of the recipe's batch, by settings."""
    rows: list[dict[str, str]] = []
    feed = Pixels(8)
    for changes in ({}, {"checkpointing": True}, {"precision": "bfloat16"}):
        settings = settings_of(batch=128, **changes)
        found = measure_step(model, feed, settings, cross_entropy(settings))
        said = ", ".join(f"{k} {v}".lower() for k, v in changes.items()) or "float32"
        for parts in sorted({1, accumulate, 4}):
            rows.append(
                {
                    "model": name,
                    "computed with": said,
                    "accumulate": str(parts),
                    "weights, gradients, moments GB": f"{fixed(found) / 1e9:.2f}",
                    "activations of a sample MB": f"{found.per_sample / 1e6:.1f}",
                    "a step of 128 GB": f"{found.need(128, parts) / 1e9:.1f}",
                }
            )
    return rows


def fixed(found: StepMemory) -> float:
    return found.weights + (1 + found.moments) * found.trainable


def resident(model: nn.Module) -> dict[str, float]:
    """The growth of the process's peak by one real pass, beside the prediction; in bytes."""
    count, settings = 16, settings_of(batch=16)
    feed = Pixels(count)
    predicted = measure_step(model, feed, settings, cross_entropy(settings))
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    inputs, labels = feed.test_batch(np.arange(count))
    nn.functional.cross_entropy(model.train()(inputs), labels).backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for weight in model.parameters():
        weight.grad = None
    activations = predicted.constant + count * predicted.per_sample
    return {
        "images": count,
        "predicted": activations,
        "grown": peak - held,
        "gradients": predicted.trainable,
    }


def states(model: nn.Module) -> dict[str, float]:
    """The size of a state, and the seconds of copying and of writing it."""
    settings = settings_of()
    optimizer = make_optimizer(model, settings)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    size = sum(tensor.nbytes for tensor in named_state(model, optimizer).values())
    copies: list[float] = []
    totals: list[float] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for _ in range(3):
            with StateSaver(Path(folder) / "state", model, optimizer, 0) as saver:
                begun = time.monotonic()
                saver.save(Position())
                copies.append(time.monotonic() - begun)
            totals.append(saver.cost or 0.0)
    for weight in model.parameters():
        weight.grad = None
    return {"size": size, "copy": statistics.median(copies), "cost": statistics.median(totals)}


def written(found: dict[str, float], hours: float) -> dict[str, float]:
    """Bytes of states over a training, by the old and by the present rule.

    Before, a save came every 15 seconds after the last one, and the training waited for it. Now
    the first save comes after the assumed, and the others after the measured interval.
    """
    seconds = 3600 * hours
    old = seconds // (OLD_INTERVAL + found["cost"])
    first = max(OLD_INTERVAL, found["size"] / 500e6 / SHARE)
    interval = max(OLD_INTERVAL, found["cost"] / SHARE)
    new = 0 if seconds < first else 1 + (seconds - first) // interval
    return {
        "hours": hours,
        "before": old * found["size"],
        "after": new * found["size"],
        "waits_before": old * found["cost"] / seconds,
        "waits_after": new * found["copy"] / seconds,
    }


def main() -> None:
    begun = time.monotonic()
    torch.set_num_threads(1)
    model = make_model("ViT-B-32")
    state = states(model)
    fast = speed(model)
    rows = memory("ViT-B-32", model, 2)
    check = resident(model)
    lengths = [written(state, hours) for hours in (0.05, 0.5, 2.0)]
    minutes = (time.monotonic() - begun) / 60
    record = {"machine": describe(), "minutes": round(minutes, 1), "state": state, "speed": fast}
    record |= {"memory": rows, "resident": check, "written": lengths}
    (RESULTS / "training_scale.json").write_text(json.dumps(record, indent=1) + "\n")
    table = [
        {
            "hours of a training": f"{one['hours']:g}",
            "GB written before": f"{one['before'] / 1e9:.1f}",
            "GB written now": f"{one['after'] / 1e9:.1f}",
            "share of the time the training waits, before": f"{100 * one['waits_before']:.1f} %",
            "now": f"{100 * one['waits_after']:.2f} %",
        }
        for one in lengths
    ]
    reached = "reached" if fast["ratio"] >= 0.97 else "not reached"
    lines = [
        "# Training at the size of ViT-B/32",
        "",
        f"`python benchmarks/training_scale.py` on {describe()}, {minutes:.1f} minutes, one "
        "thread; random weights and images, AdamW, attention frozen.",
        "",
        f"**Speed**: {fast['ratio']:.3f} of a bare loop of torch (wanted: 0.97, {reached}): median "
        f"of {ROUNDS} pairs in turns, processor time, {fast['images']} images in batches of {BATCH}"
        f"; bare {fast['bare']:.1f} s, the loop {fast['ours']:.1f} s.",
        "",
        "**Memory** of a step of 128 images, from passes of 4 and 8 images:",
        "",
        markdown_table(rows),
        "",
        f"A pass of {check['images']} images was predicted to need {check['predicted'] / 1e9:.2f} "
        f"GB; the memory of the process grew by {check['grown'] / 1e9:.2f} GB, which includes the "
        f"gradients ({check['gradients'] / 1e9:.2f} GB).",
        "",
        f"**States**: {state['size'] / 1e9:.2f} GB; copied in {state['copy']:.2f} s, copied and "
        f"written in {state['cost']:.1f} s (median of three). By arithmetic from these numbers:",
        "",
        markdown_table(table),
    ]
    (RESULTS / "training_scale.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
