"""A base with an adapter, as a checkpoint whose weights are computed when they are read.

A weight that the adapter changes is base + s·BA, computed in float64 and rounded once to float32,
or to float64 if the base is float64. If the base has 16 bits, the sum is not rounded to 16 bits:
changes that are smaller than half a step of such a format would be lost. All other tensors are
those of the base.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.adapter import Adapter, LowRank
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import FLOATS, NUMPY_TYPES, SIZES, Bytes, from_bits, widen
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import MismatchError, quoted

Matrices = tuple[NDArray[np.float64], NDArray[np.float64]]
KEPT = 3
"""The number of modules whose matrices are kept in memory."""
STEP = 1 << 20
"""The elements that are compared at a time."""


class Adapted(Checkpoint):
    """The model base + adapter.

    Args:
        adapter: an open adapter, which is closed with this model.
        base: the open base, which is not.
        place: the name of the adapter in errors.

    Attributes:
        changed: the names of the tensors that the adapter changes.
    """

    def __init__(self, adapter: Adapter, base: Checkpoint, place: str) -> None:
        self.adapter, self.base = adapter, base
        self.path, self.folder, self.files = adapter.path, adapter.folder, adapter.files
        self.headers = adapter.headers
        self._closing = ExitStack()
        self._closing.callback(adapter.close)
        self._lock = Lock()
        self._matrices: dict[str, Matrices] = {}
        names = {module: f"{module}.weight" for module in adapter.modules}
        found = find_names([*names.values(), *adapter.full], base, place, adapter.base_name)
        self._low_rank = {found[name]: adapter.modules[module] for module, name in names.items()}
        self._full = {found[name]: info for name, info in adapter.full.items()}
        self.tensors = dict(base.tensors)
        for name, change in self._low_rank.items():
            self._check_shape(name, change, f"{place} {quoted(name)}")
            info = base.tensors[name]
            self.tensors[name] = TensorInfo(name, _format(info.dtype), info.shape, 0, 0)
        for name in [name for name in self._full if name in self._low_rank]:
            self._leave_out(name, f"{place} {quoted(name)}")
        self.tensors |= self._full
        self.changed = self._low_rank.keys() | self._full.keys()

    @property
    def changes(self) -> dict[str, LowRank]:
        """The low-rank changes by name of the tensor."""
        return self._low_rank

    def identity(self) -> tuple[tuple[int, int], ...]:
        return self.adapter.identity()

    def stamps(self) -> list[tuple[int, int]]:
        return self.adapter.stamps()

    def check_unchanged(self) -> None:
        self.adapter.check_unchanged()

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """The place of the bytes, or an invalid descriptor if they are computed."""
        if info.name in self._low_rank:
            return -1, 0
        own = self._own(info)
        return self.base.place(info) if own is None else self.adapter.place(own)

    def read_into(self, info: TensorInfo, start: int, buffer: Bytes) -> None:
        own = self._own(info)
        if own is not None:
            self.adapter.read_into(own, start, buffer)
        elif info.name not in self._low_rank:
            self.base.read_into(info, start, buffer)
        else:
            first, count = start // SIZES[info.dtype], buffer.size // SIZES[info.dtype]
            stored = self.base.tensors[info.name]
            size = SIZES[stored.dtype]
            raw = self.base.read(stored, first * size, (first + count) * size)
            values = from_bits(raw.view(_BITS[size]), stored.dtype)
            if values.dtype == np.float16:
                values = values.astype(np.float32)
            self.add_to(values, info.name, first, buffer.view(NUMPY_TYPES[info.dtype]))

    def add_to(self, base: NDArray[Any], name: str, first: int, out: NDArray[Any]) -> None:
        """Write the weights of a range, from element `first` on, given those of the base."""
        from negmerge.checkpoints.low_rank import add_low_rank  # numba takes long to import

        left, right = self.matrices(name)
        add_low_rank(left, right, self._low_rank[name].scaling, base, first, out)

    def matrices(self, name: str) -> Matrices:
        """Return the two factors of the change of a tensor, in the order of its dimensions."""
        with self._lock:
            if name not in self._matrices:
                change, shape = self._low_rank[name], self.base.tensors[name].shape
                a = self._read_matrix(change.a).reshape(change.rank, -1)
                b = self._read_matrix(change.b).reshape(-1, change.rank)
                if _is_transposed(change, shape, self.adapter.transposed):
                    a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
                while len(self._matrices) >= KEPT:
                    del self._matrices[next(iter(self._matrices))]
                self._matrices[name] = b, a
            return self._matrices[name]

    def _read_matrix(self, info: TensorInfo) -> NDArray[np.float64]:
        return widen(self.adapter.read(info), info.dtype)

    def _own(self, info: TensorInfo) -> TensorInfo | None:
        """Return the tensor of the adapter that replaces one of the base, if any."""
        return info if info.name in self.adapter.tensors else None

    def _check_shape(self, name: str, change: LowRank, where: str) -> None:
        info = self.base.tensors[name]
        if info.dtype not in FLOATS:
            raise MismatchError(
                f"{where}: the base has {info.dtype}, wanted {', '.join(FLOATS)}; name the base "
                "before it was quantised"
            )
        inputs, outputs = prod(change.a.shape[1:]), change.b.shape[0]
        fits = prod(change.b.shape[2:]) == 1 and info.shape[1:] in (change.a.shape[1:], (inputs,))
        if not fits or info.shape[0] != outputs:
            fits = info.shape == (inputs, outputs)
            fits &= change.embedding or self.adapter.transposed
        if not fits:
            raise MismatchError(
                f"{where}: shape {info.shape} in the base, the adapter has B {change.b.shape} and "
                f"A {change.a.shape}; name the base that it was trained on"
            )

    def _leave_out(self, name: str, where: str) -> None:
        """Leave out a copy of the base's tensor, which peft saves beside the matrices."""
        own, stored = self._full.pop(name), self.base.tensors[name]
        equal = own.shape == stored.shape
        for first in range(0, own.elements if equal else 0, STEP):
            last = min(first + STEP, own.elements)
            one, two = (
                widen(m.read(i, first * SIZES[i.dtype], last * SIZES[i.dtype]), i.dtype)
                for m, i in ((self.adapter, own), (self.base, stored))
            )
            equal &= np.array_equal(one, two)
        if not equal:
            raise MismatchError(
                f"{where}: the adapter has A and B and also a whole tensor that differs from the "
                "base; name the base that it was trained on"
            )


