"""Members scaled to one norm before the merge, so that longer steps alone give no member more say.

The changes of member k are multiplied by (mean norm of the members) / (norm of member k). The norms
are over the merged parameters; merged BatchNorm statistics are scaled with the member and do not
count in its norm, because a variance may change more than all weights. `TileReader.read`
multiplies: whatever is computed from its rows, first passes, folds and votes, sees scaled changes.
"""

# pyright: basic, reportCallIssue=false
# numba compiles the loop; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np

from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_statistic
from negmerge.errors import MismatchError
from negmerge.merging.first_pass import Changes, FirstPass, Floats, Rows
from negmerge.merging.folds import STRIP
from negmerge.merging.inputs import Inputs
from negmerge.support.jit import compiled_as_python


@dataclass(frozen=True)
class SquaredNorms(FirstPass):
    """The sum of the squared changes of each member, for each tensor by itself.

    Strips are summed alone and then one after the other, so that the result does not depend on how
    the work is cut.
    """

    def find_all(
        self, tensors: list[TensorInfo], changes: Callable[[list[TensorInfo]], Changes]
    ) -> dict[str, Floats]:
        every = changes(tensors)
        found = {info.name: np.zeros(every.width) for info in tensors}
        filled = iter([info for info in tensors if info.elements])
        left, name = 0, ""
        for size, strips in every.each(sum_strips):  # all ranges in order, none of two tensors
            if not left:
                info = next(filled)
                left, name = info.elements, info.name
            for strip in strips:
                found[name] += strip
            left -= size
        return found


def sum_strips(rows: Rows, size: int) -> tuple[int, Floats]:
    """Return the number of elements, and the squared norms of all members in each strip."""
    found = np.empty((-(-size // STRIP), len(rows) - 1))
    add_squares(rows, found)
    return size, found


def _rows(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    yield rng.standard_normal((3, 2 * STRIP)).astype(dtypes[0]), np.zeros((2, 2))


@compiled_as_python(_rows)
def add_squares(rows, out):
    """Write the sum of the squared changes of each strip and member."""
    for s in range(out.shape[0]):
        for k in range(out.shape[1]):
            # Four sums: one alone would wait for each addition.
            one, two, three, four = 0.0, 0.0, 0.0, 0.0
            for i in range(s * STRIP, (s + 1) * STRIP, 4):
                a = np.float64(rows[k + 1, i]) - np.float64(rows[0, i])
                b = np.float64(rows[k + 1, i + 1]) - np.float64(rows[0, i + 1])
                c = np.float64(rows[k + 1, i + 2]) - np.float64(rows[0, i + 2])
                d = np.float64(rows[k + 1, i + 3]) - np.float64(rows[0, i + 3])
                one += a * a
                two += b * b
                three += c * c
                four += d * d
            out[s, k] = (one + two) + (three + four)


def equal_factors(inputs: Inputs, squares: Mapping[str, Floats]) -> Floats:
    """Return the factor of each member that gives all of them their mean norm.

    Args:
        squares: the squared norms of all members, by tensor.
    """
    counted = [info.name for info in inputs.merged if not is_statistic(info.name)]
    norms = np.sqrt(sum((squares[name] for name in counted), np.zeros(len(inputs.members))))
    mean = fsum(norms) / len(norms)
    with np.errstate(divide="ignore", over="ignore"):
        factors = mean / norms
    for model, factor in zip(inputs.members, factors, strict=True):
        if not np.isfinite(factor):
            raise MismatchError(
                f"{model.path}: its weights do not differ from the base in the tensors to merge, "
                "so that it cannot be scaled to the norm of the others; remove this model"
            )
    return factors
