"""Fold members one at a time as they finish training: disk and memory do not grow with the pool.

The state holds, for every element, the statistics that the wanted rules need, the number of members
and their fingerprints. It is saved whole or not at all, so a member is counted once or not yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoint import Checkpoint
from negmerge.errors import (
    FileError,
    MismatchError,
    NegMergeError,
    OptionError,
    ValueRangeError,
    shown,
)
from negmerge.files import atomic, temporary, write
from negmerge.fingerprint import fingerprint, fingerprint_of, tensor_checksum
from negmerge.header import build_header
from negmerge.merge import kernels
from negmerge.merge.inputs import Buffers, Inputs, open_model
from negmerge.merge.rules import Rule, make_rule, rules
from negmerge.merge.statistics import NUMPY, STATISTICS
from negmerge.merge.tiles import SEGMENT, Segment, TileReader, segments
from negmerge.merge.trim import Thresholds, find_thresholds
from negmerge.parallel import available_workers, ordered
from negmerge.patch import Entry, Layout, Origin, header_room, versions
from negmerge.progress import Progress, Quiet
from negmerge.reading import parse_json_value
from negmerge.state_dict import Model, PathLike, StateDict
from negmerge.task_vector import TaskVector

FORMAT = "negmerge-accumulator/1"
"""A tensor `NAME#STATISTIC` for every tensor and statistic."""
COMPACT = "negmerge-accumulator/2"
"""One tensor for each statistic, for models of so many tensors that a header cannot list them."""
MEMBER = "m" * 64
"""The name of a member, for the room that a thousand of them take."""
Array = NDArray[Any]


class Accumulator:
    """The running state of a merge.

    >>> base, pool = getfixture("small_pool")
    >>> acc = Accumulator(base)
    >>> [acc.add(path) for path in pool], acc.add(pool[0])
    ([True, True, True], False)
    >>> acc.finish("consensus").origin.n
    3

    base: the model all members start from, a file, a folder or a state dict, which is copied: the
        tensors of `model.state_dict()` change when the model is trained.
    rules: what `finish` must be able to serve, by name or name → options; `consensus` (by mean)
        also serves conflict, uniform and localize.
    buffers: `keep` the base's BatchNorm statistics, or `merge` them.
    """

    def __init__(
        self,
        base: Model,
        rules: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("consensus",),
        buffers: Buffers = "keep",
        workers: int | None = None,
    ) -> None:
        if isinstance(rules, str):
            raise OptionError(f"rules: got {rules!r}, wanted a list of names; put it in brackets")
        chosen = rules if isinstance(rules, Mapping) else dict.fromkeys(rules)
        self._rules = {name: make_rule(name, options) for name, options in chosen.items()}
        self._base = StateDict(base, "base", copied=True) if isinstance(base, Mapping) else base
        self._buffers: Buffers = buffers
        self._workers = available_workers(workers)
        self.members: list[dict[str, str]] = []
        self._half: Path | None = None
        """The member that is being folded; it stays here if that was broken off."""
        with open_model(self._base, "base") as model:
            self.base = fingerprint_of(model)
        self._state: dict[str, dict[str, Array]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._kept: list[str] = []
        names = self._statistics()
        with Inputs(self._base, [self._base], buffers, allow_duplicates=True) as inputs:
            self._kept = [info.name for info in inputs.kept]
            for info in inputs.merged:
                self._shapes[info.name] = info.shape
                self._dtypes[info.name] = "F64" if info.dtype == "F64" else "F32"
                self._state[info.name] = {
                    s: np.full(info.elements, STATISTICS[s].start, NUMPY[STATISTICS[s].dtype])
                    for s in names
                }
        # Members may be gone when a state or a patch is written: it must be sure that both can be.
        self._header()
        header_room(
            {name: (self._dtypes[name], shape) for name, shape in self._shapes.items()},
            self._kept,
            [MEMBER] * 1000,
        )

    def made_for(self, rules: Mapping[str, Mapping[str, Any]], buffers: Buffers) -> bool:
        """Whether it was made for exactly these rules and this policy for buffers."""
        wanted = {name: make_rule(name, options) for name, options in rules.items()}
        return self._rules == wanted and self._buffers == buffers

    @property
    def n(self) -> int:
        """How many members were folded."""
        return len(self.members)

    def add(self, model: Model, progress: Progress | None = None) -> bool:
        """Fold one model; False if its content is in already. A refused model changes nothing.

        It is read twice: it is checked and named first, then folded. If folding is broken off (an
        interrupt, a file that changes meanwhile), the state is not used any more.

        model: a file, a folder or a state dict.
        """
        self._need_whole()
        progress = progress or Quiet()
        member = open_model(model, f"models[{self.n}]")
        with Inputs(self._base, [member], self._buffers, allow_duplicates=True) as inputs:
            member = inputs.members[0]
            name = self._check(inputs)
            if any(m["fingerprint"] == name for m in self.members):
                return False
            if self.n == 32767:
                raise OptionError("an accumulator holds at most 32767 members")
            trims = self._trims(inputs, progress)
            progress.stage("folding", inputs.nbytes)
            self._half = member.path
            for segment, deltas in self._deltas(inputs):
                part = slice(segment.start, segment.stop)
                limit = trims.get(segment.info.name, 0.0)
                for s, array in self._state[segment.info.name].items():
                    statistic = STATISTICS[s]
                    array[part] = statistic.join(array[part], statistic.of(deltas, limit))
                progress.advance(inputs.bytes_of(segment.info.name, deltas.size))
            inputs.check_unchanged()
            for info in inputs.merged:
                if member.tensors[info.name].dtype == "F64":
                    self._dtypes[info.name] = "F64"
            self.members.append({"name": member.path.name, "fingerprint": name})
            self._half = None
        return True

    def merge(self, other: Accumulator) -> None:
        """Take in the members of another accumulator of the same base and rules."""
        self._need_whole()
        other._need_whole()
        if self.base != other.base:
            raise MismatchError(f"accumulators of different bases: {self.base} and {other.base}")
        if self._rules != other._rules or self._shapes != other._shapes:
            raise MismatchError("accumulators for different rules or tensors cannot be merged")
        twice = {m["fingerprint"] for m in self.members} & {m["fingerprint"] for m in other.members}
        if twice:
            raise MismatchError(
                f"both accumulators hold the member {min(twice)}; it counts once only"
            )
        for name, statistics in self._state.items():
            for s, array in statistics.items():
                array[:] = STATISTICS[s].join(array, other._state[name][s])
            if other._dtypes[name] == "F64":
                self._dtypes[name] = "F64"
        self.members += other.members

    def finish(
        self,
        rule: str = "consensus",
        options: Mapping[str, Any] | None = None,
        layout: Layout = "auto",
    ) -> TaskVector:
        """The merged task vector; more members may be added afterwards."""
        self._need_whole()
        if not self.members:
            raise OptionError("the accumulator is empty: add a member first")
        known = self._rules.get(rule)
        chosen = known if known is not None and options is None else make_rule(rule, options)
        fold, finish = chosen.parts()
        needed = kernels.STATISTICS[fold]
        lacking = [s for s in needed if s not in self._statistics()]
        wrong_trim = chosen.trimmed == "members" and chosen != known
        if lacking or wrong_trim:
            raise OptionError(
                f"this accumulator cannot finish {rule!r} with these options; it was made for: "
                f"{', '.join(self._rules)}. Name the rule when you make it"
            )
        thresholds = self._thresholds(chosen)
        majority = self._majority() if chosen.trimmed == "members" else 1.0
        divisor = chosen.divisor(self.n)
        entries: dict[str, Entry] = {}
        for name, state in self._state.items():
            constants = chosen.constants(self.n) + thresholds.constants(name, majority)
            flat = np.empty(
                prod(self._shapes[name]), np.float64 if self._dtypes[name] == "F64" else np.float32
            )
            for start in range(0, flat.size, SEGMENT):
                part = slice(start, start + SEGMENT)
                with np.errstate(over="ignore", under="ignore"):
                    flat[part] = (
                        finish(constants, *(state[s][part] for s in needed)) / divisor + 0.0
                    )
            if not np.isfinite(flat).all():
                raise ValueRangeError(f"{shown(name)}: the merged change does not fit {flat.dtype}")
            entries[name] = Entry.of(flat, self._shapes[name], layout)
        return TaskVector(entries, self._origin(chosen))

    # ------------------------------------------------------------------------------------- on disk

    def save(self, path: PathLike) -> None:
        """Write the whole state to one file, atomically, and read its header back first."""
        self._need_whole()
        header, places = self._header()
        with atomic(Path(path)) as descriptor:
            write(descriptor, header, 0)
            for s, at in places.items():
                for statistics in self._state.values():
                    write(descriptor, statistics[s].data, at)
                    at += statistics[s].nbytes
            with Checkpoint(temporary(Path(path)), own=True):
                pass

    def _header(self) -> tuple[bytes, dict[str, int]]:
        """The header of a saved state, and where each statistic begins, of all tensors in turn."""
        names, first = sorted(self._statistics()), next(iter(self._state), "")
        metadata = {
            "base": self.base,
            "members": json.dumps(self.members),
            "rules": json.dumps({name: rule.options for name, rule in self._rules.items()}),
            "buffers": self._buffers,
            "dtypes": json.dumps(self._dtypes),
        }
        listed = {
            f"{name}#{s}": (STATISTICS[s].dtype, self._shapes[name])
            for s in names
            for name in self._state
        }
        try:
            header, places = build_header(listed, metadata | {"format": FORMAT})
            return header, {s: places[f"{first}#{s}"] for s in names if first}
        except FileError:
            elements = sum(prod(shape) for shape in self._shapes.values())
            compact = {s: (STATISTICS[s].dtype, (elements,)) for s in names}
            return build_header(compact, metadata | {"format": COMPACT})

    @classmethod
    def load(cls, path: PathLike, base: Model, workers: int | None = None) -> Accumulator:
        """Read a saved state; `base` must be the model it was made for."""
        with Checkpoint(path, own=True) as file:
            metadata = file.metadata
            if metadata.get("format") not in (FORMAT, COMPACT):
                raise FileError(
                    f"{path}: not an accumulator: metadata 'format' is "
                    f"{shown(metadata.get('format'))}, wanted {FORMAT!r}"
                )
            try:
                members, rules, dtypes, buffers = _saved(metadata, path)
                acc = cls(base, rules, buffers, workers)
            except (FileError, OptionError) as error:
                raise FileError(
                    f"{path}: metadata of the accumulator is damaged: {error}"
                ) from error
            place = "base" if isinstance(base, Mapping) else base
            if acc.base != metadata.get("base"):
                raise MismatchError(
                    f"{place}: is not the base of {path}: its fingerprint is {acc.base}, "
                    f"the accumulator wants {metadata.get('base')}"
                )
            elements, first = sum(prod(shape) for shape in acc._shapes.values()), 0
            for name, statistics in acc._state.items():
                for s, array in statistics.items():
                    if metadata["format"] == FORMAT:
                        key, shape, at = f"{name}#{s}", acc._shapes[name], 0
                    else:
                        key, shape, at = s, (elements,), first * array.itemsize
                    info = file.tensors.get(key)
                    if info is None or (info.dtype, info.shape) != (STATISTICS[s].dtype, shape):
                        raise FileError(
                            f"{path} {shown(name)}: statistic {s!r} is missing or damaged"
                        )
                    array[:] = file.read(info, at, at + array.nbytes).view(array.dtype)
                first += prod(acc._shapes[name])
            if dtypes.keys() != acc._dtypes.keys():
                raise FileError(f"{path}: metadata of the accumulator is damaged: dtypes")
            acc.members, acc._dtypes = members, dtypes
        return acc

    # ------------------------------------------------------------------------------------- helpers

    def _need_whole(self) -> None:
        if self._half is not None:
            raise NegMergeError(
                f"{self._half}: was folded into this accumulator only in part, for that was broken "
                "off; load the state that was saved last, or begin again"
            )

    def _statistics(self) -> set[str]:
        found: set[str] = set()
        for name, rule in self._rules.items():
            needed = kernels.STATISTICS[rule.parts()[0]]
            if not set(needed) <= STATISTICS.keys():
                raise OptionError(
                    f"rule {name!r} needs to see every member twice and cannot be accumulated; "
                    f"these can: {', '.join(foldable())}"
                )
            found.update(needed)
        return found

    def _check(self, inputs: Inputs) -> str:
        """The fingerprint of the one member, once all of it was read and found finite."""
        member, sums = inputs.members[0], {info.name: 0 for info in inputs.merged}
        changed = False
        for segment, deltas, seen in self._deltas(inputs, with_sums=True):
            if not np.isfinite(deltas).all():
                raise ValueRangeError(
                    f"{member.path} {shown(segment.info.name)}: "
                    f"{np.count_nonzero(~np.isfinite(deltas))} changes are NaN or infinite"
                )
            changed |= bool(deltas.any())
            sums[segment.info.name] += int(seen[1])
        if not changed:
            raise MismatchError(
                f"{member.path}: its weights are the base's: nothing can be unanimous. Leave it out"
            )
        buffer = np.empty(1 << 20, np.uint8)
        for info in inputs.kept:
            sums[info.name] = tensor_checksum(member, member.tensors[info.name], buffer)
        inputs.check_unchanged()
        return fingerprint(member.tensors, {k: v % 2**64 for k, v in sums.items()})

    def _deltas(self, inputs: Inputs, with_sums: bool = False) -> Iterator[Any]:
        """The member's differences from the base, range by range."""

        def visit(reader: TileReader, segment: Segment) -> tuple[Any, ...]:
            sums = np.zeros(2, np.uint64)
            found = np.empty(segment.stop - segment.start)
            for part in reader.tiles(segment):
                size = part.stop - part.start
                rows = reader.read(part.info.name, part.start, size, sums)
                at = part.start - segment.start
                with np.errstate(invalid="ignore", over="ignore"):
                    found[at : at + size] = rows[1, :size].astype(np.float64) - rows[0, :size]
            return (segment, found, sums) if with_sums else (segment, found)

        work = segments(inputs.merged)
        yield from ordered(work, visit, lambda: TileReader(inputs), self._workers)

    def _trims(self, inputs: Inputs, progress: Progress) -> dict[str, float]:
        """The member's own thresholds by tensor, if a rule trims members."""
        for rule in self._rules.values():
            if rule.trimmed == "members":
                found = find_thresholds(inputs, rule, self._workers, progress).found
                return {name: float(limits[0]) for name, limits in found.items()}
        return {}

    def _thresholds(self, rule: Rule) -> Thresholds:
        thresholds = Thresholds(rule, {})
        if rule.trimmed != "mean":
            return thresholds
        names = list(self._state)
        for group in [names] if rule.options["scope"] == "model" else [[name] for name in names]:
            values = np.concatenate([abs(self._state[name]["total"] / self.n) for name in group])
            k = int(rule.options["density"] * values.size)
            place = values.size - k - 1
            least = 0.0 if place < 0 else float(np.partition(values, place)[place])
            thresholds.found.update({name: np.array([least]) for name in group})
        return thresholds

    def _majority(self) -> float:
        elected = 0
        for state in self._state.values():
            elected += int(np.sign(state["gain"] + state["loss"]).sum())
        return 1.0 if elected > 0 else -1.0

    def _origin(self, rule: Rule) -> Origin:
        return Origin(
            rule=rule.name,
            n=self.n,
            base=self.base,
            options=rule.options,
            members=sorted(self.members, key=lambda m: m["fingerprint"]),
            kept=self._kept,
            versions=versions(),
        )


