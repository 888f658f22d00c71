"""The executor that a recipe asks for."""

from __future__ import annotations

from functools import partial

import torch

from negmerge.plugins import LoadedPlugins
from negmerge.rivals import rivals
from negmerge.runs.checks import check_trainings, memory_limit
from negmerge.runs.cores import Cores
from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.in_process import OnlyWorker
from negmerge.runs.executors.local import LocalProcesses, count_processes
from negmerge.runs.recipe import Recipe
from negmerge.runs.store import Run
from negmerge.scenarios.base import Scenario
from negmerge.support.parallel import worker_count
from negmerge.support.progress import Progress


def make_executor(recipe: Recipe, scenario: Scenario, store: Run, progress: Progress) -> Executor:
    """Return the executor of a run, and check that its trainings fit in memory."""
    make_scenario = partial(Recipe.make_scenario, recipe)
    if recipe.executor.kind == "ray":
        from negmerge.runs.executors.ray import Job, RayCluster

        places = (store.folder.resolve(), store.logs.resolve())
        job = Job(
            LoadedPlugins(), make_scenario, recipe.executor, recipe.workers, recipe.feed_workers,
            *places,
        )  # fmt: skip
        cluster = RayCluster(job, recipe.threads, progress.note)
        cluster.cores = store.begin_with(cluster.cores)
        return cluster
    cores, gpus = worker_count(None), torch.cuda.device_count()
    workers = count_processes(recipe.workers, cores, largest_stage(recipe), gpus)
    check_trainings(recipe, scenario, memory_limit(workers, gpus))
    shared = store.begin_with(Cores(cores, workers, recipe.threads))
    if workers == 1 and not gpus:  # the memory of a GPU is free when its process ends
        return OnlyWorker(scenario, shared.threads(1), recipe.feed_workers, store.logs)
    return LocalProcesses(make_scenario, workers, shared, recipe.feed_workers, store.logs)


def largest_stage(recipe: Recipe) -> int:
    """Return the number of steps of the largest stage: the pool, all rivals, or all shadows."""
    tries = [recipe.search.tries if m.tune else 1 for m in recipe.methods if m.name in rivals]
    merges = len(tries) < len(recipe.methods)
    shadows = recipe.shadows.count if recipe.evidence == "full" else 0
    return max(len(recipe.pool.trainings()) if merges else 1, sum(tries), shadows)
