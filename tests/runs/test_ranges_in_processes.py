"""Ranges that several processes merge: the same bytes, bounded memory, workers that are killed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import negmerge as nm
from negmerge.errors import NegMergeError
from negmerge.runs.executors import Cores, LocalProcesses
from negmerge.runs.parts_folder import folder_of
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from negmerge.support.progress import Quiet
from small_pools import VARIANTS, Counting, left, make_pool, no_scenario, small_segments  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes():
    with LocalProcesses(no_scenario, 2, Cores(2, 2)) as executor:
        yield executor


def test_processes_give_the_same_bytes(processes, tmp_path):
    base, models = make_pool(tmp_path)
    for rule, options in VARIANTS[::2]:  # every rule, or its first pass
        local = nm.merge(base, models, rule, options, out=tmp_path / "one.safetensors")
        tau = merge_on(
            processes, base, models, rule, options, out=tmp_path / "two.safetensors", ranges=3
        )
        assert tau.path.read_bytes() == local.path.read_bytes(), rule
        nm.merge_and_apply(base, models, 2.0, tmp_path / "1.safetensors", rule, options)
        merge_and_apply_on(
            processes, base, models, 2.0, tmp_path / "2.safetensors", rule, options, ranges=3
        )
        same = [(tmp_path / f"{k}.safetensors").read_bytes() for k in (1, 2)]
        assert same[0] == same[1], rule


def test_a_folder_of_shards_with_its_side_files(processes, tmp_path):
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        folder = tmp_path / f"f{k}"
        folder.mkdir()
        weights = {name: torch.randn(50, generator=draw).bfloat16() for name in "abc"}
        shards = {"x.safetensors": ["a", "b"], "y.safetensors": ["c"]}
        for shard, names in shards.items():
            save_file({name: weights[name] for name in names}, folder / shard)
        index = {"weight_map": {n: shard for shard, names in shards.items() for n in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"k": k}))
    base, models = tmp_path / "f0", [tmp_path / "f1", tmp_path / "f2"]
    for more in ({}, {"shard_size": 120, "dtype": "float32"}):
        contents = []
        for number in (1, 2):
            out = tmp_path / str(number) / "model"
            out.parent.mkdir(exist_ok=True)
            if number == 1:
                nm.merge_and_apply(base, models, -1.0, out, **more)
            else:
                merge_and_apply_on(processes, base, models, -1.0, out, ranges=3, **more)
            contents.append({path.name: path.read_bytes() for path in out.iterdir()})
            assert left(out) == []
            for path in out.iterdir():
                path.unlink()
        assert contents[0] == contents[1]
        assert {"README.md", "config.json", "model.safetensors.index.json"} <= contents[0].keys()


class Sums(Quiet):
    def __init__(self):
        self.stages: list[list] = []

    def stage(self, name, total, unit="bytes"):
        self.stages.append([name, total, 0])

    def advance(self, count):
        self.stages[-1][2] += count


def test_the_progress_is_in_bytes(processes, tmp_path):
    base, models = make_pool(tmp_path)
    local, parts = Sums(), Sums()
    nm.merge(base, models, "ties", out=tmp_path / "one", progress=local)
    merge_on(processes, base, models, "ties", out=tmp_path / "two", ranges=3, progress=parts)
    assert parts.stages == local.stages
    assert [stage[0] for stage in parts.stages] == ["first pass", "merging"]


MEASURE = """
import sys, threading, time
from pathlib import Path
from negmerge.merging.memory import anonymous_memory
from negmerge.runs.executors import InProcess
from negmerge.runs.ranges import merge_and_apply_on, merge_on

base, model, out, limit = *map(Path, sys.argv[1:4]), int(sys.argv[4])
peak = anonymous_memory()

def watch():
    global peak
    while True:
        peak = max(peak, anonymous_memory())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
given = {"threads": 32, "ranges": 2, "max_memory": limit or None}
if sys.argv[5] == "model":
    merge_and_apply_on(InProcess(None), base, [model], -1.0, out, "uniform", **given)
else:
    merge_on(InProcess(None), base, [model], "uniform", out=out, **given)
print(peak)
"""


@pytest.mark.parametrize("kind", ["patch", "model"])
def test_the_memory_is_bounded(kind, tmp_path):
    paths = [tmp_path / name for name in ("base", "model", "out.safetensors")]
    draw = torch.Generator().manual_seed(0)
    for path in paths[:2]:
        save_file({"w": torch.randn(16 << 20, generator=draw)}, path)

    def peak(limit: int) -> int:
        words = [sys.executable, "-c", MEASURE, *map(str, paths), str(limit), kind]
        return int(subprocess.run(words, check=True, capture_output=True).stdout)

    limit = 140_000_000
    if kind == "patch":
        assert peak(0) > limit  # 32 threads need more
    assert peak(limit) <= limit


class Deadly(LocalProcesses):
    """Kills its workers when one range is finished."""

    def run(self, steps, watch, stage_size=None):
        for found in super().run(steps, watch, stage_size):
            for process in list(self.pool._processes.values()):
                process.kill()
            yield found


def test_killed_workers(tmp_path):
    base, models = make_pool(tmp_path)
    out = tmp_path / "out.safetensors"
    with (
        pytest.raises(NegMergeError, match="a worker process died"),
        Deadly(no_scenario, 1, Cores(2, 1)) as executor,
    ):
        merge_on(executor, base, models, out=out, ranges=4)
    finished = {path.name for path in folder_of(out).glob("*.part")}
    assert finished
    again = Counting()
    merge_on(again, base, models, out=out, ranges=4)
    assert not finished & {f"{key}.part" for key in again.ran}
    assert out.read_bytes() == nm.merge(base, models, out=tmp_path / "local").path.read_bytes()


def test_models_at_urls(processes, tmp_path, monkeypatch):
    """Every machine fetches them to a scratch folder of its own, which has another time."""
    base, models = make_pool(tmp_path)
    monkeypatch.setenv("NEGMERGE_SCRATCH", str(tmp_path / "scratch"))
    local = nm.merge(base, models, "ties", out=tmp_path / "one.safetensors")
    urls = [f"file://{path}" for path in (base, *models)]
    out = tmp_path / "two.safetensors"
    tau = merge_on(processes, urls[0], urls[1:], "ties", out=out, ranges=3)
    assert tau.path.read_bytes() == local.path.read_bytes()
