"""θ + s·τ on files: the base is read once in ranges, changed, and written as it was laid out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from negmerge.checkpoint import INDEX, SINGLE, Checkpoint
from negmerge.dtypes import FLOATS, NAMES, SIZES, Bytes, narrow, widen
from negmerge.errors import FileError, MismatchError, OptionError, ValueRangeError, shown
from negmerge.files import atomic, atomic_folder, same_file, told_plainly, write
from negmerge.fingerprint import BLOCK, KEYS, checksum, fingerprint, padded
from negmerge.header import TensorInfo, build_header
from negmerge.names import is_variance
from negmerge.parallel import available_workers, ordered
from negmerge.patch import Entry
from negmerge.progress import Progress, Quiet
from negmerge.task_vector import TaskVector

PathLike = str | os.PathLike[str]
RANGE = 1 << 18
"""Elements of one unit of work."""
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


@dataclass
class Applied:
    """What an application did.

    nonzero: elements the patch asks to change; changed: those whose stored bits did change, fewer
    where the format is too coarse for the change; clamped: variances that were kept from going
    below zero.
    """

    out: Path
    nbytes: int
    nonzero: int = 0
    changed: int = 0
    clamped: int = 0


@dataclass
class OutFile:
    """One file to write: its header, and format and place of each tensor."""

    name: str
    header: bytes
    places: dict[str, tuple[str, int]]

    @property
    def nbytes(self) -> int:
        return len(self.header)


@dataclass
class Plan:
    """All files of the output, and small files that come along."""

    files: list[OutFile]
    index: bytes | None = None
    beside: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Range:
    """A range of one tensor; first: how many of the tensor's values lie before it."""

    info: TensorInfo
    start: int
    stop: int
    first: int


