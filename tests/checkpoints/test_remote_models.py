"""Models at URLs: the same bytes as with local files, and errors that name the URL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import negmerge as nm
import stores
from hostile import INDEX, make_sharded
from negmerge.errors import FileError, MismatchError, NegMergeError, OptionError


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stores.Watched:
    monkeypatch.setenv("NEGMERGE_SCRATCH", str(tmp_path / "scratch"))
    return stores.empty()


@pytest.fixture
def remote(small_pool) -> tuple[str, list[str]]:
    """The small pool, at URLs."""
    base, pool = small_pool
    for path in (base, *pool):
        stores.upload(path, f"watched://b/{path.name}")
    return "watched://b/base.safetensors", [f"watched://b/{path.name}" for path in pool]


def test_the_patch_has_the_bytes_of_local_files(small_pool, remote, tmp_path):
    outs = [tmp_path / name for name in ("here.safetensors", "there.safetensors")]
    for (base, pool), out in zip((small_pool, remote), outs, strict=True):
        nm.merge(base, pool, out=out, digest=True)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    wild = tmp_path / "wild.safetensors"
    nm.merge(remote[0], ["watched://b/model*.safetensors"], out=wild, digest=True)
    assert wild.read_bytes() == outs[0].read_bytes()


def test_models_of_equal_content_are_recorded_in_the_order_of_their_names(small_pool, tmp_path):
    base, pool = small_pool
    names = [f"{k}.safetensors" for k in "dacb"]
    for name in names:
        (tmp_path / name).write_bytes(pool[0].read_bytes())
        stores.upload(pool[0], f"watched://b/{name}")
    outs = [tmp_path / "here.bin", tmp_path / "there.bin"]
    for folder, out in zip((f"{tmp_path}", "watched://b"), outs, strict=True):
        models = [f"{folder}/{name}" for name in names]
        nm.merge(base, models, out=out, allow_duplicates=True)
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_model_is_applied_and_made_in_one_pass(small_pool, remote, tmp_path):
    (base, pool), (far, far_pool) = small_pool, remote
    patch = tmp_path / "patch.safetensors"
    nm.merge(base, pool, out=patch)
    stores.upload(patch, "watched://b/patch.safetensors")
    wanted = nm.apply(base, -0.5 * nm.TaskVector.load(patch))
    found = nm.apply(far, -0.5 * nm.TaskVector.load("watched://b/patch.safetensors"))
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    nm.merge_and_apply(far, far_pool, -0.5, tmp_path / "out.safetensors")
    one = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(wanted[name], one[name]) for name in wanted)


def test_a_folder_brings_its_shards_and_small_files_only(store, tmp_path):
    for k in (0, 1):
        make_sharded(tmp_path / f"m{k}", k)
        (tmp_path / f"m{k}/config.json").write_text("{}")
        (tmp_path / f"m{k}/pytorch_model.bin").write_bytes(b"pickle")
        (tmp_path / f"m{k}/other.safetensors").write_bytes(b"not a shard")
        (tmp_path / f"m{k}/old").mkdir()
        (tmp_path / f"m{k}/old/model.safetensors").write_bytes(b"old")
        stores.upload(tmp_path / f"m{k}", f"watched://b/m{k}")
    nm.merge(tmp_path / "m0", [tmp_path / "m1"], out=tmp_path / "here.safetensors")
    nm.merge("watched://b/m0/", ["watched://b/m1"], out=tmp_path / "there.safetensors")
    assert (tmp_path / "here.safetensors").read_bytes() == (
        tmp_path / "there.safetensors"
    ).read_bytes()
    read = {path.rpartition("/")[2] for path, _, _ in store.reads}
    assert read == {"a.safetensors", "b.safetensors", INDEX, "config.json"}
    tau = nm.TaskVector.load(tmp_path / "here.safetensors")
    nm.apply("watched://b/m0", -1 * tau, tmp_path / "out")
    nm.apply(tmp_path / "m0", -1 * tau, tmp_path / "wanted")
    names = {path.name for path in (tmp_path / "wanted").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names - {"README.md"}:  # it has the name of the folder
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


@pytest.mark.parametrize("shard", ["file:///etc/passwd", "../a.safetensors", "s3://b/a", "/etc/x"])
def test_an_index_names_files_of_its_folder_only(store, shard):
    store.pipe_file(f"/b/m/{INDEX}", json.dumps({"weight_map": {"w": shard}}).encode())
    with pytest.raises(FileError, match=rf"^watched://b/m/{INDEX} 'w': shard "):
        nm.merge("watched://b/m", ["watched://b/m"])


def test_errors_name_the_url(store, remote, tmp_path):
    base, pool = remote
    cases = {
        "watched://b/missing.safetensors": "no such file or folder",
        "watched://b/short.safetensors": "3 bytes, too short",
        "watched://b/folder": r"contains neither .*; name a file instead: x.safetensors",
        "watched://b/nothing": "contains neither",
        "watched://b/*.none": "no file matches",
        "watched://*/m.safetensors": "wildcard in the last part only",
    }
    store.pipe_file("/b/short.safetensors", b"abc")
    store.pipe_file("/b/folder/x.safetensors", b"abc")
    store.pipe_file("/b/nothing/x.txt", b"abc")
    for url, why in cases.items():
        with pytest.raises(NegMergeError) as error:
            nm.merge(base, [*pool, url])
        assert str(error.value).startswith(f"{url}: ")
        error.match(why)
    with pytest.raises(MismatchError, match=rf"^{pool[0]}: listed twice \(also as {pool[0]}\)"):
        nm.merge(base, [pool[0], pool[0]])
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    stores.upload(tmp_path / "other.safetensors", "watched://b/other.safetensors")
    with pytest.raises(MismatchError, match=r"^pool\[1\] watched://b/other.safetensors: 4 tensors"):
        nm.merge(base, [pool[0], "watched://b/other.safetensors"])


def test_outputs_are_local(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, pool = remote
    calls = [
        lambda url: nm.merge(base, pool, out=url),
        lambda url: nm.merge_and_apply(base, pool, -1.0, url),
        lambda url: nm.run("demo", out=url),
    ]
    before = {*tmp_path.iterdir()}
    for call in calls:
        with pytest.raises(OptionError, match=r"s3:/.*: is a URL; "):
            call("s3://bucket/out.safetensors")
    assert {*tmp_path.iterdir()} - before <= {tmp_path / "scratch"}
