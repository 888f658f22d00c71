"""The margin of a sample, the number that attacks with reference models compare."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from negmerge.errors import ValueRangeError

Floats = NDArray[np.float64]


def margin(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Return φ = z_y − log Σ exp z_j over j ≠ y, the logit of the probability of the true class.

    Unlike log p − log(1 − p), it is exact where p is so near to 1 that it is rounded to 1.

    >>> margin([[2.0, 0.0], [0.0, 50.0]], [0, 1]).tolist()
    [2.0, 50.0]

    Args:
        logits: a row of each sample, with at least two classes.
        labels: the true class of each sample.
    """
    z, y = np.array(logits, dtype=np.float64), np.asarray(labels)
    if z.ndim != 2 or z.shape[1] < 2 or y.shape != z.shape[:1]:
        raise ValueRangeError(
            f"margin: got logits of shape {z.shape} and labels of shape {y.shape}; wanted a row "
            "of at least two classes, and a label, for each sample"
        )
    rows = np.arange(len(z))
    own = z[rows, y]
    z[rows, y] = -np.inf
    highest = z.max(1, keepdims=True)
    found = own - (highest[:, 0] + np.log(np.exp(z - highest).sum(1)))
    if not np.isfinite(found).all():
        raise ValueRangeError("margin: a logit is not finite; wanted numbers")
    return found


def probability_of(margin: NDArray[np.floating[Any]]) -> Floats:
    """Return the probability of the true class, the inverse of the logit.

    >>> probability_of(np.array([0.0, -800.0])).tolist()
    [0.5, 0.0]
    """
    return np.exp(-np.logaddexp(0.0, -margin.astype(np.float64)))