_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def _format(dtype: str) -> str:
    return "F64" if dtype == "F64" else "F32"


def _is_transposed(change: LowRank, shape: tuple[int, ...], flag: bool) -> bool:
    """Whether the weight of a module is the transpose of BA."""
    turned = shape == (prod(change.a.shape[1:]), change.b.shape[0])
    return turned and (change.embedding or flag)


def find_names(
    names: Iterable[str], base: Checkpoint, place: str, base_name: str
) -> dict[str, str]:
    """Find the tensors of the base that an adapter means.

    The class that loads a base may put a prefix before all names, or leave one out.

    Args:
        names: the names that the adapter has.
        place: the name of the adapter in errors.
        base_name: what the adapter calls its base.
    """
    wanted = list(names)
    for rename in _renamings(wanted[0], base) if wanted else ():
        found = {name: rename(name) for name in wanted}
        meant = {*found.values()}
        if meant <= base.tensors.keys() and len(meant) == len(found):  # no two names for one tensor
            return found
    missing = next((name for name in wanted if name not in base.tensors), None)
    if missing is None:
        return {name: name for name in wanted}
    hint = f"; the adapter was trained on {quoted(base_name)}" if base_name else ""
    raise MismatchError(
        f"{place} {quoted(missing)}: the base {base.path} has no such tensor{hint}; name the base "
        "that it was trained on"
    )


def _renamings(name: str, base: Checkpoint) -> Iterable[Any]:
    """Yield functions that may turn names of an adapter into names of the base."""
    yield lambda name: name
    yield _older_layout
    parts = name.split(".")
    for k in range(1, len(parts) - 1):
        if ".".join(parts[k:]) in base.tensors:
            less = ".".join(parts[:k]) + "."
            yield lambda name, less=less: name.removeprefix(less)
    for longer in sorted(base.tensors):
        if longer.endswith(f".{name}"):
            more = longer.removesuffix(name)
            yield lambda name, more=more: more + name


def _older_layout(name: str) -> str:
    """Return the name in a file of a model of vision and text, in which classes now rename parts.

    >>> _older_layout("model.language_model.layers.0.mlp.weight")
    'language_model.model.layers.0.mlp.weight'
    >>> _older_layout("model.vision_tower.post.weight"), _older_layout("lm_head.weight")
    ('vision_tower.post.weight', 'language_model.lm_head.weight')
    """
    inner = name.removeprefix("model.")
    if inner.startswith("language_model."):
        return "language_model.model." + inner.removeprefix("language_model.")
    return f"language_model.{name}" if name.startswith("lm_head.") else inner
