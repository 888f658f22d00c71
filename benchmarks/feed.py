"""The feed of whole pictures, compared with a plain DataLoader with the same transform and files.

    python benchmarks/feed.py

Both decode JPEG files of 500 × 375 pixels and augment them by timm's transform to 224 × 224, for 0,
1 and 2 workers. Both sides are measured alternately; ratios are those of each round, of which the
median counts. The clock runs from when all workers work to the last batch: the start and the end of
worker processes happen once in a training. Writes benchmarks/results/feed.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, markdown_table
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler

from negmerge.training.hyperparameters import Augmentation, HyperParameters, RandAugment
from negmerge.training.prefetch import AHEAD, training_batches
from negmerge.vision.datasets import resolve
from negmerge.vision.original_feed import OriginalFeed
from negmerge.vision.originals import load_originals

RESULTS = Path(__file__).parent / "results"
PICTURES, EPOCHS, SIZE, BATCH, ROUNDS = 512, 2, 224, 64, 3
MEAN = (0.48145466, 0.4578275, 0.40821073)
SETTINGS = HyperParameters(
    epochs=EPOCHS, batch=BATCH, augment=Augmentation(randaugment=RandAugment(n=2, m=5))
)


def make_pictures(folder: Path) -> None:
    """Smooth random pictures in two classes."""
    rng = np.random.default_rng(0)
    for k in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        for split in ("train", "test") if k < 2 else ("train",):
            place = folder / split / ("one", "two")[k % 2]
            place.mkdir(parents=True, exist_ok=True)
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(place / f"{k}.jpg", quality=90)


@contextmanager
def plain(folder: Path, workers: int) -> Iterator[Iterator[Any]]:
    """A DataLoader as every tutorial has it; pixels are floats in [0, 1] as ours."""
    from timm.data.transforms_factory import transforms_imagenet_train
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, ToTensor

    own: Any = transforms_imagenet_train(
        img_size=SIZE, auto_augment="rand-m5-n2-mstd0.5", mean=MEAN, separate=True
    )
    pictures = ImageFolder(folder / "train", Compose([own[0], own[1], ToTensor()]))
    order = RandomSampler(pictures, num_samples=EPOCHS * len(pictures))
    yield iter(DataLoader(pictures, BATCH, sampler=order, num_workers=workers))


def started(batches: Iterable[Any], workers: int) -> Iterator[Any]:
    """The batches that come after those which were prepared while other workers started."""
    return islice(batches, max(workers, 1) * (AHEAD + 1), None)


def speed(batches: Iterable[Any], workers: int) -> float:
    """Pictures per second."""
    source = started(batches, workers)
    next(source)
    begun = ended = time.perf_counter()
    count = 0
    for inputs, _ in source:
        count, ended = count + len(inputs), time.perf_counter()
    return count / (ended - begun)


def waiting(batches: Iterable[Any], workers: int, step: float) -> float:
    """The share of time for which a loop waits whose network takes `step` seconds for a batch."""
    source = started(batches, workers)
    next(source)
    begun, waited = time.perf_counter(), 0.0
    while True:
        time.sleep(step)  # as the thread of a training on a GPU, which leaves the cores free
        asked = time.perf_counter()
        if next(source, None) is None:
            return waited / (asked - begun)
        waited += time.perf_counter() - asked


def main() -> None:
    torch.set_num_threads(1)
    begun, rows = time.monotonic(), list[dict[str, str]]()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pictures")
        make_pictures(folder)
        source = resolve(str(folder), size=SIZE, mean=MEAN)
        originals = load_originals(source, "train", cache=Path(temporary, "cache"))
        feed = OriginalFeed(originals, np.arange(len(originals)), source)
        feed.kept = None  # decode each time, as of a set that does not fit into memory
        slow: dict[int, float] = {}
        for workers in (0, 1, 2):
            pairs: list[tuple[float, float]] = []
            for seed in range(ROUNDS):
                with plain(folder, workers) as batches:
                    other = speed(batches, workers)
                with training_batches(feed, SETTINGS, seed, workers=workers) as batches:
                    pairs.append((speed(batches, workers), other))
            ratio = statistics.median(own / other for own, other in pairs)
            own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            slow[workers] = 2 * BATCH / own
            rows.append(
                {
                    "what": f"pictures per second, {workers} workers, times a plain DataLoader's",
                    "measured": f"{ratio:.3f}",
                    "wanted": "≥ 0.95",
                    "reached": "yes" if ratio >= 0.95 else "no",
                    "details": f"ours {own:.0f}/s, plain {other:.0f}/s",
                }
            )
        for workers in (1, 2):
            shares: list[float] = []
            for seed in range(ROUNDS):
                with training_batches(feed, SETTINGS, seed, workers=workers) as batches:
                    shares.append(waiting(batches, workers, slow[workers]))
            share = statistics.median(shares)
            rows.append(
                {
                    "what": f"share of time the training thread waits, {workers} workers",
                    "measured": f"{share:.4f}",
                    "wanted": "≤ 0.02",
                    "reached": "yes" if share <= 0.02 else "no",
                    "details": f"a network of {1000 * slow[workers]:.0f} ms per batch of {BATCH}, "
                    "twice the time of the feed; it sleeps, as if on a GPU",
                }
            )
    minutes = (time.monotonic() - begun) / 60
    text = (
        "# Feeding, measured\n\n"
        f"`python benchmarks/feed.py` on {describe()}, {minutes:.1f} minutes; load average of the "
        f"machine before the start: {busy:.1f} (other work ran at the same time if it is above 0). "
        f"{PICTURES} JPEG files of 500 × 375, {SIZE} px, timm's transform with RandAugment n = 2, "
        f"m = 5, batches of {BATCH}; medians of {ROUNDS} alternating rounds. The start of a "
        "worker, some seconds once in a training, is not counted.\n\n" + markdown_table(rows)
    )
    (RESULTS / "feed.md").write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
