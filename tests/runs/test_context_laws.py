"""Steps are run by one function: once, only what is not done, and what is done stays done."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import Fake, FakeFile, FakeMerge, FakeModel, FakeValue, make_scenario
from negmerge.errors import FileError, OptionError
from negmerge.runs.context import Context
from negmerge.runs.executors import Cores, Executor, InProcess, LocalProcesses
from negmerge.runs.recipe import Recipe
from negmerge.runs.store import Run
from negmerge.support.files import temporary_path
from negmerge.support.progress import Quiet

KINDS = {"value": FakeValue, "file": FakeFile, "model": FakeModel, "merge": FakeMerge}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Told(Quiet):
    """Notes the stages, and how much of the last one is done."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, str]] = []
        self.done = 0

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self.stages.append((name, total, unit))
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count


class Place:
    """The folder of a run, opened anew for each context: nothing is remembered in memory."""

    def __init__(self, folder: Path, reuse_from: tuple[Path, ...] = ()) -> None:
        self.folder, self.reuse_from = folder, reuse_from
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".state").mkdir(exist_ok=True)
        self.log = folder.parent / f"{folder.name}.log"

    def context(self, executor: Executor | None = None, told: Told | None = None) -> Context:
        scenario = make_scenario()
        executor = executor or InProcess(scenario)
        store = Run(self.folder, self.reuse_from)
        return Context(Recipe(), scenario, store, executor, told or Told())

    def step(self, kind: type[Fake], key: str, name: str | None = None, samples: int = 1) -> Fake:
        store = Run(self.folder)
        if kind is FakeValue:
            out = store.states / f"{key}.json"
        elif kind is FakeModel:
            out = store.member(name or key)
        else:
            out = store.sweep(name or key)
        return kind(key, out, self.log, samples)

    def poison(self, *keys: str) -> None:
        self.log.with_suffix(".poison").write_text(" ".join(keys))

    def ran(self) -> list[list[str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split() for line in lines]

    def times(self) -> Counter[str]:
        return Counter(key for key, *_ in self.ran())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "run")


@kinds
def test_a_step_that_is_listed_twice_runs_once(kind, place: Place):
    one, two = place.step(kind, "a"), place.step(kind, "b")
    told, seen = Told(), []
    found = place.context(told=told).run("all", [one, two, one, two, one], on_done=seen.append)
    assert place.times() == {"a": 1, "b": 1}
    assert [found[0]] * 3 == [found[k] for k in (0, 2, 4)]
    assert [found[1]] * 2 == [found[k] for k in (1, 3)]
    assert Counter(step.key for step in seen) == {"a": 1, "b": 1}
    assert told.stages == [("all", 2, "samples")]


@kinds
def test_what_is_done_is_not_done_again_and_nobody_is_told(kind, place: Place):
    steps = [place.step(kind, key) for key in "abc"]
    first = place.context().run("some", steps[:2])
    told, seen = Told(), []
    again = place.context(told=told).run("all", steps, on_done=seen.append)
    assert place.times() == {"a": 1, "b": 1, "c": 1}
    assert again[:2] == first
    assert [step.key for step in seen] == ["c"]
    assert told.stages == [("all", 1, "samples")], "only what is to be done is announced"
    told = Told()
    assert place.context(told=told).run("all", steps) == again
    assert told.stages == []
    assert sum(place.times().values()) == 3


@pytest.mark.parametrize("kind", [FakeFile, FakeMerge, FakeModel])
def test_another_key_or_another_content_of_its_file_is_work_to_do(kind, place: Place):
    before, after = place.step(kind, "a", "same"), place.step(kind, "b", "same")
    assert before.out == after.out
    place.context().run("first", [before])
    place.context().run("second", [after])
    assert place.times() == {"a": 1, "b": 1}
    place.context().run("first", [before])
    assert place.times()["a"] == 2, "its file is the other's"
    before.out.write_text("somebody else's")
    place.context().run("first", [before])
    assert place.times()["a"] == 3
    before.out.unlink()
    place.context().run("first", [before])
    assert place.times()["a"] == 4


def test_a_run_that_was_killed_while_it_recorded_a_hash_records_it(place: Place):
    """The file with the cost is there without the hash, and with the hash under its other name."""
    step = place.step(FakeModel, "a")
    first = place.context().run("first", [step])
    whole = step.cost_file.read_text()
    cost = json.loads(whole)
    assert cost.pop("sha256")
    step.cost_file.write_text(json.dumps(cost))
    temporary_path(step.cost_file).write_text(whole[:20])
    assert place.context().run("again", [step]) == first
    assert place.times() == {"a": 1}
    assert step.cost_file.read_text() == whole
    assert not temporary_path(step.cost_file).exists()


@kinds
def test_a_failing_step_leaves_the_others_and_the_next_run_does_the_rest(kind, place: Place):
    steps = [place.step(kind, key) for key in "abcd"]
    place.poison("c")
    told: list[str] = []
    with pytest.raises(OptionError, match="c: poisoned"):
        place.context().run("all", steps, on_done=lambda step: told.append(step.key))
    assert told == ["a", "b"]
    place.poison()
    found = place.context().run("all", steps, on_done=lambda step: told.append(step.key))
    assert place.times() == dict.fromkeys("abcd", 1)
    assert told == ["a", "b", "c", "d"]
    assert [done.seconds for done in found] == [0.5] * 4


