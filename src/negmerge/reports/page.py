"""The page of a run: one HTML file that needs no network, and the exports of its tables."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from negmerge.errors import FileError, NegMergeError
from negmerge.reports.card import folder_card
from negmerge.reports.export import DataTable
from negmerge.reports.frames import Missing, NotMeasured
from negmerge.reports.inspection import contents_of, progress_text
from negmerge.reports.names import Named
from negmerge.reports.page_data import PageData
from negmerge.reports.questions import questions
from negmerge.reports.sections import Section, sections_of
from negmerge.reports.styles import COLOURS, SYMBOLS, Styles, style_of
from negmerge.reports.summary import summary_of
from negmerge.runs.recipe import load_recipe
from negmerge.runs.records import Manifest
from negmerge.runs.result import RunResult
from negmerge.runs.store import PAGE_FILES, Run, open_run
from negmerge.support.files import file_digest, lock_folder, report_write_errors, write_file
from negmerge.support.progress import Progress, Quiet
from negmerge.support.reading import MAX_YAML, read_bytes

T = TypeVar("T")
BROKEN = (NegMergeError, OSError, ArithmeticError, AttributeError, LookupError)
BROKEN += (TypeError, ValueError)
"""The errors that reading a damaged run can raise; the page then names what is missing."""
EXPORTS = {
    "csv": ("CSV", "text/csv"),
    "md": ("Markdown", "text/markdown"),
    "tex": ("LaTeX", "application/x-tex"),
}


def report(run: Run | str | Path, progress: Progress | None = None) -> Path:
    """Build the page of a run, finished or not, from the files in its folder.

    The same run gives the same bytes. The page names the sections for which the run has no data.
    The tables of the page are also written as CSV, Markdown and LaTeX, the figures as SVG and PDF,
    and a finished run gets the model card of its unlearned model.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import negmerge as nm
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "recipe.yaml").write_text("title: My first run")
    >>> page = nm.report(folder)
    >>> page.name, "My first run" in page.read_text(encoding="utf-8")
    ('index.html', True)

    Args:
        run: what `nm.run` returned, or the folder of a run.
        progress: receives the progress of the merges that the page needs.

    Returns:
        The path of the page, `report/index.html` in the folder of the run.
    """
    run = open_run(run.folder if isinstance(run, Run) else Path(run))
    with report_write_errors(run.page):
        for folder in (run.tables, run.figures):
            folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(run.page.parent):
        builder = PageBuilder(run, progress or Quiet())
        before = builder.attempt("The exports", run.unchanged_exports) or []
        files = builder.build(before)
        for name, content in reversed(files.items()):  # the page last: it refers to all others
            write_file(run.page.parent / name, content)
        if builder.card is not None:
            write_file(run.card, builder.card.encode())
        for old in before:  # exports of an earlier page
            if old.relative_to(run.page.parent).as_posix() not in files:
                old.unlink()
        if builder.manifest is not None:
            paths = [run.page.parent / name for name in files]
            run.list_page_files(paths + ([] if builder.card is None else [run.card]))
    return run.page


class PageBuilder:
    """Build a page, and collect what is missing from it."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.missing: list[str] = []
        self.card: str | None = None
        self.damaged: list[str] = []
        self.manifest = self.attempt("The manifest", self.sealed)
        if self.manifest is not None:
            self.attempt("The files of the run", self.check_unchanged)

    def build(self, before: Collection[Path]) -> dict[str, bytes]:
        """The contents of the page, its figures and its tables, by file name.

        Args:
            before: the exports of an earlier page that are unchanged.
        """
        recipe = self.attempt("The recipe", lambda: load_recipe(self.run.recipe))
        result = self.attempt("The scores", self.result)
        page, sections = None, list[tuple[str, Section]]()
        if recipe is not None and result is not None:
            page = PageData(self.run, recipe, result, self.progress)
            if self.manifest is not None and self.run.unlearned.is_file():
                self.card = self.attempt("The model card", partial(folder_card, page))
            for title, make in sections_of(page):
                section = self.attempt(title, partial(make, page))
                sections += [] if section is None else [(title, section)]
        found = [section for _, section in sections]
        files = table_files(found)
        html = self.render(recipe and recipe.title, page, sections)
        files |= figure_files(found, page.names if page else {}, self.run.figures, before)
        return {"index.html": html.encode()} | files

    def sealed(self) -> Manifest:
        """Read the manifest of a finished run."""
        if not self.run.finished:
            raise Missing("the run is not finished")
        return self.run.read_manifest()

    def check_unchanged(self) -> None:
        """Raise if a file that the page shows was changed after the run was finished."""
        for name, entry in self.run.read_manifest().files.items():
            path = self.run.path_in_run(name)
            shown = path.suffix in (".json", ".csv", ".png") and not name.startswith(PAGE_FILES)
            if shown and path.is_file() and file_digest(path) != entry.sha256:
                raise FileError(
                    f"{name}: was changed after the run was finished; the page shows the changed "
                    "file and not what was measured"
                )

    def result(self) -> RunResult:
        """Read the scores; an unfinished run may have those of an earlier recipe."""
        if not self.run.finished:
            text = progress_text(contents_of(self.run))
            raise Missing(f"the run is not finished; it has {text}")
        return self.run.result

    def attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """Call a function; if it fails, return None and note what is missing."""
        try:
            return make()
        except NotMeasured:
            return None
        except BROKEN as error:
            reason = error if isinstance(error, NegMergeError) else f"damaged: {error!r}"
            self.missing.append(f"{what}: {reason}")
            self.damaged += [] if isinstance(error, Missing) else [what]
            return None

    def render(
        self, title: str | None, page: PageData | None, sections: list[tuple[str, Section]]
    ) -> str:
        """The page as HTML."""
        summary = page and self.attempt("The summary", partial(summary_of, page))
        asked = page and self.attempt("The verdicts", partial(questions, page, self.damaged))
        recipe = self.attempt(
            "The text of the recipe", partial(read_bytes, self.run.recipe, MAX_YAML)
        )
        return render_page(
            "page.html.j2",
            page.styles if page else {},
            page.names if page else {},
            title=title or "A run of negmerge",
            finished=self.run.finished,
            summary=summary,
            questions=asked or [],
            sections=sections,
            missing=self.missing,
            warnings=page.result.warnings if page else [],
            recipe=(recipe or b"").decode(errors="replace"),  # valid or not
            figures="figures",
            seed=page and page.recipe.seed,
            in_memory=page is not None and page.recipe.settings.in_memory,
            manifest=self.manifest,
            data=page and page.result.splits.fingerprint,
        )


