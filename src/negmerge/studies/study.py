"""A study: one run of a recipe for each seed, then the comparison of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from negmerge.errors import OptionError
from negmerge.runs.recipe import Recipe, named_recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import RESTORE
from negmerge.studies.comparison import Comparison, compared_with
from negmerge.studies.directory import StudyDirectory, checked
from negmerge.studies.page import write_page
from negmerge.support.progress import Progress, make_progress
from negmerge.support.seeds import check_seeds


class Study(Comparison):
    """A finished study: the comparison of its methods, and the folder with its page."""

    def __init__(
        self,
        recipe: Recipe,
        results: dict[int, RunResult],
        against: str | None,
        directory: StudyDirectory,
    ) -> None:
        super().__init__(recipe, results, against)
        self.folder, self.page = directory.folder, directory.page

    def tree(self) -> dict[str, Any]:
        """Return the means and the differences as JSON values."""
        means = [
            {"metric": name, "method": model, **asdict(mean)}
            for name in self.values
            for model, mean in self.means(name).items()
        ]
        return {
            "study": str(self.folder),
            "page": str(self.page),
            "against": self.against,
            "seeds": self.seeds,
            "means": means,
            "differences": [one.tree() for one in self.differences],
        }


def study(
    recipe: Recipe | str | Path | None,
    seeds: Sequence[int],
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    against: str | None = None,
    progress: Progress | None = None,
) -> Study:
    """Run a recipe with several seeds, and compare its methods seed by seed.

    A repeated call runs only the seeds that are not done, and continues an interrupted run. Runs of
    a study share the models that do not depend on the seed. `seeds/SEED.json` in the folder keeps
    the result of a seed: the folder of its run may be deleted. As with `nm.run`, a script must call
    `study` under `if __name__ == "__main__":` unless `workers` is 1.

    >>> import tempfile
    >>> import negmerge as nm
    >>> small = ["methods=[consensus, uniform]", "data.limit={train: 100, test: 50}", "workers=1"]
    >>> small += ["train.epochs=1", "retrain=null", "pool.grid={epochs: [1, 2]}"]
    >>> small += ["search={count: 3, stop: 1.0}", "threads=1"]
    >>> found = nm.study("demo", seeds=range(2), out=tempfile.mkdtemp(), changes=small)
    >>> one = found.of("acc_forget")[0]
    >>> found.against, one.method, one.test.mean.n, one.verdict in ("better", "worse", "undecided")
    ('consensus', 'uniform', 2, True)

    Args:
        recipe: a Recipe, a path or the name of a shipped recipe; None: the demo.
        seeds: the seeds; they replace the seed of the recipe.
        out: the folder of the study; `runs/study-<name>` if not given.
        changes: `key=value` changes of the recipe.
        against: the method that the others are compared with; the first one if not given.
        progress: shows how much is done; a bar on a terminal, or lines, if not given.

    Returns:
        The comparison: `differences` lists for each metric and method the paired difference, its
        interval, both tests and the verdict; `page` is the path of the page.
    """
    recipe, name = named_recipe(recipe, changes)
    check_seeds(seeds)
    for change in changes:
        if change.partition("=")[0].strip() == "seed":
            raise OptionError(f"--set {change}: the seeds of a study are those of --seeds")
    compared_with(recipe, against)
    folder = StudyDirectory(Path("runs") / f"study-{name}" if out is None else out)
    folder.check(recipe)
    with ExitStack() as stack:
        shown = stack.enter_context(make_progress()) if progress is None else progress
        results = run_seeds(recipe, seeds, folder, shown)
    found = Study(recipe, results, against, folder)
    write_page(found, folder)
    return found


def run_seeds(
    recipe: Recipe, seeds: Sequence[int], folder: StudyDirectory, progress: Progress
) -> dict[int, RunResult]:
    """Return the result of each seed; seeds without one are run, one after the other."""
    results = {seed: folder.find(seed, recipe) for seed in seeds}
    missing = [seed for seed, result in results.items() if result is None]
    if missing:
        from negmerge.runs.pipeline import checked_scenario  # it imports torch

        checked_scenario(recipe.model_copy(update={"seed": missing[0]}), progress)
    folder.claim(recipe)
    for number, seed in enumerate(seeds, 1):
        if results[seed] is None:
            text = f"seed {seed}: run {number} of {len(seeds)}"
            progress.note(text, seed=seed, number=number, of=len(seeds))
            results[seed] = run_seed(recipe, seed, folder, progress)
    return {seed: result for seed, result in results.items() if result is not None}


def run_seed(recipe: Recipe, seed: int, folder: StudyDirectory, progress: Progress) -> RunResult:
    """Make or continue the run of a seed, and record its result."""
    from negmerge.runs.pipeline import run

    store, own = folder.run(seed), recipe.model_copy(update={"seed": seed})
    done = run(own, store.folder, progress=progress, reuse_from=store.reuse_from)
    result = checked(store.scores, done.result, own, RESTORE)
    folder.keep(seed, result)
    return result
