"""Converting PyTorch pickles to safetensors: the only module that unpickles files of users."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import ALL_NAMES, SIZES
from negmerge.checkpoints.header import (
    Tensors,
    build_header,
    check_names,
    looks_pickled,
    read_header,
)
from negmerge.checkpoints.pickled_module import load_module_weights
from negmerge.checkpoints.remote import local_model
from negmerge.checkpoints.split_attention import joined_attention
from negmerge.checkpoints.state_dict import PathLike
from negmerge.errors import FileError, MismatchError, OptionError, quoted
from negmerge.support.files import atomic_file, same_file, write_fully
from negmerge.support.reading import open_regular

RANGE = 1 << 24
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DTYPES = {name: dtype for name, dtype in ALL_NAMES.items() if dtype != "C64"}
"""Formats that are converted: no merge accepts complex numbers."""
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that torch wrote before 1.6: a pickle of its magic number."""
RESAVE = (
    "; the file has the format of torch before 1.6: where its classes are installed, save it again "
    "with torch.save(model.state_dict(), FILE)"
)
FORBIDDEN = re.compile(r"GLOBAL (\S{1,100}) ")
"""Where an error of torch says which function or class a file names."""
MAX_GROWTH, MAX_EXTRA = 16, 64 << 20
"""The result has at most `MAX_GROWTH` times the bytes of the pickle, and `MAX_EXTRA` more: a pickle
stores tied and expanded tensors once."""


def convert(
    source: PathLike, out: PathLike, *, trust: bool = False, key: str = "", strip_prefix: str = ""
) -> int:
    """Write a checkpoint as one safetensors file; returns the number of tensors.

    >>> import tempfile
    >>> import torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     old, new = f"{folder}/a.pt", f"{folder}/a.safetensors"
    ...     torch.save({"state_dict": {"module.w": torch.ones(2)}}, old)
    ...     convert(old, new, trust=True, strip_prefix="module.")
    1

    Args:
        source: a `.pt`, `.pth` or `.bin` pickle (needs `trust`), or a safetensors file or folder.
        out: the file to write.
        trust: whether a pickle may be opened.
        key: the key of the weights in the pickle; necessary if several keys have weights.
        strip_prefix: a prefix that is removed from every name, such as `module.`.
    """
    path, target = local_model(source), Path(out)
    if same_file(target, path):
        raise FileError(f"{target}: is also the input; name another output")
    if not is_pickle(path):
        return _rewrite(path, target, strip_prefix)
    if not trust:
        raise OptionError(
            f"{path}: opening a pickle can run code; if you trust its source, run "
            f"negmerge convert {quote(str(path))} --trust -o {quote(str(target))}"
        )
    return _from_pickle(path, target, key, strip_prefix)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, by its suffix or its first bytes."""
    if path.suffix in SUFFIXES:
        return True
    try:
        descriptor = open_regular(path)
    except FileError:  # a folder, or a file that `Checkpoint` refuses with an error
        return False
    with os.fdopen(descriptor, "rb") as file:
        return looks_pickled(file.read(4))


def _rewrite(path: Path, target: Path, prefix: str) -> int:
    with Checkpoint(path) as model:
        names = _renamed(list(model.tensors), prefix, path)
        tensors = {names[i.name]: (i.dtype, i.shape) for i in model.tensors.values()}

        def data(name: str) -> Iterator[memoryview]:
            info = model.tensors[prefix + name]
            for start in range(0, info.nbytes, RANGE):
                yield model.read(info, start, min(start + RANGE, info.nbytes)).data

        with _written(target, tensors, {"format": "pt"} | model.metadata, data):
            model.check_unchanged()
        return len(names)


def _from_pickle(path: Path, target: Path, key: str, prefix: str) -> int:
    import torch

    given = _weights(_unpickled(path), key, path)
    names = _renamed(list(given), prefix, path)
    kinds = {names[k]: _dtype(t, path, k) for k, t in given.items()}
    found = joined_attention({names[k]: t for k, t in given.items()}, path)
    tensors = {
        name: (kinds.get(name) or _dtype(t, path, name), tuple(t.shape))
        for name, t in found.items()
    }
    needed, size = sum(SIZES[d] * prod(s) for d, s in tensors.values()), path.stat().st_size
    if needed > MAX_EXTRA + MAX_GROWTH * size:
        raise FileError(
            f"{path}: the tensors need {needed:,} bytes, the file has {size:,}: expanded tensors "
            "repeat a few numbers; remove them"
        )

    def data(name: str) -> Iterator[memoryview]:
        # A copy: in a safetensors file no tensor is a view of another.
        plain = found[name].detach().resolve_neg().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().data

    with _written(target, tensors, {"format": "pt"}, data):
        return len(tensors)


def _unpickled(path: Path) -> Any:
    """The content of a pickle, read by torch's restricted unpickler; of a module, its weights."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise OptionError(
            f"torch {torch.__version__}: versions before 2.10 unpickle unsafely; install 2.10"
        )
    # An open file, because torch treats a path by its suffix.
    with os.fdopen(open_regular(path), "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with suppress(pickle.UnpicklingError):  # the file names a class, such as a module's
                return torch.load(file, map_location="cpu", weights_only=True)
            file.seek(0)
            if (found := load_module_weights(file)) is not None:
                return found
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)  # raises again
        except Exception as error:  # a damaged pickle can raise any exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            if named := FORBIDDEN.search(str(error)):  # torch's first line advises to run the code
                reason = f"it names {quoted(named[1])}, which could run code"
            file.seek(0)
            remedy = RESAVE if file.read(len(LEGACY)) == LEGACY else ""
            raise FileError(f"{path}: cannot be read as plain weights: {reason}{remedy}") from error


