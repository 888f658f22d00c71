"""Streaming merge: all models, one range of elements at a time, in one pass over the files.

Ranges go to worker threads; results come back in order and either stay in memory (a TaskVector) or
go straight into the patch file. Nothing that is computed depends on how the work was cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.dtypes import FLOATS, widen
from negmerge.errors import MismatchError, OptionError, ValueRangeError, shown
from negmerge.fingerprint import digest_of, fingerprint, tensor_checksum
from negmerge.header import TensorInfo
from negmerge.merge import kernels
from negmerge.merge.assemble import NOTHING, Assembly, Piece
from negmerge.merge.compute import Compute, Task, check_device, make_compute
from negmerge.merge.inputs import Buffers, Inputs, check_identical, refuse_overwriting
from negmerge.merge.memory import Budget
from negmerge.merge.rules import Rule, make_rule
from negmerge.merge.tiles import SEGMENT, Segment, TileReader, segments
from negmerge.merge.trim import Thresholds, find_thresholds
from negmerge.parallel import available_workers, ordered
from negmerge.patch import Entry, Layout, Origin, PatchWriter, patch_file, versions
from negmerge.progress import Progress, Quiet
from negmerge.state_dict import Model, PathLike
from negmerge.task_vector import TaskVector

EXACT_DISSENT = 1 << 22
"""Up to so many elements the dissent count looks at all of them, beyond at every 256th strip."""
SHARED = ". state_dict() gives the module's own tensors: copy them before training goes on"


def merge(
    base: Model,
    models: Sequence[Model],
    rule: str = "consensus",
    options: Mapping[str, Any] | None = None,
    *,
    out: PathLike | None = None,
    buffers: Buffers = "keep",
    layout: Layout = "auto",
    workers: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
    digest: bool = False,
    progress: Progress | None = None,
    **more: Any,
) -> TaskVector:
    """Merge the task vectors of fine-tuned models by a rule.

    >>> base, pool = getfixture("small_pool")
    >>> tau = merge(base, pool, rule="consensus", quorum=0.8)
    >>> tau.origin.n
    3

    base, models: safetensors files, Hugging Face folders, or state dicts (names to torch tensors
        or numpy arrays), which errors call `base` and `models[0]`, `models[1]` …
    rule, options: as `negmerge list rules` shows them; options also as keywords.
    out: write a patch file while merging; the returned vector reads it lazily. Without it the
        vector is in memory.
    buffers: `keep` the base's BatchNorm statistics, or `merge` them like weights.
    layout: how tensors are stored: `sparse`, `dense`, or for each the smaller (`auto`).
    workers: threads; all cores if not given. max_memory: bytes the process may use.
    device: `cpu`, or `cuda` to compute on a GPU with torch; the bytes are the same.
    allow_duplicates: accept models with the same content. digest: record SHA-256 of all files.
    """
    chosen = make_rule(rule, _joined(rule, options or {}, more))
    check_device(device)
    path = None if out is None else Path(out)
    with Inputs(base, models, buffers, allow_duplicates) as inputs:
        budget = Budget(max_memory, None if path is None else path.absolute().parent)
        job = Merge(inputs, chosen, layout, workers, budget, device, progress or Quiet())
        job.allow_duplicates = allow_duplicates
        if path is None:
            entries = dict(job.entries())
            if job.majority_was_wrong():
                entries = dict(job.entries())
            return TaskVector(entries, job.origin(digest))
        refuse_overwriting(path, inputs.models)
        with patch_file(path) as descriptor:
            _write(job, descriptor, digest)
    return TaskVector.load(path)


def _joined(
    rule: str, options: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options of a rule, as a mapping and as keywords."""
    for key in keywords:
        if key in options:
            raise OptionError(f"merge: option {key!r} is in options and a keyword; give it once")
        if key not in make_rule(rule).options:
            has = ", ".join(make_rule(rule).options) or "none"
            own = ", ".join(list(signature(merge).parameters)[:-1])
            raise OptionError(
                f"merge: unknown keyword {key!r}; options of the rule {rule!r}: {has}; "
                f"arguments of merge: {own}"
            )
    return {**options, **keywords}


def _write(job: Merge, descriptor: int, digest: bool) -> None:
    tensors = {i.name: (job.value_dtype(i.name), i.shape) for i in job.inputs.merged}
    while True:
        os.ftruncate(descriptor, 0)
        kept = [info.name for info in job.inputs.kept]
        members = [model.path.name for model in job.inputs.models]
        writer = PatchWriter(descriptor, tensors, kept, members)
        for name, entry in job.entries():
            writer.add(name, entry)
        if not job.majority_was_wrong():
            writer.finish(job.origin(digest))
            return


