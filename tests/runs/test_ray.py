"""Steps on a Ray cluster of several nodes: the results of a local run, whatever is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import FakeModel, FakeValue, Unreadable, Waiting, make_scenario
from negmerge.errors import NegMergeError
from negmerge.plugins import LoadedPlugins
from negmerge.runs.context import Context
from negmerge.runs.executors import ray_bridge
from negmerge.runs.executors.ray import Job, RayCluster
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.recipe import Recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Quiet
from nodes import Nodes, running

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running() as started:
        yield started


class Told(Quiet):
    """Keeps notes, and the states of units."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.states: list[tuple[str, str, str]] = []

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self.total, self.done = total, 0

    def advance(self, count: int) -> None:
        self.done += count

    def note(self, text: str, **facts: object) -> None:
        self.notes.append(text)

    def unit_changed(self, name: str, state: str, **facts: object) -> None:
        self.states.append((name, state, str(facts["node"])))


class Place:
    """The folder of a run, and steps in it."""

    def __init__(self, folder: Path) -> None:
        self.store = Run(folder)
        self.store.states.mkdir(parents=True)
        self.log = folder.parent / "ran.log"
        self.told = Told()

    def executor(self, address: str, **settings: object) -> RayCluster:
        chosen = ExecutorSettings.model_validate({"kind": "ray", "address": address} | settings)
        places = (self.store.folder, self.store.logs)
        job = Job(LoadedPlugins(), make_scenario, chosen, None, None, *places)
        return RayCluster(job, 1, self.told.note)

    def context(self, executor: RayCluster) -> Context:
        return Context(Recipe(), make_scenario(), self.store, executor, self.told)

    def models(self, count: int) -> list[FakeModel]:
        return [Waiting(f"s{k}", self.store.member(f"s{k}"), self.log, 5) for k in range(count)]

    def poison(self, *keys: str) -> None:
        self.log.with_suffix(".poison").write_text(" ".join(keys))

    def go_on(self) -> None:
        self.log.with_suffix(".go").touch()

    def ran(self) -> list[list[str]]:
        return [x.split() for x in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait_for(self, what: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.ran()
            time.sleep(0.05)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "run")


def meanwhile(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_every_step_runs_once_and_both_nodes_work(place: Place, nodes: Nodes):
    steps = place.models(6)

    def go_on() -> None:
        try:
            place.wait_for(lambda: len(place.ran()) == 2, 300)  # one on each node
        finally:
            place.go_on()  # the test fails then, and does not wait for ever

    with place.executor(nodes.address) as executor:
        thread = meanwhile(go_on)
        found = place.context(executor).run("all", steps)
        thread.join()
        assert [done.value.id for done in found] == [step.key for step in steps]
        values = [FakeValue(f"v{k}", place.store.states / f"v{k}.json", place.log) for k in "xy"]
        assert [done.value for done in place.context(executor).run("v", values)] == ["vx", "vy"]
    ran = place.ran()
    assert Counter(key for key, *_ in ran) == {f"s{k}": 1 for k in range(6)} | {"vx": 1, "vy": 1}
    assert {int(threads) for _, _, threads in ran} == {1}
    assert len({pid for _, pid, _ in ran}) == 2, "a worker is kept for all of its steps"
    assert {node for _, state, node in place.told.states if state == "done"} == {"a", "b"}
    assert place.told.done == place.told.total == 2
    log = (place.store.logs / "model-s0.log").read_text()
    assert "begins on" in log
    assert "loss 0.5" in log
    assert "done after" in log


@pytest.mark.slow
def test_a_node_that_vanishes_and_a_worker_that_is_killed(place: Place, nodes: Nodes):
    steps = place.models(4)

    def trouble() -> None:
        place.wait_for(lambda: len(place.ran()) == 2)  # one on each node, waiting
        os.kill(int(place.ran()[0][1]), signal.SIGKILL)
        place.wait_for(lambda: len(place.ran()) == 3)
        nodes.tell("remove b")
        place.go_on()

    with place.executor(nodes.address) as executor:
        thread = meanwhile(trouble)
        found = place.context(executor).run("all", steps)
        thread.join()
    assert [done.value.id for done in found] == [step.key for step in steps]
    assert any("is lost; the step starts again elsewhere" in note for note in place.told.notes)
    assert place.told.done == place.told.total
    finished = Counter(name for name, state, _ in place.told.states if state == "done")
    assert set(finished.values()) == {1}
    nodes.tell("add b 1")


@pytest.mark.slow
def test_a_step_that_always_fails_names_the_node_and_the_log(place: Place, nodes: Nodes):
    place.go_on()
    place.poison("s1")
    with (
        place.executor(nodes.address, retries=2) as executor,
        pytest.raises(NegMergeError, match=r"model s1: failed on node [ab]: s1: poisoned; its log"),
    ):
        place.context(executor).run("all", place.models(2))
    place.poison("!s1")  # an error of a disk: another attempt may succeed
    with (
        place.executor(nodes.address, retries=2) as executor,
        pytest.raises(NegMergeError, match=r"model s1: failed on node [ab] \(3 attempts\): .*full"),
    ):
        place.context(executor).run("all", place.models(2))
    text = (place.store.logs / "model-s1.log").read_text()
    assert text.count("failed after") == 4
    assert "Traceback" in text
    place.poison()
    with place.executor(nodes.address) as executor:
        place.context(executor).run("all", place.models(2))
    assert Counter(key for key, *_ in place.ran()) == {"s0": 1, "s1": 1}


@pytest.mark.slow
def test_a_node_whose_disk_is_full_gives_its_steps_to_the_others(place: Place, nodes: Nodes):
    nodes.tell("remove b")
    nodes.tell("add b 1 NEGMERGE_SCRATCH=/dev/full")
    place.poison("scratch")
    steps = place.models(4)

    def go_on() -> None:  # when the worker on b has started, too
        place.wait_for(lambda: any(state == "failed" for _, state, _ in place.told.states))
        place.go_on()

    with place.executor(nodes.address) as executor:
        thread = meanwhile(go_on)
        found = place.context(executor).run("all", steps)
        thread.join()
    assert [done.value.id for done in found] == [step.key for step in steps]
    assert {node for _, state, node in place.told.states if state == "done"} == {"a"}
    assert any(state == "failed" and node == "b" for _, state, node in place.told.states)
    nodes.tell("remove b")
    nodes.tell("add b 1")


@pytest.mark.slow
def test_the_head_is_restarted(place: Place, nodes: Nodes):
    steps = place.models(3)

    def trouble() -> None:
        place.wait_for(lambda: len(place.ran()) == 2)
        nodes.tell("restart")
        place.go_on()

    with place.executor(nodes.address) as executor:
        thread = meanwhile(trouble)
        found = place.context(executor).run("all", steps)
        thread.join()
    assert [done.value.id for done in found] == [step.key for step in steps]
    assert any("the connection to the cluster is lost" in note for note in place.told.notes)


def test_a_cluster_that_is_not_there_is_one_line(place: Place):
    with pytest.raises(NegMergeError, match=r"^executor\.address 127\.0\.0\.1:9: [^\n]+$"):
        place.executor("127.0.0.1:9")


@pytest.mark.slow
def test_a_server_that_is_not_ray_is_one_line(place: Place, monkeypatch):
    monkeypatch.setattr("negmerge.runs.executors.ray.ANSWER", 15.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NegMergeError, match=f"^executor.address {address}: no Ray cluster"):
            place.executor(address)


@pytest.mark.slow
def test_another_token_is_refused(place: Place, nodes: Nodes, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 40)
    with pytest.raises(NegMergeError, match=r"^executor\.address .*token"):
        place.executor(nodes.address)


@pytest.mark.slow
def test_a_cluster_that_is_lost_again_and_again_stops_the_run(place: Place, nodes: Nodes):
    step = Unreadable("s0", place.store.member("s0"), place.log)  # ends the process that gets it
    with (
        place.executor(nodes.address) as executor,
        pytest.raises(NegMergeError, match=r"lost 3 times before a step was done; .*ray\.log"),
    ):
        place.context(executor).run("all", [step])


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line(place: Place, nodes: Nodes):
    place.store.states.rmdir()
    place.store.states.write_text("")
    with (
        place.executor(nodes.address) as executor,
        pytest.raises(NegMergeError, match=r"\.state: cannot write: File exists$"),
    ):
        place.context(executor).run("all", place.models(1))


def test_a_step_does_not_wait_for_a_worker_that_never_starts(place: Place):
    """Others may use the cluster: a worker that was asked for waits as long as they do."""
    chosen = ExecutorSettings(kind="ray", patience=0.1)
    cluster = ray_bridge.Cluster(Job(LoadedPlugins(), make_scenario, chosen), None)
    failed = ray_bridge.Waiting(place.models(1)[0], failures=1, avoid={"1"})
    cluster.steps, cluster.queue = {0: failed}, deque([0])
    bad, starting = (ray_bridge.Actor(None, (), None) for _ in range(2))
    bad.node, bad.node_id = "a", "1"
    cluster.actors = [bad, starting]
    assert cluster._next_for(bad) is None
    time.sleep(0.15)
    assert cluster._next_for(bad) == 0
