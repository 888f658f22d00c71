"""PyTorch pickles to safetensors: the only place that unpickles a user's file, if told to trust."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from negmerge.checkpoint import Checkpoint
from negmerge.dtypes import ALL_NAMES, SIZES
from negmerge.errors import FileError, MismatchError, OptionError, shown
from negmerge.files import atomic, same_file, write
from negmerge.header import build_header, check_names, looks_pickled, read_header
from negmerge.reading import open_regular

PathLike = str | os.PathLike[str]
RANGE = 1 << 24
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DTYPES = {name: dtype for name, dtype in ALL_NAMES.items() if dtype != "C64"}
"""What is converted: no merge can use complex numbers."""
SPARE, MOST_TIMES = 64 << 20, 16
"""A pickle may become so many bytes more, and so many times as large: tied and expanded tensors are
stored once there."""


def convert(
    source: PathLike, out: PathLike, *, trust: bool = False, key: str = "", strip_prefix: str = ""
) -> int:
    """Write a checkpoint as one safetensors file; returns the number of tensors.

    >>> import torch
    >>> folder = getfixture("tmp_path")
    >>> torch.save({"state_dict": {"module.w": torch.ones(2)}}, folder / "a.pt")
    >>> convert(folder / "a.pt", folder / "a.safetensors", trust=True, strip_prefix="module.")
    1

    source: a `.pt`, `.pth` or `.bin` pickle (needs `trust`), or safetensors.
    key: where in the pickle the weights are; found by itself if there is only one place.
    strip_prefix: a prefix to take off every name, such as `module.`.
    """
    path, target = Path(source), Path(out)
    if same_file(target, path):
        raise FileError(f"{target}: is also the input; name another output")
    if not _is_pickle(path):
        return _rewrite(path, target, strip_prefix)
    if not trust:
        raise OptionError(
            f"{path}: a pickle can run code when it is opened; if you know who made it: "
            f"negmerge convert {quote(str(path))} --trust -o {quote(str(target))}"
        )
    return _from_pickle(path, target, key, strip_prefix)


def _is_pickle(path: Path) -> bool:
    """By what the file holds, or by its name where that does not tell."""
    if path.suffix in SUFFIXES:
        return True
    try:
        descriptor = open_regular(path)
    except FileError:  # a folder, or what the reader of safetensors will tell of
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

    found = _weights(_unpickled(path), key, path)
    names = _renamed(list(found), prefix, path)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for old, tensor in found.items():
        tensors[names[old]] = (_dtype(tensor, path, old), tuple(tensor.shape))
    needed, size = sum(SIZES[d] * prod(s) for d, s in tensors.values()), path.stat().st_size
    if needed > SPARE + MOST_TIMES * size:
        raise FileError(
            f"{path}: its tensors would take {needed:,} bytes, the file has {size:,}: expanded "
            "tensors repeat a few numbers; leave them out"
        )

    def data(name: str) -> Iterator[memoryview]:
        # Own memory for each: a safetensors file has no tensor that is a view of another.
        plain = found[prefix + name].detach().resolve_neg().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().data

    with _written(target, tensors, {"format": "pt"}, data):
        return len(tensors)


def _unpickled(path: Path) -> Any:
    """What a pickle holds, by torch's restricted unpickler."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise OptionError(
            f"torch {torch.__version__}: convert needs 2.10, older ones unpickle unsafely"
        )
    # A descriptor, for a path would be judged by its suffix.
    with os.fdopen(open_regular(path), "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise FileError(f"{path}: cannot be read as plain weights: {reason}") from error


def _dtype(tensor: Any, path: Path, name: str) -> str:
    """The name of a tensor's number format, if it is a plain one that safetensors can hold."""
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
                f"{path} {shown(name)}: the tensor is {kind}; wanted a plain one of numbers; save "
                "it as such, or leave it out"
            )
    return DTYPES[dtype]


@contextmanager
def _written(
    target: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    data: Callable[[str], Iterator[memoryview]],
) -> Iterator[None]:
    """Write tensors part by part; the file takes its name after the block, if it can be read.

    data: from the name of a tensor to its bytes in parts.
    """
    check_names(tensors, target)
    header, places = build_header(tensors, metadata)
    with atomic(target) as descriptor:
        write(descriptor, header, 0)
        for name, place in places.items():
            for part in data(name):
                write(descriptor, part, place)
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

    if key:
        if not isinstance(content, Mapping) or not is_weights(content.get(key)):
            raise OptionError(f"{path}: no weights under the key {key!r}")
        return dict(content[key])
    if is_weights(content):
        return dict(content)
    places = (
        [k for k, v in content.items() if is_weights(v)] if isinstance(content, Mapping) else []
    )
    if len(places) == 1:
        return dict(content[places[0]])
    if places:
        named = ", ".join(map(shown, places))
        raise OptionError(f"{path}: weights under several keys: {named}; choose with --key")
    raise FileError(f"{path}: holds no dictionary from names to tensors")


def _renamed(names: list[str], prefix: str, path: Path) -> dict[str, str]:
    for name in names:
        if not name.startswith(prefix) or (prefix and name == prefix):
            raise MismatchError(f"{path} {shown(name)}: does not start with {prefix!r}")
    return {name: name.removeprefix(prefix) for name in names}
