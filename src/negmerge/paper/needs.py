"""What a table needs: by the counted work of its recipes, and by the speed of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from negmerge.errors import OptionError
from negmerge.paper.experiments import TableScale, experiment
from negmerge.paper.trials import run_count, trials_of
from negmerge.support.progress import Progress, Quiet

if TYPE_CHECKING:
    from negmerge.paper.estimate import Estimate
    from negmerge.paper.shares import Part


def needs(
    table: str,
    scale: TableScale,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    part: Part | None = None,
) -> str:
    """A text about what a table needs: runs, data, disk, memory, time, files of the user.

    The arguments are those of `reproduce`.
    """
    import torch

    wanted, trials = experiment(table), trials_of(table, scale, changes, seeds, part)
    mine = [trial for trial in trials if trial.mine]
    missing = {field for one in mine for field in one.planned.missing(one.recipe)}
    try:
        estimate = str(total(table, scale, changes, seeds, part))
    except OptionError as error:
        estimate = f"not estimated, {error}"
    data = wanted.data(scale, changes)
    if part is not None:
        data = sorted({name for one in mine for name in one.recipe.settings.data_names()})
    share = "" if part is None else f"part {part[0]} of {part[1]}, {len(mine)} of "
    text = f"{table} at {scale} scale: {share}{run_count(len(trials))} on {', '.join(data)}"
    text += f"; {estimate}"
    if not torch.cuda.is_available():
        text += "; this machine has no GPU"
    return text + "".join(f"; and --set {field}=FILE" for field in sorted(missing))


def total(
    table: str,
    scale: TableScale,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    part: Part | None = None,
) -> Estimate:
    """The estimate for all runs of a table, or of a part of it; arguments as in `reproduce`."""
    from negmerge.paper.shares import total_of

    trials = trials_of(table, scale, changes, seeds, part)
    return total_of([trial.recipe for trial in trials if trial.mine])


def measured_needs(
    table: str,
    scale: TableScale,
    changes: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    part: Part | None = None,
    progress: Progress | None = None,
) -> str:
    """A text about the hours that a table takes on this machine; arguments as in `reproduce`."""
    from negmerge.paper.calibration import measured_hours

    try:
        wanted = total(table, scale, changes, seeds, part)
    except OptionError as error:
        return f"not measured on this machine, {error}"
    return measured_hours(wanted, progress or Quiet())
