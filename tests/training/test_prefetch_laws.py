"""Batches of a training: the same bits for any number of workers, from any step; errors; ends."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from negmerge.errors import FileError, NegMergeError
from negmerge.training.hyperparameters import Augmentation, HyperParameters, RandAugment
from negmerge.training.loop import train
from negmerge.training.prefetch import set_feed_workers, training_batches
from negmerge.vision.datasets import resolve
from negmerge.vision.original_feed import SMALL, OriginalFeed
from negmerge.vision.originals import load_originals

SIZE = SMALL + 8
SETTINGS = HyperParameters(
    epochs=2, batch=4, lr=0.05, augment=Augmentation(randaugment=RandAugment(n=2, m=5))
)
STEPS = 5  # of an epoch of 19 images


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
        for k in range(19):
            buffer = io.BytesIO()
            pixels = rng.integers(0, 256, (60 + k, 90 - k, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(buffer, "JPEG")
            (root / split / ("cat", "dog")[k % 2] / f"{k}.jpg").write_bytes(buffer.getvalue())
    return root


@pytest.fixture(scope="module")
def feed(folder: Path, tmp_path_factory) -> OriginalFeed:
    return make_feed(folder, tmp_path_factory.mktemp("cache"))


def make_feed(folder: Path, cache: Path) -> OriginalFeed:
    source = resolve(str(folder), size=SIZE)
    originals = load_originals(source, "train", cache=cache)
    return OriginalFeed(originals, np.arange(len(originals)), source)


def collect(feed: OriginalFeed, first: int, workers: int) -> list[tuple[torch.Tensor, list[int]]]:
    with training_batches(feed, SETTINGS, 3, first, workers=workers) as batches:
        found = [(x.clone(), y.tolist()) for x, y in batches if isinstance(x, torch.Tensor)]
    assert not active_children()
    return found


def same(one, two) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, c) and b == d for (a, b), (c, d) in zip(one, two, strict=True)
    )


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 81, 2))


class Stop(Exception):
    """Raised in the middle of a training."""


@pytest.mark.slow
def test_any_number_of_workers_and_any_first_step_give_the_same_bits(feed, tmp_path):
    assert feed.in_workers
    whole = collect(feed, 0, workers=0)
    assert [len(labels) for _, labels in whole] == 2 * [4, 4, 4, 4, 3]
    before = torch.get_rng_state()
    assert same(collect(feed, 0, workers=1), whole)
    assert same(collect(feed, STEPS + 2, workers=2), whole[STEPS + 2 :])
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(whole[:STEPS], whole[STEPS:])  # another epoch has other numbers
    assert collect(feed, 2 * STEPS, workers=1) == []


def test_trained_weights_are_the_same_with_workers_and_after_a_stop_within_an_epoch(feed, tmp_path):
    plain, state = network(), tmp_path / "state"
    cost = train(plain, feed, SETTINGS, seed=3)
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if len(seen) == 3:
            raise Stop

    with pytest.raises(Stop):
        train(network(), feed, SETTINGS, 3, state=state, save_every=0, advance=stop)
    assert state.exists()
    resumed = network()
    set_feed_workers(1)
    try:
        again = train(resumed, feed, SETTINGS, 3, state=state)
    finally:
        set_feed_workers(None)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert (again.samples, again.loss) == (cost.samples, cost.loss)
    assert not active_children()


def test_an_error_in_a_worker_is_one_line_with_the_pictures_name(folder, tmp_path):
    feed = make_feed(folder, tmp_path)
    path = feed.originals.entry / "encoded.npy"
    data = bytearray(path.read_bytes())
    start = int(feed.originals.ends[4]) + len(data) - int(feed.originals.ends[-1])
    data[start : start + 20] = bytes(20)  # the header of picture 5
    path.write_bytes(data)
    with (
        pytest.raises(FileError, match="cannot be decoded") as caught,
        training_batches(feed, SETTINGS, 3, workers=1) as batches,
    ):
        list(batches)
    assert str(feed.originals.names[5]) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not active_children()


def lose_a_worker(feed: OriginalFeed) -> None:
    long = SETTINGS.model_copy(update={"epochs": 500})
    with training_batches(feed, long, 3, workers=1) as batches:
        next(batches)
        active_children()[0].kill()
        list(batches)


# Torch raises in a signal handler. If a weak reference is just being removed, Python prints the
# error, and the loader notices the end of its worker a little later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_is_an_error(feed):
    with pytest.raises(NegMergeError, match="that prepares samples ended") as caught:
        lose_a_worker(feed)
    assert "\n" not in str(caught.value)


PARENT = """
import sys, time
from multiprocessing import active_children
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_prefetch_laws import SETTINGS, make_feed
from negmerge.training.prefetch import training_batches
if __name__ == "__main__":
    feed = make_feed(Path(sys.argv[1]), Path(sys.argv[2]))
    with training_batches(feed, SETTINGS, 3, workers=1) as batches:
        next(batches)
        print(*(child.pid for child in active_children()), flush=True)
        time.sleep(600)
"""


def test_workers_end_with_a_parent_that_is_killed(folder, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    arguments = [folder, tmp_path / "cache", Path(__file__).parent]
    process = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        workers = process.stdout.readline().split()
        assert len(workers) == 1
        process.kill()
        process.wait()
    until = time.monotonic() + 20
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < until, "a worker outlived its parent"
        time.sleep(0.1)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
