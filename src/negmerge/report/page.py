"""The page of a run: collect, draw, render; one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from negmerge.errors import FileError, NegMergeError
from negmerge.files import alone_in, file_digest, told_plainly, write_file
from negmerge.progress import Progress, Quiet
from negmerge.reading import MAX_YAML, read_bytes
from negmerge.recipe import Recipe, load_recipe
from negmerge.report import summary
from negmerge.report.collect import Missing, NotMeasured
from negmerge.report.colours import PAIRS, SIGNS, Looks, look_of
from negmerge.report.export import Table
from negmerge.report.runs import describe_run
from negmerge.report.sections import SECTIONS, Material, Section
from negmerge.report.tables import how_far
from negmerge.rundir import PAGE, Run, need_run

T = TypeVar("T")
BROKEN = (
    NegMergeError,
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What reading a damaged run can raise; the page then says what is missing."""

TYPES = {"csv": "text/csv", "md": "text/markdown", "tex": "application/x-tex"}


def report(run: Run | str | Path, progress: Progress | None = None) -> Path:
    """Build the page of a run, finished or not, from what its folder holds; gives the page's path.

    The same run gives the same bytes. What a run has no data for is named in its place. The tables
    of the page go beside it, as CSV, Markdown and LaTeX.
    """
    run = need_run(run.folder if isinstance(run, Run) else Path(run))
    with told_plainly(run.page):
        run.tables.mkdir(parents=True, exist_ok=True)
    with alone_in(run.page.parent):
        builder = Builder(run, progress or Quiet())
        files, before = builder.build(), builder.attempt("the tables", run.own_tables) or []
        for name, text in reversed(files.items()):  # the page last: then all of it is there
            write_file(run.page.parent / name, text.encode())
        for old in before:  # exports of an earlier page, nobody else's files
            if f"tables/{old.name}" not in files:
                old.unlink()
        if builder.manifest is not None:
            run.enlist([run.page.parent / name for name in files])
    return run.page


class Builder:
    """One page in the making: its sections, and what is missing."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.missing: list[str] = []
        self.looks: Looks = {}
        self.manifest = self.attempt("the manifest", self.sealed)
        if self.manifest is not None:
            self.attempt("what the run wrote", self.check_unchanged)

    def build(self) -> dict[str, str]:
        """The page and the exports of its tables, by file name."""
        recipe = self.attempt("the recipe", lambda: load_recipe(self.run.recipe))
        scores = self.attempt("the scores", self.scores)
        sections: list[Section] = []
        top: dict[str, Any] | None = None
        if recipe is not None and scores is not None:
            given = Material(self.run, recipe, scores, self.progress)
            self.looks = self.attempt("the scores", lambda: given.looks) or {}
            found = [self.attempt(what, lambda m=make: m(given)) for what, make in SECTIONS.items()]
            sections = [section for section in found if section is not None]
            top = self.attempt("the summary", lambda: summarise(scores, recipe))
        tables = [section.table for section in sections if section.table is not None]
        files = {f"tables/{k}": v for table in tables for k, v in table.files().items()}
        return {"index.html": self.render(recipe, scores, top, sections)} | files

    def sealed(self) -> dict[str, Any]:
        """The manifest, if the run has one."""
        if not self.run.finished:
            raise Missing("the run is not finished")
        return self.run.sealed()

    def check_unchanged(self) -> None:
        """Raise if a file that the page shows is not the one that was sealed."""
        for name, entry in (self.manifest or {})["files"].items():
            path = self.run.inside(name)
            shown = path.suffix in (".json", ".csv", ".png") and not name.startswith(PAGE)
            if shown and path.is_file() and file_digest(path) != entry["sha256"]:
                raise FileError(
                    f"{name}: was changed after the run was finished; what is shown of it is not "
                    "what was measured"
                )

    def scores(self) -> dict[str, Any]:
        """The scores; those beside an unfinished run may be of an earlier recipe."""
        if not self.run.finished:
            raise Missing(f"the run is not finished; there are {how_far(describe_run(self.run))}")
        return self.run.scores

    def recipe_text(self) -> str:
        """The recipe as it stands in the run, whatever it is."""
        raw = self.attempt("the text of the recipe", lambda: read_bytes(self.run.recipe, MAX_YAML))
        return (raw or b"").decode(errors="replace")

    def attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """What a step gives, or None and a line about what is missing."""
        try:
            return make()
        except NotMeasured:
            return None
        except BROKEN as error:
            told = error if isinstance(error, NegMergeError) else f"damaged: {error!r}"
            self.missing.append(f"{what}: {told}")
            return None

    def render(
        self,
        recipe: Recipe | None,
        scores: dict[str, Any] | None,
        top: dict[str, Any] | None,
        sections: list[Section],
    ) -> str:
        listed = {} if self.manifest is None else self.manifest["files"]
        files = {k: v for k, v in listed.items() if not k.startswith("report/")}
        environment = Environment(
            loader=PackageLoader("negmerge.report"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["glued"] = glued
        return environment.get_template("page.html.j2").render(
            title=(recipe and recipe.title) or "A run of negmerge",
            finished=self.run.finished,
            top=top,
            sections=sections,
            missing=self.missing,
            warnings=(scores or {}).get("warnings", []),
            recipe=self.recipe_text(),
            seed=recipe and recipe.seed,
            manifest=self.manifest,
            files=files,
            data=(scores or {}).get("splits", {}).get("fingerprint"),
            pairs=PAIRS,
            look_of=lambda name: self.looks.get(name, look_of(name)),
            signs=SIGNS,
            downloads=downloads,
        )


def glued(text: str) -> str:
    """A text whose numbers stay with their units, and λ with its value.

    >>> glued("λ = 0.5 keeps 95 %").split(" ")[1:]
    ['keeps', '95\\xa0%']
    """
    return text.replace(" %", "\u00a0%").replace("λ = ", "λ\u00a0=\u00a0")


def summarise(scores: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The words and the small table on top."""
    first = scores["methods"][0]
    return {
        "method": first["method"],
        "forgotten": summary.forgotten(scores),
        "sentence": summary.sentence(scores),
        "nearness": summary.nearness(scores),
        "table": Table("summary", "The unlearned model", summary.how_well(scores)),
        "strength": summary.strength(scores),
        "against": summary.against_retraining(scores, recipe),
        "cost": summary.cost(scores),
        "sparsity": first["sparsity"],
        "not_measured": summary.not_measured(scores),
    }


def downloads(table: Table) -> list[tuple[str, str, str]]:
    """The exports of a table as links: what it is, file name, content as a data URI."""
    found: list[tuple[str, str, str]] = []
    for name, text in table.files().items():
        kind = name.rpartition(".")[2]
        content = base64.b64encode(text.encode()).decode()
        label = {"csv": "CSV", "md": "Markdown", "tex": "LaTeX"}[kind]
        found.append((label, name, f"data:{TYPES[kind]};charset=utf-8;base64,{content}"))
    return found
