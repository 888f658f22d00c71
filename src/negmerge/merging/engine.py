"""`nm.merge`: merge all models, one range of elements at a time, in one pass over the files.

Worker threads merge the ranges. Results come back in order and either stay in memory (a TaskVector)
or go straight into the patch file. No result depends on how the work was divided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from negmerge.checkpoints.adapted import Adapted
from negmerge.checkpoints.dtypes import FLOATS, OTHERS, widen
from negmerge.checkpoints.fingerprint import fingerprint, tensor_checksum
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.state_dict import Model, PathLike
from negmerge.errors import FileError, MismatchError, OptionError, ValueRangeError, quoted
from negmerge.merging.assembly import NOTHING, Assembly, Piece
from negmerge.merging.computation import Task, Worker, check_device, make_worker
from negmerge.merging.dissent import sample_dissent
from negmerge.merging.first_pass import FirstPass, Floats, run_first_pass
from negmerge.merging.folds import STRIP
from negmerge.merging.inputs import SAME_AS_BASE, Buffers, Inputs
from negmerge.merging.memory import Budget
from negmerge.merging.norms import SquaredNorms, equal_factors
from negmerge.merging.patterns import Globs, make_patterns
from negmerge.merging.rule import Numbers, Rule, make_rule
from negmerge.merging.tiles import SEGMENT, Segment, segments
from negmerge.registry import nearest
from negmerge.support.files import file_digest, same_file
from negmerge.support.parallel import run_in_order, worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.vectors.entry import Entry, Layout
from negmerge.vectors.origin import Origin, versions
from negmerge.vectors.patch import PatchWriter, new_patch_file
from negmerge.vectors.task_vector import TaskVector
from negmerge.vectors.values import Rounding, Values, check_values

SHARED = (
    "; state_dict() returns the tensors of the module itself: copy them before training goes on"
)
"""The remedy for a state dict that is the same as another."""
Entries = Iterator[tuple[str, Entry]]
Merged = tuple[Segment, Assembly, Piece]
"""A segment, the tensor that it is a part of, and its result."""
T = TypeVar("T")


def merge(
    base: Model,
    models: Sequence[Model],
    rule: str = "consensus",
    options: Mapping[str, Any] | None = None,
    *,
    out: PathLike | None = None,
    include: Globs = (),
    exclude: Globs = (),
    buffers: Buffers = "keep",
    equalise: bool = False,
    layout: Layout = "auto",
    values: Values = "keep",
    workers: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
    digest: bool = False,
    progress: Progress | None = None,
    **more: Any,
) -> TaskVector:
    """Merge the task vectors of fine-tuned models by a rule.

    >>> import numpy as np
    >>> import negmerge as nm
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> one = {"w": np.array([1, 2, -3, 0], np.float32)}
    >>> two = {"w": np.array([3, -2, -1, 4], np.float32)}
    >>> tau = nm.merge(base, [one, two])  # the signs agree in two elements
    >>> nm.apply(base, tau)["w"]
    array([ 2.,  0., -2.,  0.], dtype=float32)
    >>> nm.merge(base, [one, two], "consensus", zeros="abstain").nonzero
    3

    Args:
        base: a safetensors file, a Hugging Face folder, the URL of one, or a state dict (name →
            torch tensor or numpy array), which errors call `base`.
        models: the fine-tuned models, in the same forms as the base, or folders of LoRA adapters
            (`docs/adapters.md`); errors call state dicts `models[0]`, `models[1]` …
        rule: a name that `negmerge list rules` shows.
        options: the options of the rule; they may also be given as keywords.
        out: the patch file to write while merging; the returned vector reads it lazily. If not
            given, the vector is in memory.
        include: patterns of the names of tensors to merge, such as `model.layers.*`; by default all
            are merged.
        exclude: patterns of the names of tensors that stay as they are.
        buffers: `keep` the BatchNorm statistics of the base, or `merge` them like weights.
        equalise: scale all members to one norm before the rule, so that longer steps alone give
            none more say; the models are read once more for it.
        layout: how tensors are stored: `sparse`, `dense`, or the smallest (`auto`).
        values: `keep` float32 values (float64 if an input is float64), or round them to `float32`
            or `bfloat16`; `origin.values` of the result tells what is lost.
        workers: the number of threads; all cores if not given.
        max_memory: the number of bytes that the process may use.
        device: `cpu`, or `cuda` to compute on a GPU with torch; the result has the same bytes.
        allow_duplicates: accept models with the same content.
        digest: record the SHA-256 of all files.
        progress: reports the progress.
        more: options of the rule.
    """
    chosen = make_rule(rule, _all_options(rule, options or {}, more))
    check_device(device)
    check_values(values)
    path = None if out is None else Path(out)
    patterns = make_patterns(include, exclude)
    with Inputs(base, models, buffers, allow_duplicates, progress, patterns) as inputs:
        budget = Budget(max_memory, None if path is None else path.absolute().parent)
        threads = budget.workers(worker_count(workers))
        job = Merge(
            inputs, chosen, layout, values, threads, budget, device, progress or Quiet(), equalise
        )
        if path is None:
            return TaskVector(job.store(dict), job.origin(digest))
        return write_patch(job, path, digest)


def _all_options(
    rule: str, options: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Join the options that were given as a mapping and as keywords."""
    for key in keywords:
        if key in options:
            raise OptionError(f"merge: option {key!r} is in options and a keyword; give it once")
        names = make_rule(rule).options
        if key not in names:
            raise OptionError(
                f"merge: unknown keyword {key!r}; options of the rule {rule!r}: "
                f"{', '.join(names) or 'none'}; "
                f"arguments of merge: {', '.join(taken := list(signature(merge).parameters)[:-1])}"
                f"{nearest(key, [*names, *taken])}"
            )
    return {**options, **keywords}


