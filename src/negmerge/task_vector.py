"""TaskVector: the change of a model's weights, sparse, lazily read, with arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from negmerge.errors import MismatchError, ValueRangeError, shown
from negmerge.names import component_of, depth_by
from negmerge.patch import (
    Entry,
    Layout,
    Origin,
    PatchWriter,
    patch_file,
    read_patch,
    versions,
)
from negmerge.state_dict import Model, PathLike

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sparsity:
    """How much of a group of tensors is zero, as shares of 1.

    element_weighted: zeros over elements; tensor_mean: the mean over tensors of each one's share.
    """

    elements: int
    nonzero: int
    tensors: int
    element_weighted: float
    tensor_mean: float


class TaskVector(Mapping[str, "torch.Tensor"]):
    """The difference θ_fine-tuned − θ_base, as a read-only mapping from name to dense tensor.

    >>> import negmerge as nm
    >>> base, pool = getfixture("small_pool")
    >>> tau = nm.merge(base, pool)
    >>> (-0.5 * tau).scale
    -0.5
    """

    def __init__(self, entries: Mapping[str, Entry], origin: Origin, scale: float = 1.0) -> None:
        if not isfinite(scale):
            raise ValueRangeError(f"scale {scale}: wanted a finite number")
        self.entries = dict(sorted(entries.items()))
        self.origin = origin
        self.scale = float(scale)
        self.path: Path | None = None
        """The patch file it is read from, if any."""
        self.on_device: dict[Any, Any] = {}
        """Positions and values as tensors, kept by `applied` for the next time."""

    # ------------------------------------------------------------------------- making and keeping

    @classmethod
    def between(cls, base: Model, model: Model) -> TaskVector:
        """The task vector of one fine-tuned model; files, folders or state dicts.

        >>> base, pool = getfixture("small_pool")
        >>> TaskVector.between(base, pool[0]).origin.n
        1
        """
        from negmerge.merge.engine import merge

        return merge(base, [model], rule="uniform")

    @classmethod
    def load(cls, path: PathLike) -> TaskVector:
        """Open a patch file; tensors are read when they are asked for."""
        vector = cls(*read_patch(path))
        vector.path = Path(path)
        return vector

    def save(self, path: PathLike, layout: Layout = "auto") -> None:
        """Write a patch file; the scale becomes part of the values."""
        tensors = {name: (e.dtype, e.shape) for name, e in self.entries.items()}
        with patch_file(Path(path)) as descriptor:
            members = [*self.origin.digests, *(m["name"] for m in self.origin.members)]
            writer = PatchWriter(descriptor, tensors, self.origin.kept, members)
            for name, entry in self.entries.items():
                writer.add(name, Entry.of(self._scaled(name), entry.shape, layout))
            writer.finish(self.origin)

    # ------------------------------------------------------------------------------------ mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        flat = self._scaled(name)
        return torch.as_tensor(flat.copy()).reshape(self.entries[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        scale = "" if self.scale == 1 else f"{self.scale} × "
        return (
            f"TaskVector({scale}{self.origin.rule} of {self.origin.n}, "
            f"{len(self)} tensors, {self.elements} elements, {self.sparsity():.1%} zero)"
        )

    # ------------------------------------------------------------------------------------ algebra

    def __mul__(self, factor: float) -> TaskVector:
        vector = TaskVector(self.entries, self.origin, self.scale * factor)
        vector.path, vector.on_device = self.path, self.on_device
        return vector

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> TaskVector:
        return self * (1 / divisor)

    def __neg__(self) -> TaskVector:
        return self * -1

    def __add__(self, other: TaskVector) -> TaskVector:
        """Add element by element in float64, rounded once; both must belong to one base."""
        if self.origin.base != other.origin.base:
            raise MismatchError(
                f"task vectors of different bases: {self.origin.base} and {other.origin.base}"
            )
        _check_same_tensors(self.entries, other.entries)
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            total = self._exact(name) + other._exact(name)
            dtype = np.float64 if "F64" in (entry.dtype, other.entries[name].dtype) else np.float32
            entries[name] = Entry.of(total.astype(dtype), entry.shape)
        origin = replace(
            self.origin,
            rule=f"{self.origin.rule} + {other.origin.rule}",
            n=self.origin.n + other.origin.n,
            members=self.origin.members + other.origin.members,
            versions=versions(),
        )
        return TaskVector(entries, origin)

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + -other

    # ----------------------------------------------------------------------------------- measures

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors, zeros and frozen ones included."""
        return sum(e.elements for e in self.entries.values())

    @cached_property
    def nonzero(self) -> int:
        """Elements that are not zero."""
        return sum(e.nonzero for e in self.entries.values()) if self.scale else 0

    def norm(self) -> float:
        """The Euclidean norm."""
        squares = (np.square(e.stored(), dtype=np.float64).sum() for e in self.entries.values())
        return abs(self.scale) * sqrt(sum(map(float, squares)))

    @overload
    def sparsity(self, by: Literal["element_weighted", "tensor_mean"] = ...) -> float: ...
    @overload
    def sparsity(
        self, by: Literal["tensor", "depth", "component"] | Callable[[str], str]
    ) -> dict[str, Sparsity]: ...

    def sparsity(
        self, by: str | Callable[[str], str] = "element_weighted"
    ) -> float | dict[str, Sparsity]:
        """The share of zeros, over all elements or as the mean of the tensors' shares, or by group.

        >>> base, pool = getfixture("small_pool")
        >>> tau = TaskVector.between(base, pool[0])
        >>> 0 <= tau.sparsity() <= 1, sorted(tau.sparsity(by="depth"))
        (True, ['0', '1', 'none'])

        by: `element_weighted` or `tensor_mean` for one number; `tensor`, `depth` (the layer),
            `component` (what a tensor is within it) or a function of the name for a table of both.
        """
        if not isinstance(by, str):
            return self._grouped(by)
        if by in ("element_weighted", "tensor_mean"):
            return float(getattr(self._grouped(lambda _: "all")["all"], by))
        groups: dict[str, Callable[[str], str]] = {
            "tensor": str,
            "depth": depth_by(self.entries),
            "component": component_of,
        }
        if by not in groups:
            raise ValueError(
                f"by={by!r}: wanted element_weighted, tensor_mean or {', '.join(groups)}"
            )
        return self._grouped(groups[by])

    def _grouped(self, key: Callable[[str], str]) -> dict[str, Sparsity]:
        groups: dict[str, list[Entry]] = {}
        for name, entry in self.entries.items():
            groups.setdefault(key(name), []).append(entry)
        return {group: self._measure(entries) for group, entries in groups.items()}

    def _measure(self, entries: list[Entry]) -> Sparsity:
        alive = [e.nonzero if self.scale else 0 for e in entries]
        size = sum(e.elements for e in entries)
        shares = [1 - a / e.elements for a, e in zip(alive, entries, strict=True) if e.elements]
        return Sparsity(
            elements=size,
            nonzero=sum(alive),
            tensors=len(entries),
            element_weighted=1 - sum(alive) / size if size else 0.0,
            tensor_mean=sum(shares) / len(shares) if shares else 0.0,
        )

    # ---------------------------------------------------------------------------------- on models

    def applied(self, model: torch.nn.Module, scale: float = 1.0) -> AbstractContextManager[Any]:
        """Add `scale` × this vector to a module in place; on exit every bit is as it was.

        >>> import torch
        >>> base, pool = getfixture("small_pool")
        >>> model = getfixture("small_model")
        >>> with TaskVector.between(base, pool[0]).applied(model, -0.5):
        ...     _ = model(torch.zeros(1, 6))
        """
        from negmerge.modules import applied

        return applied(self, model, scale)

    def _exact(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.entries[name].dense().astype(np.float64) * self.scale

    def _scaled(self, name: str) -> np.ndarray[Any, Any]:
        flat = self.entries[name].dense()
        if self.scale == 1:
            return flat
        with np.errstate(over="ignore"):
            scaled = self._exact(name).astype(flat.dtype)
        if not np.isfinite(scaled).all():
            raise ValueRangeError(
                f"{shown(name)}: {self.scale} × the task vector overflows {flat.dtype}"
            )
        return scaled


def _check_same_tensors(left: Mapping[str, Entry], right: Mapping[str, Entry]) -> None:
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or left[name].shape != right[name].shape:
            raise MismatchError(f"{shown(name)}: not of the same shape in both task vectors")
