"""Files at URLs: what arrives is what is there, once, and no fault or name does harm."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stores
from negmerge.errors import FileError, NegMergeError, OptionError
from negmerge.support.reading import read_bytes
from negmerge.support.remote import ranges, scratch
from negmerge.support.remote.scratch import local
from negmerge.support.remote.stores import Store, check_names, checksums
from negmerge.support.remote.urls import checked, has_secret, is_url, shown
from stores import Watched

GIT = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f"
"""What `git hash-object` says of abc."""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """An empty store; ranges of 1000 bytes and short pauses."""
    monkeypatch.setenv("NEGMERGE_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(ranges, "RANGE", 1000)
    monkeypatch.setattr(ranges, "PAUSE", 0.001)
    return stores.empty()


def left(tmp_path: Path) -> list[str]:
    """The files of the scratch folder that are not locks."""
    return [p.name for p in (tmp_path / "scratch").rglob("*") if p.is_file() and p.name != "lock"]


# ---------------------------------------------------------------------------------------- fetching


@given(st.lists(st.integers(0, 4500), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_arrives_is_what_is_there(tmp_path_factory, sizes, random):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEGMERGE_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        patch.setattr(ranges, "RANGE", 1000)
        fs = stores.empty()
        content = {f"{'sub/' * (k % 2)}{k}.bin": random.randbytes(n) for k, n in enumerate(sizes)}
        for name, raw in content.items():
            fs.pipe_file(f"/folder/{name}", raw)
        found = local("watched://folder/")
        assert found.name == "folder"
        here = {p.relative_to(found).as_posix(): p for p in found.rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in here.items()} == content
        # Every byte was asked for once, and never again.
        assert sum(stop - start for _, start, stop in fs.reads) == sum(sizes)
        assert max((stop - start for _, start, stop in fs.reads), default=0) <= 1000
        count = len(fs.reads)
        assert local("watched://folder") == found
        assert len(fs.reads) == count


def test_a_changed_file_is_fetched_again_and_the_others_are_not(store):
    for name in "abc":
        store.pipe_file(f"/folder/{name}", name.encode() * 10)
    before = local("watched://folder")
    store.pipe_file("/folder/b", b"B" * 10)
    store.reads.clear()
    after = local("watched://folder")
    assert store.reads == [("/folder/b", 0, 10)]
    assert after != before
    assert [(after / n).read_bytes()[:1] for n in "abc"] == [b"a", b"B", b"c"]
    assert (before / "b").read_bytes() == b"b" * 10, "another process may use it"


def test_a_damaged_entry_is_fetched_again(store):
    store.pipe_file("/a.bin", b"x" * 2500)
    path = local("watched://a.bin")
    os.truncate(path, 100)
    assert local("watched://a.bin").read_bytes() == b"x" * 2500


def test_small_files_are_read_from_urls(store):
    store.pipe_file("/ids.txt", b"1\n2\n")
    assert read_bytes("watched://ids.txt", 100) == b"1\n2\n"
    with pytest.raises(FileError, match=r"^watched://ids.txt: larger than 3 bytes"):
        read_bytes("watched://ids.txt", 3)


# ------------------------------------------------------------------------------------------ faults


def test_a_range_that_fails_twice_is_fetched_again(store):
    failures = []

    def fail(path: str, number: int) -> None:
        if store.reads[-1][1] == 1000 and len(failures) < 2:
            failures.append(number)
            raise ConnectionResetError("reset")

    Watched.before = staticmethod(fail)
    store.pipe_file("/a.bin", bytes(range(250)) * 10)
    assert local("watched://a.bin").read_bytes() == bytes(range(250)) * 10
    assert len(failures) == 2
    assert sorted(start for _, start, _ in store.reads) == [0, 1000, 1000, 1000, 2000]


def test_a_range_that_always_fails_is_one_line_without_secrets(store, tmp_path):
    def fail(path: str, number: int) -> None:
        raise ConnectionError("GET https://me:hidden@host/a?X-Signature=hidden\n failed")

    Watched.before = staticmethod(fail)
    store.pipe_file("/a.bin", b"abc")
    with pytest.raises(FileError) as error:
        local("watched://a.bin")
    assert str(error.value) == (
        "watched://a.bin: cannot be read: ConnectionError: GET https://host/a failed"
    )
    assert len(store.reads) == ranges.ATTEMPTS
    assert left(tmp_path) == []


@pytest.mark.parametrize("new", [b"y" * 5000, b"y" * 10, None])
def test_a_file_that_is_replaced_meanwhile_is_refused(store, tmp_path, new):
    def replace(path: str, number: int) -> None:
        if number == 2:
            store.rm_file(path)
            if new is not None:
                store.pipe_file(path, new)

    Watched.before = staticmethod(replace)
    store.pipe_file("/a.bin", b"x" * 5000)
    what = "no such file" if new is None else "changed while it was fetched; run again"
    with pytest.raises(FileError, match=f"^watched://a.bin: {what}"):
        local("watched://a.bin")
    assert left(tmp_path) == []


def test_a_server_that_ignores_ranges_is_refused(store, monkeypatch):
    monkeypatch.setattr(Watched, "cat_file", lambda self, path, **_: b"x" * 5000)
    store.pipe_file("/a.bin", b"x" * 5000)
    with pytest.raises(FileError, match="does not send ranges"):
        local("watched://a.bin")


class Files(SimpleHTTPRequestHandler):
    """A web server that ignores ranges, and writes no log."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a web server, with a password that it does not ask for."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.bin").write_bytes(b"x" * 2500)
    serve = partial(Files, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://me:hidden@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_files_of_a_web_server(web, monkeypatch):
    with pytest.raises(FileError, match="support range requests") as error:
        local(f"{web}/a.bin?key=hidden")
    assert str(error.value).startswith(f"{shown(web)}/a.bin: cannot be read: ")
    assert "hidden" not in str(error.value)
    monkeypatch.setattr(ranges, "RANGE", 2500)
    path = local(f"{web}/a.bin?key=hidden")
    assert (path.name, path.read_bytes()) == ("a.bin", b"x" * 2500)
    assert "hidden" not in (path.parents[1] / "entry.json").read_text()


def test_the_checksum_of_a_store_is_checked(store, monkeypatch):
    def info(self, path, **_):
        tag = '"900150983cd24fb0d6963f7d28e17f72"'  # of abc
        row = {"name": path, "size": 3, "type": "file", "ETag": tag}
        return row | {"StorageClass": "STANDARD", "LastModified": "now"}

    monkeypatch.setattr(Watched, "info", info)
    store.pipe_file("/a.bin", b"abc")
    assert local("watched://a.bin").read_bytes() == b"abc"
    store.pipe_file("/b.bin", b"abd")
    with pytest.raises(
        FileError, match=r"^watched://b.bin: the bytes that arrived have md5 4911e5"
    ):
        local("watched://b.bin")


@pytest.mark.parametrize(
    ("info", "wanted"),
    [
        ({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}, {"md5": "900150983cd24fb0d6963f7d28e17f72"}),
        ({"lfs": {"sha256": "ba78", "size": 3}, "blob_id": "f2" * 20}, {"sha256": "ba78"}),
        ({"blob_id": GIT}, {"git": GIT}),
        ({"ETag": '"900150983cd24fb0d6963f7d28e17f72"', "mimetype": "x"}, {}),
        ({"mtime": 1.0}, {}),
    ],
)  # fmt: skip
def test_the_checksums_that_stores_give(info, wanted, tmp_path):
    from negmerge.support.remote.stores import digest

    assert checksums(info) == wanted
    (tmp_path / "abc").write_bytes(b"abc")
    for algorithm, value in wanted.items():
        if len(value) > 8:
            assert digest(tmp_path / "abc", algorithm, 3) == value


# ------------------------------------------------------------------------------------------- space


def test_too_little_space_is_one_line(store, tmp_path, monkeypatch):
    store.pipe_file("/a.bin", b"x" * 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 6000, 4999))
    with pytest.raises(FileError) as error:
        local("watched://a.bin")
    root = tmp_path / "scratch"
    assert str(error.value) == (
        f"watched://a.bin: needs 5000 bytes, {root} has 4999 free; free some space, or set "
        "NEGMERGE_SCRATCH to a folder on another disk"
    )
    assert left(tmp_path) == []