def write_patch(job: Merge, path: Path, digest: bool) -> TaskVector:
    """Write a patch while merging; with `digest`, record the SHA-256 of all files."""
    if any(same_file(path, source) for model in job.inputs.models for source in model.sources):
        raise FileError(f"{path}: is also an input; name another output")
    with new_patch_file(path) as descriptor:
        _write(job, descriptor, digest)
    return TaskVector.load(path)


def _write(job: Merge, descriptor: int, digest: bool) -> None:
    tensors = {i.name: (job.value_dtype(i.name), i.shape) for i in job.inputs.merged}
    kept = [info.name for info in job.inputs.kept]
    members = [model.path.name for model in job.inputs.models]
    members += [*job.inputs.tied, *job.inputs.patterns.words()]  # they need room in the header too
    members += job.inputs.hub_sources().values()

    def write(entries: Entries) -> PatchWriter:
        os.ftruncate(descriptor, 0)
        writer = PatchWriter(descriptor, tensors, kept, members, job.layout)
        for name, entry in entries:
            writer.add(name, entry)
        return writer

    job.store(write).finish(job.origin(digest))


@dataclass
class Merge:
    """One merge; `store` does the work, and `origin` may be called after it."""

    inputs: Inputs
    rule: Rule
    layout: Layout
    values: Values
    workers: int
    budget: Budget
    device: str
    progress: Progress
    equalise: bool = False

    def __post_init__(self) -> None:
        self.n = len(self.inputs.members)
        self.elements = sum(info.elements for info in self.inputs.merged)
        self.numbers: Numbers | None = None

    def value_dtype(self, name: str) -> str:
        """Return the format of a merged tensor: float64 if an input is float64, else float32."""
        return "F64" if any(i.dtype == "F64" for i in self.inputs.infos(name)) else "F32"

    def store(self, take: Callable[[Entries], T]) -> T:
        """Merge all tensors, and merge them again if the sums of the tallies change the constants.

        `take` stores the merged tensors and returns the result.
        """
        taken = take(self.entries())
        assert self.numbers is not None
        used = self.numbers.final_constants()
        self.numbers = replace(self.numbers, sums=self._sums())
        return taken if self.numbers.final_constants() == used else take(self.entries())

    def entries(self) -> Entries:
        """Merge tensor by tensor, in the order of their names, and check the pool as a whole."""
        self.checksums = {i.name: np.zeros(self.n + 1, np.uint64) for i in self.inputs.merged}
        self.dissent = np.zeros(self.n + 2, np.int64)
        self.sampled = 0
        self._workers: list[Worker] = []
        self.rounding = Rounding(self.values, self.layout, self.budget.allocate)
        if self.numbers is None:
            self.numbers = self._first_numbers()
        self.progress.stage("merging", self.inputs.nbytes)
        for segment, assembly, piece in self._pieces():
            name = segment.info.name
            self.checksums[name] += piece.checksums
            self.dissent += piece.dissent
            self.sampled += piece.sampled
            assembly.pieces.append(piece)
            if segment.stop == segment.info.elements:
                yield name, self.rounding.rounded(name, assembly.entry())
        for info in self.inputs.kept:
            self._read_kept(info)
        for alias, name in self.inputs.tied.items():
            self.checksums[alias] = self.checksums[name]
        self.inputs.check_unchanged()
        self._check_pool()

    def origin(self, digest: bool) -> Origin:
        """Return the origin of the result; it is known once all bytes have been read."""
        base, *members = (
            fingerprint(model.tensors, {name: int(s[k]) for name, s in self.checksums.items()})
            for k, model in enumerate(self.inputs.models)
        )
        *alone, agreeing, pairs = map(int, self.dissent)
        shares = [
            {"sole_dissent": count / self.sampled} if self.sampled and self.n > 2 else {}
            for count in alone
        ]
        return Origin(
            rule=self.rule.name,
            n=self.n,
            base=base,
            options=self.rule.options,
            members=[
                {"name": model.path.name, "fingerprint": own, **share}
                for model, own, share in zip(self.inputs.members, members, shares, strict=True)
            ],
            sampled=self.sampled,
            agreement={"pairs": pairs, "agreeing": agreeing} if pairs else {},
            kept=[info.name for info in self.inputs.kept],
            digests={
                m.path.name: file_digest(*m.files) for m in self.inputs.models if digest and m.files
            },
            versions=versions(),
            values=self.rounding.record(),
            tied=self.inputs.tied,
            include=[*self.inputs.patterns.include],
            exclude=[*self.inputs.patterns.exclude],
            factors=[] if self.inputs.factors is None else self.inputs.factors.tolist(),
            hub=self.inputs.hub_sources(),
        )

    # ------------------------------------------------------------------------------------ segments

    def _first_numbers(self) -> Numbers:
        """Return what is known before the merge; find the factors of the members."""
        self.rule.check_members(self.n)
        if self.equalise:
            squares = self._find_numbers(SquaredNorms(), "norms")
            for info in self.inputs.merged:
                if not np.isfinite(squares[info.name]).all():
                    self._raise_not_finite(info)
            self._scale(equal_factors(self.inputs, squares))
        return Numbers(self.rule, self.n, self._find_numbers(self.rule.first_pass(), "first pass"))

    def _find_numbers(self, first: FirstPass | None, stage: str) -> dict[str, Floats]:
        """Return the numbers that a first pass finds for each tensor."""
        return run_first_pass(first, self.inputs, self.workers, self.progress, stage)

    def _scale(self, factors: Floats) -> None:
        """Multiply the changes of the members from now on."""
        self.inputs.factors = factors

    def _pieces(self) -> Iterator[Merged]:
        """Merge all segments, and yield them in order; report the progress."""
        for merged in run_in_order(self._work(), self._segment, self._new_worker, self.workers):
            yield merged
            segment = merged[0]
            self.progress.advance(self.inputs.bytes_of(segment.info.name, segment.size))

    def _sums(self) -> tuple[int, ...]:
        """Return the sums of the tallies over all segments."""
        tallies = [worker.tally for worker in self._workers]
        return tuple(map(int, np.sum(tallies, axis=0)))

    def _work(self) -> Iterator[tuple[Segment, Assembly]]:
        assembly: Assembly | None = None
        for segment in segments(self.inputs.merged):
            info = segment.info
            if segment.start == 0 or assembly is None:
                dtype = self.value_dtype(info.name)
                assembly = Assembly(info, dtype, self.layout, self.budget, self.rule.mostly_dense)
            yield segment, assembly

    def _new_worker(self) -> Worker:
        worker = make_worker(self.device, self.inputs, self.rule)
        self._workers.append(worker)
        return worker

    def _segment(self, worker: Worker, work: tuple[Segment, Assembly]) -> Merged:
        segment, assembly = work
        assert self.numbers is not None
        if assembly.whole is None:
            mask = np.empty(-(-segment.size // STRIP) * STRIP // 64, np.uint64)
            out = worker.room.free(segment.size + 1, assembly.kind)
        else:
            mask, out = np.empty(0, np.uint64), assembly.whole[segment.start : segment.stop]
        checksums = np.zeros(self.n + 1, np.uint64)
        task = Task(segment, self.numbers.of(segment.info.name), checksums, mask, out)
        nonzero = worker.segment(task)
        if nonzero < 0:
            self._raise_not_finite(segment.info)
        values = out[:nonzero] if mask.size else NOTHING
        if self.budget.folder is None:
            worker.room.take(values.nbytes)
        else:  # the next segment is written to the same memory, which is bounded
            values = values.copy()
        bits = mask.view(np.uint8)[: -(-segment.size // 8)]
        dissent, sampled = sample_dissent(worker.reader, segment, self.elements)
        return segment, assembly, Piece(nonzero, bits, values, checksums, dissent, sampled)

    # ------------------------------------------------------------------------------------- checks

    def _read_kept(self, info: TensorInfo) -> None:
        """Compute the checksums of a tensor that is not merged, for the fingerprints."""
        buffer = np.empty(1 << 20, np.uint8)
        name, base = info.name, tensor_checksum(self.inputs.base, info, buffer)
        found = [base]
        for model in self.inputs.members:
            shared = isinstance(model, Adapted) and name not in model.changed
            own = base if shared else tensor_checksum(model, model.tensors[name], buffer)
            found.append(own)
            if own != base and info.dtype in OTHERS and name in self.inputs.chosen:
                raise MismatchError(
                    f"{model.path} {quoted(name)}: {info.dtype} cannot be merged and differs "
                    f"from the base; convert the models to {', '.join(FLOATS)} first"
                )
        self.checksums[name] = np.array(found, np.uint64)
        self.progress.advance(sum(i.nbytes for i in self.inputs.infos(name)))

    def _check_pool(self) -> None:
        """Raise if a model has the weights of the base or of another model."""
        if self.inputs.allow_duplicates:
            return
        seen: dict[tuple[Any, ...], int] = {}
        for k, model in enumerate(self.inputs.models):
            key = tuple(
                (model.tensors[info.name].dtype, int(self.checksums[info.name][k]))
                for info in self.inputs.merged
            )
            first = seen.setdefault(key, k)
            if first == k:
                continue
            if first == 0:
                raise MismatchError(f"{model.path}: {SAME_AS_BASE}")
            raise MismatchError(
                f"{model.path}: has the same weights as {self.inputs.models[first].path}; "
                "remove one of them; `negmerge merge --allow-duplicates` accepts both"
                f"{'' if model.files else SHARED}"
            )

    def _raise_not_finite(self, info: TensorInfo) -> None:
        """Raise an error that names the model whose NaN or infinity makes the result not finite."""
        for model in self.inputs.models:
            own = model.tensors[info.name]
            step = SEGMENT * FLOATS[own.dtype]
            bad = 0
            for start in range(0, own.nbytes, step):
                raw = model.read(own, start, min(start + step, own.nbytes))
                bad += int(np.count_nonzero(~np.isfinite(widen(raw, own.dtype))))
            if bad:
                raise ValueRangeError(
                    f"{model.path} {quoted(info.name)}: {bad} of {own.elements} values are NaN or "
                    "infinite; remove this model"
                )
        raise ValueRangeError(
            f"{quoted(info.name)}: the merged change does not fit {self.value_dtype(info.name)}; "
            "check that all models were fine-tuned from this base"
        )
