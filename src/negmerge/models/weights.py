"""Weights of live modules in safetensors files: written atomically, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from negmerge.checkpoint import Checkpoint
from negmerge.errors import FileError, MismatchError, shown
from negmerge.files import atomic, write
from negmerge.header import build_header
from negmerge.models.classifiers import resize

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors of any layout to one file, atomically; same tensors, same bytes.

    >>> path = getfixture("tmp_path") / "a.safetensors"
    >>> save_tensors(path, {"w": torch.eye(2).T}, {"id": "x"})
    >>> load_tensors(path)[0]["w"].tolist(), load_tensors(path)[1]
    ([[1.0, 0.0], [0.0, 1.0]], {'id': 'x'})
    """
    names = {dtype: name for name, dtype in _TORCH.items()}
    for name, tensor in tensors.items():
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        if kind not in names:
            raise MismatchError(
                f"weights: {shown(name)} is {kind}; a file holds tensors of {_known()}"
            )
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header, places = build_header(
        {name: (names[t.dtype], tuple(t.shape)) for name, t in sorted(plain.items())}, metadata
    )
    with atomic(path) as descriptor:
        write(descriptor, header, 0)
        for name, place in places.items():
            write(descriptor, plain[name].reshape(-1).view(torch.uint8).numpy().data, place)


def _known() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _TORCH.values())


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a file or folder, through the strict reader, with the metadata."""
    with Checkpoint(path) as file:
        tensors: dict[str, Tensor] = {}
        for name, info in file.tensors.items():
            if info.dtype not in _TORCH:
                raise FileError(f"{path} {shown(name)}: dtype {info.dtype} cannot be loaded")
            tensors[name] = torch.empty(info.shape, dtype=_TORCH[info.dtype])
            if info.nbytes:  # torch gives no view of nothing
                raw = torch.from_numpy(file.read(info).copy().view("uint8"))
                tensors[name] = raw.view(_TORCH[info.dtype]).reshape(info.shape)
        return tensors, dict(file.metadata)


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a file, from its header alone."""
    with Checkpoint(path) as file:
        return dict(file.metadata)


def save_model(path: Path, model: nn.Module, metadata: Mapping[str, object]) -> None:
    """Write a model's state; metadata values are JSON."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    save_tensors(path, model.state_dict(), texts)


def load_model(path: Path, model: nn.Module, new_head: str | None = None) -> None:
    """Put a file's weights into a module; every name and shape must fit.

    A file that says how many outputs it has gives the module as many.

    new_head: the name of a layer that keeps its fresh weights if the file's have another shape.
    """
    tensors, metadata = load_tensors(path)
    if "outputs" in metadata:
        with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten below
            resize(model, _outputs(path, metadata["outputs"], tensors))
    wanted = model.state_dict()
    if new_head is not None:
        for name in (f"{new_head}.weight", f"{new_head}.bias"):
            if name in wanted and (
                name not in tensors or tensors[name].shape != wanted[name].shape
            ):
                tensors[name] = wanted[name]
    check_fit(path, tensors, wanted, "the model", "check model.name and the number of classes")
    model.load_state_dict(tensors)


def _outputs(path: Path, said: str, tensors: Mapping[str, Tensor]) -> int:
    """How many outputs a file says it has, which some tensor of it must have too."""
    if not said.isdecimal() or int(said) not in {len(t) for t in tensors.values() if t.dim()}:
        raise FileError(f"{path}: its metadata says outputs = {shown(said)}, its tensors do not")
    return int(said)


def check_fit(
    path: Path,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    model: str,
    remedy: str,
) -> None:
    """Raise unless a file has every tensor that is wanted, in its shape, and no other."""
    for name in sorted(wanted.keys() | tensors.keys()):
        here, there = wanted.get(name), tensors.get(name)
        if here is None or there is None or here.shape != there.shape:
            found = "has no such tensor" if there is None else f"has shape {tuple(there.shape)}"
            need = "none" if here is None else f"{tuple(here.shape)}"
            raise MismatchError(
                f"{path} {shown(name)}: the file {found}, {model} wants {need}; {remedy}"
            )
