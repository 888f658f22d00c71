"""Writing a model that is computed range by range: a file, or a folder of shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from negmerge.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from negmerge.checkpoints.dtypes import Bytes
from negmerge.checkpoints.model_folder import CARD
from negmerge.errors import FileError, OptionError
from negmerge.support.files import (
    atomic_file,
    atomic_folder,
    kept_file,
    kept_folder,
    preallocate,
    report_write_errors,
    same_file,
    temporary_path,
    write_fully,
)
from negmerge.support.systems import BINARY
from negmerge.vectors.card import model_card
from negmerge.vectors.plan import OutFile, Plan, check_space, make_plan
from negmerge.vectors.task_vector import TaskVector


class Job(Protocol):
    """The computation of a model.

    Attributes:
        model: the base.
        sources: all files that are read.
        tau: the task vector that is added, with its scale and origin; valid after `run`.
        changed, clamped, lost: as in `Applied`; valid after `run`.
    """

    model: Checkpoint
    sources: list[Path]
    tau: TaskVector
    changed: int
    clamped: int
    lost: dict[str, int]

    def run(self, formats: Mapping[str, str], put: Callable[[str, int, Bytes], None]) -> None:
        """Compute all tensors.

        Args:
            formats: the number format of each result.
            put: called by several threads with the name of a tensor, an offset in its bytes, and
                the bytes at this offset. For an output on disk it is a `Places`.
        """

    def command(self, settings: Mapping[str, str]) -> list[str] | None:
        """The command that makes the model again, without its output; None if there is none."""


@dataclass
class Applied:
    """The result of `apply` with an output.

    Args:
        nbytes: the size of all tensors.
        nonzero: the number of nonzero elements of the task vector.
        changed: how many of these elements differ in the output from the base in the same format.
        clamped: the number of variances that would be negative and were set to zero.
        lost: for each number format of the output, how many changes rounded to nothing.
    """

    out: Path
    nbytes: int
    nonzero: int
    changed: int
    clamped: int
    lost: dict[str, int]


class Places:
    """Writes ranges of tensors to their places in open files.

    Attributes:
        places: the file of each tensor, and the offset of the tensor in the file.
    """

    def __init__(self, out: Path, files: list[tuple[OutFile, Path, int]]) -> None:
        self._out = out
        self.places: dict[str, tuple[Path, int]] = {}
        self._descriptors: dict[str, int] = {}
        for file, path, descriptor in files:
            for name, (_, offset) in file.places.items():
                self.places[name], self._descriptors[name] = (path, offset), descriptor
        self._turns = {descriptor: Lock() for _, _, descriptor in files}

    def __call__(self, name: str, at: int, raw: Bytes) -> None:
        descriptor, offset = self._descriptors[name], self.places[name][1]
        # A file system lets one thread at a time write to a file; waiting here is faster.
        with report_write_errors(self._out), self._turns[descriptor]:
            write_fully(descriptor, raw.data, offset + at)


def write_model(
    job: Job, path: Path, dtype: str, shard_size: int | None, waiting: Path | None = None
) -> Applied:
    """Compute a model and write it as a file or a folder, which appears complete or not at all.

    Args:
        waiting: where the file or folder is until it is complete. It is on the same disk, it stays
            if the job fails, and the next job goes on with it. By default nothing stays.
    """
    model = job.model
    single = path.suffix == ".safetensors"
    if single and shard_size is not None:
        raise OptionError(f"{path}: shards need a folder; name an output without .safetensors")
    if any(same_file(path, source) for source in job.sources):
        raise FileError(f"{path}: is also an input; name another output")
    plan = make_plan(model, dtype, shard_size, single)
    if waiting is None or not waiting.exists():
        check_space(path, plan)
    if single:
        # Without fsync, as `cp` writes: after a power cut base and patch still exist.
        whole = atomic_file(path, durable=False) if waiting is None else kept_file(path, waiting)
        with whole as descriptor:
            place = waiting or temporary_path(path)
            _write_files(job, path, [(plan.files[0], place, descriptor)])
    else:
        with atomic_folder(path) if waiting is None else kept_folder(path, waiting) as folder:
            _write_folder(job, path, plan, folder)
            settings = {} if dtype == "keep" else {"dtype": dtype}
            if shard_size is not None:
                settings["shard-size"] = str(shard_size)
            name = path.absolute().name
            card = model_card(model, job.tau, job.changed, name, job.command(settings))
            (folder / CARD).write_text(card, encoding="utf-8")
    nbytes = sum(file.nbytes for file in plan.files)
    return Applied(path, nbytes, job.tau.nonzero, job.changed, job.clamped, job.lost)


def _write_folder(job: Job, out: Path, plan: Plan, folder: Path) -> None:
    with ExitStack() as stack:
        opened: list[tuple[OutFile, Path, int]] = []
        for file in plan.files:
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            stack.callback(os.close, descriptor)
            opened.append((file, folder / file.name, descriptor))
        _write_files(job, out, opened)
    if plan.index is not None:
        (folder / INDEX_FILE).write_bytes(plan.index)
    for path in plan.copied:
        if path.name.lower() != CARD.lower():  # the base's model card does not describe the result
            shutil.copyfile(path, folder / path.name)


def _write_files(job: Job, out: Path, files: list[tuple[OutFile, Path, int]]) -> None:
    """Write headers and tensors to open files."""
    formats: dict[str, str] = {}
    for file, _, descriptor in files:
        formats |= {name: dtype for name, (dtype, _) in file.places.items()}
        preallocate(descriptor, len(file.header) + file.nbytes)
        write_fully(descriptor, file.header, 0)
    job.run(formats, Places(out, files))
