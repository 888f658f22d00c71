"""What a table needs: by the counted work of its recipes, and by the speed of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from negmerge.errors import OptionError
from negmerge.paper.division import Part
from negmerge.paper.experiments import TableScale
from negmerge.paper.trials import Trial, finished_run, run_count
from negmerge.runs.calibration import measured_hours
from negmerge.runs.estimate import Estimate, total_of
from negmerge.support.progress import Progress


def needs(table: str, scale: TableScale, trials: Sequence[Trial], part: Part | None = None) -> str:
    """A text about what a table needs: runs, data, disk, memory, time, files of the user.

    `trials` are all runs of the table; the other arguments are those of `reproduce`.
    """
    mine = [trial for trial in trials if trial.mine]
    try:
        estimate = str(total(trials))
    except OptionError as error:
        estimate = f"not estimated, {error}"
    data = sorted({name for one in mine for name in one.recipe.settings.data_names()})
    share = "" if part is None else f"part {part[0]} of {part[1]}, {len(mine)} of "
    text = f"{table} at {scale} scale: {share}{run_count(len(trials))} on {', '.join(data)}"
    text += f"; {estimate}"
    if not torch.cuda.is_available():
        text += "; this machine has no GPU"
    missing = {field for one in mine for field in one.planned.missing(one.recipe)}
    return text + "".join(f"; and --set {field}=FILE" for field in sorted(missing))


def total(trials: Sequence[Trial]) -> Estimate:
    """The estimate for the runs of a table, or of a part of it."""
    return total_of([trial.recipe for trial in trials if trial.mine])


def measured_needs(trials: Sequence[Trial], progress: Progress) -> str:
    """A text about the hours that the runs of a table take on this machine."""
    try:
        wanted = total(trials)
    except OptionError as error:
        return f"not measured on this machine, {error}"
    return measured_hours(wanted, progress)


def finished_runs(trials: Sequence[Trial], folder: Path) -> str:
    """A text about how many runs of a table are finished in a folder."""
    mine = [trial for trial in trials if trial.mine]
    done = sum(finished_run(trial, folder) is not None for trial in mine)
    return f"{folder}: {done} of {run_count(len(mine))} finished"
