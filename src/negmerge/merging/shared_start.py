"""Whether the adapters of a pool began with the same matrices A.

LoRA starts with a random A and B = 0. The changes s·BA of two adapters lie in the rows of their A:
if these were drawn apart, the signs of the changes agree about as often as those of random numbers,
and a consensus of them is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from negmerge.checkpoints.adapted import Adapted
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import widen

SIMILAR = 0.5
"""Adapters whose A have a smaller cosine are taken for drawn apart: the cosine of such A is about
0, and that of an A that both left as it was is 1."""
MODULES = 8
"""The number of modules that are compared, spread over all."""


def different_starts(models: Sequence[Checkpoint]) -> str | None:
    """Return a warning if adapters have different A; None if they have not, or there is one."""
    adapters = [model for model in models if isinstance(model, Adapted)]
    found = [
        cosine for other in adapters[1:] if (cosine := _cosine(adapters[0], other)) is not None
    ]
    apart = sum(cosine < SIMILAR for cosine in found)
    if not apart:
        return None
    return (
        f"{apart} of {len(adapters)} adapters have other matrices A than {adapters[0].path.name} "
        f"(cosine {min(found):.2f}): the signs of their changes agree about as often as by chance; "
        "fine-tune all adapters of a pool from the same A"
    )


def _cosine(one: Adapted, two: Adapted) -> float | None:
    """Return the median cosine between the A of modules that both have; None without any."""
    shared = sorted(
        name
        for name, change in one.changes.items()
        if name in two.changes and change.a.shape == two.changes[name].a.shape
    )
    cosines: list[float] = []
    for name in shared[:: -(-len(shared) // MODULES)] if shared else ():
        rows: list[Any] = []
        for model in (one, two):
            change = model.changes[name]
            info = change.b if change.embedding else change.a  # the one that is drawn
            rows.append(widen(model.adapter.read(info), info.dtype))
        norms = float(np.linalg.norm(rows[0]) * np.linalg.norm(rows[1]))
        if norms > 0 and np.isfinite(norms):
            cosines.append(float(rows[0] @ rows[1]) / norms)
    return median(cosines) if cosines else None
