"""Checkpoints on disk: one safetensors file, or a Hugging Face folder with an index.

Opening reads headers only. Data is read in byte ranges into buffers of the caller:
memory is bounded, and a file that becomes shorter while it is read raises an error (with a mapped
file it would kill the process).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from negmerge.checkpoints.dtypes import Bytes
from negmerge.checkpoints.header import MAX_HEADER, Header, TensorInfo, read_header
from negmerge.errors import FileError, quoted
from negmerge.support.files import raise_open_file_limit
from negmerge.support.reading import open_regular, parse_json, read_bytes
from negmerge.support.remote.hub import hub_url
from negmerge.support.remote.urls import is_url
from negmerge.support.systems import read_at

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_REFUSED = (
    "got a PEFT adapter (such as LoRA), wanted a whole model; a member of a pool may be the folder "
    "of an adapter, with adapter_config.json; otherwise merge it into its base first: "
    "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)"
)


class Checkpoint:
    """An open checkpoint: its tensors by name, read by byte range.

    >>> import tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": np.ones((2, 3), np.float32)}, f"{folder}/model.safetensors")
    ...     with Checkpoint(folder) as model:
    ...         model.tensors["w"].shape
    (2, 3)

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or
            `model.safetensors.index.json`; or the URL or Hub id of one, which is fetched.
        own: whether the file may be a patch or an accumulator: no tensors are allowed, and a tensor
            may be stored in parts, as `NAME#PART`.
    """

    def __init__(self, path: str | os.PathLike[str], *, own: bool = False) -> None:
        self.path = _fetched(path) if is_url(path) or hub_url(path) else Path(path)
        self.folder: Path | None = None
        self.files: list[Path] = []
        self.headers: list[Header] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors: list[int] = []
        self._stats: list[tuple[int, int]] = []
        self._closing = ExitStack()
        self._own = own
        raise_open_file_limit()
        try:
            if os.path.isdir(self.path):  # noqa: PTH112 Path.is_dir raises for invalid paths
                self.folder = self.path
                self._open_folder(self.path)
            else:
                self._open_file(self.path)
            for header in self.headers:
                self.tensors.update(header.tensors)
            if not self.tensors and not own:
                raise FileError(f"{self.path}: contains no tensors")
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files."""
        return {k: v for header in self.headers for k, v in header.metadata.items()}

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def sources(self) -> list[Path]:
        """The files of the checkpoint, and their folder."""
        return self.files if self.folder is None else [self.folder, *self.files]

    def identity(self) -> tuple[tuple[int, int], ...]:
        """Device and inode of each file: equal for checkpoints that are the same files."""
        return tuple((s.st_dev, s.st_ino) for s in map(os.stat, self.files))

    def stamps(self) -> list[tuple[int, int]]:
        """The size of each file, and the time of its last change in nanoseconds, when opened."""
        return list(self._stats)

    def read_into(self, info: TensorInfo, start: int, buffer: Bytes) -> None:
        """Fill a buffer with the bytes of a tensor from byte `start` on."""
        view = buffer.data
        at = info.offset + start
        while view.nbytes:
            path = self.files[info.file]
            try:
                done = read_at(self._descriptors[info.file], view, at)
            except OSError as error:
                raise FileError(f"{path}: cannot read: {error.strerror}") from error
            if not done:
                raise FileError(
                    f"{path} {quoted(info.name)}: the file became shorter while it was read; run "
                    "again when it is complete"
                )
            view, at = view[done:], at + done

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """The open descriptor of a tensor's file, and the offset of the tensor."""
        return self._descriptors[info.file], info.offset

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes `start` to `stop` of a tensor; by default all."""
        buffer = np.empty((info.nbytes if stop is None else stop) - start, np.uint8)
        self.read_into(info, start, buffer)
        return buffer

    def check_unchanged(self) -> None:
        """Raise if a file was written to since it was opened."""
        for path, descriptor, before in zip(
            self.files, self._descriptors, self._stats, strict=True
        ):
            if _stamp(descriptor) != before:
                raise FileError(f"{path}: changed while it was read; run again when it is complete")

    def close(self) -> None:
        """Close all files."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A patch that is read lazily stays open as long as its task vector exists.
        if hasattr(self, "_closing"):
            self.close()

    def _open_file(self, path: Path) -> None:
        descriptor = open_regular(path)
        self._closing.callback(os.close, descriptor)
        self.headers.append(read_header(descriptor, path, len(self.files), self._own))
        self._add_file(path, descriptor)

    def _add_file(self, path: Path, descriptor: int) -> None:
        self.files.append(path)
        self._descriptors.append(descriptor)
        self._stats.append(_stamp(descriptor))

    def _open_folder(self, folder: Path) -> None:
        index = path_within(folder, INDEX_FILE)
        if index.exists():
            weight_map = read_index(index)
            for name in sorted(set(weight_map.values())):
                self._open_file(path_within(folder, name))
            self._check_index(index, weight_map)
        elif (folder / SINGLE_FILE).exists():
            self._open_file(path_within(folder, SINGLE_FILE))
        elif (folder / "adapter_config.json").exists():
            raise FileError(f"{folder}: {ADAPTER_REFUSED}")
        else:
            found = sorted(p.name for p in folder.glob("*.safetensors"))
            hint = f"; name a file instead: {', '.join(found[:5])}" if found else ""
            raise FileError(f"{folder}: contains neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        found: dict[str, str] = {}
        for path, header in zip(self.files, self.headers, strict=True):
            for name in header.tensors:
                if name in found:
                    raise FileError(
                        f"{path} {quoted(name)}: is also in {found[name]}, wanted in one shard"
                    )
                found[name] = path.name
        for name in sorted(found.keys() | weight_map.keys()):
            listed, shard = (names.get(name, "no shard") for names in (weight_map, found))
            if listed != shard:
                raise FileError(
                    f"{index} {quoted(name)}: the index says {listed}, found in {shard}; "
                    "write the folder again"
                )


def aligned_buffer(nbytes: int) -> Bytes:
    """A buffer of some bytes on a page boundary: reading into others can be five times slower."""
    raw = np.empty(nbytes + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + nbytes]


def read_index(index: Path) -> dict[str, str]:
    """Read and check the weight map of a Hugging Face index: tensor name → shard name."""
    found: Any = parse_json(read_bytes(index, MAX_HEADER), index, "index").get("weight_map")
    if not isinstance(found, dict) or not found:
        raise FileError(f"{index}: no 'weight_map' from tensor names to shard names")
    weight_map = cast("dict[str, Any]", found)
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not plain or shard in ("", ".", ".."):
            raise FileError(
                f"{index} {quoted(name)}: shard {quoted(shard)}, wanted the name of a file in the "
                "same folder"
            )
    return weight_map


def path_within(folder: Path, name: str) -> Path:
    """The path of a file in a folder; raises if the path is a link that leads out of the folder.

    The file may be missing. The links of a Hugging Face cache may lead to any file in the cache of
    the same repository.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "tokenizer.json").symlink_to("/etc/hostname")
    ...     path_within(Path(folder), "tokenizer.json")
    Traceback (most recent call last):
    negmerge.errors.FileError: .../tokenizer.json: links to /etc/hostname, outside ...
    """
    path = folder / name
    home = folder.resolve()
    kinds = ("models--", "datasets--")
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith(kinds):
        home = home.parent.parent
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise FileError(f"{path}: is a link without a target; copy the file here") from error
    if not target.is_relative_to(home):
        raise FileError(f"{path}: links to {target}, outside {home}; copy the file here")
    return path


def read_within(folder: Path, name: str, limit: int = MAX_HEADER) -> bytes | None:
    """The content of a small file in a folder, which `path_within` checks; None if it is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_within(Path(folder), "config.json") is None
    True
    """
    path = path_within(folder, name)
    return read_bytes(path, limit) if os.path.lexists(path) else None


def _fetched(place: str | os.PathLike[str]) -> Path:
    from negmerge.checkpoints.remote import local_model  # it imports this module

    return local_model(place)


def _stamp(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
