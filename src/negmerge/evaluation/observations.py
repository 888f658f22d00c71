"""Observations: the columns of single samples that metrics are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
"""By name, an array with one value for each sample."""


@dataclass(frozen=True)
class Observations:
    """The columns of a set by name: one value for each sample, in the order of the set.

    >>> found = Observations({"correct": np.array([True, False])})
    >>> len(found), found["correct"].tolist()
    (2, [True, False])
    """

    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]


def join_columns(parts: Sequence[Columns]) -> Observations:
    """Join the columns of the batches of a set; a set without samples has an empty column."""
    if not parts:
        return Observations({"correct": np.empty(0, np.bool_)})
    return Observations({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
