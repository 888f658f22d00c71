"""`negmerge doctor`: what is installed, what is missing, and caches that are emptied with care."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys
import time
from pathlib import Path

import pytest

from negmerge.runs.caches import compiled_files
from negmerge.vision.datasets import load, resolve
from running import negmerge, negmerge_here


def examined(place: Path, **environment: str) -> dict:
    out, _ = negmerge(place, "doctor", "--json", plain=True, **environment)
    return json.loads(out)


def install_fake(place: Path, *requirements: str) -> str:
    """Metadata of the package with other requirements; the PYTHONPATH that finds it first."""
    folder = place / "fake" / "negmerge-9.9.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", "Name: negmerge", "Version: 9.9"]
    lines += [f"Requires-Dist: {text}" for text in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\n")
    return os.pathsep.join([str(place / "fake"), *sys.path])


def test_missing_extras_and_old_libraries_are_named_with_a_remedy(tmp_path):
    path = install_fake(
        tmp_path,
        "numpy>=99.1",
        "no-such-library>=1.0; extra == 'clip'",
        'pydantic>=2; extra == "clip"',
        "no-such-tool; extra == 'dev'",
    )
    found = examined(tmp_path, PYTHONPATH=path)
    assert found["negmerge"] == "9.9"
    assert [*found["extras"]] == ["clip"]
    assert found["extras"]["clip"]["missing"] == ["no-such-library"]
    assert found["extras"]["clip"]["install"] == "pip install 'negmerge[clip]'"
    assert [
        line for line in found["problems"] if "is older than 99.1; pip install -U numpy" in line
    ]


def test_a_gpu_that_torch_does_not_see_is_a_problem(tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'Fast, Large 9000, 24576, 20480'\n")
    tool.chmod(0o755)
    found = examined(tmp_path, PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    assert found["gpus"] == [
        {"name": "Fast, Large 9000", "total": 24576 << 20, "free": 20480 << 20}
    ]
    assert any("does not see the GPU Fast, Large 9000" in line for line in found["problems"])


def test_the_table_shows_everything(tmp_path):
    out, _ = negmerge_here(tmp_path, "doctor")
    for text in (
        "Python",
        "extra clip",
        "open-clip-torch",
        "cores",
        "memory",
        "GPU",
        "disk (here)",
    ):
        assert text in out
    for text in ("compiled code", "decoded images", "Hugging Face Hub (never cleaned)"):
        assert text in out


def test_a_wrong_folder_of_data_is_a_problem(tmp_path):
    found = examined(tmp_path, NEGMERGE_DATA=str(tmp_path / "nowhere"))
    assert any(line.startswith("NEGMERGE_DATA: ") for line in found["problems"])


# Cleaning


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with caches of its own: compiled code in another folder, images, Hub, runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "NEGMERGE_SCRATCH", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # The compiled code of other tests stays.
    monkeypatch.setattr("negmerge.runs.caches.SOURCE", tmp_path / "source")
    (tmp_path / "source" / "__pycache__").mkdir(parents=True)
    (tmp_path / "source" / "a.py").touch()
    load(resolve("fashion_small"), "test", cache=tmp_path / "cache")
    return tmp_path


def clean(place: Path) -> dict:
    return json.loads(negmerge_here(place, "doctor", "--clean", "--yes", "--json")[0])


def entries(place: Path) -> list[str]:
    return sorted(p.name for p in (place / "cache").iterdir() if p.name[0] != ".")


def test_only_what_the_package_wrote_is_removed(home):
    compiled = home / "source" / "__pycache__" / "a.f-1.py311.nbc"
    compiled.write_bytes(b"x" * 1000)
    others = [
        home / "source" / "__pycache__" / "a.cpython-311.pyc",
        home / "home" / "huggingface" / "hub" / "models--a" / "model.safetensors",
        home / "cache" / "thesis.txt",
        home / "cache" / "photos" / "1.png",
        home / "cache" / "set-train-0123456789abcdef0123" / "entry.json",  # of another program
        home / "home" / "negmerge" / "remote" / "notes" / "mine" / "text",
        home / "runs" / "a" / ".state" / "0123456789abcdef.json",  # of an unfinished run
        home / "runs" / "a" / "recipe.yaml",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    size = sum(p.stat().st_size for p in (home / "cache").rglob("fashion*/*"))
    done = clean(home)
    assert done["kept"] == []
    assert done["freed"] == size + 1000 > 10**6
    assert not compiled.exists()
    assert all(path.exists() for path in others)
    assert entries(home) == ["photos", "set-train-0123456789abcdef0123", "thesis.txt"]
    assert clean(home)["freed"] == 0


def test_links_are_not_followed(home):
    kept = home / "kept" / "fashion_small-test-0123456789abcdef0123"
    (entry,) = (p for p in (home / "cache").iterdir() if p.is_dir())
    kept.parent.mkdir()
    entry.rename(kept)
    (home / "cache" / kept.name).symlink_to(kept)
    before = sorted(kept.iterdir())
    clean(home)
    assert sorted(kept.iterdir()) == before
    assert (home / "cache" / kept.name).is_symlink()


def test_what_a_process_uses_stays(home):
    (entry,) = (p for p in (home / "cache").iterdir() if p.is_dir())
    file = entry / "pixels.npy"
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ):
        done = clean(home)
        assert done["freed"] == 0
        assert done["kept"] == [f"{entry}: a process uses it"]
        assert file.exists()
    lock = os.open(entry.with_name(f".{entry.name}.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a process that makes the entry
    try:
        assert len(clean(home)["kept"]) == 1
    finally:
        os.close(lock)
    assert clean(home)["freed"] > 10**6
    assert entries(home) == []


def test_the_state_of_a_finished_run_is_removed_unless_a_process_holds_the_run(home):
    run = home / "runs" / "done"
    (run / ".state").mkdir(parents=True)
    (run / "recipe.yaml").touch()
    (run / "manifest.json").write_text("{}")
    state = run / ".state" / "0123456789abcdef.json"
    state.write_text("x" * 100)
    lock = os.open(run, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        (line,) = clean(home)["kept"]
        assert "another run is writing" in line
    finally:
        os.close(lock)
    assert state.exists()
    clean(home)
    assert not state.exists()


def test_without_a_terminal_cleaning_needs_yes(home):
    _, err = negmerge_here(home, "doctor", "--clean", code=2)
    assert "there is no terminal to ask; add --yes" in err
    assert len(entries(home)) == 1


def test_the_folders_of_compiled_code_are_those_of_numba(tmp_path):
    """Compiled code in the source or in NUMBA_CACHE_DIR is found by the names that numba gives."""
    from numba.core.caching import _CacheLocator

    from negmerge.merging.loop import __file__ as source

    folder = tmp_path / _CacheLocator.get_suitable_cache_subpath(source)
    folder.mkdir()
    (folder / "loop.f-1.py311.1.nbc").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
        assert folder / "loop.f-1.py311.1.nbc" in [*compiled_files()]


def test_it_is_quick(tmp_path):
    begun = time.process_time()
    negmerge_here(tmp_path, "doctor", "--json")
    assert time.process_time() - begun < 3