def _dtype(tensor: Any, path: Path, name: str) -> str:
    """The number format of a tensor; raises for tensors that safetensors cannot store."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    kinds = {
        "sparse or nested": tensor.layout is not torch.strided or tensor.is_nested,
        "quantised": tensor.is_quantized,
        "without data": tensor.device.type != "cpu",
        f"a {type(tensor).__name__}": type(tensor) not in (torch.Tensor, torch.nn.Parameter),
        f"of {dtype}": dtype not in DTYPES,
    }
    for kind, holds in kinds.items():
        if holds:
            raise FileError(
                f"{path} {quoted(name)}: the tensor is {kind}; wanted a plain tensor of numbers; "
                "save it as one, or remove it"
            )
    return DTYPES[dtype]


@contextmanager
def _written(
    target: Path,
    tensors: Tensors,
    metadata: Mapping[str, str],
    data: Callable[[str], Iterator[memoryview]],
) -> Iterator[None]:
    """Write a file; it appears after the block, and only if its header can be read.

    `data` returns the bytes of a tensor in parts.
    """
    check_names(tensors, target)
    header, places = build_header(tensors, metadata)
    with atomic_file(target) as descriptor:
        write_fully(descriptor, header, 0)
        for name, place in places.items():
            for part in data(name):
                write_fully(descriptor, part, place)
                place += part.nbytes
        read_header(descriptor, target)
        yield


def _weights(content: Any, key: str, path: Path) -> dict[str, Any]:
    import torch

    def is_weights(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and bool(value)
            and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
        )

    items = content.items() if isinstance(content, Mapping) else ()
    places = {k: v for k, v in items if is_weights(v)}
    if key:
        if key not in places:
            raise OptionError(f"{path}: no weights under the key {key!r}")
        return dict(places[key])
    if is_weights(content):
        return dict(content)
    if len(places) > 1:
        named = ", ".join(map(quoted, places))
        raise OptionError(f"{path}: weights under several keys: {named}; choose one with --key")
    if not places:
        raise FileError(f"{path}: contains no dictionary from names to tensors")
    return dict(*places.values())


def _renamed(names: list[str], prefix: str, path: Path) -> dict[str, str]:
    for name in names:
        if not name.startswith(prefix) or (prefix and name == prefix):
            raise MismatchError(f"{path} {quoted(name)}: does not start with {prefix!r}")
    return {name: name.removeprefix(prefix) for name in names}
