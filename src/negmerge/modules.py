"""A task vector on a live `nn.Module`: added in place, undone bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from negmerge.errors import MismatchError, ValueRangeError, shown
from negmerge.names import is_variance

if TYPE_CHECKING:
    from negmerge.task_vector import TaskVector


@contextmanager
def applied(
    tau: TaskVector, model: torch.nn.Module, scale: float = 1.0
) -> Iterator[torch.nn.Module]:
    """Add `scale` · τ in place for the block; only elements that τ changes are touched.

    Positions and values are kept on the model's device after the first time, so that a sweep over
    scales costs time in proportion to the elements that are not zero.
    """
    factor = scale * tau.scale
    touched: list[tuple[Tensor, Any, Tensor]] = []
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    try:
        with torch.no_grad():
            for name, entry in tau.entries.items():
                tensor = _find(state, name, entry.shape)
                # Tied weights are one tensor under two names: it is changed once.
                if not entry.nonzero or factor == 0 or tensor.data_ptr() in seen:
                    continue
                seen.add(tensor.data_ptr())
                where, values = _on_device(tau, name, tensor)
                old = tensor.data[where].clone()  # indexing a scalar gives a view
                new = rounded(old.double() + factor * values, tensor.dtype)
                if entry.mask is None:
                    new = torch.where(values == 0, old, new)  # keeps the bits of a negative zero
                if is_variance(name):
                    new = torch.maximum(new, torch.zeros_like(new))  # as on files
                if not bool(new.isfinite().all()):
                    raise ValueRangeError(
                        f"{shown(name)}: θ + {factor}·τ does not fit {tensor.dtype}"
                    )
                touched.append((tensor, where, old))
                tensor.data[where] = new
        yield model
    finally:
        with torch.no_grad():
            for tensor, where, old in touched:
                tensor.data[where] = old


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 once; torch itself goes to 16 bits by way of float32, rounding twice.

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
        found = "is not there" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)}"
        raise MismatchError(f"{shown(name)}: {found} in this model, the task vector has {shape}")
    return tensor


def _on_device(tau: TaskVector, name: str, tensor: Tensor) -> tuple[Any, Tensor]:
    """Index and float64 values of the elements that are not zero; works for any memory layout."""
    key = (name, tensor.device)
    if key not in tau.on_device:
        entry = tau.entries[name]
        values = torch.from_numpy(entry.stored().copy()).double().to(tensor.device)
        if entry.mask is None:
            tau.on_device[key] = ((Ellipsis,), values.reshape(entry.shape))
        else:
            flat = torch.from_numpy(entry.positions())
            places = torch.unravel_index(flat, entry.shape)
            tau.on_device[key] = (tuple(p.to(tensor.device) for p in places), values)
    return tau.on_device[key]