def table_files(sections: Iterable[Section]) -> dict[str, bytes]:
    """The exports of the tables of a page, by name of the file beside the page."""
    files = [table.files() for section in sections for table in section.tables]
    return {f"tables/{name}": text.encode() for own in files for name, text in own.items()}


def figure_files(
    sections: Iterable[Section],
    names: Mapping[str, Named],
    folder: Path,
    before: Collection[Path] = (),
) -> dict[str, bytes]:
    """The figures of a page as SVG and PDF with legends, by name of the file beside the page.

    Args:
        names: how the page calls the methods.
        folder: the folder of the figures of an earlier page.
        before: its files that are unchanged; the PDF of a figure with the same SVG is used again.
    """
    found: dict[str, bytes] = {}
    for chart in (one.chart for section in sections for one in section.drawings):
        drawn, printed = folder / f"{chart.id}.svg", folder / f"{chart.id}.pdf"
        chart.add_legend(lambda title: names[title].label if title in names else title)
        svg = chart.file_svg().encode()
        same = {drawn, printed} <= {*before} and drawn.read_bytes() == svg
        pdf = printed.read_bytes() if same else chart.file_pdf()
        found |= {f"figures/{drawn.name}": svg, f"figures/{printed.name}": pdf}
    return found


def render_page(
    template: str, styles: Styles, names: Mapping[str, Named] | None = None, **variables: Any
) -> str:
    """Return a page as HTML.

    Args:
        template: `page.html.j2`, or a template that extends it.
        styles: the styles of the names in legends and tables.
        names: how the page calls the methods; by their titles if not given.
        variables: the variables of the template; `figures` is the folder of the figures beside the
            page, if they are written.
    """
    environment = Environment(
        loader=PackageLoader("negmerge.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = unbroken
    return environment.get_template(template).render(
        colours=COLOURS,
        style_of=lambda name: styles.get(name, style_of(name)),
        symbols=SYMBOLS,
        name_of=lambda title: (names or {}).get(title, Named(title, title)),
        downloads=downloads,
        **({"figures": ""} | variables),
    )


def unbroken(text: str) -> str:
    """Replace the spaces in percentages and values of λ by non-breaking spaces.

    >>> unbroken("λ = 0.5 keeps 95 %").split(" ")[1:]
    ['keeps', '95\\xa0%']
    """
    return text.replace(" %", "\u00a0%").replace("λ = ", "λ\u00a0=\u00a0")


def downloads(table: DataTable) -> list[tuple[str, str, str]]:
    """The exports of a table: the format, the file name, the content as a data URI."""
    found: list[tuple[str, str, str]] = []
    for name, text in table.files().items():
        label, kind = EXPORTS[name.rpartition(".")[2]]
        content = base64.b64encode(text.encode()).decode()
        found.append((label, name, f"data:{kind};charset=utf-8;base64,{content}"))
    return found
