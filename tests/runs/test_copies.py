"""Copies of finished runs at URLs: complete if the manifest is there, and sent once."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

import stores
from negmerge.errors import FileError, NegMergeError, OptionError
from negmerge.runs.copies import MANIFEST, PARTIAL, copy_run
from negmerge.runs.store import Run, write_json
from negmerge.support.progress import Quiet

URL = "watched://bucket/runs/one"


@pytest.fixture(autouse=True)
def store() -> stores.Watched:
    return stores.empty()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run of small files."""
    made = Run(tmp_path / "run")
    files = {"recipe.yaml": b"seed: 1\n", "base.safetensors": b"x" * 5000}
    files |= {"pool/a/a.safetensors": b"a" * 3000, "report/index.html": b"<html>"}
    for name, raw in files.items():
        (made.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / name).write_bytes(raw)
    write_json(made.scores, {})
    made.finish("problem", [made.folder / name for name in files] + [made.scores])
    return made


def copied(source, target, dry_run=False):
    return copy_run(source, target, dry_run, Quiet())


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_run_goes_there_and_back(run, tmp_path, store):
    planned = copied(run.folder, URL, dry_run=True)
    assert store.store == {}
    done = copied(run.folder, URL)
    assert done.sent == planned.sent == {k: len(v) for k, v in contents(run.folder).items()}
    assert [*done.sent][-1] == MANIFEST
    listed = {name.removeprefix("/bucket/runs/one/") for name in store.store}
    assert listed == {*contents(run.folder)}
    assert copied(URL, tmp_path / "back", dry_run=True).sent == done.sent
    assert not (tmp_path / "back").exists()
    copied(URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(run.folder)
    assert Run(tmp_path / "back").check_contents().verify() == 5


def test_only_what_has_changed_is_sent_again(run):
    copied(run.folder, URL)
    assert copied(run.folder, URL).sent == {}
    run.page.write_bytes(b"<html>new")
    run.list_page_files([run.page])
    assert {*copied(run.folder, URL).sent} == {"report/index.html", MANIFEST}
    fs = fsspec.filesystem("watched")
    fs.rm_file("/bucket/runs/one/base.safetensors")
    assert {*copied(run.folder, URL).sent} == {"base.safetensors", MANIFEST}
    assert copied(run.folder, URL).sent == {}


def test_an_interrupted_copy_has_no_manifest_and_continues(run, store, monkeypatch, tmp_path):
    put, sent = stores.Watched.put_file, []

    def fail_once(self, lpath, rpath, **options):
        if len(sent) == 3:
            sent.append("failure")
            raise ConnectionError("the line is cut")
        sent.append(rpath)
        return put(self, lpath, rpath, **options)

    monkeypatch.setattr("negmerge.runs.copies.STREAMS", 1)
    monkeypatch.setattr(stores.Watched, "put_file", fail_once)
    with pytest.raises(FileError, match=rf"^{URL}/\S+: cannot be written: ConnectionError"):
        copied(run.folder, URL)
    names = {name.removeprefix("/bucket/runs/one/") for name in store.store}
    assert MANIFEST not in names
    assert PARTIAL in names
    with pytest.raises(FileError, match="the copy is not complete"):
        copied(URL, tmp_path / "back")
    again = copied(run.folder, URL)
    assert 0 < len(again.unchanged) < 5
    assert len(again.sent) + len(again.unchanged) == 6
    names = {name.removeprefix("/bucket/runs/one/") for name in store.store}
    assert names == {*contents(run.folder)}


def test_what_is_not_a_finished_run_is_not_copied(run, tmp_path):
    run.base.write_bytes(b"y" * 5000)
    with pytest.raises(NegMergeError, match=r"base.safetensors: has changed"):
        copied(run.folder, URL)
    run.manifest.unlink()
    with pytest.raises(FileError, match="the run is not finished"):
        copied(run.folder, URL)
    with pytest.raises(FileError, match="is not a run"):
        copied(tmp_path, URL)


def test_other_files_are_not_overwritten(run, store, tmp_path):
    copied(run.folder, URL)
    run.recipe.write_bytes(b"seed: 2\n")
    run.finish("problem", [run.recipe, run.scores])
    with pytest.raises(FileError, match=f"^{URL}: is the copy of a run with another recipe"):
        copied(run.folder, URL)
    store.pipe_file("/bucket/other/notes.txt", b"mine")
    with pytest.raises(FileError, match="is not empty, and not the copy of a run"):
        copied(run.folder, "watched://bucket/other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(FileError, match="exists and is not an empty folder"):
        copied(URL, tmp_path / "full")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a\\b", "a\x1bb"])
def test_a_manifest_names_files_of_the_copy_only(run, store, tmp_path, name):
    copied(run.folder, URL)
    place = f"/bucket/runs/one/{MANIFEST}"
    manifest = json.loads(store.cat_file(place))
    manifest["files"][name] = manifest["files"]["recipe.yaml"]
    store.pipe_file(place, json.dumps(manifest).encode())
    with pytest.raises(FileError, match="has a file with the name"):
        copied(URL, tmp_path / "a/b")
    assert not (tmp_path / "evil").exists()


def test_a_damaged_copy_is_refused(run, store, tmp_path):
    copied(run.folder, URL)
    store.pipe_file("/bucket/runs/one/base.safetensors", b"y" * 5000)
    with pytest.raises(NegMergeError, match=f"^{URL}/base.safetensors: has changed"):
        copied(URL, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_one_of_both_is_a_url(run, tmp_path):
    for source, target in ((URL, URL), (run.folder, tmp_path / "b")):
        with pytest.raises(OptionError, match="wanted one folder and one URL"):
            copied(source, target)


def test_sizes_are_checked_before_anything_is_fetched(run, store, tmp_path):
    copied(run.folder, URL)
    fsspec.filesystem("watched").pipe_file("/bucket/runs/one/base.safetensors", b"x" * 9000)
    store.reads.clear()
    with pytest.raises(FileError, match="has 9000 bytes, the manifest says 5000"):
        copied(URL, tmp_path / "back")
    assert [path for path, *_ in store.reads] == [f"/bucket/runs/one/{MANIFEST}"]