def _saved(metadata: Mapping[str, str], path: PathLike) -> tuple[Any, Any, dict[str, str], Any]:
    """Members, rules, dtypes and buffers of a saved accumulator, checked."""
    members, rules, dtypes = (
        parse_json_value(metadata.get(name, ""), path, name)
        for name in ("members", "rules", "dtypes")
    )
    fits = {
        "members": _all(members, list, _is_member),
        "rules": _all(rules, dict, lambda options: type(options) is dict),
        "dtypes": _all(dtypes, dict, lambda dtype: dtype in ("F32", "F64")),
        "buffers": metadata.get("buffers") in ("keep", "merge"),
    }
    for name, fit in fits.items():
        if not fit:
            raise FileError(f"{name} is {shown(metadata.get(name))}")
    return members, rules, dtypes, metadata["buffers"]


def _is_member(value: Any) -> bool:
    texts = _all(value, dict, lambda text: type(text) is str)
    return texts and set(value) == {"name", "fingerprint"}


def _all(value: Any, kind: type, fits: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or dict all of whose values fit."""
    return type(value) is kind and all(map(fits, value.values() if kind is dict else value))


def foldable() -> list[str]:
    """The rules that an accumulator can serve.

    >>> "consensus" in foldable(), "tall" in foldable()
    (True, False)
    """
    return [
        name
        for name in rules
        if set(kernels.STATISTICS[rules.get(name)().parts()[0]]) <= STATISTICS.keys()
    ]
