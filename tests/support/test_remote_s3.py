"""`s3://` with moto's server on this machine: faults, checksums, two processes at once, a copy."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto.moto_server", reason="moto[server] is not installed")
pytest.importorskip("s3fs", reason="s3fs is not installed")

import s3fs

import running
import stores
from negmerge.errors import FileError
from negmerge.support.remote import ranges
from negmerge.support.remote.scratch import local
from negmerge.support.remote.stores import Store, checksums

CONTENT = os.urandom(300_000)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[stores.S3]:
    with stores.S3().running() as server:
        yield server


@pytest.fixture(autouse=True)
def s3(server, tmp_path, monkeypatch) -> s3fs.S3FileSystem:
    """A bucket with an object."""
    server.reset()
    variables = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NEGMERGE_SCRATCH": str(tmp_path / "scratch"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranges, "RANGE", 100_000)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    if not fs.exists("bucket"):
        fs.mkdir("bucket")
    fs.pipe_file("bucket/a.bin", CONTENT)
    return fs


def fetching(place: Path, url: str):
    """A process that fetches a URL and prints the path."""
    code = f"from negmerge.support.remote.scratch import local; print(local({url!r}))"
    return running.start_python(place, "-c", code, plain=True)


def test_an_object_is_fetched_once_with_its_checksum(server):
    (file,) = Store("s3://bucket/a.bin").files()
    assert hashlib.md5(CONTENT).hexdigest() in file.tag  # noqa: S324
    assert local("s3://bucket/a.bin").read_bytes() == CONTENT
    assert local("s3://bucket/a.bin").name == "a.bin"
    assert len(server.ranges) == 3


def test_a_range_that_fails_twice_is_fetched_again(server):
    server.before = lambda number: number > 2
    assert local("s3://bucket/a.bin").read_bytes() == CONTENT
    assert len(server.ranges) == 5


def test_an_object_that_is_replaced_meanwhile_is_refused(server, s3, tmp_path):
    def replace(number: int) -> bool:
        if number == 2:
            s3.pipe_file("bucket/a.bin", os.urandom(300_000))
        return True

    server.before = replace
    with pytest.raises(FileError, match=r"^s3://bucket/a.bin: changed while it was fetched"):
        local("s3://bucket/a.bin")
    assert not [*(tmp_path / "scratch").rglob("*.bin")]


def test_missing_objects_and_buckets_are_one_line():
    for url in ("s3://bucket/missing", "s3://nowhere/a.bin"):
        with pytest.raises(FileError, match=f"^{url}: ") as error:
            local(url)
        assert "hidden" not in str(error.value)


def test_two_processes_fetch_an_object_once(server, s3, tmp_path):
    s3.pipe_file("bucket/small.bin", b"abc")
    asked = server.heads + 4

    def wait(number: int) -> bool:
        """Until both have asked what the object is, and the second one waits."""
        deadline = time.monotonic() + 60
        while server.heads < asked and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        return True

    server.before = wait
    url = "s3://bucket/small.bin"
    both = [fetching(tmp_path, url) for _ in range(2)]
    told = [running.ended(process, 0) for process in both]
    assert told[0][0] == told[1][0]
    notes = sorted(err for _, err in told)
    assert notes == ["", f"note: waiting for another process that fetches {url}\n"]
    assert Path(told[0][0].strip()).read_bytes() == b"abc"
    assert server.ranges == ["/bucket/small.bin"]


def test_what_a_killed_process_left_does_no_harm(server, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def wait(number: int) -> bool:
        begun.set()
        return go_on.wait(30)

    server.before = wait
    process = fetching(tmp_path, "s3://bucket/a.bin")
    assert begun.wait(60)
    process.kill()
    process.communicate()
    go_on.set()
    left = [*(tmp_path / "scratch").rglob(".new-*")]
    assert len(left) == 1
    assert local("s3://bucket/a.bin").read_bytes() == CONTENT
    assert not left[0].exists()


def test_a_folder_of_objects_is_fetched(s3):
    for name in ("x/1.txt", "x/y/2.txt"):
        s3.pipe_file(f"bucket/folder/{name}", name.encode())
    s3.touch("bucket/folder/x/")  # the object that some tools make for a folder
    found = local("s3://bucket/folder")
    assert {p.relative_to(found).as_posix() for p in found.rglob("*.txt")} == {
        "x/1.txt",
        "x/y/2.txt",
    }


def test_an_object_in_parts_has_no_checksum_but_arrives(s3, tmp_path):
    content = os.urandom(6 << 20)
    with s3.open("bucket/large.bin", "wb", block_size=5 << 20) as file:
        file.write(content)
    (found,) = Store("s3://bucket/large.bin").files()
    assert "-" in found.tag
    assert checksums(found.info) == {}
    assert local("s3://bucket/large.bin").read_bytes() == content


def test_the_tag_of_an_encrypted_object_is_not_a_checksum(s3, monkeypatch):
    s3.pipe_file("bucket/secret.bin", CONTENT, ServerSideEncryption="aws:kms")
    wrong = {"md5": "0" * 32}
    monkeypatch.setattr("negmerge.support.remote.stores.checksums", lambda info: wrong)
    assert local("s3://bucket/secret.bin").read_bytes() == CONTENT
    with pytest.raises(FileError, match=r"^s3://bucket/a.bin: the bytes that arrived have md5"):
        local("s3://bucket/a.bin")


def test_a_run_is_copied_there_and_back(tmp_path, s3):
    from negmerge.runs.store import Run, write_json

    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.recipe.write_text("seed: 1\n")
    run.base.write_bytes(CONTENT)
    write_json(run.scores, {})
    run.finish("problem", [run.recipe, run.base, run.scores])
    url, back = "s3://bucket/runs/one", tmp_path / "back"
    out, _ = running.negmerge_here(tmp_path, "copy", "run", url, "--dry-run")
    assert "300,000  base.safetensors" in out
    assert not s3.exists("bucket/runs/one")
    out, _ = running.negmerge_here(tmp_path, "copy", "run", url)
    assert out.startswith(f"{url}: 4 files copied")
    out, _ = running.negmerge_here(tmp_path, "copy", "run", url)
    assert out.startswith(f"{url}: 0 files copied")
    running.negmerge_here(tmp_path, "copy", url, str(back))
    out, _ = running.negmerge_here(tmp_path, "verify", "back")
    assert out == "back: 3 files match the manifest\n"


def test_the_scratch_folder_is_where_it_is_said(tmp_path):
    assert local("s3://bucket/a.bin").is_relative_to(Path(tmp_path / "scratch"))
