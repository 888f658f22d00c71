"""The run directory: what a run removes is its own, and what is not its own is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from negmerge.errors import FileError
from negmerge.runs.records import Done
from negmerge.runs.steps import FileStep
from negmerge.runs.store import Run, write_json
from negmerge.support.files import lock_folder


@dataclass(frozen=True)
class Written(FileStep):
    """A step that writes its own name."""

    out: Path
    key: str = "id"

    def size(self, scenario) -> int:
        return 1

    def run(self, scenario, advance) -> Done[int]:
        self.out.write_text(self.name)
        return Done(0, 1.0)


def begun(folder: Path) -> Run:
    """A run with two patches and a sweep on its journal."""
    run = Run(folder)
    with run.locked():
        for path in (run.patch("consensus"), run.patch("ties"), run.sweep("ties")):
            step = Written(path)
            run.mark_done(step, step.run(None, print))
            assert run.find(step) == Done(0, 1.0)
    write_json(run.scores, {})
    return run


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_the_seal_removes_only_what_the_run_made(tmp_path: Path):
    run = begun(tmp_path / "run")
    own = ["patches/mine.safetensors", "patches/notes.txt", "sweeps/folder/a.csv", "sweeps/b.csv"]
    own.append(".state/notes.txt")
    for name in own:
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text("mine")
    (run.states / "0123456789abcdef.json").write_text("{}")
    (run.states / ".0123456789abcdef.json.negmerge-tmp").write_text("{")
    run.finish("problem", [run.patch("consensus"), run.folder / "scores.json"])
    made = {"patches/consensus.safetensors", "scores.json", "journal.json", "manifest.json"}
    assert files(run.folder) == made | set(own)


def test_a_patch_that_somebody_replaced_is_not_the_runs(tmp_path: Path):
    run = begun(tmp_path / "run")
    run.patch("ties").write_text("another")
    run.finish("problem", [run.folder / "scores.json"])
    assert run.patch("ties").read_text() == "another"
    assert not run.patch("consensus").exists()


def test_a_new_recipe_removes_the_page_and_no_notes_beside_it(tmp_path: Path):
    run = begun(tmp_path / "run")
    run.tables.mkdir(parents=True)
    run.data.mkdir()
    shown = [run.page, run.tables / "scores.csv", run.data / "gradcam-1-image.png"]
    notes = [run.page.parent / "notes.md", run.tables / "own.csv", run.data / "own.png"]
    for path in (*shown, *notes):
        path.write_text("x")
    run.finish("problem", [run.folder / "scores.json"])
    run.list_page_files(shown[:2])
    run.reopen()
    assert not any(path.exists() for path in (*shown, run.manifest))
    assert all(path.exists() for path in notes)
    for path in notes:
        path.unlink()
    run.reopen()
    assert not run.page.parent.exists()


def test_a_manifest_cannot_name_other_files_for_removal(tmp_path: Path):
    run = begun(tmp_path / "run")
    run.finish("problem", [run.folder / "scores.json", run.patch("ties")])
    manifest = json.loads(run.manifest.read_text())
    entry = manifest["files"]["patches/ties.safetensors"]
    manifest["files"]["report/tables/../../patches/ties.safetensors"] = entry
    run.manifest.write_text(json.dumps(manifest))
    with pytest.raises(FileError, match="leads out of the run"):
        run.reopen()
    assert run.patch("ties").exists()


def test_a_run_may_be_reached_through_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run = begun(tmp_path / "link" / "run")
    (tmp_path / "again").symlink_to(run.folder)
    assert Run(tmp_path / "again").check_contents().journal.keys() == run.journal.keys()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "/etc/hostname", "a\0", 5, None])
def test_names_of_methods_and_members_are_no_paths(name, tmp_path: Path):
    run = Run(tmp_path)
    for path in (run.member, run.patch, run.sweep, lambda n: run.rival(n, "a")):
        with pytest.raises(FileError, match="is not the name of a method or a model"):
            path(name)


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path):
    (tmp_path / "run/pool").mkdir(parents=True)
    (tmp_path / "run/pool").chmod(0)
    try:
        if os.access(tmp_path / "run/pool", os.R_OK):
            pytest.skip("this user may read everything")
        with pytest.raises(FileError, match="cannot be read"):
            Run(tmp_path / "run").check_contents()
    finally:
        (tmp_path / "run/pool").chmod(0o700)


def test_a_folder_that_is_no_run_is_not_to_be_tidied(tmp_path: Path):
    """Nobody is told to remove links of a project because it was named as the folder of a run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/usr/bin/python3")
    with pytest.raises(FileError) as caught:
        Run(tmp_path).check_contents()
    assert str(caught.value) == (
        f"{tmp_path}: is not a run, and holds {tmp_path}/bin/python, which is a link; name a new "
        "folder, or that of a run"
    )


@pytest.mark.parametrize("network", [False, True], ids=["local", "nfs"])
def test_a_folder_has_one_run_at_a_time_also_where_folders_cannot_be_locked(
    tmp_path: Path, monkeypatch, network: bool
):
    lock = fcntl.flock

    def on_nfs(descriptor: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(descriptor, how)

    if network:
        monkeypatch.setattr(fcntl, "flock", on_nfs)
    refused = pytest.raises(FileError, match="another run")
    with lock_folder(tmp_path), refused, lock_folder(tmp_path, wait=False):
        pass
    with lock_folder(tmp_path, wait=False):
        pass
