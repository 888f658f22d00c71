"""θ + s·τ on files and state dicts: `nm.apply`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import FLOAT_NAMES, FLOATS, SIZES, Bytes
from negmerge.checkpoints.remote import local_models
from negmerge.checkpoints.state_dict import Model, PathLike, check_numpy_holds, tensor_of
from negmerge.errors import MismatchError, OptionError, quoted
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.vectors.addition import Addition
from negmerge.vectors.output import Applied, write_model
from negmerge.vectors.plan import written_format
from negmerge.vectors.task_vector import TaskVector, open_model


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
        base: the file, folder or state dict from which the task vector was made; or a URL.
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
    with open_model(local_models([base], progress)[0], "base") as model:
        _check_belongs(tau, model)
        job = Addition(model, tau, progress or Quiet(), worker_count(workers))
        if out is not None:
            return write_model(job, Path(out), dtype, shard_size)
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
