"""`nm.merge_and_apply`: θ + s·τ in one pass over the models, without a patch.

A worker merges a segment, adds it to the base and writes the sum to its place in the output. τ is
rounded to the format that a patch would store, so that the result has the bytes of `nm.merge` and
`nm.apply`. Every model is read once from the disk, and at most twice before that for rules with a
first pass (TIES, localize); a segment of the base is read again while it is in the page cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import aligned_buffer
from negmerge.checkpoints.dtypes import FLOAT_NAMES, NUMPY_TYPES, SIZES, Bytes
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.state_dict import Model, PathLike
from negmerge.errors import OptionError, ValueRangeError
from negmerge.merging.assembly import NOTHING, Assembly, Piece
from negmerge.merging.computation import Worker, check_device
from negmerge.merging.engine import Entries, Merge, Merged
from negmerge.merging.inputs import Buffers, Inputs
from negmerge.merging.memory import Budget
from negmerge.merging.patterns import Globs, Patterns, make_patterns
from negmerge.merging.rule import make_rule
from negmerge.merging.tiles import SEGMENT, Segment, segments
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.support.remote.scratch import given_name
from negmerge.vectors.addition import scale_words
from negmerge.vectors.entry import Entry
from negmerge.vectors.output import Applied, write_model
from negmerge.vectors.ranges import Adder, Range
from negmerge.vectors.task_vector import TaskVector


def merge_and_apply(
    base: Model,
    models: Sequence[Model],
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
    workers: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
    progress: Progress | None = None,
) -> Applied:
    """Write θ + scale·τ in one pass over the models, for those who know their scale.

    The output has the bytes that `nm.merge` and then `nm.apply` write.

    >>> import tempfile
    >>> import negmerge as nm
    >>> base = {"w": np.ones(3, np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = Path(folder, "unlearned.safetensors")
    ...     done = nm.merge_and_apply(base, [{"w": np.array([3, 1, 0], np.float32)}], -0.5, out)
    ...     done.changed, out.exists()
    (2, True)

    Args:
        base: a file, folder or state dict, as in `nm.merge`.
        models: the fine-tuned models, in the same forms, or folders of LoRA adapters.
        scale: the factor of the task vector: −λ to forget, λ to learn.
        out: a `.safetensors` file, or a folder, as in `nm.apply`.
        rule: a name that `negmerge list rules` shows.
        options: the options of the rule.
        dtype: `keep`, or float64, float32, bfloat16 or float16 for all float tensors.
        shard_size: the largest size of a shard in bytes; by default the shards of the base.
        include: patterns of the names of tensors to merge; by default all are merged.
        exclude: patterns of the names of tensors that stay as they are.
        buffers: `keep` the BatchNorm statistics of the base, or `merge` them like weights.
        equalise: scale all members to one norm before the rule.
        workers: the number of threads; all cores if not given.
        max_memory: the number of bytes that the process may use.
        device: `cpu`, or `cuda` to compute on a GPU with torch; the result has the same bytes.
        allow_duplicates: accept models with the same content.
        progress: reports the progress.
    """
    check_output_options(scale, dtype)
    chosen = make_rule(rule, options or {})
    check_device(device)
    path = Path(out)
    patterns = make_patterns(include, exclude)
    with Inputs(base, models, buffers, allow_duplicates, progress, patterns) as inputs:
        budget = Budget(max_memory, path.absolute().parent)
        threads = budget.workers(worker_count(workers))
        job = MergeAndApply(
            inputs, chosen, "auto", "keep", threads, budget, device, progress or Quiet(), equalise
        )
        job.scale, job.given = float(scale), given_words(buffers, patterns, equalise)
        return write_model(job, path, dtype, shard_size)


def given_words(buffers: Buffers, patterns: Patterns, equalise: bool) -> list[str]:
    """Return the arguments of a command that the rule and its options do not tell."""
    words = ["--buffers", buffers] if buffers == "merge" else []
    return [*words, *patterns.words(), *(["--equalise"] if equalise else [])]


def check_output_options(scale: float, dtype: str) -> None:
    """Raise for a scale or a format that no model can be written with."""
    if dtype != "keep" and dtype not in FLOAT_NAMES:
        raise OptionError(f"dtype {dtype!r}: wanted keep, {', '.join(FLOAT_NAMES)}")
    if not np.isfinite(scale):
        raise ValueRangeError(f"scale {scale}: wanted a finite number")


def named_like(inputs: Inputs) -> dict[str, list[str]]:
    """Return all names of each tensor that the base stores twice, by the name that is merged."""
    return {
        name: [name, *(alias for alias, other in inputs.tied.items() if other == name)]
        for name in inputs.tied.values()
    }


class Window:
    """The place of a tensor's values: whatever the range, the memory of the calling thread."""

    def __init__(self, buffers: local, kind: Any) -> None:
        self._buffers, self._kind = buffers, kind

    def __getitem__(self, place: slice) -> NDArray[Any]:
        if not hasattr(self._buffers, "values"):
            self._buffers.values = np.empty(SEGMENT)
        return self._buffers.values.view(self._kind)[: place.stop - place.start]


class Passing(Assembly):
    """The result of a tensor whose segments are not kept: only counted."""

    def __init__(self, info: TensorInfo, dtype: str, whole: Window | None) -> None:
        self.info, self.dtype, self.kind = info, dtype, NUMPY_TYPES[dtype]
        self.whole: Any = whole
        self.pieces: list[Piece] = []

    def entry(self) -> Entry:
        """The shape and the number of values that are not zero, without the values."""
        return Entry(self.info.shape, self.dtype, sum(piece.nonzero for piece in self.pieces))


def passing(
    job: Merge, work: Sequence[Segment], buffers: local
) -> Iterator[tuple[Segment, Passing]]:
    """Yield segments, each with the result of its tensor, whose values are not kept."""
    own: Passing | None = None
    for segment in work:
        if own is None or own.info != segment.info:
            dtype = job.value_dtype(segment.info.name)
            dense = job.rule.mostly_dense
            own = Passing(
                segment.info, dtype, Window(buffers, NUMPY_TYPES[dtype]) if dense else None
            )
        yield segment, own


class MergeAndApply(Merge):
    """A merge whose segments are added to the base; `output.Job` for `write_model`."""

    scale: float
    given: list[str]
    """Arguments of the command that are not in the origin."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self.inputs.base
        self.sources = [source for model in self.inputs.models for source in model.sources]
        self.names = named_like(self.inputs)
        self.changed = self.clamped = 0
        self.lost: dict[str, int] = {}
        self._buffers, self._lock = local(), Lock()

    def run(self, formats: Mapping[str, str], put: Callable[[str, int, Bytes], None]) -> None:
        """Merge all tensors and write the sums."""
        self._formats, self._put = formats, put
        entries = self.store(dict)
        self.tau = TaskVector(entries, self.origin(digest=False), self.scale)
        self.changed = self.changes.total()
        for name, entry in entries.items():
            if self.scale and (lost := entry.nonzero - self.changes[name]):
                self.lost[formats[name]] = self.lost.get(formats[name], 0) + lost

    def entries(self) -> Entries:
        """Merge all tensors; what an earlier call counted is forgotten."""
        self.changes: Counter[str] = Counter()
        self.clamped = 0
        return super().entries()

    def command(self, settings: Mapping[str, str]) -> list[str] | None:
        """The command that makes the model again, without its output."""
        if not all(model.sources for model in self.inputs.models):
            return None
        words = ["negmerge", "merge", *(given_name(m.path) for m in self.inputs.models)]
        words += ["--rule", self.rule.name]
        words += [w for k, v in self.rule.options.items() for w in ("--option", f"{k}={v}")]
        words += self.given
        words += ["--allow-duplicates"] if self.inputs.allow_duplicates else []
        return words + scale_words(self.scale, settings)

    # ------------------------------------------------------------------------------------ segments

    def _work(self) -> Iterator[tuple[Segment, Assembly]]:
        return passing(self, segments(self.inputs.merged), self._buffers)

    def _segment(self, worker: Worker, work: tuple[Segment, Assembly]) -> Merged:
        segment, assembly, piece = super()._segment(worker, work)
        entry = None
        if piece.nonzero:
            if assembly.whole is None:
                mask, values = piece.mask, piece.values
            else:
                mask, values = None, assembly.whole[segment.start : segment.stop]
            entry = Entry((segment.size,), assembly.dtype, piece.nonzero, mask, values)
        self._add(segment.info, segment.start, segment.stop, entry)
        return segment, assembly, replace(piece, mask=NOTHING, values=NOTHING)

    def _add(self, info: TensorInfo, start: int, stop: int, entry: Entry | None) -> None:
        """Add the merged values of a range to the base, and write the sum."""
        own = self._buffers
        if not hasattr(own, "adder"):
            own.base, own.adder = aligned_buffer(SEGMENT * 8), Adder(SEGMENT, compiled=True)
        size, dtype = SIZES[info.dtype], self._formats[info.name]
        raw = own.base[: (stop - start) * size]
        self.model.read_into(info, start * size, raw)
        part = Range(info, 0, stop - start, 0, entry.nonzero if entry else 0)
        done = own.adder.add(part, entry, raw, dtype, self.scale)
        for name in self.names.get(info.name, (info.name,)):
            self._put(name, start * SIZES[dtype], done.raw)
        with self._lock:
            self.changes[info.name] += done.changed
            self.clamped += done.clamped

    def _read_kept(self, info: TensorInfo) -> None:
        super()._read_kept(info)
        for start in range(0, info.elements, SEGMENT):
            self._add(info, start, min(start + SEGMENT, info.elements), None)