def test_the_longest_unused_makes_room_and_what_is_used_stays(store, tmp_path, monkeypatch):
    """A disk of 100 kB; the entries of 20 kB are those of other processes but for one."""
    root = tmp_path / "scratch"

    def usage(_: object) -> Usage:
        used = sum(p.stat().st_size for p in root.rglob("*.bin"))
        return Usage(100_000, used, 100_000 - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(ranges, "RANGE", 1 << 20)
    paths = []
    for k in range(4):
        store.pipe_file(f"/{k}.bin", b"x" * 20_000)
        paths.append(local(f"watched://{k}.bin"))
        os.utime(paths[-1].parents[1] / "lock", (k, k))
    for k in (1, 2, 3):  # as if their processes had ended
        os.close(scratch._used.pop(paths[k].parents[1]))
    store.pipe_file("/new.bin", b"x" * 30_000)
    local("watched://new.bin")
    assert [path.exists() for path in paths] == [True, False, True, True]
    store.pipe_file("/large.bin", b"x" * 60_000)
    with pytest.raises(FileError, match="needs 60000 bytes"):
        local("watched://large.bin")
    assert [path.exists() for path in paths] == [True, False, False, False]
    local("watched://new.bin")


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name", ["../b", "/b", "a/../../b", "a//b", "a\x1b[31m", "a\nb", "a\\b", "x" * 300, ".", ""]
)
def test_no_name_leads_out_of_the_scratch_folder(store, tmp_path, name):
    store.pipe_file("/folder/good", b"x")
    store.store[f"/folder/{name}"] = store.store["/folder/good"]
    with pytest.raises(FileError, match="has a file with the name") as error:
        check_names([name], "watched://folder")
    assert "\n" not in str(error.value)
    if name and name[-1] != "/":
        with pytest.raises(FileError, match=r"^watched://folder: "):
            local("watched://folder")
    assert left(tmp_path) == []


