"""The exact k-th largest magnitude, found without holding the vectors (TIES, localize).

A sample of strips brackets the threshold; one pass over the files counts what lies above the
bracket and collects what lies inside; the answer is then exact or known to be missed. A miss (a
heavy tie, an unlucky sample) is settled by counting digits of 16 bits, from the highest, one pass
for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from negmerge.header import TensorInfo
from negmerge.jit import compiled, twin
from negmerge.merge.inputs import Inputs
from negmerge.merge.kernels import STRIP
from negmerge.merge.rules import Constants, Rule
from negmerge.merge.tiles import Segment, TileReader, segments
from negmerge.parallel import ordered
from negmerge.progress import Progress

R = TypeVar("R")
Floats = NDArray[np.float64]
SMALL = 1 << 20
"""Groups of at most so many elements are collected whole."""
MARGIN = 0.003
"""Half the width of the bracket, as a share of all elements."""


@dataclass
class Thresholds:
    """The least magnitude to keep, for each member or for the mean, by tensor."""

    rule: Rule
    found: dict[str, Floats]

    def limits(self, name: str) -> Floats:
        """Numbers for the fold of a tensor."""
        if self.rule.trimmed == "members":
            return self.found[name]
        return np.array(self.rule.limits())

    def constants(self, name: str, majority: float) -> Constants:
        """Numbers for the finish of a tensor, after the rule's own."""
        if self.rule.trimmed == "members":
            return (majority,)
        return (float(self.found[name][0]),) if self.rule.trimmed else ()


def find_thresholds(inputs: Inputs, rule: Rule, workers: int, progress: Progress) -> Thresholds:
    """Find what a rule trims at; nothing is read for a rule that does not trim."""
    thresholds = Thresholds(rule, {})
    if not rule.trimmed:
        return thresholds
    progress.stage("finding thresholds", inputs.nbytes)
    tensors = inputs.merged
    for group in [tensors] if rule.options["scope"] == "model" else [[t] for t in tensors]:
        search = Search(inputs, group, rule.trimmed == "mean", workers, progress)
        least = search.threshold(rule.options["density"])
        thresholds.found.update({info.name: least for info in group})
    return thresholds


