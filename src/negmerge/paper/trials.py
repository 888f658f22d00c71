"""The runs of a table: which there are, the names of their folders, and those that are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from negmerge.paper.division import Part, parts_of
from negmerge.paper.experiments import PlannedRun, TableScale, experiment
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.store import Run
from negmerge.scenarios.base import identity
from negmerge.support.seeds import check_seeds


@dataclass(frozen=True)
class Trial:
    """A run of a table.

    Args:
        number: the number of the planned run.
        recipe: the recipe, with the seed of the trial.
        part: the number of the part that the run belongs to.
        mine: whether the run is in the part that is made now.
    """

    number: int
    planned: PlannedRun
    recipe: Recipe
    part: int = 1
    mine: bool = True

    @property
    def name(self) -> str:
        """The name of the folder of the run."""
        return name_of(self.planned.recipe, self.recipe)


def trials_of(
    table: str,
    scale: TableScale,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    part: Part | None = None,
) -> list[Trial]:
    """All runs of a table; the arguments are those of `reproduce`."""
    wanted = experiment(table)
    default = range(wanted.seeds if scale == "paper" else 1)
    seeds = default if seeds is None else check_seeds(seeds)
    trials = [
        Trial(number, planned, planned.load(seed, changes))
        for number, planned in enumerate(wanted.runs(scale))
        for seed in seeds
    ]
    if part is None:
        return trials
    own, count = part
    parts = parts_of([trial.recipe for trial in trials], count)
    return [replace(t, part=k, mine=k == own) for t, k in zip(trials, parts, strict=True)]


def run_count(count: int) -> str:
    """A number of runs as text.

    >>> run_count(1), run_count(40), run_count(0)
    ('1 run', '40 runs', '0 runs')
    """
    return f"{count} run{'' if count == 1 else 's'}"


def name_of(shipped: str, recipe: Recipe) -> str:
    """The name of the folder of a run; it does not depend on the table or on the title.

    >>> from negmerge.runs.recipe import load_recipe
    >>> name_of("demo", load_recipe("demo")).startswith("demo-fashion_small-0-")
    True
    """
    content = identity(recipe.model_copy(update={"title": ""}).dump())
    data = Path(recipe.settings.data_names()[0]).name
    return f"{shipped}-{data}-{recipe.seed}-{content}"


def finished_run(trial: Trial, folder: Path) -> Run | None:
    """A run of another part, if it is finished in the folder with the same recipe.

    The data of the run need not be on this machine, so that only the recipe is compared.
    """
    done = Run(folder / trial.name)
    if not (done.finished and done.recipe.is_file()):
        return None
    done.check_unchanged(done.scores)
    found = load_recipe(done.recipe).model_copy(update={"title": trial.recipe.title})
    return done if found.dump() == trial.recipe.dump() else None
