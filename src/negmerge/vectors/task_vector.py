"""`TaskVector`: the change of a model's weights, sparse, lazily read, with arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.names import component_of, depth_by
from negmerge.checkpoints.state_dict import Model, PathLike, open_checkpoint
from negmerge.errors import FileError, MismatchError, OptionError, ValueRangeError, quoted
from negmerge.vectors.entry import Entry, Layout
from negmerge.vectors.origin import Origin, to_json, versions
from negmerge.vectors.patch import PatchWriter, local_patch, new_patch_file, read_patch
from negmerge.vectors.values import Rounding

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sparsity:
    """The share of zeros in a group of tensors.

    Args:
        element_weighted: the share of zeros among all elements, 0 to 1.
        tensor_mean: the mean of the shares of the single tensors, 0 to 1.
    """

    elements: int
    nonzero: int
    tensors: int
    element_weighted: float
    tensor_mean: float


class TaskVector(Mapping[str, "torch.Tensor"]):
    """The difference θ_fine-tuned − θ_base, as a read-only mapping from names to torch tensors.

    `nm.merge` returns a task vector, `TaskVector.load` opens a patch file. Task vectors can be
    scaled, added and subtracted.

    >>> import numpy as np
    >>> import negmerge as nm
    >>> base = {"w": np.zeros(4, np.float32)}
    >>> tau = nm.merge(base, [{"w": np.array([1, 0, -2, 3], np.float32)}])
    >>> -0.5 * tau
    TaskVector(-0.5 × consensus of 1, 1 tensors, 4 elements, 25.0% zero)
    >>> nm.apply(base, tau + tau)["w"]
    array([ 2.,  0., -4.,  6.], dtype=float32)

    Args:
        scale: the factor of all values.
    """

    def __init__(self, entries: Mapping[str, Entry], origin: Origin, scale: float = 1.0) -> None:
        if not isfinite(scale):
            raise ValueRangeError(f"scale {scale}: wanted a finite number")
        self.entries = dict(sorted(entries.items()))
        self.origin = origin
        self.scale = float(scale)
        self.path: Path | None = None
        """The patch file that stores the values, if any."""
        self.on_device: dict[Any, Any] = {}
        """Positions and values as torch tensors, kept by `applied` for the next call."""

    # ------------------------------------------------------------------------- making and keeping

    @classmethod
    def load(cls, path: PathLike) -> TaskVector:
        """Open a file of `negmerge merge`, `nm.merge` or `save`; tensors are read when needed.

        A folder, or a model of the Hub, has the patch as `patch.safetensors`.
        """
        here = local_patch(path)
        vector = cls(*read_patch(here))
        vector.path = here
        return vector

    def save(self, path: PathLike, layout: Layout = "auto") -> None:
        """Write a patch file; the scale becomes part of the values.

        Args:
            layout: `sparse`, `dense`, or for each tensor the smallest (`auto`).
        """
        tensors = {name: (e.dtype, e.shape) for name, e in self.entries.items()}
        with new_patch_file(Path(path)) as descriptor:
            members = [*self.origin.digests, *(m["name"] for m in self.origin.members)]
            members += [*self.origin.tied, *self.origin.include, *self.origin.exclude]
            members += [to_json(how) for how in self.origin.reshaped.values()]
            members += self.origin.hub.values()
            writer = PatchWriter(descriptor, tensors, self.origin.kept, members, layout)
            for name, entry in self.entries.items():
                new = Entry.of(self._scaled(name), entry.shape, layout)
                if entry.dtype == "BF16" and self.scale == 1:
                    new = Rounding("bfloat16", layout).rounded(name, new)
                writer.add(name, new)
            writer.finish(self.origin)

    def entry_of(self, name: str) -> Entry | None:
        """The change of a tensor of the base, also under the second name of a tied tensor."""
        return self.entries.get(self.origin.tied.get(name, name))

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
        """Add element by element in float64, rounded once; both must have the same base."""
        if self.origin.base != other.origin.base:
            raise MismatchError(
                f"task vectors of different bases: {self.origin.base} and {other.origin.base}; add "
                "vectors that were merged with the same base"
            )
        _check_same_tensors(self.entries, other.entries)
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            total = self._exact(name) + other._exact(name)
            dtype = np.float64 if "F64" in (entry.dtype, other.entries[name].dtype) else np.float32
            entries[name] = Entry.of(total.astype(dtype), entry.shape)
        scaled = self.origin.factors or other.origin.factors
        origin = replace(
            self.origin,
            rule=f"{self.origin.rule} + {other.origin.rule}",
            n=self.origin.n + other.origin.n,
            members=self.origin.members + other.origin.members,
            versions=versions(),
            values=self.origin.values or other.origin.values,
            factors=_factors(self.origin) + _factors(other.origin) if scaled else [],
        )
        return TaskVector(entries, origin)

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + -other

    # ----------------------------------------------------------------------------------- measures

    @cached_property
    def elements(self) -> int:
        """The number of elements, including zeros and frozen weights."""
        return sum(e.elements for e in self.entries.values())

    @cached_property
    def nonzero(self) -> int:
        """The number of elements that are not zero."""
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
        """The share of zeros in all tensors or in groups of tensors.

        >>> import numpy as np
        >>> import negmerge as nm
        >>> base = {f"blocks.{k}.weight": np.zeros(4, np.float32) for k in range(2)}
        >>> model = {name: np.array([1, 0, 0, k], np.float32) for k, name in enumerate(base)}
        >>> tau = nm.merge(base, [model])
        >>> tau.sparsity()
        0.625
        >>> {depth: row.element_weighted for depth, row in tau.sparsity(by="depth").items()}
        {'0': 0.75, '1': 0.5}

        Args:
            by: for one number `element_weighted` (the share among all elements) or `tensor_mean`
                (the mean of the tensors' shares); for a table of both `tensor`, `depth` (the
                layer), `component` (the part of a layer) or a function from a tensor's name to its
                group.
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
        groups: dict[str, list[tuple[int, int]]] = {}
        for name, entry in self.entries.items():
            nonzero = entry.nonzero if self.scale else 0
            groups.setdefault(key(name), []).append((nonzero, entry.elements))
        return {group: _sparsity(counts) for group, counts in groups.items()}

    # ---------------------------------------------------------------------------------- on models

    def applied(
        self, model: torch.nn.Module | Mapping[str, Any], scale: float = 1.0
    ) -> AbstractContextManager[Any]:
        """Add `scale` × this vector to a model in place; on exit the model is restored exactly.

        >>> import torch
        >>> import negmerge as nm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> tau = nm.merge(model.state_dict(), [{"weight": torch.tensor([[3.0, 1.0]])}])
        >>> with tau.applied(model, -0.5):
        ...     print(model(torch.ones(1, 2)).item())
        1.0
        >>> model(torch.ones(1, 2)).item()
        2.0

        Args:
            model: a module, or a state dict of torch tensors or numpy arrays.
            scale: the factor of the vector; −λ subtracts λ·τ.
        """
        from negmerge.vectors.module import applied

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
                f"{quoted(name)}: {self.scale} × the task vector overflows {flat.dtype}; use a "
                "smaller scale"
            )
        return scaled


