"""The store of a run: which steps are done, what the result is, and the manifest of all files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from pydantic import TypeAdapter

from negmerge.errors import FileError, MismatchError
from negmerge.runs.cores import Cores
from negmerge.runs.directory import DATA_FILE, PAGE_FILE, RunDirectory, remove_files
from negmerge.runs.records import (
    Artefact,
    Begun,
    Done,
    Manifest,
    Receipt,
    Unit,
    check_record,
    read_record,
)
from negmerge.runs.result import RunResult
from negmerge.runs.steps import FileStep, ModelStep, Step, StoredModel, T, ValueStep
from negmerge.support.files import file_digest, link_or_copy, report_write_errors, write_file
from negmerge.support.parallel import worker_count
from negmerge.support.reading import is_file, read_json

MEASURE_AGAIN = "remove it and run again: it is measured again"
RESTORE = "put it back from a copy, or run again in another folder"
"""The remedy for a damaged file of a finished run."""
EXPORTS = ("report/tables/", "report/figures/")
PAGE_FILES = ("report/index.html", *EXPORTS, "unlearned/README.md")
"""The files that `report` writes, and may replace: the page, its exports, and the model card."""


class Run(RunDirectory):
    """A run, finished or not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Run(folder).finished
    False

    Args:
        folder: the run directory.
        reuse_from: directories of other runs; models that they trained are used again.
    """

    def __init__(self, folder: str | Path, reuse_from: Sequence[Path] = ()) -> None:
        super().__init__(folder)
        self.reuse_from = reuse_from

    @cached_property
    def result(self) -> RunResult:
        """The content of `scores.json`."""
        return read_record(self.scores, RunResult, RESTORE)

    # -------------------------------------------------------------------------------------- steps

    @cached_property
    def journal(self) -> dict[str, Unit]:
        """The finished merges and sweeps: their keys, hashes and costs."""
        if not self.journal_file.exists():
            return {}
        remedy = "remove it and run again: merges and sweeps are made again"
        return read_record(self.journal_file, dict[str, Unit], remedy)

    def find(self, step: Step[T]) -> Done[T] | None:
        """Return the result of a step if the step is done."""
        done: Done[Any] | None = None
        if isinstance(step, ModelStep):
            if all(model.find_cost() is not None for model in step.models):
                cost = step.read_cost()
                found = self.mark_done(step, Done(cost, cost.seconds))  # if it was killed before
                same = [m.read_cost().sha256 == _digest_of_model(m) for m in step.models]
                done = found if all(same) else None
        elif isinstance(step, FileStep):
            unit = self.journal.get(step.name)
            if unit is not None and unit.id == step.key and step.out.is_file():
                same = unit.sha256 == file_digest(step.out)
                done = Done(unit.evaluations, unit.seconds) if same else None
        elif isinstance(step, ValueStep) and step.out.exists():
            receipt = read_record(step.out, Receipt, MEASURE_AGAIN, infinite=True)
            value = check_record(receipt.value, step.value_type, step.out, MEASURE_AGAIN)
            done = Done(value, receipt.seconds)
        return done

    def mark_done(self, step: Step[Any], done: Done[Any]) -> Done[Any]:
        """Record that a step is done, and return what `find` will return.

        A model step has recorded all but the hashes of its models.
        """
        if isinstance(step, ModelStep):
            for model in step.models:
                cost, digest = model.read_cost(), _digest_of_model(model)
                if cost.sha256 is None and digest is not None:
                    cost = cost.model_copy(update={"sha256": digest})
                    write_json(model.cost_file, cost.model_dump(exclude_unset=True))
            done = Done(step.read_cost(), done.seconds)
        elif isinstance(step, FileStep):
            cost = {"seconds": done.seconds, "evaluations": done.value}
            self.journal[step.name] = Unit(id=step.key, sha256=file_digest(step.out), **cost)
            units = {name: unit.model_dump() for name, unit in self.journal.items()}
            write_json(self.journal_file, units)
        elif isinstance(step, ValueStep):
            receipt = {"id": step.key, "seconds": done.seconds}
            # A field that is not set must not be set after reading: `scores.json` leaves it out.
            kind: TypeAdapter[Any] = TypeAdapter(step.value_type)
            receipt["value"] = kind.dump_python(done.value, mode="json", exclude_unset=True)
            write_file(step.out, json.dumps(receipt).encode())
        return done

    def reuse(self, step: Step[Any]) -> Done[Any] | None:
        """Take the model of a step, and its cost, from another run that has done the step."""
        if not isinstance(step, ModelStep) or not step.trains:
            return None
        for folder in self.reuse_from:
            others = step.in_folder(self.folder, folder).models
            if all(_is_usable(other, folder) for other in others):
                for other, model in zip(others, step.models, strict=True):
                    link_or_copy(other.cost_file, model.cost_file)
                    link_or_copy(other.out, model.out)
                return self.find(step)
        return None

    def begin_with(self, cores: Cores) -> Cores:
        """Return the cores that the run began with; record the given ones if it begins now.

        The last bits of a training depend on its number of threads: a run that continues with more
        cores, or elsewhere, computes as it began.
        """
        path = self.states / "cores.json"
        if not path.exists():
            write_json(path, {"cores": cores.cores, "workers": cores.workers})
        begun = read_record(path, Begun, "remove it and run again")
        return Cores(begun.cores, begun.workers, cores.fixed)

    # ------------------------------------------------------------------------------- the manifest

    @property
    def finished(self) -> bool:
        """Whether there is a manifest, which is written last."""
        return self.manifest.exists()

    def finished_with(self, problem: str) -> bool:
        """Return whether the run is finished with this recipe file and this hash of the problem."""
        if not (self.finished and self.recipe.is_file()):
            return False
        manifest = self.read_manifest()
        recipe = manifest.files.get(self.recipe.name)
        unchanged = recipe is not None and recipe.sha256 == file_digest(self.recipe)
        return manifest.problem == problem and unchanged

    @property
    def has_page(self) -> bool:
        """Whether the run is finished and has a page."""
        return self.finished and PAGE_FILES[0] in self.read_manifest().files and self.page.is_file()

    def finish(self, problem: str, artefacts: Collection[Path]) -> None:
        """Write the manifest, then remove the state of work in progress.

        Patches and sweeps of an earlier recipe are removed; its models stay, but the manifest does
        not list them. Files that the journal does not list stay too.

        Args:
            problem: the hash of what the result depends on beside the recipe.
            artefacts: all files of this run.
        """
        folders = ("patches", "sweeps", "matched")
        steps = {path for name in folders for path in self.folder.glob(f"{name}/*")}
        for path in steps - {*artefacts}:
            made = self.journal.get(f"{path.parent.name}/{path.stem}")
            if made is not None and path.is_file() and made.sha256 == file_digest(path):
                path.unlink()
        files = self._entries(artefacts)
        hashes = {"problem": problem, "result": self._result_hash(files)}
        manifest = Manifest(format="negmerge-run/1", **hashes, versions=versions(), files=files)
        write_json(self.manifest, manifest.model_dump())
        self.clear_state()

    def reopen(self) -> None:
        """Remove the manifest, the page with its data, and the model card; other files stay."""
        exports = self.unchanged_exports()
        self.manifest.unlink(missing_ok=True)
        for path in exports:
            path.unlink(missing_ok=True)
        for folder in (self.tables, self.figures):
            with suppress(OSError):  # the folder does not exist, or is not empty
                folder.rmdir()
        remove_files(self.data, DATA_FILE)
        remove_files(self.page.parent, PAGE_FILE)
        with report_write_errors(self.card):
            self.card.unlink(missing_ok=True)

    def read_manifest(self) -> Manifest:
        """Read the manifest."""
        return read_record(self.manifest, Manifest, RESTORE)

    def list_page_files(self, paths: Collection[Path]) -> None:
        """List the files of the page in the manifest; the hash of the result does not change."""
        manifest = self.read_manifest()
        others = {k: v for k, v in manifest.files.items() if not k.startswith(PAGE_FILES)}
        files = dict(sorted((others | self._entries(paths)).items()))
        write_json(self.manifest, manifest.model_copy(update={"files": files}).model_dump())

    def unchanged_exports(self) -> list[Path]:
        """Return the tables and figures that the manifest lists and that are unchanged."""
        files = self.read_manifest().files if self.finished else {}
        listed = [
            (self.path_in_run(name), entry.sha256)
            for name, entry in files.items()
            if name.startswith(EXPORTS)
        ]
        return [path for path, sha in listed if path.is_file() and sha == file_digest(path)]

    def check_unchanged(self, path: Path) -> None:
        """Raise unless a file of a finished run is there and has the hash of the manifest."""
        entry = self.read_manifest().files.get(path.relative_to(self.folder).as_posix())
        if entry is None:
            raise MismatchError(f"{path}: the manifest does not list it; {RESTORE}")
        if not is_file(path):
            raise MismatchError(f"{path}: is missing; the manifest lists it; {RESTORE}")
        if (found := file_digest(path)) != entry.sha256:
            raise MismatchError(
                f"{path}: has changed: sha256 {found}, the manifest says {entry.sha256}; {RESTORE}"
            )

    def verify(self) -> int:
        """Recompute every hash of the manifest; return the number of files."""
        manifest = self.read_manifest()
        for name in manifest.files:
            self.check_unchanged(self.path_in_run(name))
        if self._result_hash(manifest.files) != manifest.result:
            raise MismatchError(f"{self.manifest}: the hash of the result does not fit the files")
        return len(manifest.files)

    def _entries(self, paths: Collection[Path]) -> dict[str, Artefact]:
        return {
            path.relative_to(self.folder).as_posix(): Artefact(
                bytes=path.stat().st_size, sha256=file_digest(path)
            )
            for path in sorted(paths)
        }

    def _result_hash(self, files: Mapping[str, Artefact]) -> str:
        """Return one hash of everything that a repeated run reproduces: all but the times."""
        digest = hashlib.sha256()
        for name, entry in sorted(files.items()):
            if name.endswith((".safetensors", ".csv", ".yaml")) and not name.startswith("report/"):
                digest.update(f"{name} {entry.sha256}\n".encode())
        scores = json.dumps(without_seconds(read_json(self.scores)), sort_keys=True)
        digest.update(scores.encode())
        return digest.hexdigest()


def open_run(path: Path) -> Run:
    """Open the run of a folder, finished or not; raise if there is none."""
    if not is_run(path):
        Run(path)  # raises for the path of a URL
        raise FileError(f"{path}: is not a run, it has no recipe.yaml; name a run directory")
    return Run(path).check_contents()


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory, of a finished run or not.

    >>> is_run(Path("x" * 5000))
    False
    """
    return is_file(path / "recipe.yaml")


