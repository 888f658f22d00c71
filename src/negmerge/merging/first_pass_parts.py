"""Parts of a first pass: a function of every tile of a range, or the numbers of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from negmerge.merging.first_pass import Rows, run_first_pass
from negmerge.merging.inputs import Inputs
from negmerge.merging.part_file import CannotStore, PartWriter
from negmerge.merging.parts import Description, Facts, Part, hash_of
from negmerge.merging.rule import make_rule
from negmerge.merging.tiles import Segment, visit_tiles
from negmerge.support.progress import Advance, CallbackProgress

NOT_STORED = "not stored"
"""Failure: the function returns what a part file cannot store."""


@dataclass(frozen=True)
class ChangesPart(Part):
    """A function of every tile of some segments, as `Changes.each` calls it.

    Args:
        visit: the function.
        identity: its pickled form.
        work: name, start and stop of each segment.
    """

    merge: Description
    visit: Callable[[Rows, int], Any]
    identity: bytes
    work: list[tuple[str, int, int]]
    nbytes: int

    @property
    def key(self) -> str:
        return hash_of("changes", self.merge.key, self.identity, self.work)

    def fill(self, inputs: Inputs, threads: int, writer: PartWriter, advance: Advance) -> Facts:
        tensors = inputs.base.tensors
        work = [Segment(tensors[name], start, stop) for name, start, stop in self.work]
        try:
            for tile, result, _ in visit_tiles(inputs, self.visit, threads, work):
                writer.add(result)
                advance(inputs.bytes_of(tile.info.name, tile.size))
        except CannotStore as error:
            return {"failure": [NOT_STORED, str(error)]}
        return {}


@dataclass(frozen=True)
class TensorsPart(Part):
    """The first pass over some tensors, each by itself; the results are names and numbers."""

    merge: Description
    names: list[str]
    nbytes: int

    @property
    def key(self) -> str:
        return hash_of("tensors", self.merge.key, self.names)

    def fill(self, inputs: Inputs, threads: int, writer: PartWriter, advance: Advance) -> Facts:
        first = make_rule(self.merge.rule, self.merge.options).first_pass()
        inputs.merged = [inputs.base.tensors[name] for name in self.names]
        for found in run_first_pass(first, inputs, threads, CallbackProgress(advance)).items():
            writer.add(found)
        return {}
