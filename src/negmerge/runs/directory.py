"""The run directory: the paths of its files, and the checks that they belong to the run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from negmerge.errors import FileError, quoted
from negmerge.support.files import (
    TEMPORARY_SUFFIX,
    lock_folder,
    remove_abandoned,
    report_write_errors,
)
from negmerge.support.remote.urls import refuse_url

TITLE = re.compile(r"[A-Za-z0-9_-]+")
"""The titles of methods and the keys of models; both name files."""
STATE_FILE = re.compile(r"([0-9a-f]{16}|given|conflict|status|cores)(\.\w+)?")
DATA_FILE = re.compile(r"attack\.csv|gradcam\.json|gradcam-\d+-[A-Za-z0-9_-]+\.png")
PAGE_FILE = re.compile(r"index\.html")
"""The names that a run gives to its files; a run removes no others."""


class RunDirectory:
    """The folder of a run, which need not exist."""

    def __init__(self, folder: str | Path) -> None:
        refuse_url(folder, "a run is on this machine; `negmerge copy` brings a finished run here")
        self.folder = Path(folder)
        self.recipe = self.folder / "recipe.yaml"
        self.base = self.folder / "base.safetensors"
        self.retrain = self.folder / "retrain.safetensors"
        self.second = self.folder / "retrain-2.safetensors"
        self.accumulator = self.folder / "pool" / "accumulator.safetensors"
        self.unlearned = self.folder / "unlearned" / "model.safetensors"
        self.card = self.unlearned.parent / "README.md"
        self.page = self.folder / "report" / "index.html"
        self.data = self.folder / "report" / "data"
        self.tables = self.folder / "report" / "tables"
        self.figures = self.folder / "report" / "figures"
        self.states = self.folder / ".state"
        self.logs = self.folder / "logs"
        self.journal_file = self.folder / "journal.json"
        self.manifest = self.folder / "manifest.json"
        self.scores = self.folder / "scores.json"

    def member(self, name: str) -> Path:
        """Return the file of a pool member."""
        return self.folder / "pool" / self._checked(name) / f"{name}.safetensors"

    def rival(self, method: str, name: str) -> Path:
        """Return the file of a model that a rival trained."""
        return self.folder / "rivals" / self._checked(method) / f"{self._checked(name)}.safetensors"

    def patch(self, method: str) -> Path:
        """Return the file of a merged task vector."""
        return self.folder / "patches" / f"{self._checked(method)}.safetensors"

    def sweep(self, method: str) -> Path:
        """Return the file of a λ sweep."""
        return self.folder / "sweeps" / f"{self._checked(method)}.csv"

    def matched(self, method: str) -> Path:
        """Return the file of a λ sweep with the λ that were measured around a forget level."""
        return self.folder / "matched" / f"{self._checked(method)}.csv"

    def shadow(self, number: int) -> Path:
        """Return the file with what a shadow recorded."""
        return self.folder / "shadows" / f"shadow-{number}.safetensors"

    def _checked(self, name: object) -> str:
        """Return a name if it cannot lead out of the folder; `scores.json` may hold any name."""
        if not isinstance(name, str) or not TITLE.fullmatch(name):
            raise FileError(
                f"{self.folder}: {quoted(name)} is not the name of a method or a model; wanted "
                "letters, digits, - and _"
            )
        return name

    def path_in_run(self, name: str) -> Path:
        """Return the path of a file that the manifest lists, if it is in the run directory."""
        path = self.folder / name
        plain = ".." not in path.parts and not Path(name).is_absolute()
        if not plain or not path.resolve().is_relative_to(self.folder.resolve()):
            raise FileError(f"{self.manifest} {quoted(name)}: leads out of the run")
        return path

    def check_contents(self) -> Self:
        """Raise if the folder holds anything but regular files and folders; return the run.

        A link could lead to files of others, which a run would read, overwrite or remove. The path
        of the folder itself may contain links.
        """
        found = irregular_entry(self.folder)
        if found is not None:
            self._refuse(found.path, found.is_symlink())
        return self

    def _refuse(self, path: str, link: bool) -> None:
        """Raise the error for an entry that is neither a regular file nor a folder."""
        kind = "a link" if link else "neither a file nor a folder"
        if not any(os.path.lexists(path) for path in (self.recipe, self.manifest)):
            raise FileError(
                f"{self.folder}: is not a run, and holds {path}, which is {kind}; name a new "
                "folder, or that of a run"
            )
        remedy = "remove it, or copy what it links to" if link else "remove it"
        raise FileError(f"{path}: is {kind}, and a run holds only files and folders; {remedy}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it: one run at a time may write to it."""
        self.check_contents()
        with report_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.folder, wait=False):
            with report_write_errors(self.folder):
                for name in (".state", "pool", "patches", "sweeps", "unlearned"):
                    (self.folder / name).mkdir(exist_ok=True)
            remove_abandoned(self.folder)
            yield

    def clear_state(self) -> None:
        """Remove the state of work in progress."""
        remove_files(self.states, STATE_FILE)


def irregular_entry(folder: Path) -> os.DirEntry[str] | None:
    """Return a link, a pipe or a device below a folder; None if there are only files and folders.

    A folder that does not exist has none.
    """
    folders = [folder]
    while folders:
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # there is no folder yet, or another process has just removed it
        except OSError as error:
            raise FileError(f"{error.filename}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # a NUL character, or half a surrogate pair
            raise FileError(f"{quoted(folder)}: cannot be a folder: {error}") from None
        for entry in entries:
            link = entry.is_symlink()
            if not link and entry.is_dir():
                folders.append(Path(entry.path))
            elif link or not entry.is_file():
                return entry
    return None


def remove_files(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files of a folder with these names, then the folder if it is empty."""
    with report_write_errors(folder):
        for path in folder.iterdir() if folder.is_dir() else ():
            name = path.name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
            if names.fullmatch(name) and path.is_file():
                path.unlink()
    with suppress(OSError):  # the folder does not exist, or is not empty
        folder.rmdir()
