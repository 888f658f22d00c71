"""Tasks of the LM Evaluation Harness (`lm_eval`) as metrics of a language model."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from negmerge.errors import OptionError, one_line, quoted
from negmerge.evaluation.metrics.accuracy import Z
from negmerge.evaluation.scores import Scores
from negmerge.scenarios.text.settings import Harness, as_name
from negmerge.support.files import file_digest

ERROR = "_stderr"


def check_tasks(harness: Harness) -> None:
    """Raise if `lm_eval` is missing, or does not know a task or cannot open its data."""
    if harness.folder is not None and not Path(harness.folder).is_dir():
        raise OptionError(f"harness.folder: {quoted(harness.folder)}: no such folder")
    known = _tasks(harness)
    for task in harness.tasks:
        if not known.match_tasks([task]):
            raise OptionError(
                f"harness.tasks: lm_eval has no task {quoted(task)}; wanted names of "
                "`lm_eval ls tasks`, or of files in harness.folder"
            )
        try:
            with _quiet():
                known.load([task])
        except Exception as error:  # tasks are programs of others, and may raise anything
            raise OptionError(
                f"harness.tasks: lm_eval cannot open {quoted(task)}: {one_line(error)}"
            ) from None
    for task in harness.forget:
        if task not in harness.tasks:
            raise OptionError(
                f"harness.forget: {quoted(task)} is not among harness.tasks "
                f"({', '.join(harness.tasks)}); add it there, or remove it here"
            )


def _tasks(harness: Harness) -> Any:
    return _index(harness.folder, *version_of(harness)[1:])


@cache
def _index(folder: str | None, *digests: str) -> Any:
    """Return the tasks of lm_eval and of a folder; that takes many seconds."""
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager(include_path=folder)


def evaluate(model: Any, tokenizer: Any, harness: Harness) -> Scores:
    """Return the results of all tasks, named `TASK_METRIC`, with the intervals of their errors.

    Args:
        model: a causal language model of transformers.
    """
    tasks = _tasks(harness)
    import lm_eval
    from lm_eval.models import huggingface

    harness_api: Any = lm_eval  # the types of its decorated functions are wrong
    models: Any = huggingface
    with _quiet():
        try:
            found: Any = harness_api.simple_evaluate(
                models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8),
                tasks=list(harness.tasks),
                task_manager=tasks,
                limit=harness.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        except Exception as error:  # tasks are programs of others, and may raise anything
            raise OptionError(
                f"harness.tasks {', '.join(harness.tasks)}: lm_eval fails: {one_line(error)}"
            ) from None
    values: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for task, results in sorted(found["results"].items()):
        for label, value in sorted(results.items()):
            metric, _, way = label.partition(",")
            if metric.endswith(ERROR) or not isinstance(value, int | float) or not isfinite(value):
                continue
            name = as_name(f"{task}_{metric}" + ("" if way in ("", "none") else f"_{way}"))
            values[name] = float(value)
            error = results.get(f"{metric}{ERROR},{way}")
            if isinstance(error, int | float) and isfinite(error):
                intervals[name] = (value - Z * error, value + Z * error)
    return Scores(values, intervals)


def version_of(harness: Harness | None) -> list[Any]:
    """Return what the results of tasks depend on beside the model."""
    if harness is None:
        return []
    files = sorted(Path(harness.folder).rglob("*")) if harness.folder else []
    return [harness.model_dump(mode="json"), *(file_digest(f) for f in files if f.is_file())]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the logs and bars of lm_eval off the terminal, where a run shows its own progress."""
    level = logging.root.manager.disable
    with io.StringIO() as nowhere, contextlib.redirect_stderr(nowhere):
        logging.disable(logging.WARNING)
        try:
            with contextlib.redirect_stdout(nowhere):
                yield
        finally:
            logging.disable(level)
