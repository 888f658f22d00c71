"""PyTorch pickles to safetensors: the only place that unpickles a user's file, if told to trust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from shlex import quote
from typing import Any

from negmerge.checkpoint import Checkpoint
from negmerge.errors import FileError, MismatchError, OptionError, shown
from negmerge.files import atomic, same_file, write
from negmerge.header import build_header, looks_pickled

PathLike = str | os.PathLike[str]
RANGE = 1 << 24


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
    try:
        with path.open("rb") if path.is_file() else BytesIO() as file:
            return looks_pickled(file.read(4)) or path.suffix in (".pt", ".pth", ".bin", ".ckpt")
    except OSError as error:
        raise FileError(f"{path}: cannot open: {error.strerror}") from error


def _rewrite(path: Path, target: Path, prefix: str) -> int:
    with Checkpoint(path) as model:
        names = _renamed(list(model.tensors), prefix, path)
        tensors = {names[i.name]: (i.dtype, i.shape) for i in model.tensors.values()}
        header, places = build_header(tensors, {"format": "pt"} | model.metadata)
        with atomic(target) as descriptor:
            write(descriptor, header, 0)
            for info in model.tensors.values():
                for start in range(0, info.nbytes, RANGE):
                    raw = model.read(info, start, min(start + RANGE, info.nbytes))
                    write(descriptor, raw.data, places[names[info.name]] + start)
            model.check_unchanged()
        return len(names)


def _from_pickle(path: Path, target: Path, key: str, prefix: str) -> int:
    import pickle

    import torch
    from safetensors.torch import save

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise OptionError(
            f"torch {torch.__version__}: convert needs 2.10, older ones unpickle unsafely"
        )
    try:
        with path.open("rb") as file:  # a path would be judged by its suffix
            content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise FileError(f"{path}: cannot be read as plain weights: {reason}") from error
    found = _weights(content, key, path)
    names = _renamed(list(found), prefix, path)
    # Own memory for each: a safetensors file has no tensor that is a view of another.
    tensors = {names[k]: v.detach().clone().contiguous() for k, v in found.items()}
    with atomic(target) as descriptor:
        write(descriptor, save(tensors, {"format": "pt"}), 0)
    return len(tensors)


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
        raise OptionError(
            f"{path}: weights under several keys: {', '.join(places)}; choose with --key"
        )
    raise FileError(f"{path}: holds no dictionary from names to tensors")


def _renamed(names: list[str], prefix: str, path: Path) -> dict[str, str]:
    for name in names:
        if not name.startswith(prefix) or name == prefix:
            raise MismatchError(f"{path} {shown(name)}: does not start with {prefix!r}")
    return {name: name.removeprefix(prefix) for name in names}
