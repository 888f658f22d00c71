"""The run directory: where everything is, what is finished, and the manifest that seals it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, MismatchError, shown
from negmerge.files import SUFFIX, atomic_lock, file_digest, told_plainly, write_file

FORMAT = "negmerge-run/1"


class Run:
    """A folder with one run, finished or not.

    >>> run = Run(getfixture("tmp_path"))
    >>> run.finished
    False
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe = self.folder / "recipe.yaml"
        self.base = self.folder / "base.safetensors"
        self.retrain = self.folder / "retrain.safetensors"
        self.accumulator = self.folder / "pool" / "accumulator.safetensors"
        self.unlearned = self.folder / "unlearned" / "model.safetensors"
        self.states = self.folder / ".state"
        self.manifest = self.folder / "manifest.json"

    def member(self, name: str) -> Path:
        """The file of a pool member."""
        return self.folder / "pool" / name / f"{name}.safetensors"

    def patch(self, method: str) -> Path:
        """The file of a merged task vector."""
        return self.folder / "patches" / f"{method}.safetensors"

    def sweep(self, method: str) -> Path:
        """The file of a λ sweep."""
        return self.folder / "sweeps" / f"{method}.csv"

    @property
    def finished(self) -> bool:
        """Whether the manifest is there, which is written last."""
        return self.manifest.exists()

    def finished_with(self, recipe: str) -> bool:
        """Whether it is finished, with exactly this recipe."""
        return self.finished and self.recipe.read_text(encoding="utf-8") == recipe

    @cached_property
    def scores(self) -> dict[str, Any]:
        """`scores.json`."""
        return read_json(self.folder / "scores.json")

    # ----------------------------------------------------------------------------- while it is made

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the folder: one run at a time."""
        with told_plainly(self.folder):
            for folder in (self.folder, self.states, *self._folders()):
                folder.mkdir(parents=True, exist_ok=True)
        with atomic_lock(self.folder / ".lock"):
            yield
        with suppress(OSError):  # it is empty if there was nothing to do
            self.states.rmdir()

    def _folders(self) -> list[Path]:
        return [self.folder / name for name in ("pool", "patches", "sweeps", "unlearned")]

    @cached_property
    def journal(self) -> dict[str, Any]:
        """Finished merges and sweeps: what they were made from and how long they took."""
        path = self.folder / "journal.json"
        return read_json(path) if path.exists() else {}

    def finished_unit(self, name: str, identity: str, seconds: float) -> None:
        """Note a finished piece of work."""
        self.journal[name] = {"id": identity, "seconds": seconds}
        write_json(self.folder / "journal.json", self.journal)

    def has(self, name: str, identity: str, path: Path) -> bool:
        """Whether a piece of work with this content is finished."""
        return path.exists() and self.journal.get(name, {}).get("id") == identity

    # --------------------------------------------------------------------------------- the manifest

    def seal(self, members: Collection[str], patches: Collection[str]) -> None:
        """Clear what this run does not need, then write the manifest.

        members: the ids of its pool; others, of an earlier pool, stay but are not listed.
        patches: its methods; patches and sweeps of others go, they are made again in no time.
        """
        shutil.rmtree(self.states, ignore_errors=True)
        known = {*patches, *(f"member-{name}" for name in members)}
        for path in (*self.folder.glob("patches/*"), *self.folder.glob("sweeps/*")):
            if path.stem not in known:
                path.unlink()
        files = {
            path.relative_to(self.folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in self._artefacts(members)
        }
        manifest = {
            "format": FORMAT,
            "result": self._result(files),
            "versions": versions(),
            "files": files,
        }
        write_json(self.manifest, manifest)

    def _artefacts(self, members: Collection[str]) -> list[Path]:
        own = (self.manifest.name, ".lock", self.accumulator.name)
        others = [p for p in self.folder.glob("pool/*/") if p.name not in members]
        return sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file()
            and path.name not in own
            and not path.name.endswith(SUFFIX)
            and path.parent not in others
        )

    def _result(self, files: Mapping[str, Mapping[str, Any]]) -> str:
        """One hash of all that a repeated run gives again: everything but how long it took."""
        digest = hashlib.sha256()
        for name, entry in sorted(files.items()):
            if name.endswith((".safetensors", ".csv", ".yaml")):
                digest.update(f"{name} {entry['sha256']}\n".encode())
        scores = json.dumps(without_seconds(read_json(self.folder / "scores.json")), sort_keys=True)
        digest.update(scores.encode())
        return digest.hexdigest()

    def verify(self) -> int:
        """Recompute every hash of the manifest; the number of files, or the first that differs."""
        manifest = read_json(self.manifest)
        if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
            raise FileError(f"{self.manifest}: is not the manifest of a run")
        for name, entry in manifest["files"].items():
            path = self.folder / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise FileError(f"{self.manifest} {shown(name)}: leads out of the run")
            if not path.is_file():
                raise MismatchError(f"{path}: is missing; the manifest lists it")
            if (found := file_digest(path)) != entry["sha256"]:
                raise MismatchError(
                    f"{path}: has changed: sha256 {found}, the manifest says {entry['sha256']}"
                )
        if self._result(manifest["files"]) != manifest["result"]:
            raise MismatchError(f"{self.manifest}: the hash of the result does not fit the files")
        return len(manifest["files"])


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, finished or not."""
    return (folder / "recipe.yaml").is_file()


def describe_run(run: Run) -> dict[str, Any]:
    """What is there of a run, as plain data; the scores if it is finished."""
    pool = sorted(run.folder.glob("pool/*/*.json"))
    return {
        "kind": "run",
        "finished": run.finished,
        "base": run.base.exists(),
        "retrain": run.retrain.exists(),
        "members": len(pool),
        "patches": sorted(p.stem for p in run.folder.glob("patches/*.safetensors")),
        "sweeps": sorted(p.stem for p in run.folder.glob("sweeps/*.csv")),
        "scores": run.scores if run.finished else None,
    }


def without_seconds(tree: Any) -> Any:
    """A tree without its measured times.

    >>> without_seconds({"seconds": 1.0, "methods": [{"seconds": 2.0, "mia": 3.0}]})
    {'methods': [{'mia': 3.0}]}
    """
    if isinstance(tree, dict):
        return {k: without_seconds(v) for k, v in tree.items() if not k.startswith("seconds")}
    return [without_seconds(v) for v in tree] if isinstance(tree, list) else tree


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    names = ("negmerge", "numba", "numpy", "scikit-learn", "torch", "torchvision")
    return {name: version(name) for name in names}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise FileError(f"{path}: wanted a JSON object")
    return found


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write JSON for people and machines, atomically; NaN and infinity are refused."""
    write_file(path, (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())
