"""Experiment trackers: losses, sweeps, scores and the page of a run, in the tool of one's choice.

`track` in a recipe names a tracker. ◄ ADD A TRACKER: a class with the methods of `Tracker`, and a
line in `TRACKERS`. No result depends on a tracker: one that fails is a warning, no lost run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import yaml

from negmerge.errors import OptionError, one_line
from negmerge.evaluation.search import read_rows
from negmerge.extras import MissingExtraError
from negmerge.runs.recipe import Recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Progress
from negmerge.support.terminal import print_warning

PROJECT = "negmerge"
Numbers = Mapping[str, float]


class Tracker(Protocol):
    """A run in a tracker; made again with the same arguments, it goes on with the same run.

    Args:
        store: the run.
        name: a name for people.
        id: 16 hexadecimal digits that only this run has.
        config: the recipe.
    """

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None: ...
    def log(self, numbers: Numbers, step: int) -> None: ...
    def page(self, path: Path) -> None: ...
    def close(self) -> None: ...


class Trackio:
    """A project of trackio, by default on this machine; `trackio show` opens it."""

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self.library = trackio
        trackio.init(
            project=PROJECT,
            name=f"{name}-{id[:6]}",
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, numbers: Numbers, step: int) -> None:
        self.library.log(dict(numbers), step=step)

    def page(self, path: Path) -> None:
        self.library.log_artifact(path, name="report", type="report")

    def close(self) -> None:
        self.library.finish()


class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.library = wandb
        settings = wandb.Settings(console="off", silent=True)
        self.run = wandb.init(
            project=PROJECT, name=name, id=id, config=config, resume="allow", settings=settings
        )
        self.run.define_metric("*", step_metric="step")  # trainings do not take turns

    def log(self, numbers: Numbers, step: int) -> None:
        self.run.log({**numbers, "step": step})

    def page(self, path: Path) -> None:
        found = self.library.Artifact(f"report-{self.run.id}", type="report")
        found.add_file(str(path))
        self.run.log_artifact(found)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.client = mlflow.MlflowClient()
        found = self.client.get_experiment_by_name(PROJECT)
        place = self.client.create_experiment(PROJECT) if found is None else found.experiment_id
        same = self.client.search_runs([place], f"tags.negmerge = '{id}'")
        run = same[0] if same else self.client.create_run(place, run_name=name)
        self.id = run.info.run_id
        if not same:
            self.client.set_tag(self.id, "negmerge", id)
            self.client.log_text(self.id, yaml.safe_dump(config, sort_keys=False), "recipe.yaml")

    def log(self, numbers: Numbers, step: int) -> None:
        for key, value in numbers.items():
            self.client.log_metric(self.id, key, value, step=step)

    def page(self, path: Path) -> None:
        self.client.log_artifact(self.id, str(path))

    def close(self) -> None:
        self.client.set_terminated(self.id)


class TensorBoard:
    """Files for TensorBoard in the folder `tensorboard` beside the run."""

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(store.folder.parent / "tensorboard" / name))
        text = yaml.safe_dump(config, sort_keys=False).replace("\n", "\n    ")
        self.writer.add_text("recipe", f"    {text}")

    def log(self, numbers: Numbers, step: int) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def page(self, path: Path) -> None:
        self.writer.add_text("page", str(path.resolve()))  # it takes no files

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Tracker]] = {
    "trackio": Trackio,
    "wandb": WandB,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
}
PACKAGES = {"mlflow": "mlflow-skinny"}
"""The names on PyPI that differ from those of the imported modules."""


def check_tracker(name: str | None) -> None:
    """Raise if the library of a tracker is not installed."""
    if name is not None and find_spec(name) is None:
        raise MissingExtraError(
            f"track: {name} is not installed: pip install {PACKAGES.get(name, name)}", name=name
        )


class Tracking:
    """A tracker that never stops a run: the first failure is a warning, and the last call."""

    def __init__(self, name: str, store: Run, recipe: Recipe) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        try:
            with redirect_stdout(sys.stderr):  # standard output is for results
                self.tracker = TRACKERS[name](store, *_names(store), yaml.safe_load(recipe.dump()))
        except Exception as error:  # libraries raise errors of many kinds
            raise OptionError(f"track: {name} does not start: {one_line(error)}") from None

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            with redirect_stdout(sys.stderr):
                action(self.tracker)
        except Exception as error:  # libraries raise errors of many kinds
            self.tracker = None
            print_warning(
                f"track: {self.name} failed, and the run goes on without it: {one_line(error)}"
            )

    def log(self, numbers: Numbers, step: int = 0) -> None:
        """Log numbers by name."""
        self._try(lambda tracker: tracker.log(numbers, step))

    def result(self, store: Run) -> None:
        """Log the sweeps and the scores of a finished run."""
        result = store.result
        for row in result.methods:
            path = store.sweep(row.method)
            for step, found in enumerate(read_rows(path) if path.is_file() else []):
                self.log({f"sweep/{row.method}/{key}": found[key] for key in found}, step)
        models: dict[str, Any] = {"original": result.original, "retrained": result.retrain}
        models |= {row.method: row for row in result.methods}
        for title, row in models.items():
            if row is not None:
                known = {"avg_gap": row.avg_gap, "scale": getattr(row, "scale", None)}
                numbers = row.measured() | {k: v for k, v in known.items() if v is not None}
                self.log({f"{title}/{key}": value for key, value in numbers.items()})

    def page(self, path: Path) -> None:
        """Log the page of a run."""
        self._try(lambda tracker: tracker.page(path))

    def close(self) -> None:
        """End the run in the tracker."""
        self._try(lambda tracker: tracker.close())


def _names(store: Run) -> tuple[str, str]:
    """Return the name of a run for people, and an id; both are those of its folder."""
    folder = store.folder.resolve()
    above = "" if folder.parent.name == "runs" else f"{folder.parent.name}-"
    name = f"{above}{folder.name}" if folder.name.startswith("seed-") else folder.name
    return name, hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()


class TrackedProgress:
    """Shows progress as another one does, and logs the loss of each epoch of a training."""

    def __init__(self, progress: Progress, tracking: Tracking) -> None:
        self.progress, self.tracking = progress, tracking
        self.stage, self.advance, self.note = progress.stage, progress.advance, progress.note
        self.logged: set[tuple[str, float]] = set()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None: ...

    def unit_changed(self, name: str, state: str, **facts: Any) -> None:
        """A training tells its epoch and its loss."""
        self.progress.unit_changed(name, state, **facts)
        epoch = facts.get("epoch")
        if epoch is not None and "loss" in facts and (name, epoch) not in self.logged:
            self.logged.add((name, epoch))
            self.tracking.log({f"loss/{name}": facts["loss"]}, int(epoch))


@contextmanager
def tracked(recipe: Recipe, store: Run, progress: Progress) -> Iterator[Progress]:
    """Track a run during the block, if its recipe asks for it; yields the progress to report to."""
    if recipe.track is None:
        yield progress
        return
    tracking = Tracking(recipe.track, store, recipe)
    try:
        yield TrackedProgress(progress, tracking)
        tracking.result(store)
    finally:
        tracking.close()


def track_page(recipe: Recipe, store: Run, page: Path) -> None:
    """Add the page to the run in the tracker, if the recipe asks for it."""
    if recipe.track is not None:
        try:
            tracking = Tracking(recipe.track, store, recipe)
        except OptionError as error:
            print_warning(f"{error}")
            return
        tracking.page(page)
        tracking.close()
