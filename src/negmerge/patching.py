"""θ + s·τ on files: the base is read once in ranges, changed, and written as it was laid out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.card import CARD, model_card
from negmerge.checkpoint import INDEX, Checkpoint, aligned
from negmerge.dtypes import FLOATS, NAMES, SIZES, Bytes, narrow, widen
from negmerge.errors import FileError, MismatchError, OptionError, ValueRangeError, shown
from negmerge.files import (
    atomic,
    atomic_folder,
    reserve,
    same_file,
    told_plainly,
    write,
)
from negmerge.fingerprint import BLOCK, KEYS, checksum, fingerprint, padded
from negmerge.header import TensorInfo
from negmerge.names import is_variance
from negmerge.parallel import available_workers, ordered
from negmerge.patch import Entry
from negmerge.plan import OutFile, Plan, check_space, make_plan
from negmerge.progress import Progress, Quiet
from negmerge.state_dict import Model, PathLike, open_checkpoint
from negmerge.task_vector import TaskVector

RANGE = 1 << 18
"""Elements of one unit of work."""
LARGE = 1 << 30
"""A base of so many bytes is worth the time that loading numba takes."""
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass
class Applied:
    """What an application did.

    nbytes: bytes of all tensors that were written.
    nonzero: elements the patch asks to change; changed: those whose bits in the output differ from
    what the base alone would have there; clamped: variances that were kept from going below zero.
    lost: for each number format of the output, how many changes were too small for it.
    """

    out: Path
    nbytes: int
    nonzero: int = 0
    changed: int = 0
    clamped: int = 0
    lost: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """A range of one tensor; first: how many of the tensor's values lie before it."""

    info: TensorInfo
    start: int
    stop: int
    first: int


