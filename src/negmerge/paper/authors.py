"""`negmerge reproduce authors`: the authors' own checkpoints give the authors' own numbers.

The models of the release are merged, λ is searched on the validation sets, and the count of
unanimous elements, λ and the test accuracies are compared with the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator
from torch import nn

from negmerge.errors import FileError, NegMergeError, OptionError, quoted
from negmerge.evaluation.criteria import Row, choose
from negmerge.evaluation.scales import Search
from negmerge.evaluation.search import Curve, search_scale
from negmerge.merging.engine import merge
from negmerge.paper.experiments import FOLDER
from negmerge.paper.released import Release, check_trust, convert_release, find_release
from negmerge.paper.verdicts import Compared, Comparison, markdown
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.scenarios.base import identity
from negmerge.scenarios.clip.scenario import ClipScenario
from negmerge.support.files import file_digest, lock_folder, report_write_errors, write_file
from negmerge.support.mistakes import first_mistake
from negmerge.support.progress import Progress
from negmerge.support.reading import read_json
from negmerge.support.settings import Strict
from negmerge.training.weights import check_fit, load_tensors
from negmerge.vectors.task_vector import TaskVector
from negmerge.vision.datasets import resolve
from negmerge.vision.places import Hub, find

POINTS = 0.1
"""The largest difference of accuracies, in percentage points."""


class Expected(Strict):
    """The published numbers of a release.

    Args:
        what: the model and the data.
        source: where the numbers were published.
        recipe: the recipe that names data, model and prompts.
        members: the number of fine-tuned models.
        elements, unanimous: of the task vector, and those with the same sign in all models.
        acc_forget, acc_retain: accuracies on the test sets, in percent.
        validation: the accuracies on the validation sets for each λ.
    """

    what: str
    source: str = ""
    recipe: str = "clip_vit_b32"
    members: int
    elements: int
    unanimous: int
    scale: float
    acc_forget: float
    acc_retain: float
    validation: tuple[Row, ...] = ()

    @field_validator("validation")
    @classmethod
    def _check_rows(cls, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        if any(not {"scale", "acc_forget", "acc_retain"} <= row.keys() for row in rows):
            raise ValueError("wanted scale, acc_forget and acc_retain in each row")
        return rows


@dataclass(frozen=True)
class ReleaseComparison(Comparison):
    """The numbers of a release; the sweep on the validation sets is empty if data is missing."""

    expected: Expected
    sweep: list[Row]
    folder: Path

    def tree(self) -> dict[str, Any]:
        return {
            "what": self.expected.what,
            "passed": self.passed,
            "numbers": [row.tree() for row in self.rows],
            "validation": self.sweep,
            "notes": self.notes,
            "folder": str(self.folder),
        }


def published_numbers(path: Path | None = None) -> Expected:
    """Return the published numbers: those of the package, or those of a JSON file.

    >>> published_numbers().unanimous
    10961529
    """
    path = FOLDER / "authors.json" if path is None else path
    try:
        return Expected.model_validate(read_json(path))
    except ValidationError as error:
        raise FileError(f"{path}: {first_mistake(error)}") from None


def compare_release(
    checkpoints: Path,
    out: Path | None,
    trust: bool,
    changes: Sequence[str],
    expected: Path | None,
    progress: Progress,
) -> ReleaseComparison:
    """Merge and measure the models of a release; repeated, it does only what is not done.

    Args:
        checkpoints: the folder of the release.
        out: the folder for converted files, patch, sweep and table; runs/reproduce-authors if None.
        trust: whether pickles may be opened.
        changes: changes of the recipe as `key=value`.
        expected: a JSON file of published numbers; the authors' if None.
        progress: shows the progress.
    """
    wanted = published_numbers(expected)
    folder = Path("runs/reproduce-authors") if out is None else out
    recipe = load_recipe(wanted.recipe, changes)
    if recipe.scenario != "clip":
        raise OptionError(f"recipe {wanted.recipe}: scenario {recipe.scenario}, wanted clip")
    if folder.resolve() == checkpoints.resolve():
        raise OptionError(f"--out {folder}: is the folder of the checkpoints; name another")
    release = find_release(checkpoints, folder)
    notes = member_notes(release, wanted)
    for note in notes:
        progress.note(note)
    check_trust(release, trust)
    with report_write_errors(folder):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, wait=False):
        base, members = convert_release(release, folder / "checkpoints", progress)
        content = identity([path.name for path in (base, *members)])
        patch = folder / f"consensus-{content}.safetensors"
        if not patch.is_file():
            merge(base, members, "consensus", out=patch, progress=progress)
        tau = TaskVector.load(patch)
        try:
            sweep, scale, scores = measure(recipe, base, patch, folder, progress)
        except MissingDataError as error:
            sweep, scale, scores = list[Row](), None, dict[str, float]()
            notes.append(f"λ and accuracies: not checked; {error}")
    rows = [
        Compared("members", len(members), wanted.members),
        Compared("elements", tau.elements, wanted.elements),
        Compared("unanimous elements", tau.nonzero, wanted.unanimous),
        Compared("λ", scale, wanted.scale),
        Compared("forget accuracy", scores.get("acc_forget"), wanted.acc_forget, POINTS),
        Compared("retain accuracy", scores.get("acc_retain"), wanted.acc_retain, POINTS),
    ]
    made = ReleaseComparison(rows, notes, wanted, sweep, folder)
    write_file(folder / "authors.json", (json.dumps(made.tree(), indent=1) + "\n").encode())
    write_file(folder / "authors.md", page(made).encode())
    return made


def member_notes(release: Release, wanted: Expected) -> list[str]:
    """Return notes about members that may not belong to the pool.

    In the release members are gathered by folder name, so that a model that was fine-tuned without
    RandAugment joins the pool.
    """
    notes: list[str] = []
    if (count := len(release.members)) != wanted.members:
        notes.append(f"{count} members, the published numbers are of {wanted.members}")
    if unlike := release.unlike:
        names = ", ".join(map(quoted, unlike[:5]))
        notes.append(
            f"members whose names are unlike the others: {names}; remove them if they were not "
            "fine-tuned with RandAugment"
        )
    return notes


class MissingDataError(NegMergeError):
    """Data or weights for the measurements are not on this machine."""


def measure(
    recipe: Recipe, base: Path, patch: Path, folder: Path, progress: Progress
) -> tuple[list[Row], float, dict[str, float]]:
    """Search λ on the validation sets, and measure on the test sets.

    Returns:
        The rows of the sweep, which a file in `folder` keeps, λ, and the accuracies.
    """
    scenario = recipe.make_scenario(progress)
    assert isinstance(scenario, ClipScenario)
    check_data(scenario)
    scenario.check()
    tau, model = TaskVector.load(patch), network(scenario, base)
    search = Search(strategy="grid", samples=recipe.search.samples)
    content = identity(file_digest(patch), scenario.scored_on, search.samples)
    partial = folder / f"sweep-{content}.csv"
    size, grid = scenario.size("choose"), search.grid()
    progress.stage(f"searching λ among {len(grid)}", size * len(grid), "samples")
    curve = Curve(scenario.evaluator(model, tau), size, partial, progress.advance)
    criterion = scenario.settings.criterion("keep_retain")
    rows = search_scale(curve, search, criterion)
    scale = choose(rows, criterion).scale
    progress.stage(f"measuring at λ = {scale:g}", scenario.size("report"), "samples")
    with tau.applied(model, -scale):
        scores = scenario.measure(model, "report", progress.advance)
    return rows, scale, scores.row()


def check_data(scenario: ClipScenario) -> None:
    """Raise if a data set or the weights of the text encoder are not on this machine."""
    settings = scenario.settings
    for data in (settings.data, settings.clip.control):
        source = resolve(data.name, **{"size": scenario.source.size} | data.given())
        place = find(source, data.root or settings.data.root, data.revision)
        if isinstance(place, Hub):
            searched = " and ".join(map(quoted, place.searched))
            looked = f"looked for {searched}; " if searched else ""
            raise MissingDataError(
                f"the data set {quoted(data.name)} was not found; {looked}set data.root or "
                "NEGMERGE_DATA to a folder with local copies"
            )
    try:
        scenario.source.fingerprint  # noqa: B018 (finds the weights)
    except FileError as error:
        raise MissingDataError(str(error)) from None


def network(scenario: ClipScenario, base: Path) -> nn.Module:
    """Return the network of a scenario with the weights of the release.

    The file must have the whole image encoder; it may lack what is left of the text encoder.
    """
    model = scenario.model()
    (tensors, _), state = load_tensors(base), model.state_dict()
    wanted = {k: v for k, v in state.items() if k in tensors or k.startswith("visual.")}
    remedy = "set model.name to the architecture of the release"
    check_fit(base, tensors, wanted, scenario.source.name, remedy)
    model.load_state_dict(tensors, strict=False)  # the names are compared above
    return model


def page(made: ReleaseComparison) -> str:
    """Return the comparison as Markdown: the numbers, the notes, and both sweeps."""
    lines = [f"# {made.expected.what}\n", f"Known numbers: {made.expected.source}.\n"]
    lines += [markdown(made.rows), *(f"- {note}" for note in made.notes)]
    if made.sweep:
        known = {row["scale"]: row for row in made.expected.validation}
        lines += [
            "\n## Validation sets\n",
            "| λ | forget | known | retain | known |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in made.sweep:
            theirs, cells = known.get(row["scale"], {}), [f"{row['scale']:g}"]
            for metric in ("acc_forget", "acc_retain"):
                cells += [f"{row[metric]:.2f}", f"{theirs[metric]:.2f}" if theirs else "–"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
