"""Checkpoints on disk: one safetensors file, or a Hugging Face folder with an index.

Opening reads headers only. Data is read in byte ranges with `preadv` into buffers the caller owns:
memory stays bounded, and a file that is cut off meanwhile is an error, where a mapped one would
kill the process.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np

from negmerge.dtypes import Bytes
from negmerge.errors import FileError, shown
from negmerge.header import MAX_HEADER, Header, TensorInfo, read_header
from negmerge.reading import open_regular, parse_json, read_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = (
    "a PEFT adapter (LoRA or the like), wanted a whole model; merge it into its base first: "
    "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder), "
    "and name that folder"
)


class Checkpoint:
    """An open checkpoint: its tensors by name, read by byte range.

    >>> from safetensors.numpy import save_file
    >>> path = getfixture("tmp_path") / "m.safetensors"
    >>> save_file({"w": np.ones((2, 3), np.float32)}, path)
    >>> with Checkpoint(path) as model:
    ...     model.tensors["w"].shape
    (2, 3)

    path: a `.safetensors` file, or a folder with `model.safetensors` or
        `model.safetensors.index.json`; own: whether it may be a file of negmerge's own kinds, which
        can be empty and have parts of tensors.
    """

    def __init__(self, path: str | os.PathLike[str], *, own: bool = False) -> None:
        self.path = Path(path)
        self.folder: Path | None = None
        self.files: list[Path] = []
        self.headers: list[Header] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors: list[int] = []
        self._stats: list[tuple[int, int]] = []
        self._closing = ExitStack()
        _allow_open_files()
        self._own = own
        try:
            if _is_folder(self.path):
                self.folder = self.path
                self._open_folder(self.path)
            else:
                self._open_file(self.path)
            for header in self.headers:
                self.tensors.update(header.tensors)
            if not self.tensors and not own:
                raise FileError(f"{self.path}: holds no tensors")
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files together."""
        return {k: v for header in self.headers for k, v in header.metadata.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def sources(self) -> list[Path]:
        """All that it is read from: files, and their folder."""
        return self.files if self.folder is None else [self.folder, *self.files]

    def identity(self) -> tuple[tuple[int, int], ...]:
        """The same for two checkpoints that are read from the same place."""
        stats = [path.stat() for path in self.files]
        return tuple((s.st_dev, s.st_ino) for s in stats)

    def read_into(self, info: TensorInfo, start: int, buffer: Bytes) -> None:
        """Fill a buffer with a tensor's bytes from byte `start` on."""
        view = buffer.data
        at = info.offset + start
        while view.nbytes:
            try:
                done = os.preadv(self._descriptors[info.file], [view], at)
            except OSError as error:
                raise FileError(
                    f"{self.files[info.file]}: cannot read: {error.strerror}"
                ) from error
            if not done:
                raise FileError(
                    f"{self.files[info.file]} {shown(info.name)}: "
                    "the file was cut off while it was read"
                )
            view, at = view[done:], at + done

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """The open descriptor of a tensor's file and the byte where the tensor begins."""
        return self._descriptors[info.file], info.offset

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> Bytes:
        """The bytes of a tensor, or of a part of it."""
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

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_file(self, path: Path) -> None:
        descriptor = open_regular(path)
        self._closing.callback(os.close, descriptor)
        header = read_header(descriptor, path, len(self.files), self._own)
        self.files.append(path)
        self.headers.append(header)
        self._descriptors.append(descriptor)
        self._stats.append(_stamp(descriptor))

    def _open_folder(self, folder: Path) -> None:
        index = inside(folder, INDEX)
        if not index.exists():
            if not (folder / SINGLE).exists():
                if (folder / "adapter_config.json").exists():
                    raise FileError(f"{folder}: {ADAPTER}")
                found = sorted(p.name for p in folder.glob("*.safetensors"))
                hint = f"; name one of its files instead: {', '.join(found[:5])}" if found else ""
                raise FileError(f"{folder}: wanted {SINGLE} or {INDEX} in it{hint}")
            self._open_file(inside(folder, SINGLE))
            return
        weight_map = read_index(index)
        for name in sorted(set(weight_map.values())):
            self._open_file(inside(folder, name))
        self._check_index(index, weight_map)

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        found: dict[str, str] = {}
        for path, header in zip(self.files, self.headers, strict=True):
            for name in header.tensors:
                if name in found:
                    raise FileError(
                        f"{path} {shown(name)}: stands in {found[name]} too; wanted in one shard"
                    )
                found[name] = path.name
        for name, shard in weight_map.items():
            if found.get(name) != shard:
                raise FileError(
                    f"{index} {shown(name)}: index says {shard}, "
                    f"found in {found.get(name, 'no shard')}"
                )
        extra = found.keys() - weight_map.keys()
        if extra:
            name = min(extra)
            raise FileError(f"{index} {shown(name)}: stands in {found[name]}, not in the index")


def aligned(nbytes: int) -> Bytes:
    """A buffer on a page boundary: reads into unaligned ones can be five times slower."""
    raw = np.empty(nbytes + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + nbytes]


def read_index(index: Path) -> dict[str, str]:
    """The checked weight map of a Hugging Face index: tensor name → shard name."""
    raw = read_bytes(index, MAX_HEADER)
    found: Any = parse_json(raw, index, "index").get("weight_map")
    if not isinstance(found, dict) or not found:
        raise FileError(f"{index}: wanted a 'weight_map' from tensor names to shard names")
    weight_map = cast("dict[str, str]", found)
    for name, shard in weight_map.items():
        if (
            not isinstance(cast(Any, shard), str)
            or Path(shard).name != shard
            or shard in ("", ".", "..")
            or not shard.isprintable()
        ):
            raise FileError(
                f"{index} {shown(name)}: shard {shown(shard)} "
                "must be the plain name of a file beside it"
            )
    return weight_map


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a folder, whether it exists or not; a link must not lead elsewhere.

    In a Hugging Face cache the files of a folder are links, which may lead anywhere within the
    cache of that repository.

    >>> (getfixture("tmp_path") / "tokenizer.json").symlink_to("/etc/hostname")
    >>> inside(getfixture("tmp_path"), "tokenizer.json")
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
        raise FileError(f"{path}: a link that leads nowhere") from error
    if not target.is_relative_to(home):
        raise FileError(f"{path}: links to {target}, outside {home}; copy the file here")
    return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise FileError(f"{path}: cannot open: {error.strerror}") from error


def read_inside(folder: Path, name: str, limit: int = MAX_HEADER) -> bytes | None:
    """The content of a small file of a folder, by the rules of `inside`; None if there is none.

    >>> read_inside(getfixture("tmp_path"), "config.json") is None
    True

    limit: bytes; a larger file is refused.
    """
    path = inside(folder, name)
    return read_bytes(path, limit) if os.path.lexists(path) else None


def _stamp(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _allow_open_files() -> None:
    """A pool of sharded models holds many files open: use what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
