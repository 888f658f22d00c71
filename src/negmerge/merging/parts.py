"""What the parts of a merge have in common, so that each can be computed by itself, anywhere.

A merge is cut into parts, contiguous ranges of its segments. A part is described by small values
that can be sent to another machine; `run` opens the models there, reads only its range of each
file, and writes a part file (`part_file.py`). `merge_part.py` and `first_pass_parts.py` have the
kinds of parts; `parted.py` cuts a merge and puts the parts together.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import SIZES
from negmerge.errors import FileError
from negmerge.merging.inputs import EVERY, Buffers, Inputs
from negmerge.merging.memory import Budget
from negmerge.merging.part_file import PartFile, PartWriter
from negmerge.merging.patterns import Patterns
from negmerge.merging.rule import rules
from negmerge.merging.tiles import Segment
from negmerge.support.files import atomic_file
from negmerge.support.progress import Advance
from negmerge.support.remote.scratch import scratch
from negmerge.support.remote.urls import Place
from negmerge.vectors.origin import versions

Facts = dict[str, Any]
"""What a part file says beside its results, as JSON. `failure`, if a part has no results from some
place on, is a pair: what happened, and details."""


@dataclass(frozen=True)
class Description:
    """A merge as other processes get it: what every part of it depends on.

    Args:
        base: the absolute path of the base, or its URL, which every machine fetches.
        members: the absolute paths or URLs of the models, sorted by content as in `Inputs`.
        stamps: size and time of last change of each file of each model, the base first.
        made_with: the versions of packages and of the plug-in that defines the rule.
        patterns: the tensors to merge.
        equalise: whether the members are scaled to one norm.
        factors: the factors of the members, once they are known.
        threads: the number of threads of each part; None: as many as its process is given.
        max_memory: the bytes that the process of a part may use.
    """

    base: Place
    members: tuple[Place, ...]
    stamps: list[list[tuple[int, int]]]
    rule: str
    options: dict[str, Any]
    buffers: Buffers
    made_with: list[str]
    patterns: Patterns = EVERY
    device: str = "cpu"
    threads: int | None = None
    max_memory: int | None = None
    equalise: bool = False
    factors: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """A hash of everything that the merged values depend on."""
        paths = [str(path) for path in (self.base, *self.members)]
        rule = [self.rule, self.options, self.buffers, self.made_with, self.patterns.words()]
        scaled = [["equalise", *self.factors]] if self.equalise else []
        return hash_of(paths, self.stamps, *rule, *scaled)

    def inputs(self) -> Inputs:
        """Open the models, and check that they are those of the process that made this."""
        given = (self.base, self.members, self.buffers, True)
        inputs = Inputs(*given, patterns=self.patterns, is_sorted=True)
        for model, stamps in zip(inputs.models, self.stamps, strict=True):
            if _stamps(model) != stamps:
                inputs.close()
                raise FileError(
                    f"{model.path}: changed since the merge began, or is another file on this "
                    "machine; run again when it is complete and the same on all machines"
                )
        inputs.factors = np.array(self.factors) if self.factors else None
        return inputs


def describe(
    inputs: Inputs, rule: str, options: Mapping[str, Any], buffers: Buffers, **more: Any
) -> Description:
    """Describe a merge of open models; `more` are other fields of `Description`."""
    paths = [model.path.absolute() for model in inputs.models]
    base, *members = (inputs.urls.get(path, path) for path in paths)
    return Description(
        base,
        tuple(members),
        [_stamps(model) for model in inputs.models],
        rule,
        dict(options),
        buffers,
        [*(f"{name} {version}" for name, version in versions().items()), *rules.versions(rule)],
        inputs.patterns,
        **more,
    )


def _stamps(model: Checkpoint) -> list[tuple[int, int]]:
    """Return size and time of last change of each file of a model.

    A fetched file has another time on each machine. The name of its place in the scratch folder,
    which depends on the version of the object, is what must be the same.
    """
    found = model.stamps()
    if not model.path.absolute().is_relative_to(scratch().absolute()):
        return found
    place = model.path.absolute().relative_to(scratch().absolute())
    version = int(hash_of(str(place))[:12], 16)
    return [(size, version) for size, _ in found]


def hash_of(*parts: object) -> str:
    """Return a short hash of content, which may have numpy arrays.

    >>> hash_of("a", np.zeros(2)) == hash_of("a", np.zeros(3))
    False
    """

    def content(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            array = cast("NDArray[Any]", value)
            return [array.dtype.str, list(array.shape), array.tobytes().hex()]
        return value.hex() if isinstance(value, bytes) else str(value)

    text = json.dumps(parts, sort_keys=True, default=content)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cut(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a sequence of sizes into at most `count` contiguous ranges of about equal size.

    >>> cut([4, 1, 1, 1, 1], 2)
    [(0, 1), (1, 5)]
    """
    ends = list(accumulate(sizes))
    places = {0, len(sizes)}
    count = min(count, max(len(sizes), 1))
    for k in range(1, count):
        # The range ends before or after the element in which it should end.
        wanted = ends[-1] * k / count
        after = bisect_left(ends, wanted)
        before = ends[after] - sizes[after]
        places.add(after if wanted - before < ends[after] - wanted else after + 1)
    return list(pairwise(sorted(places)))


class Part(ABC):
    """A piece of a merge that can be pickled and computed anywhere; fields and `key` are small.

    Attributes:
        merge: the merge.
        nbytes: the bytes that it reads.
    """

    merge: Description
    nbytes: int

    @property
    @abstractmethod
    def key(self) -> str:
        """A hash of everything that the results depend on."""

    @abstractmethod
    def fill(self, inputs: Inputs, threads: int, writer: PartWriter, advance: Advance) -> Facts:
        """Compute the results and add them to a part file; return facts about them."""

    def run(self, out: Path, threads: int, advance: Advance) -> None:
        """Compute the results and write the part file; call `advance` with bytes that were read."""
        with self.merge.inputs() as inputs:
            threads = Budget(self.merge.max_memory, out.parent).workers(threads)
            with atomic_file(out) as descriptor, PartWriter(descriptor) as writer:
                facts = self.fill(inputs, threads, writer, advance)
                inputs.check_unchanged()
                writer.finish({"key": self.key} | facts)

    def is_done(self, out: Path) -> bool:
        """Return whether a file has the results of this part, undamaged."""
        try:
            with PartFile(out) as file:
                return file.facts["key"] == self.key and file.is_intact() and self._intact(file)
        except (FileError, KeyError, TypeError, ValueError):
            return False

    def _intact(self, file: PartFile) -> bool:
        """Return whether what the part wrote elsewhere is undamaged."""
        return True


def bytes_of(inputs: Inputs, work: Sequence[Segment]) -> list[int]:
    """Return the bytes that each segment has in all models together."""
    each = {
        info.name: sum(SIZES[i.dtype] for i in inputs.infos(info.name))
        for info in {segment.info.name: segment.info for segment in work}.values()
    }
    return [segment.size * each[segment.info.name] for segment in work]