@given(
    listed=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from("abcde"))),
    bad=st.lists(st.sets(st.sampled_from("abcde")), max_size=3),
)
def test_however_often_it_fails_every_step_is_done_once(listed, bad):
    """Any list of steps, any failures on the way: in the end each was done once, in order."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder) / "run")
        named = {(kind, f"{kind}{letter}") for kind, letter in listed}
        steps = [
            place.step(KINDS[kind], f"{kind}{letter}", f"{kind}-{letter}")
            for kind, letter in listed
        ]
        by_kind = {kind: [s for s in steps if type(s) is KINDS[kind]] for kind in KINDS}
        told: Counter[str] = Counter()
        for poisoned in (*bad, set()):
            place.poison(*(key for _, key in named if key[-1] in poisoned))
            context = place.context()
            for kind, own in by_kind.items():
                with suppress(OptionError):
                    found = context.run(kind, own, on_done=lambda step: told.update([step.key]))
                    assert len(found) == len(own)
                    if kind == "value":
                        assert [done.value for done in found] == [step.key for step in own]
        assert place.times() == told == dict.fromkeys((key for _, key in named), 1)


@kinds
def test_a_value_that_cannot_be_read_is_an_error_and_not_work_to_do(kind, place: Place):
    """`.state` is the run's own: what is there and damaged is told, with what to do about it."""
    step = place.step(kind, "a")
    place.context().run("all", [step])
    if kind is FakeValue:
        step.out.write_text('{"id": "a"')
        with pytest.raises(FileError, match=r"a\.json: .*not valid JSON"):
            place.context().run("all", [step])
        step.out.write_text('{"id": "a", "value": 1}')
        with pytest.raises(FileError, match=r"seconds: Field required; remove it and run again"):
            place.context().run("all", [step])
    elif kind in (FakeFile, FakeMerge):
        (place.folder / "journal.json").write_text("{")
        with pytest.raises(FileError, match=r"journal\.json: .*not valid JSON"):
            place.context().run("all", [step])
    else:
        step.cost_file.write_text('{"id": "another", "samples": 1, "seconds": 1.0}')
        place.context().run("all", [step])
        assert place.times() == {"a": 2}


def test_what_another_run_has_trained_is_taken_and_told_of(tmp_path: Path):
    lender = Place(tmp_path / "lender")
    lender.context().run("all", [lender.step(FakeModel, "a"), lender.step(FakeFile, "b")])
    place = Place(tmp_path / "run", (tmp_path / "nothing", lender.folder))
    steps, told = [place.step(FakeModel, key) for key in "ac"], []
    found = place.context().run("all", steps, on_done=lambda step: told.append(step.key))
    assert told == ["a", "c"]
    assert place.times() == {"c": 1}
    assert [done.value.id for done in found] == ["a", "c"]
    place.context().run("all", [place.step(FakeFile, "b")])
    assert place.times() == {"c": 1, "b": 1}, "only models are lent"


# ------------------------------------------------------------------------------------- many workers


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalProcesses]:
    with LocalProcesses(make_scenario, 2, Cores(4, 2)) as executor:
        yield executor


@pytest.mark.parametrize(
    ("steps", "done", "stage_size", "threads"),
    [
        (4, 0, None, 2),  # two workers share four cores
        (4, 3, None, 2),  # a single one is left: it trains as it would have beside the others
        (1, 0, None, 4),
        (1, 0, 4, 2),  # the others of its stage were done, and are gone
    ],
)
def test_the_threads_of_a_step_are_those_of_the_whole_stage(
    steps, done, stage_size, threads, place: Place, workers: LocalProcesses
):
    made = [place.step(FakeModel, f"s{k}") for k in range(steps)]
    place.context().run("before", made[:done])
    told = Told()
    found = place.context(workers, told).run("all", made, stage_size=stage_size)
    assert [one.value.id for one in found] == [step.key for step in made]
    ran = place.ran()[done:]
    assert {int(count) for _, _, count in ran} == {threads}
    assert os.getpid() not in {int(pid) for _, pid, _ in ran}
    assert told.stages == [("all", steps - done, "samples")]
    assert told.done == steps - done


def test_a_step_with_threads_of_its_own_runs_here(place: Place, workers: LocalProcesses):
    place.context(workers).run("merging", [place.step(FakeMerge, key) for key in "ab"])
    assert {int(pid) for _, pid, _ in place.ran()} == {os.getpid()}


def test_a_worker_that_fails_leaves_what_the_others_did(place: Place):
    steps = [place.step(FakeValue, f"s{k}") for k in range(3)]
    place.poison("s2")
    with (
        pytest.raises(OptionError, match="s2: poisoned"),
        LocalProcesses(make_scenario, 1, Cores(1, 1)) as executor,
    ):
        place.context(executor).run("all", steps)
    place.poison()
    assert [done.value for done in place.context().run("all", steps)] == ["s0", "s1", "s2"]
    assert place.times() == {"s0": 1, "s1": 1, "s2": 1}
