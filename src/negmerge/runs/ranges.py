"""Merges that an executor computes, one range of the elements at a time, on any number of machines.

The folder `.NAME.negmerge-parts` beside the output has the results of the finished ranges until the
output is complete. A merge that was killed and is started again computes only the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from negmerge.checkpoints.state_dict import PathLike
from negmerge.errors import OptionError
from negmerge.merging.engine import write_patch
from negmerge.merging.inputs import Buffers, Inputs
from negmerge.merging.memory import Budget
from negmerge.merging.one_pass import check_output_options, given_words
from negmerge.merging.parted import PartedMerge, PartedMergeAndApply
from negmerge.merging.parts import Part, describe, hash_of
from negmerge.merging.patterns import Globs, Patterns, make_patterns
from negmerge.merging.rule import make_rule
from negmerge.plugins import LoadedPlugins
from negmerge.runs.cores import Cores
from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.ray import Job, RayCluster
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.parts_folder import folder_of, parts_folder, read_state, write_state
from negmerge.runs.records import Done
from negmerge.runs.steps import Needs, Step
from negmerge.runs.watch import Unit, Watch, facts_of
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Advance, Progress, Quiet
from negmerge.vectors.entry import Layout
from negmerge.vectors.output import Applied, write_model
from negmerge.vectors.task_vector import TaskVector
from negmerge.vectors.values import Values, check_values

RANGE = 4 << 30
"""The bytes of all models together that a range has, at most and about."""
RANGES = 4
"""The number of ranges of each worker, so that a slow one does fewer of them."""


def merge_on(
    executor: Executor,
    base: PathLike,
    models: Sequence[PathLike],
    rule: str = "consensus",
    options: Mapping[str, Any] | None = None,
    *,
    out: PathLike,
    include: Globs = (),
    exclude: Globs = (),
    buffers: Buffers = "keep",
    equalise: bool = False,
    layout: Layout = "auto",
    values: Values = "keep",
    ranges: int = 1,
    threads: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
    digest: bool = False,
    progress: Progress | None = None,
) -> TaskVector:
    """Merge models like `nm.merge`, in ranges that an executor computes; the bytes are the same.

    >>> import tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> from negmerge.runs.executors import InProcess
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     base, model, out = (Path(folder, f"{name}.safetensors") for name in "abc")
    ...     save_file({"w": np.zeros(3, np.float32)}, base)
    ...     save_file({"w": np.array([1, 0, -2], np.float32)}, model)
    ...     tau = merge_on(InProcess(None), base, [model], out=out)
    ...     tau.nonzero
    2

    Args:
        executor: runs the ranges. All its machines see the files under the same paths.
        base: a safetensors file or a folder.
        models: the fine-tuned models, files or folders.
        rule, options, out, include, exclude, buffers, equalise, layout, values, device,
            allow_duplicates, digest, progress: as in `nm.merge`.
        ranges: the least number of ranges; there are more if one would have more than 4 GiB. A
            merge that goes on where it stopped keeps its number.
        threads: the threads of each range; by default those that the executor gives to a step.
        max_memory: the number of bytes that each process may use.
    """
    check_values(values)
    path = Path(out)
    opened = _opened(
        base,
        models,
        rule,
        options,
        buffers,
        allow_duplicates,
        progress,
        make_patterns(include, exclude),
    )
    with opened as (inputs, chosen):
        budget = Budget(max_memory, path.absolute().parent)
        given = (budget.workers(worker_count(threads)), budget, device, progress or Quiet())
        job = PartedMerge(inputs, chosen, layout, values, *given, equalise)
        more = {"device": device, "threads": threads, "max_memory": max_memory}
        more |= {"equalise": equalise}
        job.description = describe(inputs, rule, chosen.options, buffers, **more)
        with parts_folder(path, job.description.key) as folder:
            job.runner = Parts(folder, executor, ranges, inputs.nbytes, job.progress)
            return write_patch(job, path, digest)


def merge_and_apply_on(
    executor: Executor,
    base: PathLike,
    models: Sequence[PathLike],
    scale: float,
    out: PathLike,
    rule: str = "consensus",
    options: Mapping[str, Any] | None = None,
    *,
    dtype: str = "keep",
    shard_size: int | None = None,
    include: Globs = (),
    exclude: Globs = (),
    buffers: Buffers = "keep",
    equalise: bool = False,
    ranges: int = 1,
    threads: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
    progress: Progress | None = None,
) -> Applied:
    """Write θ + scale·τ like `nm.merge_and_apply`, in ranges that an executor computes.

    The machines write to the files of the output in the folder of the finished ranges, from where
    they are renamed when all are complete.

    Args:
        executor, ranges, threads, max_memory: as in `merge_on`.
        base, models, scale, out, rule, options, dtype, shard_size, include, exclude, buffers,
            equalise, device, allow_duplicates, progress: as in `nm.merge_and_apply`.
    """
    check_output_options(scale, dtype)
    path = Path(out)
    patterns = make_patterns(include, exclude)
    opened = _opened(base, models, rule, options, buffers, allow_duplicates, progress, patterns)
    with opened as (inputs, chosen):
        budget = Budget(max_memory, path.absolute().parent)
        given = (budget.workers(worker_count(threads)), budget, device, progress or Quiet())
        job = PartedMergeAndApply(inputs, chosen, "auto", "keep", *given, equalise)
        job.scale, job.given = float(scale), given_words(buffers, patterns, equalise)
        more = {"device": device, "threads": threads, "max_memory": max_memory}
        more |= {"equalise": equalise}
        job.description = describe(inputs, rule, chosen.options, buffers, **more)
        key = hash_of(job.description.key, job.scale, dtype, shard_size, path.suffix)
        with parts_folder(path, key) as folder:
            job.runner = Parts(folder, executor, ranges, inputs.nbytes, job.progress)
            # A worker of a killed merge with another key may still be writing to its own output.
            return write_model(job, path, dtype, shard_size, folder / f"{key}.output")


def cluster_for(
    out: Path, settings: ExecutorSettings, workers: int | None, progress: Progress
) -> tuple[RayCluster, int]:
    """Connect to the Ray cluster that merges to an output.

    Args:
        settings: the cluster.
        workers: the number of ranges at a time; by default one for each machine.

    Returns:
        The cluster, and a number of ranges that keeps it busy until the end.
    """
    if workers is not None:
        worker_count(workers)  # raises for wrong numbers
    folder = folder_of(out).resolve()
    job = Job(LoadedPlugins(), _no_scenario, settings, workers, folder=folder)
    cluster = RayCluster(job, None, progress.note)
    at_a_time = workers or -(-cluster.cores.cores // cluster.largest)
    cluster.cores = Cores(cluster.cores.cores, at_a_time)
    return cluster, RANGES * at_a_time


def _no_scenario() -> None:
    """Steps of merges have no scenario."""


@contextmanager
def _opened(
    base: PathLike,
    models: Sequence[PathLike],
    rule: str,
    options: Mapping[str, Any] | None,
    buffers: Buffers,
    allow_duplicates: bool,
    progress: Progress | None,
    patterns: Patterns,
) -> Iterator[tuple[Inputs, Any]]:
    """Open and check the models, and make the rule."""
    chosen = make_rule(rule, options or {})
    with Inputs(base, models, buffers, allow_duplicates, progress, patterns) as inputs:
        for model in inputs.models:
            if not model.files:
                raise OptionError(
                    f"{model.path}: is in the memory of this process, wanted a file or a folder "
                    "that all machines see; save it, or use nm.merge"
                )
        yield inputs, chosen


@dataclass(frozen=True)
class Range(Step[None]):
    """A step that computes a part of a merge, in whatever scenario."""

    part: Part
    key: str
    out: Path
    title: str
    needs: Needs

    @property
    def label(self) -> str:
        return self.title

    def size(self, scenario: Any) -> int:
        return self.part.nbytes

    def run(self, scenario: Any, advance: Advance) -> Done[None]:
        begun = time.perf_counter()
        if self.part.is_done(self.out):  # by a worker that was taken for lost
            advance(self.part.nbytes)
        else:
            self.part.run(self.out, self.part.merge.threads or _threads(), advance)
        return Done(None, time.perf_counter() - begun)


def _threads() -> int:
    """Return the number of threads that the executor gives to a step: it tells torch."""
    torch: Any = sys.modules.get("torch")
    return worker_count(None) if torch is None else torch.get_num_threads()


class Parts:
    """Runs parts in an executor; a `Runner` for `merging/parted.py`.

    Args:
        folder: the folder of the finished ranges.
        ranges: the least number of ranges.
        nbytes: the bytes of all models.
    """

    def __init__(
        self, folder: Path, executor: Executor, ranges: int, nbytes: int, progress: Progress
    ) -> None:
        self.folder, self.executor, self.progress = folder, executor, progress
        state = read_state(folder)
        kept, sums = state.get("ranges"), state.get("sums")
        self.ranges = (
            kept if isinstance(kept, int) and kept > 0 else max(ranges, -(-nbytes // RANGE))
        )
        self.sums: tuple[int, ...] = _counts(sums)
        write_state(folder, state | {"ranges": self.ranges})

    def keep_sums(self, sums: tuple[int, ...]) -> None:
        self.sums = sums
        write_state(self.folder, read_state(self.folder) | {"sums": list(sums)})

    def run(self, parts: Sequence[Part], reported: bool = True) -> Iterator[Path]:
        steps = [self._step(part, f"range {k + 1} of {len(parts)}") for k, part in enumerate(parts)]
        done = [step.part.is_done(step.out) for step in steps]
        advance = self.progress.advance if reported else _ignore
        for step, is_done in zip(steps, done, strict=True):
            if is_done:
                advance(step.part.nbytes)
        todo = [k for k, is_done in enumerate(done) if not is_done]
        watch = self._watch([steps[k] for k in todo], advance)
        finished = (
            self.executor.run([steps[k] for k in todo], watch, len(steps)) if todo else iter(())
        )
        for k, step in enumerate(steps):
            while not done[k]:
                position, _ = next(finished)
                watch.finished(position)
                done[todo[position]] = True
            yield step.out

    def _step(self, part: Part, title: str) -> Range:
        key, gpus = part.key, 0.0 if part.merge.device == "cpu" else 1.0
        needs = Needs(gpus, part.merge.max_memory)
        return Range(part, key, self.folder / f"{key}.part", title, needs)

    def _watch(self, steps: Sequence[Range], advance: Advance) -> Watch:
        def changed(one: Unit) -> None:
            self.progress.unit_changed(one.name, one.state, **facts_of(one))

        units = [Unit(name=step.label, size=step.part.nbytes) for step in steps]
        return Watch(units, advance, changed)


def _counts(found: Any) -> tuple[int, ...]:
    """Return a list of integers as a tuple; anything else is damage, and known as nothing."""
    some = cast("list[Any]", found) if isinstance(found, list) else []
    return tuple(some) if all(type(one) is int for one in some) else ()


def _ignore(count: int) -> None: ...
