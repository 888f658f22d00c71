"""Which files an application writes: their headers, where each tensor goes, what comes along."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from negmerge.checkpoint import INDEX, SINGLE, Checkpoint, inside, open_regular
from negmerge.dtypes import FLOATS, NAMES, SIZES
from negmerge.errors import FileError
from negmerge.files import told_plainly
from negmerge.header import MAX_HEADER, build_header
from negmerge.reading import read_bytes

WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


@dataclass
class OutFile:
    """One file to write: its header, and format and place of each tensor."""

    name: str
    header: bytes
    places: dict[str, tuple[str, int]]


@dataclass
class Plan:
    """All files of the output, and small files that come along."""

    files: list[OutFile]
    index: bytes | None = None
    beside: list[Path] = field(default_factory=list)


def make_plan(model: Checkpoint, dtype: str, shard_size: int | None, single: bool) -> Plan:
    """The files for a base in a format, one file or as many as its shards or `shard_size` ask."""
    folder = model.folder is not None
    beside = []
    if folder and not single:
        beside = _beside(model.path)
    as_it_is = folder != single and len(model.files) > 0
    if dtype == "keep" and shard_size is None and as_it_is:
        # The base's own headers: with a scale of zero the files are the base's, byte for byte.
        files = [
            OutFile(
                path.name,
                header.raw,
                {t.name: (t.dtype, t.offset) for t in header.tensors.values()},
            )
            for path, header in zip(model.files, model.headers, strict=True)
        ]
        index = model.path / INDEX
        has_index = folder and index.exists()
        return Plan(files, read_bytes(index, MAX_HEADER) if has_index else None, beside)
    kinds = {
        info.name: (
            NAMES[dtype] if dtype != "keep" and info.dtype in FLOATS else info.dtype,
            info.shape,
        )
        for info in model.tensors.values()
    }
    metadata = {"format": "pt"} | model.metadata
    groups = [list(kinds)] if single else _shards(model, kinds, shard_size)
    return _laid_out(groups, kinds, metadata, beside)


def _beside(folder: Path) -> list[Path]:
    """The small files of a folder: each a plain file of its own, or of its Hugging Face cache."""
    found = [p for p in sorted(folder.iterdir()) if not p.is_dir() and not p.name.endswith(WEIGHTS)]
    for path in found:
        os.close(open_regular(inside(folder, path.name)))
    return found


def _shards(
    model: Checkpoint, kinds: dict[str, tuple[str, tuple[int, ...]]], shard_size: int | None
) -> list[list[str]]:
    if shard_size is None:
        return [list(header.tensors) for header in model.headers if header.tensors]
    groups: list[list[str]] = [[]]
    used = 0
    for name, (dtype, _) in kinds.items():
        size = model.tensors[name].elements * SIZES[dtype]
        if groups[-1] and used + size > shard_size:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _laid_out(
    groups: list[list[str]],
    kinds: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str],
    beside: list[Path],
) -> Plan:
    files = []
    for k, group in enumerate(groups):
        name = SINGLE if len(groups) == 1 else f"model-{k + 1:05}-of-{len(groups):05}.safetensors"
        header, places = build_header({n: kinds[n] for n in group}, metadata)
        files.append(OutFile(name, header, {n: (kinds[n][0], places[n]) for n in group}))
    if len(files) == 1:
        return Plan(files, None, beside)
    total = sum(int(np.prod(shape, dtype=np.int64)) * SIZES[d] for d, shape in kinds.values())
    weight_map = {name: file.name for file in files for name in file.places}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Plan(files, (json.dumps(index, indent=2) + "\n").encode(), beside)


def check_space(path: Path, plan: Plan, model: Checkpoint) -> None:
    """Raise before any work if the disk has no room."""
    needed = sum(len(file.header) for file in plan.files)
    for file in plan.files:
        for name, (dtype, _) in file.places.items():
            needed += model.tensors[name].elements * SIZES[dtype]
    folder = path.absolute().parent
    with told_plainly(path):
        there = folder.is_dir()
    if there and shutil.disk_usage(folder).free < needed:
        free = shutil.disk_usage(folder).free
        raise FileError(f"{path}: needs {needed} bytes, {folder} has {free} free")
