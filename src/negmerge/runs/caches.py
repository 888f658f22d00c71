"""The caches of the package: where they are, how large they are, and how they are emptied.

Only what the package wrote is removed, recognised by its name and content, and nothing that a
process uses: a removed entry is made again when it is needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path

from negmerge.errors import FileError, NegMergeError
from negmerge.runs.store import Run, is_run
from negmerge.support.machine import size_of
from negmerge.support.reading import read_json
from negmerge.support.remote.scratch import remove_unused, scratch
from negmerge.vision.cache import FORMAT, cache_folder

SOURCE = Path(str(files("negmerge")))
ENTRY = re.compile(r".+-(train|test)-(originals-)?[0-9a-f]{20}")
PARTS = re.compile(r"\..+-(train|test)-(originals-)?[0-9a-f]{20}\.parts")
HEAD = re.compile(r"\.?[0-9a-f]{16,64}\.safetensors(\.removed)?")
REMOVED = ".removed"
"""The end of the name of an entry that is being removed."""
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Cache:
    """A cache, or data of other tools that is only shown.

    Args:
        name: what it holds.
        place: the folder; of several folders the first.
        bytes: its size.
        items: the files and folders that may be removed.
        own: whether it belongs to this package and may be emptied.
        remedy: what a person can do about its size.
    """

    name: str
    place: Path
    bytes: int
    items: tuple[Path, ...] = field(default=(), repr=False)
    own: bool = True
    remedy: str = ""


def caches(runs: Path = Path("runs")) -> list[Cache]:
    """Return the caches of the package on this machine, and the cache of the Hub.

    Args:
        runs: the folder of runs whose state is counted.
    """
    compiled = [*compiled_files()]
    images = [*image_entries(cache_folder())]
    fetched = scratch()
    states = [*finished_states(runs)]
    working = [path for path in runs.glob("*/.state") if path not in states]
    hub = hub_folder()
    return [
        _cache("compiled code", compiled[0].parent if compiled else SOURCE, compiled),
        _cache("decoded images", cache_folder(), images),
        Cache("files from URLs", fetched, size_of(fetched)),
        _cache("state of finished runs", runs, states),
        Cache(
            "state of unfinished runs",
            runs,
            sum(map(size_of, working)),
            own=False,
            remedy="the next `negmerge unlearn` of the run continues with it",
        ),
        Cache(
            "Hugging Face Hub",
            hub,
            size_of(hub),
            own=False,
            remedy="other tools use it, too; `hf cache prune` empties it",
        ),
    ]


def _cache(name: str, place: Path, items: list[Path]) -> Cache:
    return Cache(name, place, sum(map(size_of, items)), tuple(items))


def clean(runs: Path = Path("runs")) -> tuple[int, list[str]]:
    """Empty the caches of the package; return the freed bytes, and what was kept and why."""
    kept: list[str] = []
    before = sum(cache.bytes for cache in caches(runs) if cache.own)
    for path in compiled_files():  # a process has read its file at once: nobody keeps one open
        with suppress(OSError):
            path.unlink()
    for entry in image_entries(cache_folder()):
        if not _remove_entry(entry):
            kept.append(f"{entry}: a process uses it")
    remove_unused(scratch())
    for state in finished_states(runs):
        run = Run(state.parent)
        try:
            with run.locked():
                run.clear_state()
        except NegMergeError as error:
            kept.append(str(error))
    after = sum(cache.bytes for cache in caches(runs) if cache.own)
    return max(before - after, 0), kept


def compiled_files() -> Iterator[Path]:
    """Yield the files of compiled code, in any of the folders that numba may choose."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    others = [home / "numba"]
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        others.append(Path(named))
    for package in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        # As numba names the folder of a module outside of the source.
        name = f"{package.name}_{hashlib.sha1(str(package).encode()).hexdigest()}"  # noqa: S324
        places = [folder / name for folder in others]
        for place in (package / "__pycache__", *places):
            for ending in ("nbc", "nbi"):
                yield from sorted(p for p in place.glob(f"*.{ending}") if _is_plain(p))


def image_entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of the cache of images, parts of downloads, and heads of CLIP models."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir() and ENTRY.fullmatch(path.name.removesuffix(REMOVED).removeprefix(".")):
            with suppress(FileError, KeyError, TypeError):
                if read_json(path / "entry.json")["format"] == FORMAT:
                    yield path
        elif PARTS.fullmatch(path.name):
            yield path
        elif path.is_dir() and path.name == "heads":
            yield from sorted(p for p in path.iterdir() if HEAD.fullmatch(p.name) and _is_plain(p))


def finished_states(runs: Path) -> Iterator[Path]:
    """Yield the folders of work in progress of runs that are finished."""
    for state in sorted(runs.glob("*/.state")):
        if state.is_dir() and not state.is_symlink() and is_run(state.parent):
            with suppress(NegMergeError):
                if Run(state.parent).finished:
                    yield state


def hub_folder() -> Path:
    """Return the folder of models and data sets from the Hub."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _remove_entry(entry: Path) -> bool:
    """Remove a part of the cache of images; False if a process makes or uses it.

    The entry gets another name first: a process that opens it afterwards makes it again, and one
    that opened it before has mapped its files into memory.
    """
    name = entry.name.removesuffix(REMOVED).removesuffix(".parts").removeprefix(".")
    away = entry.with_name(f".{name}{REMOVED}")
    with _trying_lock(entry.with_name(f".{name}.lock")) as is_free:
        if not is_free or in_use(entry):
            return False
        try:
            if entry != away:
                if away.exists():
                    shutil.rmtree(away)
                entry.rename(away)
            if in_use(away):
                away.rename(entry)
                return False
            shutil.rmtree(away) if away.is_dir() else away.unlink()
        except OSError:
            return False
    return True


@contextmanager
def _trying_lock(path: Path) -> Iterator[bool]:
    """Hold the lock of an entry; yields False if a process holds it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def in_use(folder: Path) -> bool:
    """Return whether a process of this user has mapped a file below a folder into memory.

    Where the system does not tell (there is no /proc), everything counts as used.
    """
    if not PROCESSES.is_dir():
        return True
    mapped = partial(_maps, f"{folder.resolve()}".encode())
    return any(mapped(process) for process in PROCESSES.glob("[0-9]*"))


def _maps(folder: bytes, process: Path) -> bool:
    try:
        text = (process / "maps").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return False
    return folder + b"/" in text or folder + b"\n" in text
