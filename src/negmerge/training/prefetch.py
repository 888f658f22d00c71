"""The batches of a training, prepared ahead by worker processes where the feed asks for it.

A batch follows from (seed, epoch, samples), so that any number of workers gives the same bits, and
a training can begin at any step. Workers are started by `spawn`: a training process has threads and
perhaps a GPU, which a forked process must not use.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from negmerge.errors import NegMergeError, one_line
from negmerge.plugins import LoadedPlugins
from negmerge.support.processes import end_with_parent
from negmerge.training.feeds import Batch, Feed, Indices, epoch_of, passes_of, steps_of
from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.samples import to_device
from negmerge.training.seeds import seed_of

AHEAD = 2
"""How many batches each worker prepares ahead."""
MOST_WORKERS = 16
"""The largest number of workers that is chosen by default."""

_workers: int | None = None


def set_feed_workers(count: int | None) -> None:
    """Set the number of workers of the trainings of this process; it never changes their results.

    Args:
        count: None: one for each thread of torch but one if the model is on a GPU, otherwise none,
            because the training itself uses all threads.
    """
    global _workers
    _workers = count


class PreparedFeed(Feed, Protocol):
    """A feed whose batches workers prepare, in fewer bytes, if `in_workers` is true."""

    @property
    def in_workers(self) -> bool: ...
    def prepare(self, picked: Indices, seed: int, augment: Augmentation) -> Batch: ...
    def finish(self, batch: Batch) -> Batch: ...


@contextmanager
def training_batches(
    feed: Feed,
    settings: HyperParameters,
    seed: int,
    first: int = 0,
    device: torch.device | None = None,
    workers: int | None = None,
) -> Iterator[Iterator[Batch]]:
    """Yield an iterator over the batches of a training; end its workers at the end of the block.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(5, 2), torch.arange(5)))
    >>> with training_batches(feed, HyperParameters(epochs=2, batch=3), seed=0) as batches:
    ...     [len(labels) for _, labels in batches]
    [3, 2, 3, 2]

    Args:
        feed: the source of batches; workers serve a `PreparedFeed`, others have none.
        first: the step to begin with, counted from 0 over all epochs.
        device: the device of the model; batches from workers are moved to it.
        workers: the number of workers; if not given, see `set_feed_workers`.
    """
    device = device or torch.device("cpu")
    steps = Steps(feed, settings, seed)
    wanted = range(first, len(steps))
    count = _count(workers, device) if getattr(feed, "in_workers", False) else 0
    if not (count and wanted):
        yield (feed.train_batch(*steps.samples(step), settings.augment) for step in wanted)
        return
    loader: DataLoader[Any] = DataLoader(
        steps,
        sampler=wanted,
        batch_size=None,
        num_workers=count,
        prefetch_factor=AHEAD,
        pin_memory=device.type == "cuda",
        multiprocessing_context="spawn",
        worker_init_fn=partial(_start_worker, os.getpid()),
        generator=torch.Generator(),  # otherwise the loader draws from the caller's generator
    )
    source: Any = iter(loader)
    batches = _finished(source, feed, device)
    try:
        yield batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise _ended(error) from error  # torch raises it in a signal handler, anywhere in the block
    finally:
        batches.close()
        source._shutdown_workers()  # there is no public way


def _finished(
    source: Iterator[Any], feed: Any, device: torch.device
) -> Generator[Batch, None, None]:
    """Move batches of workers to the device and finish them; raise the errors of workers.

    A thread does it for the next batch while the caller uses one: to receive a batch takes some
    milliseconds even if a worker has it ready.
    """

    def fetch() -> Batch | None:
        if (found := next(source, None)) is None:
            return None
        if isinstance(found, NegMergeError):
            raise found
        inputs, labels = found
        inputs = to_device(inputs, device, non_blocking=True)
        return feed.finish((inputs, labels.to(device, non_blocking=True)))

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch)
        try:
            while (batch := coming.result()) is not None:
                coming = thread.submit(fetch)
                yield batch
        except (EOFError, OSError) as error:  # a worker ended while it sent a batch
            raise _ended(error) from error


def _ended(error: Exception) -> NegMergeError:
    """The error for a worker that was killed, or could not get memory that processes share."""
    return NegMergeError(
        f"a worker process that prepares samples ended: {one_line(error)}; run the same command "
        "again, with fewer feed_workers if memory ran out"
    )


class Steps(Dataset[Any]):
    """The steps of a training; in a worker, their prepared batches by number."""

    def __init__(self, feed: Feed, settings: HyperParameters, seed: int) -> None:
        self.plugins = LoadedPlugins()  # comes first: a plug-in may define what follows
        self.feed, self.settings, self.seed = feed, settings, seed
        self.epoch_steps = sum(steps_of(size, settings.batch) for size in passes_of(feed))
        self.order: tuple[int, list[Indices]] = (-1, [])

    def __len__(self) -> int:
        return self.settings.epochs * self.epoch_steps

    def samples(self, step: int) -> tuple[Indices, int]:
        """Return the positions of the samples of a step, and the seed of its epoch."""
        epoch, place = divmod(step, self.epoch_steps)
        if self.order[0] != epoch:
            self.order = epoch, epoch_of(self.feed, self.settings, self.seed, epoch)
        return self.order[1][place], seed_of("augment", self.seed, epoch)

    def __getitem__(self, step: int) -> Batch | NegMergeError:
        """Return a prepared batch, or the error: torch would add a traceback to its message."""
        feed: Any = self.feed
        try:
            return feed.prepare(*self.samples(step), self.settings.augment)
        except NegMergeError as error:
            return type(error)(str(error))  # without its cause, which may not be picklable


def _count(workers: int | None, device: torch.device) -> int:
    found = _workers if workers is None else workers
    if found is not None:
        return found
    return min(max(torch.get_num_threads() - 1, 1), MOST_WORKERS) if device.type == "cuda" else 0


def _start_worker(parent: int, number: int) -> None:
    end_with_parent(parent)
