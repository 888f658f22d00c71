"""The number format of the values that a task vector stores, and what is lost by rounding to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.dtypes import BITS, FLOAT_NAMES, narrow, widen
from negmerge.errors import OptionError, ValueRangeError, quoted
from negmerge.vectors.entry import Entry, Layout

Values = Literal["keep", "float32", "bfloat16"]
STEP = 1 << 20
"""Values that are rounded at once."""
Allocate = Callable[[int, Any], NDArray[Any]]


def check_values(values: str) -> None:
    """Raise for an unknown format of values."""
    if values not in get_args(Values):
        raise OptionError(f"values: got {values!r}, wanted {', '.join(get_args(Values))}")


@dataclass
class Rounding:
    """Rounds the values of a task vector, tensor by tensor, and sums up what is lost.

    >>> entry = Entry.of(np.array([1 + 2**-9, 0, 2], np.float32), (3,))
    >>> rounding = Rounding("bfloat16")
    >>> rounding.rounded("w", entry).stored()
    array([1., 2.], dtype=float32)
    >>> rounding.record()
    {'error': 0.000873..., 'format': 'bfloat16', 'rounded': 1, 'zeroed': 0}

    Args:
        values: `keep`, `float32` (which changes only float64 values) or `bfloat16`.
        layout: the layout of a tensor that must be packed again.
        allocate: makes an array for a number of elements and a format.
    """

    values: Values
    layout: Layout = "auto"
    allocate: Allocate = np.empty

    def __post_init__(self) -> None:
        check_values(self.values)
        self.changed = self.zeroed = 0
        self._lost = self._whole = 0.0

    def dtype(self, stored: str) -> str:
        """The format in which values of a format are stored."""
        wanted = FLOAT_NAMES.get(self.values, stored)
        return wanted if BITS[wanted](0).itemsize < BITS[stored](0).itemsize else stored

    def rounded(self, name: str, entry: Entry) -> Entry:
        """The tensor in the format that is stored."""
        dtype = self.dtype(entry.dtype)
        if dtype == entry.dtype or entry.values is None:
            return replace(entry, dtype=dtype)
        count = entry.elements if entry.layout == "dense" else entry.nonzero
        words = self.allocate(count, BITS[dtype])
        nonzero = 0
        for start in range(0, count, STEP):
            exact = entry.stored(start, min(start + STEP, count)).astype(np.float64)
            raw = narrow(exact, dtype)
            new = widen(raw, dtype)
            if not np.isfinite(new).all():
                raise ValueRangeError(
                    f"{quoted(name)}: a value of the merged change does not fit {self.values}; "
                    "keep the values (--values keep)"
                )
            words[start : start + exact.size] = raw.view(BITS[dtype])
            nonzero += int(np.count_nonzero(new))
            self.changed += int(np.count_nonzero(new != exact))
            self._lost += float(np.square(exact - new).sum())
            self._whole += float(np.square(exact).sum())
        done = replace(entry, dtype=dtype, values=words)
        if nonzero == entry.nonzero:
            return done
        self.zeroed += entry.nonzero - nonzero
        flat = done.dense()
        packed = Entry.of(flat, entry.shape, self.layout)
        exact = packed.stored().astype(np.float64)
        stored = None if packed.values is None else narrow(exact, dtype).view(BITS[dtype])
        return replace(packed, dtype=dtype, values=stored)

    def record(self) -> dict[str, Any]:
        """What was lost, for the origin; empty if the values are kept."""
        if self.values == "keep":
            return {}
        error = sqrt(self._lost / self._whole) if self._whole else 0.0
        return {
            "error": error,
            "format": self.values,
            "rounded": self.changed,
            "zeroed": self.zeroed,
        }


def loss_text(record: dict[str, Any]) -> str:
    """One line about what rounding lost.

    >>> loss_text({"format": "bfloat16", "rounded": 12000, "zeroed": 0, "error": 0.00166})
    'values stored as bfloat16: 12,000 were rounded, 0 became zero; relative error 0.166 %'
    """
    return (
        f"values stored as {record['format']}: {record['rounded']:,} were rounded, "
        f"{record['zeroed']:,} became zero; relative error {100 * record['error']:.3g} %"
    )
