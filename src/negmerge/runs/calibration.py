"""The speed of this machine, by real steps of the networks of a table, and the hours it takes.

A network has random weights, its batches are random samples. Reading, decoding and augmenting
images is not measured: a run takes longer where it waits for them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from negmerge.evaluation.passes import evaluating
from negmerge.runs.estimate import Estimate, Processed
from negmerge.scenarios.workload import Probe
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Advance, Progress
from negmerge.training.feeds import Batch, Indices
from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.loop import train

SECONDS = 8.0
"""How long one network is measured, about; the largest need longer for their first steps."""
LEAST = 3
"""The least number of steps of a measurement."""
GROWTH = 4
"""The factor between two batch sizes that are tried."""


@dataclass(frozen=True)
class Speed:
    """The speed of one network on this machine.

    Args:
        trained, scored: samples per second in training and in measurements.
        batch, steps: the batch size and the number of the measured steps.
    """

    trained: float
    scored: float
    batch: int
    steps: int

    def hours(self, work: Processed) -> float:
        """The hours that some work takes."""
        return (work.trained / self.trained + work.scored / self.scored) / 3600


class RandomFeed:
    """A feed of `size` samples whose batches, of at most `batch`, have the same random samples."""

    def __init__(self, probe: Probe, size: int, batch: int) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.rand(batch, *probe.shape, generator=generator)
        self.labels = torch.randint(probe.classes, (batch,), generator=generator)

    def __len__(self) -> int:
        return self.size

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.test_batch(picked)

    def test_batch(self, picked: Indices) -> Batch:
        return self.inputs[: len(picked)], self.labels[: len(picked)]


class _Enough(Exception):
    """The time for measuring is over."""


def measure_training(
    network: nn.Module, probe: Probe, settings: HyperParameters, batch: int, seconds: float
) -> tuple[float, int]:
    """Train for some seconds; return samples per second and the number of measured steps.

    The first step is not counted: it allocates memory and chooses algorithms. At least one step
    after the first is measured, and `LEAST` if they take less than `SECONDS`: the speed is that of
    the median, because a step may wait for another process.
    """
    times: list[float] = []

    def step_done(count: int) -> None:
        synchronise()
        times.append(time.perf_counter())
        spent = times[-1] - times[0]
        if len(times) > 1 and spent >= (seconds if len(times) > LEAST else SECONDS):
            raise _Enough

    own = {"epochs": 1, "batch": batch, "accumulate": min(settings.accumulate, batch)}
    feed = RandomFeed(probe, 1000 * batch, batch)
    with suppress(_Enough):
        train(network, feed, settings.model_copy(update=own), seed=0, advance=step_done)
    return batch / median(after - before for before, after in pairwise(times)), len(times) - 1


def measure_scoring(network: nn.Module, inputs: Tensor, seconds: float) -> float:
    """Run forward passes for some seconds; return samples per second."""
    with evaluating(network), torch.inference_mode():
        network(inputs)
        synchronise()
        begun, passes = time.perf_counter(), 0
        while not passes or time.perf_counter() - begun < seconds:
            network(inputs)
            synchronise()
            passes += 1
    return passes * len(inputs) / (time.perf_counter() - begun)


def measure_speed(
    work: Processed, seconds: float = SECONDS, advance: Advance = lambda count: None
) -> Speed:
    """Measure the speed of a network in training and in measurements.

    The batch grows up to that of the recipe while a step is short and the memory suffices.

    `advance` is called with 1 after the training and after the scoring.
    """
    probe, settings = work.probe, work.settings
    network = probe.build().to(device())
    batch, short = 1, seconds / 16
    found = measure_training(network, probe, settings, batch, 0)
    while batch < settings.batch and batch / found[0] < short:
        larger = min(GROWTH * batch, settings.batch)
        try:
            found = measure_training(network, probe, settings, larger, 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        batch = larger
    found = measure_training(network, probe, settings, batch, seconds / 2)
    advance(1)
    inputs = RandomFeed(probe, batch, batch).inputs.to(device())
    scored = measure_scoring(network, inputs, seconds / 8)
    advance(1)
    return Speed(found[0], scored, batch, found[1])


def device() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    """Wait until the GPU has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """The device that was measured.

    >>> "GPU" in machine() or "CPU" in machine()
    True
    """
    if torch.cuda.is_available():
        return f"one GPU, {torch.cuda.get_device_name()}"
    return f"CPU, {worker_count(None)} cores"


def measure_speeds(
    wanted: Estimate, progress: Progress, seconds: float = SECONDS
) -> tuple[dict[str, Speed], list[str]]:
    """Measure the networks of an estimate on this machine.

    Returns:
        The speed of each network by name, and the names of those that do not fit into memory.
    """
    progress.stage("measuring the speed of this machine", 2 * len(wanted.networks), "measurements")
    speeds: dict[str, Speed] = {}
    failed: list[str] = []
    for name, work in wanted.networks.items():
        try:
            speeds[name] = measure_speed(work, seconds, progress.advance)
        except torch.OutOfMemoryError:
            failed.append(name)
    return speeds, failed


def measured_hours(wanted: Estimate, progress: Progress, seconds: float = SECONDS) -> str:
    """Measure the networks of an estimate on this machine; return the hours it needs, as text."""
    speeds, failed = measure_speeds(wanted, progress, seconds)
    hours = sum(speed.hours(wanted.networks[name]) for name, speed in speeds.items())
    text = f"measured on this machine ({machine()}): {hours:,.1f} hours"
    if failed:
        text += f" without {', '.join(failed)}, which do not fit into its memory"
    for name, speed in speeds.items():
        text += f"; {name}: {speed.trained:,.1f} images/s in training, {speed.scored:,.1f} in "
        text += f"measurements ({speed.steps} steps of {speed.batch})"
    return f"{text}; random weights and images; reading and augmenting images is not included"
