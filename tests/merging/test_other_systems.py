"""What only Linux has is not needed: merge, apply and inspect without it give the same bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

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
    monkeypatch.setattr(files, "_LIBC", object())
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
