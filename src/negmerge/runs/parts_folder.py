"""The folder beside an output that keeps the finished ranges of its merge until it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from negmerge.errors import FINAL, FileError
from negmerge.support.files import (
    LOCK,
    lock_folder,
    report_write_errors,
    temporary_path,
    write_file,
)
from negmerge.support.reading import read_json_value

STATE = "merge.json"


def folder_of(out: Path) -> Path:
    """Return the folder of the finished ranges of an output.

    >>> folder_of(Path("out/patch.safetensors")).name
    '.patch.safetensors.negmerge-parts'
    """
    temporary_path(out)  # raises for what cannot be the name of an output
    return out.absolute().with_name(f".{out.name}.negmerge-parts")


@contextmanager
def parts_folder(out: Path, key: str) -> Iterator[Path]:
    """Make or find the folder of the finished ranges of an output, and lock it.

    It is removed if the block succeeds, if no range is finished, or if the same command would fail
    again. The ranges of a merge with another key are removed first.
    """
    path = folder_of(out)
    if not path.parent.is_dir():
        raise FileError(f"{out}: the folder {out.parent} does not exist; create it first")
    with _locked(path):
        if read_state(path).get("key") != key:
            _empty(path)
            write_state(path, {"key": key})
        try:
            yield path
        except BaseException as error:
            if isinstance(error, FINAL) or not any(path.glob("*.part")):
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # NFS keeps a folder until its lock is released
        path.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    while True:
        with report_write_errors(path):
            if path.is_symlink():
                raise FileError(f"{path}: is a link, wanted a folder; remove it")
            path.mkdir(exist_ok=True)
            before = path.stat()
        with lock_folder(path, wait=False):
            # Another merge may have removed the folder, and a third one made it again.
            if path.is_dir() and os.path.samestat(before, path.stat()):
                yield
                return


def _empty(folder: Path) -> None:
    with report_write_errors(folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def read_state(folder: Path) -> dict[str, Any]:
    """Return what the folder says about its merge; nothing if that is missing or damaged."""
    try:
        found = read_json_value(folder / STATE)
    except FileError:
        return {}
    return found if isinstance(found, dict) else {}


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what the folder says about its merge: its key, and the number of its ranges."""
    write_file(folder / STATE, json.dumps(state).encode())
