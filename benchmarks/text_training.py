"""Training a language model, compared with a bare loop and with `Trainer` of transformers.

    python benchmarks/text_training.py

All train `stories15m` on the same batches of the set `persons`, with AdamW, in float32. The bare
loop and `Trainer` compute the loss as transformers does, from all logits of a batch; our loop
computes the logits of answers only. They are measured in turn, and medians of the speeds and of the
ratios of each turn are recorded in benchmarks/results/text_training.json and .md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe, markdown_table
from torch.utils.data import Dataset

from negmerge.runs.recipe import Recipe
from negmerge.training.feeds import epoch_of
from negmerge.training.loop import train

RESULTS = Path(__file__).parent / "results"
TURNS = 9
SEED = 7


class Batches(Dataset[Any]):
    """Whole batches, as the data set of a `Trainer`."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return self.batches[place]


def first_of(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return batches[0]


def bare(model: Any, batches: list[dict[str, torch.Tensor]], lr: float) -> None:
    """The simplest loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()


def trainer(model: Any, batches: list[dict[str, torch.Tensor]], lr: float) -> None:
    """`Trainer` without logging, saving and clipping."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,  # a sample is a batch
            num_train_epochs=1,
            learning_rate=lr,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        Trainer(model, arguments, data_collator=first_of, train_dataset=Batches(batches)).train()


def measure(threads: int, batch: int) -> dict[str, Any]:
    """Measure the three for one number of threads and samples of a batch."""
    torch.set_num_threads(threads)
    recipe = Recipe.model_validate(
        {
            "scenario": "text",
            "data": {"records": "persons"},
            "train": {"epochs": 1, "batch": batch, "lr": 1e-5},
            "threads": threads,
        }
    )
    scenario: Any = recipe.make_scenario()
    feed, settings = scenario.train_set("train"), scenario.training
    picked = epoch_of(feed, settings, SEED, 0)
    batches: list[dict[str, torch.Tensor]] = []
    for own in picked:
        inputs, targets = feed.test_batch(own)
        batches.append({**inputs, "labels": targets})
    tokens = int(sum(feed.lengths[own].sum() for own in picked))
    ways: dict[str, Callable[[Any], Any]] = {
        "ours": lambda model: train(model, feed, settings, SEED, objective=scenario.loss(settings)),
        "bare": partial(bare, batches=batches, lr=settings.lr),
        "trainer": partial(trainer, batches=batches, lr=settings.lr),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            model = scenario.model()
            begun = time.perf_counter()
            way(model)
            if turn:  # the first one warms up
                speeds[name].append(tokens / (time.perf_counter() - begun))
    faster = [max(pair) for pair in zip(speeds["bare"], speeds["trainer"], strict=True)]
    shares = [ours / other for ours, other in zip(speeds["ours"], faster, strict=True)]
    padded = int(sum(one["input_ids"].numel() for one in batches))
    return {
        "threads": threads,
        "batch": batch,
        "tokens": tokens,
        "padding": 1 - tokens / padded,
        **{name: statistics.median(own) for name, own in speeds.items()},
        "share": statistics.median(shares),
        "least": min(shares),
        "most": max(shares),
        "reached": statistics.median(shares) >= 0.95,
    }


def main() -> None:
    begun = time.monotonic()
    rows = [measure(threads, batch) for threads in (1, 2) for batch in (8, 32)]
    minutes = (time.monotonic() - begun) / 60
    found = {"machine": describe(), "minutes": minutes, "turns": TURNS, "rows": rows}
    (RESULTS / "text_training.json").write_text(json.dumps(found, indent=1))
    table = markdown_table(
        [
            {
                "threads": str(row["threads"]),
                "batch": str(row["batch"]),
                "padding": f"{row['padding']:.1%}",
                "ours, tokens/s": f"{row['ours']:.0f}",
                "bare loop": f"{row['bare']:.0f}",
                "Trainer": f"{row['trainer']:.0f}",
                "share of the faster": f"{row['share']:.2f}",
                "range": f"{row['least']:.2f} to {row['most']:.2f}",
                "≥ 0.95": "yes" if row["reached"] else "no",
            }
            for row in rows
        ]
    )
    text = f"""# Training a language model, measured

`python benchmarks/text_training.py` on {found["machine"]}, {minutes:.0f} minutes. `stories15m` in
float32, one epoch of the set `persons` ({rows[0]["tokens"]:,} tokens) with AdamW, the same batches
for all; {TURNS} turns of ours, a bare loop and `transformers.Trainer` after one to warm up. Tokens
without padding; medians. The share is that of the faster of the two others in each turn.

{table}
"""
    (RESULTS / "text_training.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
