"""The folder of a study: its recipe, one run for each seed, the results, the page and tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from negmerge.errors import FileError, MismatchError, quoted
from negmerge.runs.directory import irregular_entry
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.records import Record, Sha256, read_record
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run, is_run, write_json
from negmerge.studies.comparison import numbers_of
from negmerge.support.files import file_digest, lock_folder, report_write_errors, write_file
from negmerge.support.reading import is_file, parse_yaml
from negmerge.support.remote.urls import refuse_url

IGNORED: dict[str, Any] = {
    "title": "", "seed": 0, "workers": None, "feed_workers": None, "save_every": 0.0,
}  # fmt: skip
"""Fields of a recipe that may differ between two calls for the same study."""
TOO_LARGE = 1e290
"""The magnitude of a number above which sums of a few overflow."""
FORMULA = ("=", "+", "-", "@")
"""The first characters of what a spreadsheet takes for a formula in a CSV file."""
MEASURE_AGAIN = "remove it and repeat the command: the seed is read from its run, or run again"


class SeedRecord(Record):
    """`seeds/SEED.json`: the result of the run of one seed, which remains if the run is deleted.

    Args:
        recipe: the hash of `study.yaml`.
    """

    format: Literal["negmerge-study-seed/1"]
    recipe: Sha256
    seed: int
    result: RunResult


class StudyDirectory:
    """The folder of a study, which need not exist."""

    def __init__(self, folder: str | Path) -> None:
        refuse_url(folder, "a study is on this machine; copy its folder afterwards")
        self.folder = Path(folder)
        self.recipe = self.folder / "study.yaml"
        self.page = self.folder / "index.html"
        self.tables = self.folder / "tables"

    def run(self, seed: int) -> Run:
        """Return the run of a seed; it may use the models of the finished runs of other seeds."""
        own = self.folder / f"seed-{seed}"
        others = sorted(path for path in self.folder.glob("seed-*") if path != own)
        return Run(own, [path for path in others if Run(path).finished])

    def record(self, seed: int) -> Path:
        """Return the file of the result of a seed."""
        return self.folder / "seeds" / f"{seed}.json"

    def check(self, recipe: Recipe) -> None:
        """Raise if the folder holds anything but a study of this recipe; it may be empty."""
        found = irregular_entry(self.folder)
        if found is not None:
            raise FileError(
                f"{found.path}: is neither a file nor a folder of its own, and a study holds only "
                "these; remove it, or copy what it links to"
            )
        if is_run(self.folder):
            raise FileError(f"{self.folder}: is a run; name another folder with --out")
        if is_file(self.recipe):
            place = first_difference(load_recipe(self.recipe), recipe)
            if place is not None:
                raise MismatchError(
                    f"{self.folder}: holds the study of another recipe, which differs in {place}; "
                    "name another folder with --out"
                )

    def claim(self, recipe: Recipe) -> None:
        """Make the folder, and write the recipe unless it is there; raise if another one is."""
        with report_write_errors(self.folder):
            for folder in (self.folder, self.record(0).parent, self.tables):
                folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.folder):  # another study may begin here at this moment
            if is_file(self.recipe):
                self.check(recipe)
            else:
                text = recipe.model_copy(update={"seed": 0}).dump()
                write_file(self.recipe, text.encode())

    def find(self, seed: int, recipe: Recipe) -> RunResult | None:
        """Return the result of a seed if it was recorded with this recipe."""
        path = self.record(seed)
        if not path.exists() or not is_file(self.recipe):
            return None
        try:
            found: SeedRecord = read_record(path, SeedRecord, MEASURE_AGAIN)
        except FileError as error:
            told = str(error)
            raise FileError(told if MEASURE_AGAIN in told else f"{told}; {MEASURE_AGAIN}") from None
        if found.seed != seed or found.result.seed != seed:
            raise FileError(
                f"{path}: is damaged: it is of seed {found.result.seed}; {MEASURE_AGAIN}"
            )
        if found.recipe != file_digest(self.recipe):
            return None
        return checked(path, found.result, recipe, MEASURE_AGAIN)

    def keep(self, seed: int, result: RunResult) -> None:
        """Record the result of a seed."""
        head = {"format": "negmerge-study-seed/1", "recipe": file_digest(self.recipe)}
        write_json(self.record(seed), head | {"seed": seed, "result": result.tree()})


def checked(path: Path, result: RunResult, recipe: Recipe, remedy: str) -> RunResult:
    """Return a result; raise if it is not of the methods of a recipe, or cannot be computed with.

    Args:
        path, remedy: of the error: the damaged file, and what the user can do about it.
    """
    found, wanted = (
        sorted(row.method for row in result.methods),
        sorted(method.title for method in recipe.methods),
    )
    if found != wanted:
        raise FileError(
            f"{path}: is damaged: it has the methods {quoted(', '.join(found), 200)}, wanted "
            f"{', '.join(wanted)}; {remedy}"
        )
    for name, value in all_numbers(result):
        if abs(value) > TOO_LARGE:
            raise FileError(
                f"{path}: is damaged: {quoted(name, 80)} is {value:g}, wanted at most "
                f"{TOO_LARGE:g}; {remedy}"
            )
        if not name.isprintable() or name.startswith(FORMULA):
            raise FileError(
                f"{path}: is damaged: {quoted(name, 80)} is no name of a number; {remedy}"
            )
    return result


def all_numbers(result: RunResult) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of everything that a study computes with."""
    for row in (result.original, *result.methods, *([result.retrain] if result.retrain else [])):
        yield from numbers_of(row).items()
    if result.matching is not None:
        yield from result.matching.retrained.items()
    tests = {} if result.evidence is None else result.evidence.tests
    for name, test in tests.items():
        for quantity, found in (pair for own in test.models.values() for pair in own.items()):
            if found.value is not None:
                yield f"{name}.{quantity}", found.value


def first_difference(one: Recipe, other: Recipe) -> str | None:
    """Return the dotted key of the first field that makes the results of two recipes differ.

    >>> ours, theirs = (load_recipe("demo", [change]) for change in ("seed=1", "search.count=5"))
    >>> first_difference(ours, theirs), first_difference(ours, load_recipe("demo"))
    ('search.count', None)
    """
    dumps = [recipe.model_copy(update=IGNORED).dump() for recipe in (one, other)]
    trees: list[Any] = [parse_yaml(text, "recipe") for text in dumps]
    place: list[str] = []
    while trees[0] != trees[1] and all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        place.append(next(key for key in keys if trees[0].get(key) != trees[1].get(key)))
        trees = [tree.get(place[-1]) for tree in trees]
    return ".".join(place) or None
