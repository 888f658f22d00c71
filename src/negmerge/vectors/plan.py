"""The files that `apply` writes: headers, places of tensors, copied files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from negmerge.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, path_within
from negmerge.checkpoints.dtypes import FLOAT_NAMES, FLOATS, SIZES
from negmerge.checkpoints.header import MAX_HEADER, build_header
from negmerge.checkpoints.remote import WEIGHTS
from negmerge.errors import FileError
from negmerge.support.files import report_write_errors
from negmerge.support.reading import open_regular, read_bytes


@dataclass
class OutFile:
    """One file with weights: its first bytes, and the number format and offset of each tensor."""

    name: str
    header: bytes
    places: dict[str, tuple[str, int]]
    nbytes: int


@dataclass
class Plan:
    """All files of the output.

    Args:
        copied: small files of the base's folder that are copied.
        index: the Hugging Face index, if there are several files with weights.
    """

    files: list[OutFile]
    copied: list[Path]
    index: bytes | None = None


def make_plan(model: Checkpoint, dtype: str, shard_size: int | None, single: bool) -> Plan:
    """The files of the output: one, as many as the base has, or as `shard_size` asks for."""
    folder = model.folder is not None
    copied = _small_files(model.path) if folder and not single else []
    if dtype == "keep" and shard_size is None and folder != single and model.files:
        # With the base's headers a scale of zero gives the base's files, byte for byte.
        files = [
            OutFile(
                path.name,
                header.raw,
                {t.name: (t.dtype, t.offset) for t in header.tensors.values()},
                sum(t.nbytes for t in header.tensors.values()),
            )
            for path, header in zip(model.files, model.headers, strict=True)
        ]
        index = model.path / INDEX_FILE
        has_index = folder and index.exists()
        return Plan(files, copied, read_bytes(index, MAX_HEADER) if has_index else None)
    tensors = {
        info.name: (written_format(info.dtype, dtype), info.shape)
        for info in model.tensors.values()
    }
    sizes = {name: model.tensors[name].elements * SIZES[d] for name, (d, _) in tensors.items()}
    groups = [list(tensors)] if single else _shards(model, sizes, shard_size)
    files: list[OutFile] = []
    for k, group in enumerate(groups):
        name = (
            SINGLE_FILE if len(groups) == 1 else f"model-{k + 1:05}-of-{len(groups):05}.safetensors"
        )
        metadata = {"format": "pt"} | model.metadata
        header, offsets = build_header({n: tensors[n] for n in group}, metadata)
        places = {n: (tensors[n][0], offsets[n]) for n in group}
        files.append(OutFile(name, header, places, sum(sizes[n] for n in group)))
    return Plan(files, copied, _index(files) if len(files) > 1 else None)


def written_format(stored: str, dtype: str) -> str:
    """The number format of a result.

    >>> written_format("F32", "bfloat16"), written_format("I64", "bfloat16")
    ('BF16', 'I64')
    """
    return FLOAT_NAMES[dtype] if dtype != "keep" and stored in FLOATS else stored


def _small_files(folder: Path) -> list[Path]:
    """The files of a folder without weights; raises for links that lead elsewhere, and pipes."""
    found = [p for p in sorted(folder.iterdir()) if not p.is_dir() and not p.name.endswith(WEIGHTS)]
    for path in found:
        os.close(open_regular(path_within(folder, path.name)))
    return found


def _shards(model: Checkpoint, sizes: dict[str, int], shard_size: int | None) -> list[list[str]]:
    if shard_size is None:
        return [list(header.tensors) for header in model.headers if header.tensors]
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > shard_size:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _index(files: list[OutFile]) -> bytes:
    weight_map = {name: file.name for file in files for name in file.places}
    total = sum(file.nbytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def check_space(path: Path, plan: Plan) -> None:
    """Raise if the disk has too little space for the files with weights."""
    needed = sum(len(file.header) + file.nbytes for file in plan.files)
    folder = path.absolute().parent
    with report_write_errors(path):
        free = shutil.disk_usage(folder).free if folder.is_dir() else needed
    if free < needed:
        raise FileError(
            f"{path}: needs {needed} bytes, {folder} has {free} free; free some space, or name an "
            "output on another disk"
        )
