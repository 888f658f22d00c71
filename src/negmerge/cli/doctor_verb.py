"""The verb `doctor`: what is installed, what is missing, how much room there is, and the caches."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from negmerge.cli.app import Flag, Json, app
from negmerge.cli.init_verb import Questions
from negmerge.errors import OptionError, printable
from negmerge.support.terminal import print_tables

if TYPE_CHECKING:
    from negmerge.runs.caches import Cache
    from negmerge.support.installed import Extra

LEAST_DISK, LEAST_MEMORY = 5_000_000_000, 2_000_000_000
"""Bytes below which the room on a disk, or in memory, is called a problem."""


@app.command
def doctor(*, clean: Flag = False, yes: Flag = False, json_: Json = False) -> None:
    """Show what is installed and what is missing, GPU, memory, disk and caches; empty the caches.

    Args:
        clean: Remove the caches of this package: compiled code, decoded images, fetched files, the
            state of finished runs. What a process uses stays, and so does the cache of the Hub.
        yes: Do not ask before removing.
        json_: Print JSON instead of tables.
    """
    from negmerge.runs.caches import caches
    from negmerge.runs.caches import clean as empty

    if clean:
        own = [cache for cache in caches() if cache.own and cache.bytes]
        if not yes and own:
            _confirm(own)
        freed, kept = empty()
        if json_:
            print(json.dumps({"event": "result", "freed": freed, "kept": kept}))
            return
        print(f"freed {decimal(freed)}")
        for line in kept:
            print(printable(f"kept: {line}"))
        return
    found = examine(caches())
    print(json.dumps(found)) if json_ else print_tables([*_rendered(found)])


def _confirm(own: list[Cache]) -> None:
    """Ask before removing; raise where nobody can be asked."""
    total = sum(cache.bytes for cache in own)
    if not Questions.possible():
        raise OptionError(
            f"doctor: --clean would remove {decimal(total)}, and there is no terminal to ask; add "
            "--yes"
        )
    listed = "\n".join(f"  {cache.name}: {decimal(cache.bytes)} in {cache.place}" for cache in own)
    answer = Questions().ask(f"{listed}\nRemove {decimal(total)}?", None, str.lower, "no")
    if answer not in ("y", "yes"):
        raise OptionError("doctor: nothing was removed")


def examine(found: list[Cache]) -> dict[str, Any]:
    """Return what `negmerge doctor --json` prints.

    Args:
        found: the caches.
    """
    from negmerge.support.installed import installed_version, libraries
    from negmerge.support.machine import free_disk, gpus, memory
    from negmerge.support.parallel import worker_count

    extras = libraries()
    base = extras.pop("")
    places = {str(cache.place.absolute()): cache.place for cache in found if cache.own}
    disks = {"here": Path.cwd(), "images": found[1].place, "URLs": found[2].place}
    room = memory()
    about: dict[str, Any] = {
        "negmerge": installed_version("negmerge"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libraries": {one.name: one.installed for one in base.libraries},
        "extras": {
            name: {
                "libraries": {one.name: one.installed for one in extra.libraries},
                "missing": extra.missing,
                "install": extra.command if extra.missing else None,
            }
            for name, extra in extras.items()
        },
        "cores": worker_count(None),
        "memory": None if room is None else asdict(room),
        "gpus": [asdict(gpu) for gpu in gpus()],
        "disk": {name: {"place": str(p), "free": free_disk(p)} for name, p in disks.items()},
        "caches": [
            {"name": c.name, "place": str(c.place), "bytes": c.bytes, "own": c.own} for c in found
        ],
    }
    return about | {"problems": [*_problems(about, [base, *extras.values()], [*places.values()])]}


def _problems(about: dict[str, Any], extras: list[Extra], places: list[Path]) -> Iterator[str]:
    """Yield what is wrong, each with what to do."""
    for extra in extras:
        for library in extra.libraries:
            if library.too_old:
                yield (
                    f"{library.name} {library.installed}: is older than {library.least}; "
                    f"pip install -U {library.name}"
                )
    if extras[0].missing:
        yield f"{', '.join(extras[0].missing)}: not installed; pip install negmerge"
    torch = about["extras"].get("unlearn", {}).get("libraries", {}).get("torch")
    if about["gpus"] and torch is not None and not _sees_gpu():
        yield (
            f"torch {torch}: does not see the GPU {about['gpus'][0]['name']}; install a build of "
            "torch for CUDA (pytorch.org)"
        )
    for name, disk in about["disk"].items():
        if disk["free"] is not None and disk["free"] < LEAST_DISK:
            yield (
                f"disk ({name}): {decimal(disk['free'])} free in {disk['place']}; `negmerge doctor "
                "--clean` frees caches, and --out, NEGMERGE_CACHE and NEGMERGE_SCRATCH name other "
                "places"
            )
    if about["memory"] is not None and about["memory"]["available"] < LEAST_MEMORY:
        yield (
            f"memory: {decimal(about['memory']['available'])} available; close other programs, or "
            "set workers to 1"
        )
    for place in places:
        existing = next(p for p in (place, *place.absolute().parents) if p.exists())
        if not os.access(existing, os.W_OK):
            yield f"{place}: cannot be written; set NEGMERGE_CACHE or NEGMERGE_SCRATCH"
    data = os.environ.get("NEGMERGE_DATA")
    if data and "://" not in data and not Path(data).expanduser().is_dir():
        yield f"NEGMERGE_DATA: {data} is no folder; correct it, or unset it"


def _sees_gpu() -> bool:
    """Whether torch can use a GPU; imports torch, which takes seconds."""
    import torch

    return torch.cuda.is_available()


def _rendered(found: dict[str, Any]) -> Iterator[Any]:
    """Yield tables and lines for the terminal."""
    from rich.table import Table

    from negmerge.support.terminal import escape_markup

    installed = Table("", "", title="installed", show_header=False)
    installed.add_row("negmerge", str(found["negmerge"] or "not installed, run from its source"))
    installed.add_row("Python", escape_markup(f"{found['python']}, {found['executable']}"))
    installed.add_row("system", escape_markup(found["platform"]))
    installed.add_row("libraries", _versions(found["libraries"]))
    named = {name: extra["libraries"] for name, extra in found["extras"].items()}
    for name, extra in found["extras"].items():
        inner = [libs for libs in named.values() if libs.keys() < extra["libraries"].keys()]
        told = {k: v for k, v in extra["libraries"].items() if not any(k in one for one in inner)}
        text = _versions(told)
        if extra["install"]:
            text += f"\n{escape_markup(extra['install'])}"
        installed.add_row(f"extra {name}", text)
    yield installed
    machine = Table("", "", title="machine", show_header=False)
    machine.add_row("cores", str(found["cores"]))
    if found["memory"] is not None:
        total, free = (decimal(found["memory"][key]) for key in ("total", "available"))
        machine.add_row("memory", f"{total}, {free} available")
    shown = [
        f"{g['name']}, {decimal(g['total'])}, {decimal(g['free'])} free" for g in found["gpus"]
    ]
    machine.add_row("GPU", escape_markup("\n".join(shown)) or "none")
    for name, disk in found["disk"].items():
        free = "?" if disk["free"] is None else decimal(disk["free"])
        machine.add_row(f"disk ({name})", escape_markup(f"{free} free, {disk['place']}"))
    yield machine
    caches = Table("", "size", "place", title="caches")
    for cache in found["caches"]:
        kept = "" if cache["own"] else " (never cleaned)"
        caches.add_row(
            f"{cache['name']}{kept}", decimal(cache["bytes"]), escape_markup(cache["place"])
        )
    yield caches
    for problem in found["problems"]:
        yield printable(f"problem: {problem}")
    missing = [name for name, extra in found["extras"].items() if extra["missing"]]
    yield (
        f"{len(found['problems'])} problems; extras that are not installed: "
        f"{', '.join(missing) or 'none'}; `negmerge doctor --clean` empties the caches"
    )


def _versions(libraries: dict[str, str | None]) -> str:
    parts = [f"{name} {found}" if found else f"{name} missing" for name, found in libraries.items()]
    return ", ".join(parts)
