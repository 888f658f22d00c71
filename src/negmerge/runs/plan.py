"""The plan of a run before the work: its steps, disk, memory, time, and what is already done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from negmerge.errors import FileError, OptionError
from negmerge.evidence.registry import ShadowTest, tests_of
from negmerge.evidence.shadow_margins import recorded_id
from negmerge.rivals import rivals
from negmerge.runs.calibration import Speed, machine, measure_speeds
from negmerge.runs.checks import check_methods
from negmerge.runs.context import Context
from negmerge.runs.estimate import Estimate, estimate
from negmerge.runs.evidence import plan_second
from negmerge.runs.executors import InProcess
from negmerge.runs.executors.choose import largest_stage
from negmerge.runs.executors.local import count_processes
from negmerge.runs.pool import plan_members, plan_originals
from negmerge.runs.recipe import Recipe
from negmerge.runs.reshape import plan_retain
from negmerge.runs.rival_trainings import plan_rivals
from negmerge.runs.shadows import plan_shadows
from negmerge.runs.steps import ModelStep
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import Scenario
from negmerge.scenarios.data import require_sets
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress, format_duration


@dataclass(frozen=True)
class Stage:
    """A stage of a run: how many steps it has, and how many of them are done."""

    name: str
    steps: int
    done: int = 0


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Args:
        stages: the stages with their steps.
        needs: disk, memory and operations by an estimate; None if the sizes of the data are not
            known before they are loaded.
        speeds: the measured speed of each network on this machine.
        read, written: bytes of models and patches.
        seconds: the time on this machine, without what is done.
        workers: the number of steps at a time.
        memory: bytes of memory of one training, by the estimate.
        free: bytes that are free on the disk of the run.
    """

    stages: tuple[Stage, ...]
    needs: Estimate | None
    speeds: dict[str, Speed]
    read: int
    written: int
    seconds: float | None
    workers: int
    memory: int | None
    free: int

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return sum(stage.steps for stage in self.stages)

    @property
    def done(self) -> int:
        """The number of steps that are done."""
        return sum(stage.done for stage in self.stages)

    def tree(self) -> dict[str, Any]:
        """Return the plan as a tree of JSON values."""
        own = ("read", "written", "seconds", "workers", "memory", "free", "steps", "done")
        stages = [asdict(stage) for stage in self.stages]
        speeds = {name: asdict(speed) for name, speed in self.speeds.items()}
        return {name: getattr(self, name) for name in own} | {"stages": stages, "speeds": speeds}

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        yield f"{self.steps} steps, {self.done} of them done; {self.workers} at a time:"
        for stage in self.stages:
            done = f", {stage.done} done" if stage.done else ""
            yield f"  {stage.name}: {stage.steps}{done}"
        if self.needs is None:
            yield "disk, memory and time: not known before the data are loaded"
            return
        yield (
            f"models and patches: about {decimal(self.read)} read, {decimal(self.written)} "
            f"written; {decimal(self.free)} free"
        )
        where = "GPU memory" if torch.cuda.is_available() else "memory"
        yield f"one training: about {decimal(self.memory or 0)} of {where}"
        if self.seconds is not None:
            yield f"time: about {format_duration(self.seconds)} on this machine ({machine()})"
        yield "reading and augmenting data is not included"


