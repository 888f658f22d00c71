"""Copies of finished runs at URLs: sent file by file, the manifest last, and fetched back.

The manifest at a URL means that all files are there. A copy that is not complete has the file
`manifest.json.partial` instead: which files are there, so that they are not sent again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from negmerge.errors import FileError, NegMergeError, OptionError, show_instead
from negmerge.runs.records import Manifest, Record, Sha256, check_record
from negmerge.runs.store import Run, open_run
from negmerge.support.files import atomic_folder, file_digest
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Progress
from negmerge.support.reading import MAX_JSON, parse_json
from negmerge.support.remote.ranges import Fetch, check_space, check_unchanged, fetch_files
from negmerge.support.remote.stores import RemoteFile, Store, check_names
from negmerge.support.remote.urls import Place, is_url, join

MANIFEST = "manifest.json"
PARTIAL = "manifest.json.partial"
FOLDERLESS = {"abfs", "adl", "az", "gcs", "gs", "hf", "http", "https", "oci", "oss", "s3", "s3a"}
STREAMS = 4
"""The number of files that are sent at a time."""
EVERY = 10.0
"""Seconds between two records of what was sent."""


@dataclass(frozen=True)
class Copied:
    """What a copy did, or would do.

    Args:
        target: the folder or URL.
        sent: the bytes of each file that was copied, by name.
        unchanged: the names of the files that were there already.
    """

    target: str
    sent: dict[str, int]
    unchanged: list[str]


class Partial(Record):
    """`manifest.json.partial`."""

    format: Literal["negmerge-copy/1"]
    recipe: Sha256
    files: dict[str, Sha256]


def copy_run(source: Place, target: Place, dry_run: bool, progress: Progress) -> Copied:
    """Copy a finished run from a folder to a URL, or from a URL to a new folder.

    Args:
        dry_run: whether only to tell what would be copied.
    """
    if is_url(source) == is_url(target):
        how = "copy it to a folder first" if is_url(source) else "copy it with cp -r"
        raise OptionError(f"copy: wanted one folder and one URL; {how}")
    if is_url(target):
        return _send(open_run(Path(source)), Store(target), dry_run, progress)
    return _bring(Store(str(source)), Path(target), dry_run, progress)


# ------------------------------------------------------------------------------------------ sending


def _send(run: Run, store: Store, dry_run: bool, progress: Progress) -> Copied:
    if not run.finished:
        raise FileError(f"{run.folder}: the run is not finished; continue it with negmerge unlearn")
    run.verify()
    digests = {name: file.sha256 for name, file in run.read_manifest().files.items()}
    sizes = {name: file.bytes for name, file in run.read_manifest().files.items()}
    digests[MANIFEST], sizes[MANIFEST] = file_digest(run.manifest), run.manifest.stat().st_size
    check_names([*digests], str(run.folder))
    there = _Copy(store, digests[run.recipe.name])
    todo = [name for name in digests if not there.has(name, digests[name], sizes[name])]
    if todo and MANIFEST not in todo:
        todo.append(MANIFEST)  # it is removed until all files are there
    unchanged = [name for name in digests if name not in {*todo}]
    done = Copied(store.shown, {name: sizes[name] for name in todo}, unchanged)
    if dry_run:
        return done
    if not todo:
        there.complete()
        return done
    progress.stage("copying", sum(done.sent.values()))
    with there.incomplete():

        def send(_: None, name: str) -> str:
            there.send(run.path_in_run(name), name, progress)
            return name

        for name in run_in_order(todo[:-1], send, lambda: None, STREAMS):
            there.note(name, digests[name])
    there.send(run.manifest, MANIFEST, progress)
    there.complete()
    return done


class _Copy:
    """A copy at a URL: which files of which run are there.

    Args:
        recipe: the hash of the run's recipe; a copy of another recipe is refused.
    """

    def __init__(self, store: Store, recipe: str) -> None:
        self.store, self.recipe = store, recipe
        found = {} if store.kind == "missing" else {file.name: file for file in store.files()}
        self.sizes = {name: file.size for name, file in found.items()}
        self.known: dict[str, str] = {}
        self.noted = time.monotonic()
        if store.kind == "file":
            raise FileError(f"{store.shown}: is a file; wanted the URL of a folder")
        if MANIFEST in found:
            raw = read_small(store, found[MANIFEST])
            manifest = _manifest(store, raw)
            self.known = {name: file.sha256 for name, file in manifest.files.items()}
            self.known[MANIFEST] = hashlib.sha256(raw).hexdigest()
            self._check_same(self.known.get("recipe.yaml"))
        elif PARTIAL in found:
            where = join(store.shown, PARTIAL)
            tree = parse_json(read_small(store, found[PARTIAL]), where, "content")
            partial: Partial = check_record(tree, Partial, where, "remove the copy")
            self.known = dict(partial.files)
            self._check_same(partial.recipe)
        elif found:
            raise FileError(
                f"{store.shown}: is not empty, and not the copy of a run; name another URL"
            )

    def _check_same(self, recipe: str | None) -> None:
        if recipe != self.recipe:
            raise FileError(
                f"{self.store.shown}: is the copy of a run with another recipe; name another URL"
            )

    def has(self, name: str, digest: str, size: int) -> bool:
        """Whether a file is there, with this content."""
        return self.known.get(name) == digest and self.sizes.get(name) == size

    @contextmanager
    def incomplete(self) -> Iterator[None]:
        """Replace the manifest by the record of what is there, until all files are sent."""
        self.known.pop(MANIFEST, None)
        self._write_record()
        if MANIFEST in self.sizes:
            with self._writing(MANIFEST):
                self.store.fs.rm_file(join(self.store.path, MANIFEST))
        try:
            yield
        finally:
            self._write_record()

    def complete(self) -> None:
        """Remove the record, if there is one: the manifest is there."""
        if PARTIAL not in self.sizes:
            return
        with self._writing(PARTIAL):
            self.store.fs.rm_file(join(self.store.path, PARTIAL))

    def note(self, name: str, digest: str) -> None:
        """Record that a file is there."""
        self.known[name] = digest
        if time.monotonic() - self.noted > EVERY:
            self._write_record()

    def _write_record(self) -> None:
        tree = {"format": "negmerge-copy/1", "recipe": self.recipe, "files": self.known}
        with self._writing(PARTIAL):
            self._make_folder(PARTIAL)
            self.store.fs.pipe_file(join(self.store.path, PARTIAL), json.dumps(tree).encode())
        self.sizes[PARTIAL] = 0
        self.noted = time.monotonic()

    def send(self, path: Path, name: str, progress: Progress) -> None:
        """Send a file and check what the store has afterwards."""
        from fsspec.callbacks import Callback

        class Advance(Callback):
            def relative_update(self, inc: int = 1) -> None:
                self.value += inc
                progress.advance(inc)

        told, size, there = Advance(), path.stat().st_size, join(self.store.path, name)
        with self._writing(name):
            self._make_folder(name)
            self.store.fs.put_file(str(path), there, callback=told)
            self.store.fs.invalidate_cache()
            info: Mapping[str, Any] = self.store.fs.info(there)
        if info["size"] != size:
            raise FileError(
                f"{join(self.store.shown, name)}: has {info['size']} bytes after it was sent, "
                f"wanted {size}; run again"
            )
        self.store.check_content(RemoteFile(there, name, size, "", info), path)
        progress.advance(size - told.value)

    def _make_folder(self, name: str) -> None:
        """Make the folder of a file; stores of objects have none, and would make a bucket."""
        if FOLDERLESS.isdisjoint({self.store.url.partition("://")[0].lower()}):
            parent = join(self.store.path, name).rpartition("/")[0]
            self.store.fs.makedirs(parent, exist_ok=True)

    def _writing(self, name: str) -> Any:
        return self.store.reporting(name, "cannot be written")


# ------------------------------------------------------------------------------------ bringing back


def _bring(store: Store, folder: Path, dry_run: bool, progress: Progress) -> Copied:
    if store.kind != "folder":
        raise FileError(f"{store.shown}: is not the copy of a run; wanted the URL of a folder")
    found = {file.name: file for file in store.files()}
    if MANIFEST not in found:
        why = "the copy is not complete" if PARTIAL in found else "it has no manifest.json"
        raise FileError(f"{store.shown}: is not the copy of a finished run: {why}")
    listed = _manifest(store, read_small(store, found[MANIFEST])).files
    names = [*listed, MANIFEST]
    check_names(names, store.shown)
    if missing := [name for name in names if name not in found]:
        raise FileError(f"{join(store.shown, missing[0])}: is missing; the manifest lists it")
    for name, listing in listed.items():  # before anything is fetched
        if found[name].size != listing.bytes:
            raise FileError(
                f"{join(store.shown, name)}: has {found[name].size} bytes, the manifest says "
                f"{listing.bytes}; copy the run again, to another URL"
            )
    files = [found[name] for name in names]
    done = Copied(str(folder), {file.name: file.size for file in files}, [])
    if dry_run:
        return done
    with atomic_folder(folder) as new:
        show_instead(str(new), store.shown)
        need = sum(done.sent.values())
        check_space(new, need, store.shown, "name a folder on another disk")
        progress.stage("copying", need)
        try:
            fetch_files([Fetch(store, file, new / file.name) for file in files], progress)
        except NegMergeError:
            check_unchanged(store, files, deep=True)
            raise
        Run(new).check_contents().verify()
    return done


def read_small(store: Store, file: RemoteFile) -> bytes:
    """Return the content of a small file."""
    if file.size > MAX_JSON:
        raise FileError(f"{store.where(file)}: larger than {MAX_JSON} bytes, the limit for JSON")
    with store.reporting(file.name):
        return store.read(file, 0, file.size)


def _manifest(store: Store, raw: bytes) -> Manifest:
    where = join(store.shown, MANIFEST)
    remedy = "copy the run again, to another URL"
    return check_record(parse_json(raw, where, "content"), Manifest, where, remedy)