def _sparsity(counts: list[tuple[int, int]]) -> Sparsity:
    """The sparsity of tensors, from the number of nonzero elements and of elements of each."""
    nonzero, elements = (sum(column) for column in zip(*counts, strict=True))
    shares = [1 - some / size for some, size in counts if size]
    return Sparsity(
        elements=elements,
        nonzero=nonzero,
        tensors=len(counts),
        element_weighted=1 - nonzero / elements if elements else 0.0,
        tensor_mean=sum(shares) / len(shares) if shares else 0.0,
    )


def _factors(origin: Origin) -> list[float]:
    """The factors of all members, also of those that were not scaled."""
    return origin.factors or [1.0] * len(origin.members)


def _check_same_tensors(left: Mapping[str, Entry], right: Mapping[str, Entry]) -> None:
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or left[name].shape != right[name].shape:
            raise MismatchError(
                f"{quoted(name)}: missing, or of another shape, in one of the two task vectors"
            )


def open_model(source: Model | Checkpoint, name: str) -> Checkpoint:
    """Open a model, which errors call `name`; raises for patches, accumulators and task vectors."""
    if isinstance(source, TaskVector):
        raise OptionError(f"{name}: got a task vector, wanted a model")
    model = open_checkpoint(source, name)
    if model.metadata.get("format", "").startswith("negmerge-"):
        model.close()
        raise FileError(f"{model.path}: got a {model.metadata['format']} file, wanted a model")
    return model
