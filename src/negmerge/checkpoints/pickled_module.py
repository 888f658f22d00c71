"""Weights of a pickled module, without its classes.

`torch.save(model)` pickles the module itself, and loading it would import and run the code of its
classes. Here every class but those of tensors is replaced by `Unknown`, which stores what the
pickle sets and runs nothing; the weights are then found in the dictionaries of the modules.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from inspect import isfunction
from types import SimpleNamespace
from typing import Any, BinaryIO
from zipfile import ZipFile, is_zipfile

TENSOR_PARTS = {
    ("__builtin__", "set"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
}
"""The names that a pickle of tensors needs; none of them runs code that the pickle chooses, and a
pickle, which can set attributes, cannot change the classes."""
MAX_MODULES = 100_000
"""The largest number of modules: modules that share others would take forever to list."""
STORAGES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
TENSOR_PARTS |= {("torch", f"{name}Storage") for name in STORAGES}


class Unknown:
    """An object of any class that the pickle names: it stores its state."""

    def __new__(cls, *args: Any, **options: Any) -> Unknown:
        """Accept the arguments of any class."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = dict(state) if isinstance(state, Mapping) else {}

    def __call__(self, *args: Any, **options: Any) -> Unknown:
        """Accept the call of any function."""
        return Unknown()

    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None:
        """Accept the items of any list."""

    def extend(self, values: Any) -> None:
        """Accept the items of any list."""


def _refuse(*args: Any, **options: Any) -> None:
    raise pickle.UnpicklingError("only an archive of tensors can be read")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a part of tensors as itself, and any other name as `Unknown`."""
        if (module, name) not in TENSOR_PARTS:
            return type("Unknown", (Unknown,), {})  # the pickle may change this class only
        found = super().find_class(module, name)
        return (lambda *args: found(*args)) if isfunction(found) else found


def load_module_weights(file: BinaryIO) -> dict[str, Any] | None:
    """Return parameters and buffers of a pickled module by name; None if the file has no module.

    Of a dictionary with modules, such as one with the state of an optimiser, return a dictionary
    for each module.

    >>> import io
    >>> import torch
    >>> file = io.BytesIO()
    >>> torch.save(torch.nn.Sequential(torch.nn.Linear(2, 1)), file)
    >>> _ = file.seek(0)
    >>> sorted(load_module_weights(file))
    ['0.bias', '0.weight']
    """
    import torch

    # Older formats, and archives of TorchScript, are read by other code of torch.
    if not is_zipfile(file) or any(
        name.endswith("/constants.pkl") for name in ZipFile(file).namelist()
    ):
        return None
    file.seek(0)
    reader = SimpleNamespace(Unpickler=_Unpickler, load=_refuse, __name__="pickle")
    content = torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)
    left = iter(range(MAX_MODULES))
    if _is_module(content):
        return dict(_tensors_of(content, "", set(), left))
    items = content.items() if isinstance(content, Mapping) else ()
    found = {k: dict(_tensors_of(v, "", set(), left)) for k, v in items if _is_module(v)}
    return found or None


def _is_module(value: Any) -> bool:
    return isinstance(value, Unknown) and "_modules" in value.state


def _tensors_of(
    module: Unknown, prefix: str, above: set[int], left: Iterator[int]
) -> Iterator[tuple[str, Any]]:
    """The tensors of a module and of those in it, in the order of `state_dict()`.

    Args:
        module: the module.
        prefix: the beginning of their names.
        above: the modules that it is in.
        left: one for each module that may still be listed.
    """
    import torch

    if next(left, None) is None:
        raise pickle.UnpicklingError(f"more than {MAX_MODULES:,} modules")
    state = module.state
    hidden = state.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, tensor in (state.get(kind) or OrderedDict()).items():
            if isinstance(tensor, torch.Tensor) and not (kind == "_buffers" and name in hidden):
                yield f"{prefix}{name}", tensor
    for name, inner in (state.get("_modules") or OrderedDict()).items():
        if isinstance(inner, Unknown) and id(inner) not in above:
            yield from _tensors_of(inner, f"{prefix}{name}.", above | {id(module)}, left)
