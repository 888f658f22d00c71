"""What only Linux has is not needed: merge, apply and inspect without it give the same bytes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from negmerge.cli import main
from negmerge.merging import memory
from negmerge.support import files


@pytest.fixture
def not_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The functions that macOS lacks are gone; it also refuses limits that Linux allows."""

    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    for name in ("posix_fallocate", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(files, "LIBC", object())
    monkeypatch.setattr(memory, "STATUS", tmp_path / "no such file")


def merged(base: Path, models: list[Path], folder: Path) -> list[bytes]:
    folder.mkdir()
    patch, out = folder / "patch.safetensors", folder / "out.safetensors"
    main(["merge", str(base), *map(str, models), "-o", str(patch)])
    main(["apply", str(base), str(patch), "--negate", "0.5", "-o", str(out)])
    main(["inspect", str(patch)])
    return [patch.read_bytes(), out.read_bytes()]


def test_the_same_bytes(small_pool, tmp_path: Path, monkeypatch, request):
    monkeypatch.setattr(memory, "LARGE", 0)  # every result is stored on disk
    wanted = merged(*small_pool, tmp_path / "linux")
    request.getfixturevalue("not_linux")
    assert merged(*small_pool, tmp_path / "other") == wanted


def test_a_limit_of_memory_is_one_line(small_pool, tmp_path: Path, not_linux, capsys):
    base, models = small_pool
    command = ["merge", str(base), *map(str, models), "-o", str(tmp_path / "patch.safetensors")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--max-memory", "1GB"])
    assert ended.value.code == 2
    assert "this system does not report how much memory is in use" in capsys.readouterr().err


@pytest.fixture(scope="module")
def on_windows(tmp_path_factory) -> tuple[Path, list[tuple[int, str, str]]]:
    """The folder and the outcome of commands in a process without what Windows lacks."""
    place = tmp_path_factory.mktemp("windows")
    rng = np.random.default_rng(0)
    shape = {"a.weight": (70, 50), "b.weight": (9,)}
    base = {name: rng.standard_normal(size, np.float32) for name, size in shape.items()}
    (place / "base").mkdir()
    save_file(base, place / "base" / "model.safetensors")
    (place / "base" / "config.json").write_text("{}")
    for k in range(3):
        drawn = {n: v + 0.1 * rng.standard_normal(v.shape, np.float32) for n, v in base.items()}
        save_file(drawn, place / f"{k}.safetensors")
    merging = ["merge", "base", *(f"{k}.safetensors" for k in range(3))]
    commands = [
        [*merging, "-o", "patch.safetensors"],
        ["apply", "base", "patch.safetensors", "--negate", "0.5", "-o", "out.safetensors"],
        ["apply", "base", "patch.safetensors", "--negate", "0.5", "-o", "folder"],
        ["inspect", "patch.safetensors", "--json"],
        ["convert", "base", "-o", "again.safetensors"],
        [*merging, "--rule", "ties", "-o", "ties.safetensors"],
        [*merging, "-o", "missing/patch.safetensors"],
        ["merge", "base", "0.safetensors", "missing.safetensors", "-o", "patch.safetensors"],
    ]
    script = Path(__file__).parents[1] / "without_posix.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(commands)],
        cwd=place, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return place, [tuple(one) for one in json.loads(done.stdout)]


def test_the_merge_verbs_work_without_what_windows_lacks(on_windows):
    place, outcome = on_windows
    assert [code for code, _, _ in outcome] == [0, 0, 0, 0, 0, 0, 2, 2], outcome
    assert json.loads(outcome[3][1])["n"] == 3
    assert all(err.count("\n") == 1 and err.startswith("error: ") for _, _, err in outcome[6:])
    assert not list(place.rglob("*.negmerge-tmp"))


def test_the_bytes_are_those_of_linux(on_windows, tmp_path: Path, monkeypatch):
    place, _ = on_windows
    monkeypatch.chdir(place)
    merging = ["merge", "base", *(f"{k}.safetensors" for k in range(3))]
    main([*merging, "-o", str(tmp_path / "patch.safetensors")])
    main([*merging, "--rule", "ties", "-o", str(tmp_path / "ties.safetensors")])
    negate = ["apply", "base", "patch.safetensors", "--negate", "0.5", "-o"]
    main([*negate, str(tmp_path / "out.safetensors")])
    main([*negate, str(tmp_path / "folder")])
    names = ["patch.safetensors", "ties.safetensors", "out.safetensors"]
    for name in [*names, "folder/model.safetensors", "folder/config.json"]:
        assert (place / name).read_bytes() == (tmp_path / name).read_bytes(), name
    main(["convert", "base", "-o", str(tmp_path / "again.safetensors")])
    again = (tmp_path / "again.safetensors").read_bytes()
    assert (place / "again.safetensors").read_bytes() == again


def test_nothing_of_posix_is_imported_outside_of_one_module():
    """`fcntl` and `resource` come from `support/systems.py`, but for rooms that need Linux."""
    source = Path(files.__file__).parents[1]
    free = ("checkpoints", "cli", "merging", "support", "vectors")
    for path in source.rglob("*.py"):
        if path.relative_to(source).parts[0] in free and path.name != "systems.py":
            text = path.read_text()
            assert not re.search(r"^\s*(import|from) (fcntl|resource|pwd|grp)\b", text, re.M), path
