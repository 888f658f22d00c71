"""Ways to change a merged task vector τ before λ is searched; each is recorded in its origin.

The numbers that these functions need come from data: a task vector of the retain set, the Fisher
information of a model, factors that were found by measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.vectors.entry import Entry
from negmerge.vectors.task_vector import TaskVector

EPSILON = 1e-6
"""ε of the Fisher weights, as a share of the mean information of the forget set: elements that
neither set informs about get weight 0."""

Array = NDArray[Any]


def minus_retained(tau: TaskVector, retained: TaskVector, weight: float) -> TaskVector:
    """Return τ − β·(‖τ‖ / ‖τ_r‖)·τ_r: what the retain set teaches is not to be forgotten.

    >>> import negmerge as nm
    >>> base = {"w": np.zeros(2, np.float32)}
    >>> tau, retained = (nm.merge(base, [{"w": np.array(w, np.float32)}]) for w in ([3, 4], [0, 1]))
    >>> minus_retained(tau, retained, 0.4)["w"]
    tensor([3., 2.])

    Args:
        retained: τ_r, the task vector of a training on the retain set.
        weight: β; 0 gives τ.
    """
    norm, own = tau.norm(), retained.norm()
    how = {"weight": weight, "norm": norm, "norm_retain": own}
    if not weight or not norm:
        return _with_entries(tau, tau.entries, "retain", how)
    if not own:
        raise ValueRangeError(
            "retain: the training on the retain set changed no tensor of τ; raise "
            "pool.settings.lr, or leave retain out"
        )
    both = tau - (weight * norm / own) * retained
    return _with_entries(tau, both.entries, "retain", how, scale=1.0)


def fisher_weights(forget: Array, retain: Array, weight: float, epsilon: float) -> Array:
    """Return F_f / (F_f + α·F_r + ε), element by element: between 0 and 1.

    >>> fisher_weights(np.array([1.0, 1.0, 0.0]), np.array([0.0, 1.0, 1.0]), 3.0, 0.0)
    array([1.  , 0.25, 0.  ])
    """
    forget, retain = forget.astype(np.float64), retain.astype(np.float64)
    return forget / (forget + weight * retain + epsilon)


def fisher_weighted(
    tau: TaskVector,
    information: Callable[[str], tuple[Array, Array] | None],
    weight: float,
    **record: int,
) -> TaskVector:
    """Return τ with every element multiplied by its Fisher weight.

    Args:
        information: returns the diagonal Fisher information of a tensor on the forget and on the
            retain set, as flat arrays; None for a tensor that keeps its values, such as a buffer.
        weight: α, how much the retain set counts.
        record: further numbers for the origin.
    """
    total = count = 0
    for name in tau.entries:
        if (found := information(name)) is not None:
            total, count = total + float(found[0].sum(dtype=np.float64)), count + found[0].size
    if not total > 0:
        raise ValueRangeError(
            "fisher: the gradients of the loss on the forget set are all zero; leave fisher out"
        )
    epsilon, weights, changed = EPSILON * total / count, 0.0, 0

    def weigh(name: str, values: Array) -> Array | None:
        nonlocal weights, changed
        if (found := information(name)) is None:
            return None
        own = fisher_weights(*found, weight, epsilon)
        weights, changed = (
            weights + float(own[values != 0].sum()),
            changed + tau.entries[name].nonzero,
        )
        return values * own

    entries = _changed(tau, weigh)
    how = {"weight": weight, "mean": weights / changed if changed else 0.0} | record
    return _with_entries(tau, entries, "fisher", how)


def with_factors(
    tau: TaskVector,
    groups: Mapping[str, list[str]],
    factors: Mapping[str, float],
    **record: str | int,
) -> TaskVector:
    """Return τ with the tensors of each group multiplied by its factor.

    >>> import negmerge as nm
    >>> base = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    >>> tau = nm.merge(base, [{"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}])
    >>> found = with_factors(tau, {"first": ["a"], "last": ["b"]}, {"first": 1.0, "last": 0.5})
    >>> found["a"], found["b"]
    (tensor([1.]), tensor([0.5000]))

    Args:
        groups: the names of the tensors of each group; only tensors of zeros are in none.
        factors: by group; powers of two and zero, so that no bit is lost.
        record: further facts for the origin.
    """
    own = {name: factors[group] for group, names in groups.items() for name in names}
    entries = _changed(tau, lambda name, values: None if own[name] == 1 else values * own[name])
    return _with_entries(tau, entries, "groups", record | {"factors": dict(factors)})


def _changed(tau: TaskVector, change: Callable[[str, Array], Array | None]) -> dict[str, Entry]:
    """Return the entries of τ, changed in float64 and rounded once; None keeps the bits of one."""
    entries: dict[str, Entry] = {}
    for name, entry in tau.entries.items():
        values = entry.dense()
        new = change(name, values.astype(np.float64)) if entry.nonzero else None
        entries[name] = entry if new is None else Entry.of(new.astype(values.dtype), entry.shape)
    return entries


def _with_entries(
    tau: TaskVector,
    entries: Mapping[str, Entry],
    way: str,
    how: dict[str, Any],
    scale: float | None = None,
) -> TaskVector:
    """Return a task vector with the origin of τ, and the record of one more way."""
    origin = replace(tau.origin, reshaped=tau.origin.reshaped | {way: how})
    return TaskVector(entries, origin, tau.scale if scale is None else scale)