class Search:
    """The search in one group of tensors, for all members or for their mean at once."""

    def __init__(
        self,
        inputs: Inputs,
        tensors: list[TensorInfo],
        mean: bool,
        workers: int,
        progress: Progress,
    ) -> None:
        self.inputs, self.tensors, self.mean = inputs, tensors, mean
        self.workers, self.progress = workers, progress
        self.width = 1 if mean else len(inputs.members)
        self.elements = sum(info.elements for info in tensors)

    def threshold(self, density: float) -> Floats:
        """The (k+1)-th largest magnitude, k = ⌊density · elements⌋; what reaches it is kept."""
        k = int(density * self.elements)
        if k >= self.elements:
            return np.zeros(self.width)
        rank = k + 1
        low, high = self._bracket(rank)
        above, inside = self._collect(low, high)
        least = np.zeros(self.width)
        missed: list[int] = []
        for g, values in enumerate(inside):
            if values is None or not above[g] < rank <= above[g] + values.size:
                missed.append(g)
                continue
            place = values.size - (rank - above[g])
            least[g] = np.partition(values, place)[place]
        return self._by_digits(rank, missed, least) if missed else least

    def _bracket(self, rank: int) -> tuple[Floats, Floats]:
        if self.elements <= SMALL:
            return np.zeros(self.width), np.full(self.width, np.inf)
        strips = self.elements // STRIP
        every = max(1, strips // 256)
        sample = [
            Segment(s.info, start, min(start + STRIP, s.stop), 0)
            for s in segments(self.tensors)
            for j, start in enumerate(range(s.start, s.stop, STRIP))
            if (s.strip + j) % every == 0
        ]
        values = np.concatenate(list(self._each(sample, self._magnitudes)), axis=1)
        size = values.shape[1]
        share = rank / self.elements
        first = max(0, int((share - MARGIN) * size) - 1)
        last = min(size - 1, int((share + MARGIN) * size) + 1)
        places = [size - 1 - last, size - 1 - first]
        values.partition(places, axis=1)
        low = values[:, places[0]].copy() if last < size - 1 else np.zeros(self.width)
        high = values[:, places[1]].copy() if first > 0 else np.full(self.width, np.inf)
        return low, high

    def _collect(self, low: Floats, high: Floats) -> tuple[NDArray[np.int64], list[Floats | None]]:
        """Count what is above the bracket and gather what is in it; None where that is too much."""
        above = np.zeros(self.width, np.int64)
        inside: list[list[Floats]] = [[] for _ in range(self.width)]
        room = max(SMALL, int(self.elements * MARGIN * 4))

        def run(rows: NDArray[Any], size: int) -> tuple[NDArray[np.int64], list[Floats]]:
            counts, sizes = np.zeros(self.width, np.int64), np.zeros(self.width, np.int64)
            found = np.empty((self.width, size + 1))
            gather(rows, self.mean, size, low, high, counts, found, sizes)
            return counts, [found[g, : sizes[g]].copy() for g in range(self.width)]

        sizes = np.zeros(self.width, np.int64)
        for counts, found in self._each(segments(self.tensors), run, show=True):
            above += counts
            for g in range(self.width):
                sizes[g] += found[g].size
                if sizes[g] > room:
                    inside[g] = []
                else:
                    inside[g].append(found[g])
        return above, [
            None if sizes[g] > room else np.concatenate(inside[g]) for g in range(self.width)
        ]

    def _by_digits(self, rank: int, groups: list[int], least: Floats) -> Floats:
        """Settle groups by counting 16-bit digits of the float64 pattern, the highest first."""
        prefixes = dict.fromkeys(groups, 0)
        ranks = dict.fromkeys(groups, rank)
        for shift in (48, 32, 16, 0):

            def run(rows: NDArray[Any], size: int, shift: int = shift) -> NDArray[np.int64]:
                values = self._magnitudes(rows, size)
                counts = np.zeros((len(groups), 1 << 16), np.int64)
                for row, g in enumerate(groups):
                    bits = values[g].view(np.uint64)
                    count_digits(bits, np.uint64(prefixes[g]), np.uint64(shift), counts[row])
                return counts

            counts = np.zeros((len(groups), 1 << 16), np.int64)
            for found in self._each(segments(self.tensors), run):
                counts += found
            for row, g in enumerate(groups):
                from_top = np.cumsum(counts[row][::-1])
                # NaN is not counted; a tensor that holds it is refused when it is merged.
                digit = (1 << 16) - 1 - min(int(np.searchsorted(from_top, ranks[g])), (1 << 16) - 1)
                ranks[g] -= int(from_top[-1] - np.cumsum(counts[row])[digit])
                prefixes[g] = (prefixes[g] << 16) | digit
        for g in groups:
            least[g] = np.array([prefixes[g]], np.uint64).view(np.float64)[0]
        return least

    def _magnitudes(self, rows: NDArray[Any], size: int) -> Floats:
        """One row for each member, or one for the mean."""
        values = np.empty((self.width, size))
        for g in range(self.width):
            magnitudes(rows, self.mean, g, 0, values[g])
        return values

    def _each(
        self,
        work: list[Segment],
        run: Callable[[NDArray[Any], int], R],
        show: bool = False,
    ) -> Iterator[R]:
        """Give the rows and the size of every tile to `run`; yield what it returns."""
        unused = np.zeros(len(self.inputs.models), np.uint64)

        def visit(reader: TileReader, segment: Segment) -> list[R]:
            results: list[R] = []
            for part in reader.tiles(segment):
                size = part.stop - part.start
                rows = reader.read(part.info.name, part.start, size, unused.copy())
                results.append(run(rows, size))
            return results

        found = ordered(work, visit, lambda: TileReader(self.inputs), self.workers)
        for segment, results in zip(work, found, strict=True):
            yield from results
            if show:
                self.progress.advance(
                    self.inputs.bytes_of(segment.info.name, segment.stop - segment.start)
                )


def _magnitudes(rows: NDArray[Any], mean: bool, g: int, start: int, out: Floats) -> None:
    """`magnitudes` in numpy."""
    deltas = rows[1:, start : start + len(out)].astype(np.float64) - rows[0, start:][: len(out)]
    out[:] = abs(_total(deltas) / len(deltas) if mean else deltas[g])


def _total(deltas: Floats) -> Floats:
    total = np.zeros(deltas.shape[1])
    for delta in deltas:  # one after the other: numpy's own sum would choose another order
        total += delta
    return total


def _rows(dtypes: Sequence[Any]) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal((4, STRIP + 300)).astype(dtypes[0])


def _members(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rows = _rows(dtypes)
    yield rows, False, 2, 100, np.zeros(1000)
    yield rows, True, 0, 100, np.zeros(1000)


@compiled(twin(_magnitudes, _members), error_model="numpy")
def magnitudes(rows: NDArray[Any], mean: bool, g: int, start: int, out: Floats) -> None:
    """|θₖ − θ₀| of member g, counted from 0, or |mean of all of them|, from `start` on."""
    size = out.shape[0]
    base = rows[0, start : start + size]
    if not mean:
        member = rows[g + 1, start : start + size]
        for i in range(size):
            out[i] = abs(np.float64(member[i]) - np.float64(base[i]))
        return
    out[:] = 0.0
    n = rows.shape[0] - 1
    for k in range(1, n + 1):
        member = rows[k, start : start + size]
        for i in range(size):
            out[i] += np.float64(member[i]) - np.float64(base[i])
    for i in range(size):
        out[i] = abs(out[i] / n)


def _gather(
    rows: NDArray[Any],
    mean: bool,
    size: int,
    low: Floats,
    high: Floats,
    above: NDArray[np.int64],
    inside: Floats,
    sizes: NDArray[np.int64],
) -> None:
    """`gather` in numpy."""
    values = np.empty(size)
    for g, row in enumerate(inside):
        _magnitudes(rows, mean, g, 0, values)
        above[g] += np.count_nonzero(values > high[g])
        kept = values[(values >= low[g]) & (values <= high[g])]
        sizes[g] = kept.size
        row[: kept.size] = kept


def _proves_gather(code: Callable[..., Any], dtypes: Sequence[Any]) -> bool:
    rows = _rows(dtypes)
    for mean, width in ((False, 3), (True, 1)):
        size = rows.shape[1]
        results: list[Any] = []
        for form in (code, _gather):
            above, inside = np.zeros(width, np.int64), np.zeros((width, size + 1))
            sizes = np.zeros(width, np.int64)
            low, high = np.full(width, 0.5), np.full(width, 1.0)
            form(rows, mean, size, low, high, above, inside, sizes)
            # What lies beyond the sizes is room to write in.
            kept = [inside[g, : sizes[g]].tobytes() for g in range(width)]
            results.append((above.tolist(), sizes.tolist(), kept))
        if results[0] != results[1]:
            return False
    return True


@compiled(_proves_gather)
def gather(
    rows: NDArray[Any],
    mean: bool,
    size: int,
    low: Floats,
    high: Floats,
    above: NDArray[np.int64],
    inside: Floats,
    sizes: NDArray[np.int64],
) -> None:
    """Count the magnitudes above `high`, write those from `low` to `high` to `inside`.

    inside: a row for each member, or one for the mean, longer than `size` by one.
    """
    strip = np.empty(STRIP)
    for g in range(inside.shape[0]):
        least, most = low[g], high[g]
        at = 0
        for start in range(0, size, STRIP):
            some = strip[: min(STRIP, size - start)]
            magnitudes(rows, mean, g, start, some)
            count = 0
            for i in range(some.shape[0]):
                count += some[i] > most
            above[g] += count
            for i in range(some.shape[0]):
                # Written without looking, kept only if the next one goes elsewhere: no branch.
                inside[g, at] = some[i]
                at += (some[i] >= least) & (some[i] <= most)
        sizes[g] = at


def _count_digits(
    bits: NDArray[np.uint64], prefix: np.uint64, shift: np.uint64, counts: NDArray[np.int64]
) -> None:
    """`count_digits` in numpy."""
    kept = bits[bits <= np.uint64(0x7FF0000000000000)]
    if shift < 48:
        kept = kept[kept >> np.uint64(shift + 16) == prefix]
    digits = (kept >> np.uint64(shift)) & np.uint64(0xFFFF)
    counts += np.bincount(digits.astype(np.int64), minlength=1 << 16)


def _digits(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    values = abs(np.random.default_rng(0).standard_normal(500))
    bits = np.append(values, [0.0, 5e-324, np.inf, np.nan]).view(np.uint64)
    counts = np.zeros(1 << 16, np.int64)
    yield bits, np.uint64(0), np.uint64(48), counts
    yield bits, bits[0] >> np.uint64(48), np.uint64(32), counts


@compiled(twin(_count_digits, _digits))
def count_digits(
    bits: NDArray[np.uint64], prefix: np.uint64, shift: np.uint64, counts: NDArray[np.int64]
) -> None:
    """Count the 16-bit digit at `shift` of the numbers whose higher digits are `prefix`."""
    infinite = np.uint64(0x7FF0000000000000)
    for i in range(bits.shape[0]):
        if bits[i] <= infinite and (shift == 48 or bits[i] >> (shift + np.uint64(16)) == prefix):
            counts[(bits[i] >> shift) & np.uint64(0xFFFF)] += 1
