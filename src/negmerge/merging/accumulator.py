"""`nm.Accumulator`: fold members one at a time, so that disk and memory do not grow with the pool.

The state holds the statistics of every element that the rules need, and the names and fingerprints
of the members. A file of the state is written atomically, so that it holds each member once or not
at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import NUMPY_TYPES
from negmerge.checkpoints.fingerprint import fingerprint, fingerprint_of, tensor_checksum
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.state_dict import Model, PathLike, StateDict
from negmerge.errors import MismatchError, NegMergeError, OptionError, ValueRangeError, quoted
from negmerge.merging.accumulator_file import (
    damaged,
    read_arrays,
    read_metadata,
    state_header,
    write_state,
)
from negmerge.merging.first_pass import AccumulatedMean, Floats, changes_of, run_first_pass
from negmerge.merging.inputs import SAME_AS_BASE, Buffers, Inputs
from negmerge.merging.patterns import Globs, make_patterns
from negmerge.merging.rule import Numbers, Rule, make_rule
from negmerge.merging.shared_statistics import Limits, needed_by, shared_statistics
from negmerge.merging.statistics import TOTAL, Statistic
from negmerge.merging.tiles import SEGMENT, visit_tiles
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.vectors.entry import Entry, Layout
from negmerge.vectors.origin import Origin, versions
from negmerge.vectors.patch import header_size
from negmerge.vectors.task_vector import TaskVector, open_model


class Accumulator:
    """The statistics of all members so far, from which a rule computes the merged task vector.

    >>> import numpy as np
    >>> import negmerge as nm
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> acc = nm.Accumulator(base)
    >>> acc.add({"w": np.array([1, 2, -3, 0], np.float32)})
    True
    >>> acc.add({"w": np.array([3, -2, -1, 4], np.float32)})
    True
    >>> tau = acc.finish("consensus")
    >>> nm.apply(base, tau)["w"]
    array([ 2.,  0., -2.,  0.], dtype=float32)

    Args:
        base: the model that all members start from: a file, a folder or a state dict. A state dict
            is copied, because training changes the tensors of `model.state_dict()`.
        rules: the rules that `finish` must be able to serve: names, or name → options. `consensus`
            (by mean) also serves conflict, uniform and localize.
        buffers: `keep` the BatchNorm statistics of the base, or `merge` them.
        workers: the number of threads; all cores if not given.
        include, exclude: the tensors to merge, as in `nm.merge`.
    """

    def __init__(
        self,
        base: Model,
        rules: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("consensus",),
        buffers: Buffers = "keep",
        workers: int | None = None,
        include: Globs = (),
        exclude: Globs = (),
    ) -> None:
        if isinstance(rules, str):
            raise OptionError(f"rules: got {rules!r}, wanted a list of names; put it in brackets")
        self._rules = _make_rules(rules if isinstance(rules, Mapping) else dict.fromkeys(rules))
        self._statistics = shared_statistics(self._rules)
        self._base = StateDict(base, "base", copied=True) if isinstance(base, Mapping) else base
        self._buffers: Buffers = buffers
        self._patterns = make_patterns(include, exclude)
        self._workers = worker_count(workers)
        self.members: list[dict[str, str]] = []
        self._unfinished: Path | None = None
        """The member that is being folded; still set after an interruption."""
        self._state: dict[str, dict[str, NDArray[Any]]] = {}
        self._dtypes: dict[str, str] = {}
        with self._inputs(self._base) as inputs:
            self._tied = inputs.tied
            self.base = fingerprint_of(inputs.base)
            self._kept = [info.name for info in inputs.kept]
            self._shapes = {info.name: info.shape for info in inputs.merged}
            for info in inputs.merged:
                self._dtypes[info.name] = "F64" if info.dtype == "F64" else "F32"
                self._state[info.name] = {
                    one.name: np.full(info.elements, one.start, "i2" if one.count else "f8")
                    for one in self._statistics
                }
        # Members may be deleted before a state or a patch is written: both must be possible.
        state_header(self._state, self._shapes, self._metadata())
        tensors = {name: (self._dtypes[name], shape) for name, shape in self._shapes.items()}
        header_size(tensors, self._kept, ["m" * 64] * 1000)  # a thousand members with long names

    def made_for(
        self,
        rules: Mapping[str, Mapping[str, Any]],
        buffers: Buffers,
        include: Globs = (),
        exclude: Globs = (),
    ) -> bool:
        """Return whether the accumulator was made for exactly these rules, buffers and tensors."""
        given = (_make_rules(rules), buffers, make_patterns(include, exclude))
        return (self._rules, self._buffers, self._patterns) == given

    @property
    def n(self) -> int:
        """The number of members."""
        return len(self.members)

    def add(self, model: Model, progress: Progress | None = None) -> bool:
        """Fold one model; return False if a member has the same content.

        The model is read twice: to check it and compute its fingerprint, then to fold it. A model
        that is refused changes nothing. After an interruption or an error while it is folded, the
        accumulator refuses to be used.
        """
        self._check_usable()
        progress = progress or Quiet()
        with self._inputs(model) as inputs:
            if inputs.tied != self._tied:
                raise MismatchError(
                    f"{inputs.members[0].path}: its head is not tied to its embedding, that of the "
                    "base is; use nm.merge, which compares all models"
                )
            member = inputs.members[0]
            name = self._check(inputs)
            if any(m["fingerprint"] == name for m in self.members):
                return False
            if self.n == 32767:
                raise OptionError("an accumulator holds at most 32767 members")
            limits = self._member_limits(inputs, progress)
            progress.stage("folding", inputs.nbytes)
            self._unfinished = member.path
            for tile, (deltas,), _ in visit_tiles(inputs, changes_of, self._workers):
                tensor, part = tile.info.name, slice(tile.start, tile.stop)
                for one in self._statistics:
                    array = self._state[tensor][one.name]
                    limit = limits[one][tensor] if one in limits else 0.0
                    array[part] = one.join(array[part], one.value_of(deltas, limit))
                progress.advance(inputs.bytes_of(tensor, tile.size))
            inputs.check_unchanged()
            wide = [i.name for i in inputs.merged if member.tensors[i.name].dtype == "F64"]
            self._dtypes |= dict.fromkeys(wide, "F64")
            self.members.append({"name": member.path.name, "fingerprint": name})
            self._unfinished = None
        return True

    def merge(self, other: Accumulator) -> None:
        """Add the members of another accumulator of the same base and rules."""
        self._check_usable()
        other._check_usable()
        if self.base != other.base:
            raise MismatchError(
                f"accumulators: the bases differ: {self.base} and {other.base}; "
                "only accumulators of one base can be merged"
            )
        if self._rules != other._rules or self._shapes != other._shapes:
            raise MismatchError(
                "accumulators: the rules or tensors differ; only accumulators of the same rules "
                "and tensors can be merged"
            )
        twice = {m["fingerprint"] for m in self.members} & {m["fingerprint"] for m in other.members}
        if twice:
            raise MismatchError(
                f"accumulators: both have the member {min(twice)}; each member counts once"
            )
        for name, state in self._state.items():
            for one in self._statistics:
                state[one.name][:] = one.join(state[one.name], other._state[name][one.name])
        self._dtypes |= {name: dtype for name, dtype in other._dtypes.items() if dtype == "F64"}
        self.members += other.members

    def finish(
        self,
        rule: str = "consensus",
        options: Mapping[str, Any] | None = None,
        layout: Layout = "auto",
    ) -> TaskVector:
        """Return the merged task vector; more members may be added afterwards.

        Args:
            options: the options of the rule; those of the accumulator if not given.
            layout: how tensors are stored: `sparse`, `dense`, or the smaller one (`auto`).
        """
        self._check_usable()
        if not self.members:
            raise OptionError("the accumulator is empty: add a member first")
        own = self._rules.get(rule) if options is None else None
        chosen = own or make_rule(rule, options)
        if not needed_by(chosen).items() <= self._statistics.items():
            raise OptionError(
                f"this accumulator cannot finish {rule!r} with these options; it was made for: "
                f"{', '.join(self._rules)}; name this rule when you make the accumulator"
            )
        statistics, finish = chosen.parts()
        numbers = self._numbers(chosen)
        entries: dict[str, Entry] = {}
        for name, state in self._state.items():
            _, constants, divisor = numbers.of(name)
            flat = np.empty(prod(self._shapes[name]), NUMPY_TYPES[self._dtypes[name]])
            for start in range(0, flat.size, SEGMENT):
                part = slice(start, start + SEGMENT)
                values = (state[one.name][part] for one in statistics)
                with np.errstate(over="ignore", under="ignore"):
                    flat[part] = finish(constants, *values) / divisor + 0.0
            if not np.isfinite(flat).all():
                raise ValueRangeError(
                    f"{quoted(name)}: the merged change does not fit {flat.dtype}"
                )
            entries[name] = Entry.of(flat, self._shapes[name], layout)
        origin = Origin(
            rule=chosen.name,
            n=self.n,
            base=self.base,
            options=chosen.options,
            members=sorted(self.members, key=lambda m: m["fingerprint"]),
            kept=self._kept,
            versions=versions(),
            tied=self._tied,
            include=[*self._patterns.include],
            exclude=[*self._patterns.exclude],
        )
        return TaskVector(entries, origin)

    def save(self, path: PathLike) -> None:
        """Write the state to one file, atomically."""
        self._check_usable()
        write_state(path, self._state, self._shapes, self._metadata())

    @classmethod
    def load(cls, path: PathLike, base: Model, workers: int | None = None) -> Accumulator:
        """Read a file that `save` wrote; `base` is the model that the accumulator was made for."""
        with Checkpoint(path, own=True) as file:
            saved = read_metadata(file)
            try:
                shared_statistics(_make_rules(saved["rules"]))
            except OptionError as error:
                raise damaged(file, error) from error
            given = (saved["buffers"], workers, saved["include"], saved["exclude"])
            acc = cls(base, saved["rules"], *given)
            if acc.base != file.metadata.get("base"):
                raise MismatchError(
                    f"{'base' if isinstance(base, Mapping) else base}: is not the base of {path}: "
                    f"got fingerprint {acc.base}, wanted {file.metadata.get('base')}"
                )
            read_arrays(file, acc._state, acc._shapes)
            if saved["dtypes"].keys() != acc._dtypes.keys():
                raise damaged(file, "dtypes")
            acc.members, acc._dtypes = saved["members"], saved["dtypes"]
        return acc

    # ------------------------------------------------------------------------------------- helpers

    def _inputs(self, model: Model | Checkpoint) -> Inputs:
        """Open the base and one model, which errors call by the number of the next member."""
        is_path = isinstance(model, str | os.PathLike)
        member = model if is_path else open_model(model, f"models[{self.n}]")
        return Inputs(self._base, [member], self._buffers, True, patterns=self._patterns)

    def _check_usable(self) -> None:
        """Raise if a member was folded only in part."""
        if self._unfinished is not None:
            raise NegMergeError(
                f"{self._unfinished}: was folded into this accumulator only in part, because of an "
                "interruption or an error; load the state that was saved last, or make a new "
                "accumulator"
            )

    def _metadata(self) -> dict[str, str]:
        return {
            "base": self.base,
            "members": json.dumps(self.members),
            "rules": json.dumps({name: rule.options for name, rule in self._rules.items()}),
            "buffers": self._buffers,
            "dtypes": json.dumps(self._dtypes),
        } | {
            name: json.dumps(patterns)
            for name, patterns in asdict(self._patterns).items()
            if patterns
        }

    def _check(self, inputs: Inputs) -> str:
        """Read the only member, check that it can be folded, and return its fingerprint."""
        member, checksums = inputs.members[0], {info.name: 0 for info in inputs.merged}
        invalid, changed = dict.fromkeys(checksums, 0), False
        for tile, deltas, found in visit_tiles(inputs, changes_of, self._workers):
            invalid[tile.info.name] += int(np.count_nonzero(~np.isfinite(deltas)))
            changed |= bool(deltas.any())
            checksums[tile.info.name] += int(found[1])
        for name, count in invalid.items():
            if count:
                raise ValueRangeError(
                    f"{member.path} {quoted(name)}: {count} changes are NaN or infinite"
                )
        if not changed:
            raise MismatchError(f"{member.path}: {SAME_AS_BASE}")
        buffer = np.empty(1 << 20, np.uint8)
        for info in inputs.kept:
            checksums[info.name] = tensor_checksum(member, member.tensors[info.name], buffer)
        checksums |= {alias: checksums[name] for alias, name in inputs.tied.items()}
        inputs.check_unchanged()
        return fingerprint(member.tensors, {k: v % 2**64 for k, v in checksums.items()})

    def _member_limits(
        self, inputs: Inputs, progress: Progress
    ) -> dict[Statistic, Mapping[str, float]]:
        """Return the limits of the only member, by statistic and tensor."""
        found: dict[Limits | None, Mapping[str, float]] = {}
        for limits in self._statistics.values():
            if isinstance(limits, tuple):
                found[limits] = dict.fromkeys(self._state, limits[0])
            elif limits is not None and limits not in found:
                values = run_first_pass(limits, inputs, self._workers, progress)
                found[limits] = {name: float(of_member[0]) for name, of_member in values.items()}
        return {one: found[limits] for one, limits in self._statistics.items() if limits in found}

    def _numbers(self, rule: Rule) -> Numbers:
        """Return the constants of a rule, with the numbers that depend on the whole vector."""
        first, found = rule.first_pass_of("mean"), dict[str, Floats]()
        if first:
            totals = {name: state[TOTAL.name] for name, state in self._state.items()}
            infos = [TensorInfo(name, "F64", shape, 0, 0) for name, shape in self._shapes.items()]
            found = first.find_all(infos, lambda group: AccumulatedMean(group, totals, self.n))
        numbers = Numbers(rule, self.n, found)
        sums = [0] * len(rule.tallies)
        for name, state in self._state.items():
            statistics = [state[one.name] for one in rule.parts()[0]]
            for j, tally in enumerate(rule.tallies):
                sums[j] += int(np.sum(tally(numbers.of(name)[1], *statistics)))
        return replace(numbers, sums=tuple(sums))


def _make_rules(rules: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Rule]:
    return {name: make_rule(name, options) for name, options in rules.items()}
