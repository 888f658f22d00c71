"""The run directory: where everything is, what is finished, and the manifest that seals it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from negmerge.errors import FileError, MismatchError, shown
from negmerge.files import SUFFIX, alone_in, file_digest, told_plainly, write_file
from negmerge.parallel import available_workers
from negmerge.reading import MAX_YAML, is_file, read_json, read_text
from negmerge.records import FORMAT, Manifest, Scores, Unit, read_record

AGAIN = "put it back from a copy, or run again in another folder"
"""What to do about a damaged file of a finished run."""
PAGE = ("report/index.html", "report/tables/")
"""What `report` makes, and makes again."""
PLAIN = re.compile(r"[A-Za-z0-9_-]+")
"""Names of methods, members and rivals."""
STATE = re.compile(r"([0-9a-f]{16}|given|conflict)(\.\w+)?")
SHOWN = re.compile(r"attack\.csv|gradcam\.json|gradcam-\d+-[A-Za-z0-9_-]+\.png")
"""What a run calls its files: only those are ever removed."""


class Run:
    """A folder with one run, finished or not.

    >>> run = Run(getfixture("tmp_path"))
    >>> run.finished
    False

    lenders: folders of other runs, whose models serve where the same training was done.
    """

    def __init__(self, folder: str | Path, lenders: Sequence[Path] = ()) -> None:
        self.folder, self.lenders = Path(folder), lenders
        self.recipe = self.folder / "recipe.yaml"
        self.base = self.folder / "base.safetensors"
        self.retrain = self.folder / "retrain.safetensors"
        self.accumulator = self.folder / "pool" / "accumulator.safetensors"
        self.unlearned = self.folder / "unlearned" / "model.safetensors"
        self.page = self.folder / "report" / "index.html"
        self.data = self.folder / "report" / "data"
        self.tables = self.folder / "report" / "tables"
        self.states = self.folder / ".state"
        self.manifest = self.folder / "manifest.json"

    def member(self, name: str) -> Path:
        """The file of a pool member."""
        return self.folder / "pool" / self._plain(name) / f"{name}.safetensors"

    def rival(self, method: str, name: str) -> Path:
        """The file of a model that a rival trained."""
        return self.folder / "rivals" / self._plain(method) / f"{self._plain(name)}.safetensors"

    def patch(self, method: str) -> Path:
        """The file of a merged task vector."""
        return self.folder / "patches" / f"{self._plain(method)}.safetensors"

    def sweep(self, method: str) -> Path:
        """The file of a λ sweep."""
        return self.folder / "sweeps" / f"{self._plain(method)}.csv"

    def _plain(self, name: object) -> str:
        """A name that is no path: names in `scores.json` are only as good as who wrote it."""
        if not isinstance(name, str) or not PLAIN.fullmatch(name):
            raise FileError(
                f"{self.folder}: {shown(name)} is not the name of a method or a model; wanted "
                "letters, digits, - and _"
            )
        return name

    def inside(self, name: str) -> Path:
        """The path of a file that the manifest names, which must be one of the run's."""
        path = self.folder / name
        plain = ".." not in path.parts and not Path(name).is_absolute()
        if not plain or not path.resolve().is_relative_to(self.folder.resolve()):
            raise FileError(f"{self.manifest} {shown(name)}: leads out of the run")
        return path

    def check_own(self) -> Run:
        """Raise unless the folder holds files and folders only; gives the run.

        A link could lead to files of others, which a run would then read, overwrite or remove. The
        folder itself may be reached through one.
        """
        folders = [self.folder]
        while folders:
            try:
                entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
            except FileNotFoundError:
                continue  # not begun, or another process has just removed it
            except OSError as error:
                raise FileError(f"{error.filename}: cannot be read: {error.strerror}") from None
            except ValueError as error:  # NUL, or half a surrogate pair
                raise FileError(f"{shown(self.folder)}: cannot be a folder: {error}") from None
            for entry in entries:
                special = entry.is_symlink() or not (entry.is_dir() or entry.is_file())
                if special and not self._begun:
                    kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    raise FileError(
                        f"{self.folder}: is not a run, and holds {entry.path}, which is {kind}; "
                        "name a new folder, or that of a run"
                    )
                if entry.is_symlink():
                    raise FileError(
                        f"{entry.path}: is a link, and a run holds only files and folders of its "
                        "own; remove it, or copy what it leads to"
                    )
                if entry.is_dir():
                    folders.append(Path(entry.path))
                elif not entry.is_file():
                    raise FileError(
                        f"{entry.path}: is neither a file nor a folder; remove it from the run"
                    )
        return self

    @property
    def _begun(self) -> bool:
        """Whether a run was here; otherwise the folder may be anybody's."""
        return any(os.path.lexists(path) for path in (self.recipe, self.manifest))

    @property
    def finished(self) -> bool:
        """Whether the manifest is there, which is written last."""
        return self.manifest.exists()

    def finished_with(self, recipe: str, problem: str) -> bool:
        """Whether it is finished, with exactly this recipe and this content of what it names."""
        if not (self.finished and self.recipe.is_file()):
            return False
        manifest = self.sealed()
        sealed = manifest["files"].get("recipe.yaml", {}).get("sha256")
        same = manifest.get("problem") == problem and sealed == file_digest(self.recipe)
        return same and read_text(self.recipe, MAX_YAML) == recipe

    @property
    def reported(self) -> bool:
        """Whether it is finished, and the page of what came out is there."""
        return self.finished and PAGE[0] in self.sealed()["files"] and self.page.is_file()

    @cached_property
    def scores(self) -> dict[str, Any]:
        """`scores.json`."""
        return read_record(self.folder / "scores.json", Scores, AGAIN)

    # ----------------------------------------------------------------------------- while it is made

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the folder: one run at a time."""
        self.check_own()
        with told_plainly(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with alone_in(self.folder, wait=False):
            with told_plainly(self.folder):
                for folder in (self.states, *self._folders()):
                    folder.mkdir(exist_ok=True)
            yield

    def _folders(self) -> list[Path]:
        return [self.folder / name for name in ("pool", "patches", "sweeps", "unlearned")]

    @cached_property
    def journal(self) -> dict[str, Any]:
        """Finished merges and sweeps: what they were made from and how long they took."""
        path = self.folder / "journal.json"
        remedy = "remove it and run again: merges and sweeps are made again"
        return read_record(path, dict[str, Unit], remedy) if path.exists() else {}

    def finished_unit(
        self, name: str, identity: str, path: Path, seconds: float, evaluations: int = 0
    ) -> None:
        """Note a finished piece of work: what it was made from, and the file that came of it."""
        made = {"id": identity, "sha256": file_digest(path), "seconds": seconds}
        made["evaluations"] = evaluations
        self.journal[name] = made
        write_json(self.folder / "journal.json", self.journal)

    def has(self, name: str, identity: str, path: Path) -> bool:
        """Whether a piece of work with this content is finished, and its file the one it left."""
        made = self.journal.get(name, {})
        return (
            made.get("id") == identity
            and path.is_file()
            and made.get("sha256") == file_digest(path)
        )

    # --------------------------------------------------------------------------------- the manifest

    def seal(self, problem: str, artefacts: Collection[Path]) -> None:
        """Write the manifest of a finished run, then clear what only an unfinished one needs.

        problem: a hash of what the recipe does not say, such as the content of files it names.
        artefacts: all files of this run. Models of an earlier recipe stay but are not listed;
            its patches and sweeps go, they are made again in no time. Files that the journal does
            not know are somebody else's, and stay too.
        """
        for path in (*self.folder.glob("patches/*"), *self.folder.glob("sweeps/*")):
            made = self.journal.get(f"{path.parent.name}/{path.stem}")
            if path in artefacts or not path.is_file() or not isinstance(made, dict):
                continue
            if made.get("sha256") == file_digest(path):
                path.unlink()
        files = self._entries(artefacts)
        manifest = {
            "format": FORMAT,
            "problem": problem,
            "result": self._result(files),
            "versions": versions(),
            "files": files,
        }
        write_json(self.manifest, manifest)
        self.clear()

    def enlist(self, paths: Collection[Path]) -> None:
        """Put the page's files into the manifest; the hash of the result stays as it is."""
        manifest = self.sealed()
        others = {k: v for k, v in manifest["files"].items() if not k.startswith(PAGE)}
        files = others | self._entries(paths)
        manifest["files"] = dict(sorted(files.items()))
        write_json(self.manifest, manifest)

    def _entries(self, paths: Collection[Path]) -> dict[str, dict[str, Any]]:
        return {
            path.relative_to(self.folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in sorted(paths)
        }

    def clear(self) -> None:
        """Remove the state of work in progress."""
        self._remove(self.states, STATE)

    def break_seal(self) -> None:
        """Remove the manifest, and the page with what it shows; other files beside them stay."""
        tables = self.own_tables()
        self.manifest.unlink(missing_ok=True)
        for path in tables:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not there, or not empty
            self.tables.rmdir()
        self._remove(self.data, SHOWN)
        self._remove(self.page.parent, re.compile(re.escape(self.page.name)))

    def own_tables(self) -> list[Path]:
        """The tables of the page that the manifest lists, as they were written."""
        files = self.sealed()["files"] if self.finished else {}
        listed = {k: v for k, v in files.items() if k.startswith(PAGE[1]) and isinstance(v, dict)}
        found = {self.inside(name): entry.get("sha256") for name, entry in listed.items()}
        return [p for p, digest in found.items() if p.is_file() and digest == file_digest(p)]

    def _remove(self, folder: Path, own: re.Pattern[str]) -> None:
        """Remove the files of a folder that have the run's own names; then it, if it is empty."""
        with told_plainly(folder):
            for path in folder.iterdir() if folder.is_dir() else ():
                name = path.name.removeprefix(".").removesuffix(SUFFIX)
                if own.fullmatch(name) and path.is_file():
                    path.unlink()
        with suppress(OSError):  # not there, or not empty
            folder.rmdir()

    def _result(self, files: Mapping[str, Mapping[str, Any]]) -> str:
        """One hash of all that a repeated run gives again: everything but how long it took."""
        digest = hashlib.sha256()
        for name, entry in sorted(files.items()):
            if name.endswith((".safetensors", ".csv", ".yaml")) and not name.startswith("report/"):
                digest.update(f"{name} {entry['sha256']}\n".encode())
        scores = json.dumps(without_seconds(read_json(self.folder / "scores.json")), sort_keys=True)
        digest.update(scores.encode())
        return digest.hexdigest()

    def sealed(self) -> dict[str, Any]:
        """The manifest."""
        return read_record(self.manifest, Manifest, AGAIN)

    def verify(self) -> int:
        """Recompute every hash of the manifest; the number of files, or the first that differs."""
        manifest = self.sealed()
        files = manifest["files"]
        for name, entry in files.items():
            path = self.inside(name)
            if not is_file(path):
                raise MismatchError(f"{path}: is missing; the manifest lists it")
            if (found := file_digest(path)) != entry["sha256"]:
                raise MismatchError(
                    f"{path}: has changed: sha256 {found}, the manifest says {entry['sha256']}"
                )
        if self._result(files) != manifest.get("result"):
            raise MismatchError(f"{self.manifest}: the hash of the result does not fit the files")
        return len(files)


def need_run(path: Path) -> Run:
    """The run of a folder, finished or not, which holds nothing but its own files."""
    if not is_run(path):
        raise FileError(f"{path}: is not a run, it has no recipe.yaml; name a run directory")
    return Run(path).check_own()


def is_run(path: Path) -> bool:
    """Whether a path is a run directory, finished or not; no path is too strange to ask.

    >>> is_run(Path("x" * 5000))
    False
    """
    return is_file(path / "recipe.yaml")


def without_seconds(tree: Any) -> Any:
    """A tree without its measured times.

    >>> without_seconds({"seconds": 1.0, "methods": [{"seconds": 2.0, "mia": 3.0}]})
    {'methods': [{'mia': 3.0}]}
    """
    if isinstance(tree, dict):
        return {k: without_seconds(v) for k, v in tree.items() if not k.startswith("seconds")}
    return [without_seconds(v) for v in tree] if isinstance(tree, list) else tree


DEPENDS = (
    "negmerge", "datasets", "numba", "numpy", "open_clip_torch", "pillow", "scikit-learn", "torch",
    "torchvision",
)  # fmt: skip


def versions() -> dict[str, str]:
    """What a result may depend on beside the recipe: versions, and how the work was divided."""
    found = {"python": python_version(), "cores": str(available_workers(None))}
    return found | {name: version(name) for name in DEPENDS}


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write JSON for people and machines, atomically; NaN and infinity are refused."""
    write_file(path, (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())
