"""Adding a task vector in place to a module or a state dict, and restoring the weights exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from negmerge.checkpoints.names import is_statistic, is_variance
from negmerge.errors import MismatchError, ValueRangeError, quoted

if TYPE_CHECKING:
    from negmerge.vectors.task_vector import TaskVector


@contextmanager
def applied(
    tau: TaskVector, model: torch.nn.Module | Mapping[str, Any], scale: float = 1.0
) -> Iterator[Any]:
    """Add `scale` · τ in place during the block; only the nonzero elements of τ are written.

    Positions and values stay on the model's device for the next call, so that the time of a sweep
    over scales is proportional to the number of nonzero elements.
    """
    factor = scale * tau.scale
    touched: list[tuple[Tensor, Any, Tensor]] = []
    seen: set[int] = set()
    state = _state(model)
    try:
        with torch.no_grad():
            second = [(alias, tau.entries.get(name)) for alias, name in tau.origin.tied.items()]
            for name, entry in [*tau.entries.items(), *second]:
                if entry is None or (name in tau.origin.tied and name not in state):
                    continue
                tensor = _find(state, name, entry.shape)
                # Tied weights are one tensor with two names, which is changed once.
                if not entry.nonzero or factor == 0 or tensor.data_ptr() in seen:
                    continue
                seen.add(tensor.data_ptr())
                where, values = _on_device(tau, name, tensor)
                old = tensor.data[where].clone()  # the index of a scalar gives a view
                new = rounded(old.double() + factor * values, tensor.dtype)
                if entry.layout == "dense":
                    new = torch.where(values == 0, old, new)  # keeps the bits of a negative zero
                if is_variance(name):
                    new = torch.maximum(new, torch.zeros_like(new))  # as `apply` does
                if not bool(new.isfinite().all()):
                    raise ValueRangeError(
                        f"{quoted(name)}: θ + {factor}·τ does not fit {tensor.dtype}; use a "
                        "smaller scale"
                    )
                touched.append((tensor, where, old))
                tensor.data[where] = new
        yield model
    finally:
        with torch.no_grad():
            for tensor, where, old in touched:
                tensor.data[where] = old


def unit_scale(tau: TaskVector, model: torch.nn.Module | Mapping[str, Any]) -> float | None:
    """Return the λ at which λτ is as long as the weights of the tensors that τ changes.

    >>> import numpy as np
    >>> import negmerge as nm
    >>> base = {"w": np.array([3.0, 4.0], np.float32)}
    >>> unit_scale(nm.merge(base, [{"w": np.array([3.0, 6.0], np.float32)}]), base)
    2.5

    Statistics of BatchNorm do not count. None if τ, or all these weights, are zero.
    """
    state, weights, change = _state(model), 0.0, 0.0
    names = {name: alias for alias, name in tau.origin.tied.items()}
    for name, entry in tau.entries.items():
        if not entry.nonzero or is_statistic(name):
            continue
        tensor = _find(state, name if name in state else names.get(name, name), entry.shape)
        weights += float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2
        change += float(np.square(entry.stored(), dtype=np.float64).sum())
    length = abs(tau.scale) * sqrt(change)
    return sqrt(weights) / length if weights and length else None


def _state(model: torch.nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(model, torch.nn.Module):
        return model.state_dict(keep_vars=True)
    return {name: torch.as_tensor(value) for name, value in model.items()}  # arrays are shared


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 once; `Tensor.to` rounds to 16 bits by way of float32, twice.

    >>> x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    >>> rounded(x, torch.bfloat16).item(), x.bfloat16().item()
    (1.0078125, 1.0)
    """
    if dtype in (torch.float32, torch.float64):
        return values.to(dtype)
    single = values.float()
    back = single.double()
    bits = single.view(torch.int32)
    bits = bits - ((back.abs() > values.abs()) & values.isfinite()).int()
    bits = bits | ((back != values) & values.isfinite()).int()
    return bits.view(torch.float32).to(dtype)


def _find(state: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = state.get(name)
    if tensor is None or tuple(tensor.shape) != shape or not tensor.is_floating_point():
        found = "is missing" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)}"
        raise MismatchError(
            f"{quoted(name)}: {found} in this model, the task vector has shape {shape}; "
            "wanted the model from which the vector was made"
        )
    return tensor


def _on_device(tau: TaskVector, name: str, tensor: Tensor) -> tuple[Any, Tensor]:
    """The index and the float64 values of the nonzero elements, for any memory layout."""
    key = (name, tensor.device)
    if key not in tau.on_device:
        entry = tau.entries[tau.origin.tied.get(name, name)]
        values = torch.from_numpy(entry.stored().copy()).double().to(tensor.device)
        if entry.layout == "dense":
            tau.on_device[key] = ((Ellipsis,), values.reshape(entry.shape))
        else:
            flat = torch.from_numpy(entry.positions())
            places = torch.unravel_index(flat, entry.shape)
            tau.on_device[key] = (tuple(p.to(tensor.device) for p in places), values)
    return tau.on_device[key]
