"""θ + s·τ on files and state dicts: `nm.apply`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np

from negmerge.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from negmerge.checkpoints.dtypes import FLOAT_NAMES, FLOATS, SIZES, Bytes
from negmerge.checkpoints.state_dict import Model, PathLike, check_numpy_holds, tensor_of
from negmerge.errors import FileError, MismatchError, OptionError, quoted
from negmerge.support.files import (
    atomic_file,
    atomic_folder,
    preallocate,
    report_write_errors,
    same_file,
    write_fully,
)
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.vectors.addition import Addition
from negmerge.vectors.card import CARD, model_card
from negmerge.vectors.plan import OutFile, Plan, check_space, make_plan, written_format
from negmerge.vectors.task_vector import TaskVector, open_model


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


@overload
def apply(
    base: Model,
    vector: TaskVector | PathLike,
    out: PathLike,
    *,
    dtype: str = "keep",
    shard_size: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Applied: ...
@overload
def apply(
    base: Model,
    vector: TaskVector | PathLike,
    out: None = None,
    *,
    dtype: str = "keep",
    shard_size: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]: ...


def apply(
    base: Model,
    vector: TaskVector | PathLike,
    out: PathLike | None = None,
    *,
    dtype: str = "keep",
    shard_size: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Applied | dict[str, Any]:
    """Add a task vector to its base: `apply(base, -0.45 * tau, out)` writes θ − 0.45·τ.

    >>> import numpy as np
    >>> import negmerge as nm
    >>> base = {"w": np.ones(3, np.float32)}
    >>> tau = nm.merge(base, [{"w": np.array([3, 1, 0], np.float32)}])
    >>> nm.apply(base, -0.5 * tau)["w"]
    array([0. , 1. , 1.5], dtype=float32)

    Args:
        base: the file, folder or state dict from which the task vector was made.
        vector: a TaskVector or a patch file.
        out: a `.safetensors` file, or a folder, which also gets the other files of the base's
            folder (config.json …) and a new README.md. By default the weights are returned.
        dtype: `keep`, or float64, float32, bfloat16 or float16 for all float tensors; the sum is
            rounded once, to this format.
        shard_size: the largest size of a shard in bytes; by default a folder has the shards of the
            base.
        workers: the number of threads; by default one per core.
        progress: where progress is shown.

    Returns:
        An `Applied` if `out` is given, otherwise a new state dict: numpy arrays if the base is a
        state dict of numpy arrays, otherwise torch tensors.
    """
    tau = _vector(vector)
    if dtype != "keep" and dtype not in FLOAT_NAMES:
        raise OptionError(f"dtype {dtype!r}: wanted keep, {', '.join(FLOAT_NAMES)}")
    with open_model(base, "base") as model:
        _check_belongs(tau, model)
        job = Addition(model, tau, progress or Quiet(), worker_count(workers))
        if out is not None:
            return _to_files(job, Path(out), dtype, shard_size)
        if shard_size is not None:
            raise OptionError("shard_size: shards need a folder; name a folder as out")
        return _in_memory(job, base if isinstance(base, Mapping) else {}, dtype)


def _vector(vector: object) -> TaskVector:
    if isinstance(vector, TaskVector):
        return vector
    if isinstance(vector, str | os.PathLike):
        return TaskVector.load(vector)
    raise OptionError(
        f"vector: got {type(vector).__name__}, wanted a TaskVector or a patch file; "
        "nm.merge makes one"
    )


def _check_belongs(tau: TaskVector, model: Checkpoint) -> None:
    for name, entry in tau.entries.items():
        info = model.tensors.get(name)
        if info is None or info.shape != entry.shape or info.dtype not in FLOATS:
            found = "is missing" if info is None else f"is {info.dtype} of shape {info.shape}"
            raise MismatchError(
                f"{model.path} {quoted(name)}: {found}, the patch has shape {entry.shape}; "
                "name the base from which the patch was made"
            )


def _in_memory(job: Addition, given: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The result as a state dict; `given` has the tensors of the base, if it is a state dict."""
    tensors = job.model.tensors
    formats = {name: written_format(info.dtype, dtype) for name, info in tensors.items()}
    for name, value in given.items():
        check_numpy_holds(value, formats[name], f"base {quoted(name)}")
    found = {
        name: np.empty(info.elements * SIZES[formats[name]], np.uint8)
        for name, info in tensors.items()
    }

    def put(name: str, at: int, raw: Bytes) -> None:
        found[name][at : at + raw.size] = raw

    job.run(formats, put)
    return {
        name: tensor_of(found[name], formats[name], tensors[name].shape, given.get(name))
        for name in given or tensors
    }


def _to_files(job: Addition, path: Path, dtype: str, shard_size: int | None) -> Applied:
    """Write the result as a file or a folder."""
    model, tau = job.model, job.tau
    single = path.suffix == ".safetensors"
    if single and shard_size is not None:
        raise OptionError(f"{path}: shards need a folder; name an output without .safetensors")
    inputs = [*model.sources, *([] if tau.path is None else [tau.path])]
    if any(same_file(path, p) for p in inputs):
        raise FileError(f"{path}: is also an input; name another output")
    plan = make_plan(model, dtype, shard_size, single)
    check_space(path, plan)
    if single:
        # Without fsync, as `cp` writes: after a power cut base and patch still exist.
        with atomic_file(path, durable=False) as descriptor:
            _write_files(job, path, [(plan.files[0], descriptor)])
    else:
        with atomic_folder(path) as folder:
            _write_folder(job, path, plan, folder)
            settings = {} if dtype == "keep" else {"dtype": dtype}
            if shard_size is not None:
                settings["shard-size"] = str(shard_size)
            card = model_card(model, tau, job.changed, path.absolute().name, settings)
            (folder / CARD).write_text(card, encoding="utf-8")
    nbytes = sum(file.nbytes for file in plan.files)
    return Applied(path, nbytes, tau.nonzero, job.changed, job.clamped, job.lost)


def _write_folder(job: Addition, out: Path, plan: Plan, folder: Path) -> None:
    with ExitStack() as stack:
        opened: list[tuple[OutFile, int]] = []
        for file in plan.files:
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            opened.append((file, descriptor))
        _write_files(job, out, opened)
    if plan.index is not None:
        (folder / INDEX_FILE).write_bytes(plan.index)
    for path in plan.copied:
        if path.name.lower() != CARD.lower():  # the base's model card does not describe the result
            shutil.copyfile(path, folder / path.name)


def _write_files(job: Addition, out: Path, files: list[tuple[OutFile, int]]) -> None:
    """Write headers and tensors to open files."""
    places: dict[str, tuple[int, int]] = {}
    formats: dict[str, str] = {}
    for file, descriptor in files:
        for name, (dtype, offset) in file.places.items():
            places[name], formats[name] = (descriptor, offset), dtype
        preallocate(descriptor, len(file.header) + file.nbytes)
        write_fully(descriptor, file.header, 0)
    turns = {descriptor: Lock() for _, descriptor in files}

    def put(name: str, at: int, raw: Bytes) -> None:
        descriptor, offset = places[name]
        # A file system lets one thread at a time write to a file; waiting here is faster.
        with report_write_errors(out), turns[descriptor]:
            write_fully(descriptor, raw.data, offset + at)

    job.run(formats, put)