def without_seconds(tree: Any) -> Any:
    """Return a tree of JSON values without the measured times.

    >>> without_seconds({"seconds": 1.0, "methods": [{"seconds": 2.0, "mia": 3.0}]})
    {'methods': [{'mia': 3.0}]}
    """
    if isinstance(tree, dict):
        return {k: without_seconds(v) for k, v in tree.items() if not k.startswith("seconds")}
    return [without_seconds(v) for v in tree] if isinstance(tree, list) else tree


DEPENDENCIES = (
    "negmerge", "datasets", "numba", "numpy", "open_clip_torch", "pillow", "scikit-learn", "torch",
    "torchvision",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions and the number of cores, on which a result may depend.

    A library that is not installed was not used: an extra installs only some of them.
    """
    found = {"python": python_version(), "cores": str(worker_count(None))}
    for name in DEPENDENCIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write indented JSON atomically; NaN and infinity are refused."""
    write_file(path, (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())


def _is_usable(model: StoredModel, folder: Path) -> bool:
    """Return whether another run has made a model, in its own folder."""
    # A link there could lead to any file.
    place = folder.resolve() / model.out.parent.relative_to(folder)
    linked = model.out.is_symlink() or model.cost_file.is_symlink()
    if linked or model.out.parent.resolve() != place:
        return False
    return model.find_cost() is not None and model.out.exists()


def _digest_of_model(model: StoredModel) -> str | None:
    """Return the hash of a model; None if a step made none."""
    if not model.out.is_file():
        return None
    found = model.out.stat()
    return _digest(model.out, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=10_000)
def _digest(path: Path, *state: int) -> str:
    """Return the hash of a file in some state; a stage asks for each model several times."""
    return file_digest(path)
