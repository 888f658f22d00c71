"""The seconds of the merges of a run, as the paper's Table 1 has them: the mean of three runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.merges import merge_pool
from negmerge.runs.pool import fine_tune_pool, plan_originals, train_originals
from negmerge.runs.recipe import Recipe
from negmerge.runs.records import Number, Record, read_record
from negmerge.runs.selectors import select_before_search
from negmerge.runs.store import Run, write_json
from negmerge.support.files import scratch_folder
from negmerge.support.progress import Progress

REPEATS = 3


class Timings(Record):
    """The file of the seconds: by title of a method, one value for each repetition."""

    seconds: dict[str, list[Number]]


def merge_seconds(
    recipe: Recipe, run: Run, file: Path, progress: Progress
) -> Mapping[str, list[float]]:
    """The seconds of merging the pool of a finished run by each rule, and of `greedy`.

    All rules merge once before the clock starts, so that no compilation is counted and the files
    were read once. The seconds are kept in a file and not measured again. Methods with a label, a
    subset or an added vector are not timed.
    """
    if file.exists():
        return read_record(file, Timings, "remove it: the merges are timed again").seconds
    plain = tuple(m for m in recipe.methods if m.title == m.name and m.name != "single_best")
    recipe = recipe.model_copy(update={"methods": plain})
    scenario = recipe.make_scenario(progress)
    found: dict[str, list[float]] = {}
    for repeat in range(REPEATS + 1):
        with scratch_folder(run.folder.parent) as folder:
            store = Run(folder / "run", [run.folder])  # takes over the members
            executor = InProcess(scenario)
            context = Context(recipe, scenario, store, executor, progress, illustrated=False)
            with store.locked():
                start = train_originals(context, *plan_originals(context))
                pool = fine_tune_pool(context, start)
                merged = merge_pool(context, pool)
                if repeat == 0:  # `greedy` merges by `uniform`
                    continue
                merged |= select_before_search(context, pool)
        for title, method in merged.items():
            found.setdefault(title, []).append(method.merge_seconds)
    write_json(file, Timings(seconds=found).model_dump())
    return found