def test_a_file_and_a_folder_of_one_name_are_refused():
    with pytest.raises(FileError, match="is in a folder with the name of a file"):
        check_names(["a", "a/b"], "s3://bucket")


def test_a_link_in_a_folder_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").symlink_to("/etc/hostname")
    with pytest.raises(FileError, match=r"a.txt: is neither a file nor a folder"):
        local(f"file://{tmp_path}/folder")


# -------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    "url",
    ["simplecache::s3://b/a", "zip://a.txt::s3://b/a.zip", "zip://a.txt", "reference://x", "dir://a"],
)  # fmt: skip
def test_chained_urls_are_refused(url):
    assert is_url(url)
    with pytest.raises(OptionError, match="joins several file systems"):
        local(url)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3://bucket/..", "memory://a\x1b/b"])
def test_urls_that_name_nothing_are_refused(url):
    with pytest.raises(OptionError):
        checked(url)


def test_unknown_and_missing_stores_are_one_line(store):
    for url, why in {
        "nonsense://a/b": "Protocol not known",
        "gs://bucket/a": "gcsfs",
        "watched://missing": "no such file or folder",
    }.items():
        with pytest.raises(NegMergeError, match=f"^{url}: .*{why}") as error:
            local(url)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://me:hidden@host/a/b.bin?sig=hidden", "https://host/a/b.bin"),
        ("https://hidden@host/a", "https://host/a"),
        ("s3://me:hidden@bucket/a", "s3://bucket/a"),
        ("sftp://me:hidden@host/a", "sftp://host/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("hf://datasets/me/set@refs/a", "hf://datasets/me/set@refs/a"),
        ("s3://bucket/a", "s3://bucket/a"),
    ],
)
def test_secrets_are_never_shown(url, text):
    assert shown(url) == text
    assert has_secret(url) == (url != text)


def test_what_has_no_tag_is_not_kept_for_others(store, monkeypatch):
    row = {"name": "/a.bin", "size": 3, "type": "file"}
    monkeypatch.setattr(Watched, "info", lambda self, path, **_: row)
    store.pipe_file("/a.bin", b"abc")
    assert local("watched://a.bin") != local("watched://a.bin")


def test_a_folder_needs_no_files(tmp_path):
    fsspec.filesystem("watched").mkdir("/nothing")
    assert Store("watched://nothing").kind == "folder"
    assert [*local("watched://nothing").iterdir()] == []
