"""A worker in this process and a worker process give the same run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from negmerge.errors import NegMergeError
from negmerge.runs.context import Context
from negmerge.runs.executors import Cores, Executor, LocalProcesses, OnlyWorker
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.store import Run
from negmerge.runs.watch import Report, Unit, Watch
from negmerge.support.progress import Quiet, tell

TINY = [
    "data.limit={train: 200, test: 60}", "train={epochs: 2, batch: 32}", "search.samples=40",
    "pool.grid={epochs: [1, 2]}", "methods=[consensus, finetune]", "search.count=3",
]  # fmt: skip


def test_the_same_hashes(tmp_path: Path):
    recipe = load_recipe("demo", TINY)
    scenario = recipe.make_scenario()
    executors: list[Executor] = [
        OnlyWorker(scenario, 2),
        LocalProcesses(partial(Recipe.make_scenario, recipe), 1, Cores(2, 1)),
    ]
    hashes: list[object] = []
    threads = torch.get_num_threads()
    for number, executor in enumerate(executors):
        store = Run(tmp_path / str(number))
        with store.locked(), executor:
            unlearn(Context(recipe, scenario, store, executor, Quiet(), illustrated=False))
        found = store.read_manifest()
        weights = {k: file.sha256 for k, file in found.files.items() if k.endswith(".safetensors")}
        hashes.append((found.result, weights))
    assert hashes[0] == hashes[1]
    assert torch.get_num_threads() == threads


class Failing:
    def run(self, scenario: object, advance: object) -> None:
        raise RuntimeError("shapes differ\nand more")


def test_an_error_of_torch_is_one_line():
    with pytest.raises(NegMergeError, match=r"^RuntimeError in a step of the run: shapes differ$"):
        list(OnlyWorker(None, 1).run([Failing()], Watch([Unit(name="a", size=1)])))  # pyright: ignore


class Telling:
    label = "a"

    def run(self, scenario: object, advance: Report) -> None:
        tell(advance, loss=0.5)
        raise RuntimeError("shapes differ")


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path):
    watch = Watch([Unit(name="a", size=1)])
    (tmp_path / "file").touch()
    with pytest.raises(NegMergeError, match=r"file: cannot write: File exists$"):
        list(OnlyWorker(None, 1, logs=tmp_path / "file").run([Telling()], watch))  # pyright: ignore
    (tmp_path / "a.log").symlink_to("/dev/full")
    with pytest.raises(NegMergeError, match=r"a\.log: cannot write: No space left on device$"):
        list(OnlyWorker(None, 1, logs=tmp_path).run([Telling()], watch))  # pyright: ignore


def test_threads_are_bounded_whatever_a_run_began_with():
    assert Cores(10**30, 1).threads(1) == 1024