def apply(
    base: Model,
    vector: TaskVector | PathLike,
    out: PathLike,
    *,
    dtype: str = "keep",
    shard_size: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Applied:
    """Write the base plus a task vector: `apply(base, -0.45 * tau, out)` is θ − 0.45·τ.

    >>> import negmerge as nm
    >>> base, pool = getfixture("small_pool")
    >>> tau = nm.merge(base, pool)
    >>> done = nm.apply(base, -0.5 * tau, getfixture("tmp_path") / "unlearned.safetensors")
    >>> done.changed <= done.nonzero
    True

    base: a file, a folder or a state dict; it must be what the task vector was made from.
    vector: a TaskVector or a patch file.
    out: a `.safetensors` file, or a folder, which gets the base's other files (config.json …) too,
        and a README.md of its own.
    dtype: `keep`, or float64, float32, bfloat16 or float16 for all float tensors; the sum is
        rounded once, to the format that is written.
    shard_size: bytes of a shard at most; without it a folder keeps the base's shards.
    """
    tau = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    path = Path(out)
    if dtype != "keep" and dtype not in NAMES:
        raise OptionError(f"dtype {dtype!r}: wanted keep, {', '.join(NAMES)}")
    with open_checkpoint(base, "base") as model:
        _check_belongs(tau, model)
        single = path.suffix == ".safetensors"
        if single and shard_size is not None:
            raise OptionError(f"{path}: shards go into a folder; name one without .safetensors")
        inputs = [*model.sources, *([] if tau.path is None else [tau.path])]
        if any(same_file(path, p) for p in inputs):
            raise FileError(f"{path}: is also an input; name another output")
        plan = make_plan(model, dtype, shard_size, single)
        check_space(path, plan, model)
        job = _Application(model, tau, path, progress or Quiet(), available_workers(workers))
        if single:
            # As with `cp`, the system brings it to the disk: base and patch can make it again.
            with atomic(path, durable=False) as descriptor:
                job.write([(plan.files[0], descriptor)])
        else:
            with atomic_folder(path) as folder:
                _write_folder(job, plan, folder)
                settings = {} if dtype == "keep" else {"dtype": dtype}
                if shard_size is not None:
                    settings["shard-size"] = str(shard_size)
                card = model_card(model, tau, job.changed, path.absolute().name, settings)
                (folder / CARD).write_text(card, encoding="utf-8")
        return Applied(path, job.written, tau.nonzero, job.changed, job.clamped, job.lost)


def _write_folder(job: _Application, plan: Plan, folder: Path) -> None:
    with ExitStack() as stack:
        opened: list[tuple[OutFile, int]] = []
        for file in plan.files:
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            opened.append((file, descriptor))
        job.write(opened)
    if plan.index is not None:
        (folder / INDEX).write_bytes(plan.index)
    for path in plan.beside:
        if path.name.lower() != CARD.lower():  # it describes the base
            shutil.copyfile(path, folder / path.name)


class _Application:
    def __init__(
        self, model: Checkpoint, tau: TaskVector, out: Path, progress: Progress, workers: int
    ) -> None:
        self.model, self.tau, self.out = model, tau, out
        self.progress, self.workers = progress, workers
        self.changed = self.clamped = self.written = 0
        self.lost: dict[str, int] = {}
        self.nbytes = sum(info.nbytes for info in model.tensors.values())
        self.compiled = _worth_compiling(self.nbytes)
        self.checksum: Callable[..., Any] = checksum
        if self.compiled:
            from negmerge import compiled

            self.checksum = compiled.checksum

    def write(self, files: list[tuple[OutFile, int]]) -> None:
        """Write all files, then make sure that the base was the right one."""
        places: dict[str, tuple[int, str, int]] = {}
        turn = Lock()
        for file, descriptor in files:
            end = len(file.header)
            for name, (dtype, offset) in file.places.items():
                places[name] = (descriptor, dtype, offset)
                size = self.model.tensors[name].elements * SIZES[dtype]
                self.written += size
                end = max(end, offset + size)
            reserve(descriptor, end)
            write(descriptor, file.header, 0)
        self.progress.stage("applying", self.nbytes)
        sums = dict.fromkeys(self.model.tensors, 0)
        kept = dict.fromkeys(self.model.tensors, 0)

        def run(buffer: Bytes, part: Range) -> tuple[Range, int, int, int]:
            descriptor, dtype, offset = places[part.info.name]
            raw, total = self._read(buffer, part)
            raw, changed, clamped = self._changed(part, raw, dtype)
            at = offset + part.start * SIZES[dtype]
            # File systems let one thread write to a file at a time; queueing here is cheaper.
            with told_plainly(self.out), turn:
                write(descriptor, raw.data, at)
            return part, total, changed, clamped

        def buffer() -> Bytes:
            return aligned(RANGE * 8)

        for part, total, changed, clamped in ordered(self._ranges(), run, buffer, self.workers):
            name = part.info.name
            sums[name] = (sums[name] + total) % 2**64
            kept[name] += changed
            self.clamped += clamped
            self.progress.advance((part.stop - part.start) * SIZES[part.info.dtype])
        self.model.check_unchanged()
        found, wanted = fingerprint(self.model.tensors, sums), self.tau.origin.base
        if found != wanted:
            raise MismatchError(
                f"{self.model.path}: is not the base this patch was made from: "
                f"its fingerprint is {found}, the patch wants {wanted}"
            )
        self.changed = sum(kept.values())
        for name, entry in self.tau.entries.items():
            lost = entry.nonzero - kept[name] if self.tau.scale else 0
            if lost:
                dtype = places[name][1]
                self.lost[dtype] = self.lost.get(dtype, 0) + lost

    def _ranges(self) -> Iterator[Range]:
        for info in self.model.tensors.values():
            entry = self.tau.entries.get(info.name)
            sparse = entry is not None and entry.layout == "sparse"
            counts = entry.counts(RANGE) if entry is not None and sparse else []
            first = 0
            for j, start in enumerate(range(0, info.elements, RANGE)):
                yield Range(info, start, min(start + RANGE, info.elements), first)
                first += counts[j] if sparse else 0

    def _read(self, buffer: Bytes, part: Range) -> tuple[Bytes, int]:
        size = SIZES[part.info.dtype]
        count = (part.stop - part.start) * size
        self.model.read_into(part.info, part.start * size, buffer[:count])
        buffer[count : padded(count)] = 0
        words = buffer[: padded(count)].view(np.uint64)
        return buffer[:count], int(self.checksum(words, part.start * size // BLOCK, KEYS))

    def _changed(self, part: Range, raw: Bytes, dtype: str) -> tuple[Bytes, int, int]:
        """The bytes of a range in the format that is written, with the task vector added in
        float64 and rounded once; how many elements of it changed, and how many variances were kept
        at zero.

        Elements the vector leaves alone are the base's, converted if need be.
        """
        info, entry, scale = part.info, self.tau.entries.get(part.info.name), self.tau.scale
        out = raw if dtype == info.dtype else _converted(raw, info, dtype)
        if entry is None or entry.layout == "zero" or scale == 0:
            return out, 0, 0
        clamp = is_variance(info.name)
        if self.compiled and {info.dtype, entry.dtype, dtype} == {"F32"} and not clamp:
            changed, finite = _added_by_compiled_loop(entry, part, out.view(np.float32), scale)
            clamped = 0
        else:
            changed, clamped, finite = _added(entry, part, raw, out, dtype, scale, clamp)
        if not finite:
            if not np.isfinite(entry.stored()).all():
                raise ValueRangeError(f"{entry.where()}: NaN or infinity in the task vector")
            raise ValueRangeError(
                f"{shown(info.name)}: θ + {scale}·τ does not fit {dtype}; take a smaller scale"
            )
        return out, changed, clamped


def _worth_compiling(nbytes: int) -> bool:
    return nbytes > LARGE or "numba" in sys.modules


def _added(
    entry: Entry, part: Range, raw: Bytes, out: Bytes, dtype: str, scale: float, clamp: bool
) -> tuple[int, int, bool]:
    """Put base plus vector in `out`, which holds the base in the format `dtype`.

    raw: the base as it is stored; may be the same bytes as `out`.
    Returns how many changed, how many were clamped, and whether all are finite.
    """
    clamped = 0
    where, values = _stored(entry, part)
    base = raw.view(_BITS[FLOATS[part.info.dtype]])[where]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = widen(base.view(np.uint8), part.info.dtype) + scale * values.astype(np.float64)
    if clamp:
        clamped = int(np.count_nonzero(exact < 0))
        exact = np.maximum(exact, 0.0)
    packed = narrow(exact, dtype)
    table = out.view(_BITS[FLOATS[dtype]])
    new = packed.view(table.dtype)
    changed = int(np.count_nonzero(new != table[where]))
    table[where] = new
    return changed, clamped, bool(np.isfinite(widen(packed, dtype)).all())


def _added_by_compiled_loop(
    entry: Entry, part: Range, singles: NDArray[np.float32], scale: float
) -> tuple[int, bool]:
    from negmerge import compiled

    if entry.layout == "dense":
        return compiled.add_dense(singles, entry.stored(part.start, part.stop), scale)
    bits = entry.bits(part.start // 8, -(-part.stop // 8))
    count = int(np.bitwise_count(bits).sum())
    return compiled.add_sparse(singles, bits, entry.stored(part.first, part.first + count), scale)


def _stored(entry: Entry, part: Range) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions within a range, and the values there."""
    if entry.layout == "dense":
        values = entry.stored(part.start, part.stop)
        where = np.flatnonzero(values)
        return where, values[where]
    bits = entry.bits(part.start // 8, -(-part.stop // 8))
    # Bytes without a bit are most of them: the rest is unpacked only.
    filled = np.flatnonzero(bits)
    found = np.flatnonzero(np.unpackbits(bits[filled], bitorder="little").view(np.bool_))
    where = filled[found >> 3] * 8 + (found & 7)
    return where, entry.stored(part.first, part.first + where.size)


def _converted(raw: Bytes, info: TensorInfo, dtype: str) -> Bytes:
    values = widen(raw, info.dtype)
    new = narrow(values, dtype)
    lost = int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(widen(new, dtype))))
    if lost:
        raise ValueRangeError(
            f"{shown(info.name)}: {lost} values do not fit {dtype}; "
            f"keep {info.dtype}, or use bfloat16"
        )
    return new


def _check_belongs(tau: TaskVector, model: Checkpoint) -> None:
    for name, entry in tau.entries.items():
        info = model.tensors.get(name)
        if info is None or info.shape != entry.shape or info.dtype not in FLOATS:
            found = "is not there" if info is None else f"is {info.dtype} of shape {info.shape}"
            raise MismatchError(
                f"{model.path} {shown(name)}: {found}, the patch has shape {entry.shape}; "
                "it was made from another base"
            )