@dataclass
class Worker:
    """What one thread owns."""

    reader: TileReader
    compute: Compute
    scratch: dict[Any, NDArray[Any]]

    def room(self, kind: Any) -> NDArray[Any]:
        """Scratch for the packed values of one segment."""
        if kind not in self.scratch:
            self.scratch[kind] = np.empty(SEGMENT + 1, kind)
        return self.scratch[kind]


class Merge:
    """One merge in progress: exhaust `entries()`, then ask for `origin()`."""

    def __init__(
        self,
        inputs: Inputs,
        rule: Rule,
        layout: Layout,
        workers: int | None,
        budget: Budget,
        device: str,
        progress: Progress,
    ) -> None:
        self.inputs, self.rule = inputs, rule
        self.layout: Layout = layout
        self.budget, self.device, self.progress = budget, device, progress
        self.workers = budget.workers(available_workers(workers))
        self.allow_duplicates = False
        self.n = len(inputs.members)
        self.elements = sum(info.elements for info in inputs.merged)
        self.majority = 1.0
        self.thresholds: Thresholds | None = None

    def value_dtype(self, name: str) -> str:
        """float32 holds the mean of anything narrower; float64 stays float64."""
        return "F64" if any(i.dtype == "F64" for i in self.inputs.infos(name)) else "F32"

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Merge tensor by tensor, in the order of their names, and check the pool as a whole."""
        self.sums: dict[str, NDArray[np.uint64]] = {}
        self.dissent = np.zeros(self.n, np.int64)
        self.sampled = 0
        self.crew: list[Worker] = []
        if self.thresholds is None:
            self.thresholds = find_thresholds(self.inputs, self.rule, self.workers, self.progress)
        self.progress.stage("merging", self.inputs.nbytes)
        finished = ordered(self._work(), self._segment, self._new_worker, self.workers)
        for segment, assembly, piece in finished:
            name = segment.info.name
            if segment.start == 0:
                self.sums[name] = np.zeros(self.n + 1, np.uint64)
            self.sums[name] += piece.sums
            self.dissent += piece.dissent
            self.sampled += piece.sampled
            assembly.add(piece)
            self.progress.advance(self.inputs.bytes_of(name, segment.stop - segment.start))
            if segment.stop == segment.info.elements:
                yield name, assembly.entry()
        for info in self.inputs.kept:
            self._read_kept(info)
        self.inputs.check_unchanged()
        self._check_pool()

    def majority_was_wrong(self) -> bool:
        """TIES gives elements that cancel exactly the majority sign of the whole vector, which is
        only known at the end: if the guess was wrong and mattered, all has to be done again."""
        elected, cancelled = np.sum([worker.compute.ballot for worker in self.crew], axis=0)
        wrong = bool(cancelled) and elected <= 0 and self.majority > 0
        if wrong:
            self.majority = -1.0
        return wrong

    def origin(self, digest: bool) -> Origin:
        """Where the result came from; known once all bytes have been read."""
        prints = [
            fingerprint(model.tensors, {name: int(s[k]) for name, s in self.sums.items()})
            for k, model in enumerate(self.inputs.models)
        ]
        members: list[dict[str, Any]] = []
        for k, model in enumerate(self.inputs.members):
            member: dict[str, Any] = {"name": model.path.name, "fingerprint": prints[k + 1]}
            if self.sampled:
                member["sole_dissent"] = int(self.dissent[k]) / self.sampled
            members.append(member)
        return Origin(
            rule=self.rule.name,
            n=self.n,
            base=prints[0],
            options=self.rule.options,
            members=members,
            sampled=self.sampled,
            kept=[info.name for info in self.inputs.kept],
            digests={m.path.name: digest_of(m) for m in self.inputs.models if digest and m.files},
            versions=versions(),
        )

    # -------------------------------------------------------------------------------- the one pass

    def _work(self) -> Iterator[tuple[Segment, Assembly]]:
        assembly: Assembly | None = None
        for segment in segments(self.inputs.merged):
            info = segment.info
            if segment.start == 0 or assembly is None:
                dtype = self.value_dtype(info.name)
                assembly = Assembly(info, dtype, self.layout, self.budget, self.rule.mostly_dense)
            yield segment, assembly

    def _new_worker(self) -> Worker:
        worker = Worker(TileReader(self.inputs), make_compute(self.device, self.rule), {})
        self.crew.append(worker)
        return worker

    def _segment(
        self, worker: Worker, work: tuple[Segment, Assembly]
    ) -> tuple[Segment, Assembly, Piece]:
        segment, assembly = work
        name = segment.info.name
        assert self.thresholds is not None
        count = segment.stop - segment.start
        if assembly.whole is None:
            strips = -(-count // kernels.STRIP)
            mask, out = (
                np.empty(strips * kernels.STRIP // 64, np.uint64),
                worker.room(assembly.kind),
            )
        else:
            mask, out = np.empty(0, np.uint64), assembly.whole[segment.start : segment.stop]
        task = Task(
            segment,
            self.thresholds.limits(name),
            self.rule.constants(self.n) + self.thresholds.constants(name, self.majority),
            self.rule.divisor(self.n),
            np.zeros(self.n + 1, np.uint64),
            mask,
            out,
        )
        nonzero = worker.compute.segment(worker.reader, task)
        if nonzero < 0:
            self._explain(segment.info)
        values = out[:nonzero].copy() if mask.size else NOTHING
        bits = mask.view(np.uint8)[: -(-count // 8)]
        dissent, sampled = self._count_dissent(worker.reader, segment)
        return segment, assembly, Piece(nonzero, bits, values, task.sums, dissent, sampled)

    def _count_dissent(self, reader: TileReader, segment: Segment) -> tuple[NDArray[np.int64], int]:
        """How often each member alone kept the others from agreeing, in a sample of strips, and
        how many elements were looked at.

        Below three members the question makes no sense.
        """
        dissent, sampled = np.zeros(self.n, np.int64), 0
        every = 1 if self.elements <= EXACT_DISSENT else 256
        unused = np.zeros(self.n + 1, np.uint64)
        for j, start in enumerate(range(segment.start, segment.stop, kernels.STRIP)):
            if self.n >= 3 and (segment.strip + j) % every == 0:
                size = min(kernels.STRIP, segment.stop - start)
                rows = reader.read(segment.info.name, start, size, unused)
                kernels.count_dissent(rows, size, dissent)
                sampled += size
        return dissent, sampled

    # ------------------------------------------------------------------------------------- checks

    def _read_kept(self, info: TensorInfo) -> None:
        """Checksums of a tensor that is not merged, for the fingerprints."""
        buffer = np.empty(1 << 20, np.uint8)
        sums = [tensor_checksum(m, m.tensors[info.name], buffer) for m in self.inputs.models]
        check_identical(self.inputs.models, info, [s == sums[0] for s in sums[1:]])
        self.sums[info.name] = np.array(sums, np.uint64)
        self.progress.advance(sum(i.nbytes for i in self.inputs.infos(info.name)))

    def _check_pool(self) -> None:
        """Refuse members that say nothing new."""
        if self.allow_duplicates:
            return
        seen: dict[tuple[Any, ...], int] = {}
        for k, model in enumerate(self.inputs.models):
            infos = [model.tensors[info.name] for info in self.inputs.merged]
            key = tuple((i.dtype, int(self.sums[i.name][k])) for i in infos)
            first = seen.setdefault(key, k)
            if first == k:
                continue
            if first == 0:
                raise MismatchError(
                    f"{model.path}: its weights are the base's: nothing can be unanimous. "
                    "Leave it out"
                )
            raise MismatchError(
                f"{model.path}: the same weights as {self.inputs.models[first].path}; "
                f"leave one out, or allow duplicates{'' if model.files else SHARED}"
            )

    def _explain(self, info: TensorInfo) -> None:
        """Find which model holds the number that made a result useless, and say so."""
        for model in self.inputs.models:
            own = model.tensors[info.name]
            step = SEGMENT * FLOATS[own.dtype]
            bad = 0
            for start in range(0, own.nbytes, step):
                raw = model.read(own, start, min(start + step, own.nbytes))
                bad += int(np.count_nonzero(~np.isfinite(widen(raw, own.dtype))))
            if bad:
                raise ValueRangeError(
                    f"{model.path} {shown(info.name)}: {bad} of {own.elements} values are NaN or "
                    "infinite; such a model cannot be merged"
                )
        raise ValueRangeError(
            f"{shown(info.name)}: the merged change does not fit {self.value_dtype(info.name)}; "
            "are these models of one base?"
        )
