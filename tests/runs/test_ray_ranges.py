"""Merges on a Ray cluster: the bytes of a merge by one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import negmerge as nm
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.parts_folder import folder_of
from negmerge.runs.ranges import cluster_for, merge_and_apply_on, merge_on
from negmerge.support.progress import Quiet
from nodes import Nodes
from nodes import running as running_nodes
from running import negmerge, start

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
RULE = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from negmerge.merging.rules import Consensus, rule

@rule
@dataclass(frozen=True)
class Slow(Consensus):
    'Waits on the nodes that have the variable.'

    def divisor(self, n):
        if place := os.environ.get("MERGE_WAITS"):
            Path(place, "waits").touch()
            while not Path(place, "go").exists():
                time.sleep(0.02)
        return super().divisor(n)
"""


def make_models(folder: Path, tensors: str = "abcdef") -> list[Path]:
    """A base and three models, with a range for each tensor."""
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(2000, generator=draw) for name in tensors}
    paths = [folder / f"m{k}.safetensors" for k in range(4)]
    save_file(base, paths[0])
    for path in paths[1:]:
        change = {n: v + 0.1 * torch.randn(v.shape, generator=draw) for n, v in base.items()}
        save_file(change, path)
    return paths


def test_a_cluster_gives_the_same_bytes(tmp_path):
    paths = make_models(tmp_path)
    local, out = tmp_path / "local.safetensors", tmp_path / "out.safetensors"
    cluster, ranges = cluster_for(out, ExecutorSettings(kind="ray"), 2, Quiet())
    with cluster:
        nm.merge(paths[0], paths[1:], "ties", out=local)
        merge_on(cluster, paths[0], paths[1:], "ties", out=out, ranges=ranges)
        assert out.read_bytes() == local.read_bytes()
        nm.merge_and_apply(paths[0], paths[1:], -0.5, local)
        merge_and_apply_on(cluster, paths[0], paths[1:], -0.5, out, ranges=ranges)
        assert out.read_bytes() == local.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted([*paths, local, out])


# ------------------------------------------------------------------------------------ lost machines


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running_nodes() as started:
        yield started


class Merge:
    """A merge by the command line on two nodes, of which b waits in its first range."""

    def __init__(self, folder: Path, nodes: Nodes, *more: str) -> None:
        self.folder, self.nodes = folder, nodes
        self.paths, self.out = make_models(folder, "abcdefgh"), folder / "out.safetensors"
        (folder / "slow.py").write_text(RULE)
        pool = [path.name for path in self.paths]
        self.words = ("merge", *pool, "--plugin", "slow.py", "--rule", "slow", *more)
        address = f"executor.address={nodes.address}"
        ray = ("--set", "executor.kind=ray", "--set", address, "--workers", "2", "--json")
        self.command = (*self.words, "-o", self.out.name, *ray)
        nodes.tell("remove b")
        nodes.tell(f"add b 1 MERGE_WAITS={folder}")
        self.process = start(folder, *self.command, plain=True)
        self.wait_for(lambda: (folder / "waits").exists() and len(self.finished()) >= 2)

    def wait_for(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + 120
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)

    def finished(self) -> list[Path]:
        return sorted(folder_of(self.out).glob("*.part"))

    def check(self, *others: str) -> None:
        """Compare with a merge by one process, and look for files that are left."""
        negmerge(self.folder, *self.words, "-o", "local.safetensors", plain=True)
        assert self.out.read_bytes() == (self.folder / "local.safetensors").read_bytes()
        known = {"slow.py", "waits", "go", "local.safetensors", self.out.name, *others}
        known |= {path.name for path in self.paths}
        assert {path.name for path in self.folder.iterdir()} - {"cache"} == known


def states(err: str) -> Counter[tuple[str, str]]:
    """How often each range had each state."""
    events = [json.loads(line) for line in err.splitlines()]
    units = [event for event in events if event["event"] == "unit"]
    return Counter((unit["name"], unit["state"]) for unit in units)


@pytest.mark.parametrize("more", [(), ("--negate", "0.5")])
def test_a_node_that_vanishes_in_a_merge(tmp_path: Path, nodes: Nodes, more):
    merge = Merge(tmp_path, nodes, *more)
    nodes.tell("remove b")
    (tmp_path / "go").touch()
    _, err = merge.process.communicate(timeout=120)
    nodes.tell("add b 1")
    assert merge.process.returncode == 0, err
    found = states(err)
    ranges = {name for name, _ in found}
    lost = {name for name, state in found if state == "failed"}
    assert len(ranges) == 8
    assert len(lost) == 1
    assert "is lost; the step starts again elsewhere" in err
    for name in ranges:
        assert found[name, "running"] == 1 + (name in lost), "a finished range ran again"
        assert found[name, "done"] == 1
    merge.check()


@pytest.mark.parametrize("more", [(), ("--negate", "0.5")])
def test_a_driver_that_is_killed_in_a_merge(tmp_path: Path, nodes: Nodes, more):
    merge = Merge(tmp_path, nodes, *more)
    os.kill(merge.process.pid, signal.SIGKILL)
    merge.process.communicate(timeout=60)
    assert not merge.out.exists()
    finished = merge.finished()
    (tmp_path / "go").touch()
    _, err = negmerge(tmp_path, *merge.command, plain=True)
    nodes.tell("remove b")
    nodes.tell("add b 1")
    again = {name for name, _ in states(err)}
    assert 2 <= len(finished) <= 8 - len(again)
    merge.check()