def plan_run(recipe: Recipe, scenario: Scenario, store: Run, progress: Progress) -> Plan:
    """Plan a run: count its steps and find those that are done, and measure this machine.

    Raises a FileError if the disk cannot hold what the run writes, and an OptionError if a training
    does not fit into the memory of the GPU.

    Args:
        recipe, scenario: of the run.
        store: its directory, which need not exist.
        progress: shows the measuring.
    """
    check_methods(recipe)
    context = Context(recipe, scenario, store, InProcess(scenario), progress)
    stages = tuple(stage for stage in plan_stages(context) if stage.steps)
    gpus = torch.cuda.device_count()
    workers = count_processes(recipe.workers, worker_count(None), largest_stage(recipe), gpus)
    place = next(path for path in (store.folder, *store.folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    try:
        needs = estimate(recipe)
    except OptionError:  # the sizes of the data are not known
        return Plan(stages, None, {}, 0, 0, None, workers, None, free)
    stored = sum(path.stat().st_size for path in store.folder.rglob("*.safetensors"))
    written = max(int(needs.disk) - stored, 0)
    if written > free:
        raise FileError(
            f"{store.folder}: {decimal(free)} free, about {decimal(written)} needed; free some, or "
            "set pool.keep to false"
        )
    memory = int(needs.memory)
    if gpus and memory > torch.cuda.get_device_properties(0).total_memory:
        raise OptionError(
            f"a training needs about {decimal(memory)} of GPU memory, more than this GPU has; use "
            "a smaller batch, accumulate or checkpointing"
        )
    speeds, _ = measure_speeds(needs, progress)
    seconds = sum(speed.hours(needs.networks[name]) for name, speed in speeds.items()) * 3600
    trained = [stage for stage in stages if stage.name.startswith("trainings")]
    left = 1 - sum(s.done for s in trained) / max(sum(s.steps for s in trained), 1)
    weights = needs.weights
    merged = sum(method.name not in rivals for method in recipe.methods)
    read = int(weights * ((len(recipe.pool.members()) + 1) * merged + 2 * len(recipe.methods)))
    return Plan(stages, needs, speeds, read, written, seconds * left, workers, memory, free)


def plan_stages(context: Context) -> Iterator[Stage]:
    """Yield the stages of a run, with the steps of them that are done."""
    recipe, scenario, store = context.recipe, context.scenario, context.store
    original, reference = plan_originals(context)
    originals = [step for step in (original, reference) if step is not None]
    yield Stage("trainings of the original and the retrained model", *_count(originals))
    merged = [method for method in recipe.methods if method.name not in rivals]
    begun = _is_done(original)
    start = Start(original.out, scenario.start_key(original.out) if begun else "")
    if merged:
        members = plan_members(context, start)
        yield Stage("trainings of the pool", len(members), _count(members)[1] if begun else 0)
        if (retain := plan_retain(context, start)) is not None:
            yield Stage("trainings on the retain set", 1, _count([retain])[1] if begun else 0)
        yield Stage("merges", len(merged), _recorded(store, "patches"))
        yield Stage("searches for λ", len(merged), _recorded(store, "sweeps"))
    plans = plan_rivals(scenario, recipe, store, start)
    tried = [step for steps in plans.values() for step in steps]
    yield Stage("trainings of rivals", len(tried), _count(tried)[1] if begun else 0)
    yield Stage("measurements of models", len(recipe.methods) + len(originals))
    tests = [test for test in tests_of(recipe.evidence) if not isinstance(test, ShadowTest)]
    second = plan_second(context, reference)
    if second is not None and any("second" in test.needs for test in tests):
        yield Stage("trainings of a second retrained model", *_count([second]))
    tested = sum(method.add is None for method in recipe.methods) + len(originals)
    yield Stage("tests of forgetting", len(tests) * tested)
    if recipe.evidence == "full":
        shadows = plan_shadows(recipe, require_sets(scenario, "shadows"), store)
        yield Stage(
            "shadows, each with an original, a pool and a retrained model",
            len(shadows),
            sum(recorded_id(step.out) == step.key for step in shadows),
        )


def _is_done(step: ModelStep) -> bool:
    return all(m.out.is_file() and m.find_cost() is not None for m in step.models)


def _count(steps: Sequence[ModelStep]) -> tuple[int, int]:
    return len(steps), sum(map(_is_done, steps))


def _recorded(store: Run, folder: str) -> int:
    """Return the number of merges or sweeps in the journal."""
    names = [Path(name) for name in store.journal]
    return sum(p.parent.name == folder and not p.name.startswith("member-") for p in names)
