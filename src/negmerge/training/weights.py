"""Weights of torch modules in safetensors files: atomic writing, strict reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.header import build_header
from negmerge.errors import FileError, MismatchError, quoted
from negmerge.support.files import atomic_file, write_fully
from negmerge.training.layers import resize

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors to a file atomically; equal tensors of any layout give equal bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.safetensors")
    ...     save_tensors(path, {"w": torch.eye(2).T}, {"id": "x"})
    ...     load_tensors(path)
    ({'w': tensor([[1., 0.], [0., 1.]])}, {'id': 'x'})
    """
    names = {dtype: name for name, dtype in _TORCH.items()}
    for name, tensor in tensors.items():
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        if kind not in names:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in names)
            raise MismatchError(f"weights: {quoted(name)} is {kind}; wanted a tensor of {known}")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header, places = build_header(
        {name: (names[t.dtype], tuple(t.shape)) for name, t in sorted(plain.items())}, metadata
    )
    with atomic_file(path) as descriptor:
        write_fully(descriptor, header, 0)
        for name, place in places.items():
            write_fully(descriptor, plain[name].reshape(-1).view(torch.uint8).numpy().data, place)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a file or folder, and the metadata."""
    with Checkpoint(path) as file:
        tensors: dict[str, Tensor] = {}
        for name, info in file.tensors.items():
            if info.dtype not in _TORCH:
                wanted = ", ".join(_TORCH)
                raise FileError(
                    f"{path} {quoted(name)}: dtype {info.dtype}, wanted one of {wanted}"
                )
            tensors[name] = torch.empty(info.shape, dtype=_TORCH[info.dtype])
            if info.nbytes:  # torch cannot view an empty array
                raw = torch.from_numpy(file.read(info).copy().view("uint8"))
                tensors[name] = raw.view(_TORCH[info.dtype]).reshape(info.shape)
        return tensors, dict(file.metadata)


def metadata_of(path: Path) -> dict[str, str]:
    """Read the metadata of a file."""
    with Checkpoint(path) as file:
        return dict(file.metadata)


def save_model(path: Path, model: nn.Module, metadata: Mapping[str, object]) -> None:
    """Write the state of a model; metadata values that are not str are written as JSON."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    save_tensors(path, model.state_dict(), texts)


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a module, each once, by the names that files have.

    They are those of `named_parameters` unless a hook of the module renames its state, as for
    models of transformers.

    >>> {name: (*weight.shape,) for name, weight in named_weights(nn.Linear(2, 3)).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, nn.Parameter) and id(weight) not in seen:
            found[name] = weight
            seen.add(id(weight))
    return found


def load_model(path: Path, model: nn.Module, new_head: str | None = None) -> None:
    """Load the weights of a file into a module; all names and shapes must match.

    If the metadata of the file has a number of outputs, the module gets as many.

    Args:
        new_head: the name of a layer that keeps its weights if the file has another shape for it.
    """
    tensors, metadata = load_tensors(path)
    if (outputs := metadata.get("outputs")) is not None:
        sizes = {str(len(tensor)) for tensor in tensors.values() if tensor.dim()}
        if outputs not in sizes:
            raise FileError(
                f"{path}: its metadata has outputs = {quoted(outputs)}, but no tensor has that size"
            )
        with torch.random.fork_rng(devices=[]):  # the random weights are overwritten below
            resize(model, int(outputs))
    wanted = model.state_dict()
    if new_head is not None:
        for name in (f"{new_head}.weight", f"{new_head}.bias"):
            if name in wanted and (
                name not in tensors or tensors[name].shape != wanted[name].shape
            ):
                tensors[name] = wanted[name]
    check_fit(path, tensors, wanted, "the model", "check model.name and the number of classes")
    model.load_state_dict(tensors)


def check_fit(
    path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], model: str, remedy: str
) -> None:
    """Raise an error unless a file has exactly the wanted tensors, in their shapes.

    Args:
        wanted: the tensors of the model.
        model, remedy: parts of the error message.
    """
    for name in sorted(wanted.keys() | tensors.keys()):
        here, there = wanted.get(name), tensors.get(name)
        if here is None or there is None or here.shape != there.shape:
            found = "has no such tensor" if there is None else f"has shape {tuple(there.shape)}"
            need = "none" if here is None else f"{tuple(here.shape)}"
            raise MismatchError(
                f"{path} {quoted(name)}: the file {found}, {model} wants {need}; {remedy}"
            )