def apply(
    base: PathLike,
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

    base: a file or folder; it must be the one the task vector was made from.
    vector: a TaskVector or a patch file.
    out: a `.safetensors` file, or a folder, which gets the base's other files (config.json …) too.
    dtype: `keep`, or float32, bfloat16 or float16 for all float tensors.
    shard_size: bytes of a shard at most; without it a folder keeps the base's shards.
    """
    tau = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    path = Path(out)
    if dtype != "keep" and dtype not in NAMES:
        raise OptionError(f"dtype {dtype!r}: wanted keep, {', '.join(NAMES)}")
    with Checkpoint(base) as model:
        _check_belongs(tau, model)
        single = path.suffix == ".safetensors"
        if single and shard_size is not None:
            raise OptionError(f"{path}: shards go into a folder; name one without .safetensors")
        if any(same_file(path, p) for p in [model.path, *model.files, tau.path or model.path]):
            raise FileError(f"{path}: is also an input; name another output")
        plan = _plan(model, dtype, shard_size, single)
        _check_space(path, plan, model)
        job = _Application(model, tau, progress or Quiet(), available_workers(workers))
        if single:
            with atomic(path) as descriptor:
                job.write([(plan.files[0], descriptor)])
        else:
            with atomic_folder(path) as folder:
                _write_folder(job, plan, folder)
        return Applied(path, job.nbytes, tau.nonzero, job.changed, job.clamped)


def _write_folder(job: _Application, plan: Plan, folder: Path) -> None:
    with ExitStack() as stack:
        opened: list[tuple[OutFile, int]] = []
        for file in plan.files:
            descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            opened.append((file, descriptor))
        job.write(opened)
        for _, descriptor in opened:
            os.fsync(descriptor)
    if plan.index is not None:
        (folder / INDEX).write_bytes(plan.index)
    for path in plan.beside:
        shutil.copyfile(path, folder / path.name)


class _Application:
    def __init__(self, model: Checkpoint, tau: TaskVector, progress: Progress, workers: int):
        self.model, self.tau, self.progress, self.workers = model, tau, progress, workers
        self.changed = self.clamped = 0
        self.nbytes = sum(info.nbytes for info in model.tensors.values())

    def write(self, files: list[tuple[OutFile, int]]) -> None:
        """Write all files, then make sure that the base was the right one."""
        places: dict[str, tuple[int, str, int]] = {}
        for file, descriptor in files:
            write(descriptor, file.header, 0)
            for name, (dtype, offset) in file.places.items():
                places[name] = (descriptor, dtype, offset)
        self.progress.stage("applying", self.nbytes)
        sums = dict.fromkeys(self.model.tensors, 0)

        def run(buffer: Bytes, part: Range) -> tuple[Range, int, int, int]:
            descriptor, dtype, offset = places[part.info.name]
            raw, total = self._read(buffer, part)
            raw, changed, clamped = self._changed(part, raw)
            if dtype != part.info.dtype:
                raw = _converted(raw, part.info, dtype)
            with told_plainly(self.model.path):
                write(descriptor, raw.data, offset + part.start * SIZES[dtype])
            return part, total, changed, clamped

        def buffer() -> Bytes:
            return np.empty(RANGE * 8, np.uint8)

        for part, total, changed, clamped in ordered(self._ranges(), run, buffer, self.workers):
            name = part.info.name
            sums[name] = (sums[name] + total) % 2**64
            self.changed += changed
            self.clamped += clamped
            self.progress.advance((part.stop - part.start) * SIZES[part.info.dtype])
        self.model.check_unchanged()
        found, wanted = fingerprint(self.model.tensors, sums), self.tau.origin.base
        if found != wanted:
            raise MismatchError(
                f"{self.model.path}: is not the base this patch was made from: "
                f"its fingerprint is {found}, the patch wants {wanted}"
            )

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
        return buffer[:count], int(checksum(words, part.start * size // BLOCK, KEYS))

    def _changed(self, part: Range, raw: Bytes) -> tuple[Bytes, int, int]:
        """The bytes of a range with the task vector added, how many elements of it changed, and
        how many variances were kept at zero. Elements the vector leaves alone keep their bits."""
        info, entry, scale = part.info, self.tau.entries.get(part.info.name), self.tau.scale
        if entry is None or entry.layout == "zero" or scale == 0:
            return raw, 0, 0
        clamp, clamped = is_variance(info.name), 0
        if (info.dtype, entry.dtype) == ("F32", "F32") and not clamp:
            singles = raw.view(np.float32)
            if entry.layout == "dense":
                changed, finite = add_dense(singles, entry.stored(part.start, part.stop), scale)
            else:
                bits = entry.bits(part.start // 8, -(-part.stop // 8))
                count = int(np.bitwise_count(bits).sum())
                values = entry.stored(part.first, part.first + count)
                changed, finite = add_sparse(singles, bits, values, scale)
        else:
            where, values = _stored(entry, part)
            size = FLOATS[info.dtype]
            table = raw.reshape(-1, size)
            old = table[where]
            with np.errstate(over="ignore", invalid="ignore"):
                new = widen(old.reshape(-1), info.dtype) + scale * values.astype(np.float64)
            clamped = int(np.count_nonzero(new < 0)) if clamp else 0
            packed = narrow(np.maximum(new, 0.0) if clamp else new, info.dtype)
            finite = bool(np.isfinite(widen(packed, info.dtype)).all())
            table[where] = packed.reshape(-1, size)
            changed = int((table[where] != old).any(axis=1).sum())
        if not finite:
            if not np.isfinite(entry.stored()).all():
                raise ValueRangeError(f"{entry.where()}: NaN or infinity in the task vector")
            raise ValueRangeError(
                f"{shown(info.name)}: θ + {scale}·τ does not fit {info.dtype}; take a smaller scale"
            )
        return raw, changed, clamped


def _stored(entry: Entry, part: Range) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions within a range, and the values there."""
    if entry.layout == "dense":
        values = entry.stored(part.start, part.stop)
        where = np.flatnonzero(values)
        return where, values[where]
    bits = entry.bits(part.start // 8, -(-part.stop // 8))
    where = np.flatnonzero(np.unpackbits(bits, count=part.stop - part.start, bitorder="little"))
    return where, entry.stored(part.first, part.first + where.size)


@njit(nogil=True, cache=True)
def add_sparse(
    base: NDArray[np.float32], bits: Bytes, values: NDArray[np.float32], scale: float
) -> tuple[Any, Any]:
    """Add scale · values where bits are set, in float64, rounded once.

    Returns how many elements changed, and whether all are finite.
    """
    changed, at = 0, 0
    finite = True
    for j in range(bits.shape[0]):
        byte = bits[j]
        if byte:
            for i in range(8):
                if byte & (1 << i):
                    old = base[8 * j + i]
                    new = np.float32(np.float64(old) + scale * np.float64(values[at]))
                    at += 1
                    base[8 * j + i] = new
                    changed += new != old
                    finite &= abs(new) < np.inf
    return changed, finite


@njit(nogil=True, cache=True)
def add_dense(
    base: NDArray[np.float32], values: NDArray[np.float32], scale: float
) -> tuple[Any, Any]:
    """Add scale · values where they are not zero; returns as `add_sparse`."""
    changed = 0
    finite = True
    for i in range(base.shape[0]):
        old = base[i]
        new = np.float32(np.float64(old) + scale * np.float64(values[i]))
        # A value of zero leaves even the sign of a zero alone.
        base[i] = new if values[i] != 0 else old
        changed += (values[i] != 0) & (new != old)
        finite &= abs(new) < np.inf
    return changed, finite


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


def _plan(model: Checkpoint, dtype: str, shard_size: int | None, single: bool) -> Plan:
    folder = model.path.is_dir()
    beside = []
    if folder and not single:
        beside = [
            p for p in sorted(model.path.iterdir()) if p.is_file() and not p.name.endswith(WEIGHTS)
        ]
    if dtype == "keep" and shard_size is None and single == (len(model.files) == 1 and not folder):
        # The base's own headers: with a scale of zero the files are the base's, byte for byte.
        files = [
            OutFile(
                path.name,
                header.raw,
                {t.name: (t.dtype, t.offset) for t in header.tensors.values()},
            )
            for path, header in zip(model.files, model.headers, strict=True)
        ]
        index = model.path / INDEX
        has_index = folder and index.exists()
        return Plan(files, index.read_bytes() if has_index else None, beside)
    kinds = {
        info.name: (
            NAMES[dtype] if dtype != "keep" and info.dtype in FLOATS else info.dtype,
            info.shape,
        )
        for info in model.tensors.values()
    }
    metadata = {"format": "pt"} | model.metadata
    groups = [list(kinds)] if single else _shards(model, kinds, shard_size)
    return _laid_out(groups, kinds, metadata, beside)


def _shards(
    model: Checkpoint, kinds: dict[str, tuple[str, tuple[int, ...]]], shard_size: int | None
) -> list[list[str]]:
    if shard_size is None:
        return [list(header.tensors) for header in model.headers if header.tensors]
    groups: list[list[str]] = [[]]
    used = 0
    for name, (dtype, _) in kinds.items():
        size = model.tensors[name].elements * SIZES[dtype]
        if groups[-1] and used + size > shard_size:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _laid_out(
    groups: list[list[str]],
    kinds: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str],
    beside: list[Path],
) -> Plan:
    files = []
    for k, group in enumerate(groups):
        name = SINGLE if len(groups) == 1 else f"model-{k + 1:05}-of-{len(groups):05}.safetensors"
        header, places = build_header({n: kinds[n] for n in group}, metadata)
        files.append(OutFile(name, header, {n: (kinds[n][0], places[n]) for n in group}))
    if len(files) == 1:
        return Plan(files, None, beside)
    total = sum(int(np.prod(shape, dtype=np.int64)) * SIZES[d] for d, shape in kinds.values())
    weight_map = {name: file.name for file in files for name in file.places}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Plan(files, (json.dumps(index, indent=2) + "\n").encode(), beside)


def _check_space(path: Path, plan: Plan, model: Checkpoint) -> None:
    needed = model.nbytes + sum(file.nbytes for file in plan.files)
    folder = path.absolute().parent
    if folder.is_dir() and shutil.disk_usage(folder).free < needed:
        free = shutil.disk_usage(folder).free
        raise FileError(f"{path}: needs {needed} bytes, {folder} has {free} free")
