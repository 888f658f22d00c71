"""A merge in ranges has the bytes and errors of a merge by one process, and goes on when killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.cli import main
from negmerge.errors import FileError, NegMergeError
from negmerge.merging import engine, one_pass, parted, tiles
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.rule import Rule, rules
from negmerge.merging.statistics import TOTAL
from negmerge.runs.executors import Cores, InProcess, LocalProcesses
from negmerge.runs.parts_folder import folder_of
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from negmerge.support.progress import Quiet
from storage import TORCH

VARIANTS = [
    ("consensus", {}),
    ("consensus", {"quorum": 0.6, "zeros": "abstain"}),
    ("consensus", {"reduce": "max", "signed": True}),
    ("conflict", {}),
    ("magmax", {}),
    ("uniform", {}),
    ("ties", {"density": 0.5}),
    ("ties", {"density": 0.4, "scope": "tensor"}),
    ("localize", {"density": 0.3}),
    ("localize", {"density": 0.5, "scope": "tensor"}),
    ("tall", {}),
]


def make_pool(folder: Path, dtype: str = "F32", n: int = 3, seed: int = 3):
    """A base and models with tensors of several segments, small and empty ones, and statistics."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (300, 31), "a.bias": (31,), "s": (), "empty": (0, 2), "z.weight": (5000,)}
    base = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    base |= {"bn.running_var": torch.rand(60, generator=draw) * 0.01}
    models = []
    for k in range(n):
        model = {m: v + 0.1 * torch.randn(v.shape, generator=draw) for m, v in base.items()}
        model["a.weight"][:100] = base["a.weight"][:100]
        models.append(model | {"count": torch.tensor([k, 2])})
    for k, model in enumerate([base | {"count": torch.tensor([9, 2])}, *models]):
        kind = TORCH[("F32", "BF16", "F64")[k % 3] if dtype == "mixed" else dtype]
        model = {m: v.to(kind) if v.is_floating_point() else v for m, v in model.items()}
        save_file(model, folder / f"m{k}.safetensors", {"format": "pt", "note": str(k)})
    first, *rest = sorted(folder.glob("m*.safetensors"))
    return first, rest


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    for module in (tiles, one_pass, engine):
        monkeypatch.setattr(module, "SEGMENT", 4096)
    monkeypatch.setattr("negmerge.merging.assembly.SEGMENT", 4096)
    monkeypatch.setattr(parted, "LITTLE", 0)


@pytest.fixture(scope="module")
def processes():
    with LocalProcesses(no_scenario, 2, Cores(2, 2)) as executor:
        yield executor


def no_scenario() -> None: ...


class Counting(InProcess):
    """Notes the steps that it runs; fails after a number of steps if it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(None)
        self.ran: list[str] = []
        self.fail_at = fail_at

    def run(self, steps, watch, stage_size=None):
        for found in super().run(steps, watch, stage_size):
            self.ran.append(steps[found[0]].key)
            if len(self.ran) == self.fail_at:
                raise RuntimeError("the machine is gone")
            yield found


def left(out: Path) -> list[str]:
    """What stays in the folder of an output, beside the models and the outputs."""
    return [path.name for path in out.parent.iterdir() if path.name.startswith(".")]


# ------------------------------------------------------------------------------------ same bytes


FAST = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@FAST
@given(
    st.sampled_from(VARIANTS),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["F32", "BF16", "F16", "F64", "mixed"]),
    st.sampled_from(["keep", "merge"]),
    st.sampled_from(["auto", "sparse", "dense"]),
    st.sampled_from(["keep", "float32", "bfloat16"]),
)
def test_a_patch_has_the_same_bytes(variant, ranges, n, dtype, buffers, layout, values):
    rule, options = variant
    with tempfile.TemporaryDirectory() as folder:
        base, models = make_pool(Path(folder), dtype, n)
        given = {"buffers": buffers, "layout": layout, "values": values, "digest": True}
        one, two = Path(folder, "one.safetensors"), Path(folder, "two.safetensors")
        nm.merge(base, models, rule, options, out=one, **given)
        executor = Counting()
        merge_on(executor, base, models[::-1], rule, options, out=two, ranges=ranges, **given)
        assert two.read_bytes() == one.read_bytes()
        assert len(executor.ran) >= min(ranges, 3)
        assert left(two) == []


@FAST
@given(
    st.sampled_from(VARIANTS),
    st.integers(1, 9),
    st.sampled_from(["F32", "BF16", "F64", "mixed"]),
    st.sampled_from(["keep", "merge"]),
    st.sampled_from(["keep", "float32", "bfloat16"]),
)
def test_a_model_has_the_same_bytes(variant, ranges, dtype, buffers, wanted):
    rule, options = variant
    with tempfile.TemporaryDirectory() as folder:
        base, models = make_pool(Path(folder), dtype)
        given = {"buffers": buffers, "dtype": wanted}
        one, two = Path(folder, "one.safetensors"), Path(folder, "two.safetensors")
        local = nm.merge_and_apply(base, models, -0.7, one, rule, options, **given)
        done = merge_and_apply_on(
            InProcess(None), base, models, -0.7, two, rule, options, ranges=ranges, **given
        )
        assert two.read_bytes() == one.read_bytes()
        done.out = local.out
        assert done == local
        assert left(two) == []


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


def cancelling(folder: Path) -> tuple[Path, list[Path]]:
    """Models whose changes cancel in some elements and are mostly negative: TIES merges twice."""
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(5000, generator=draw) for name in "abcd"}
    change = {name: -torch.rand(5000, generator=draw).round(decimals=2) - 1 for name in base}
    paths = [folder / f"m{k}.safetensors" for k in range(3)]
    save_file({name: torch.zeros(5000) for name in base}, paths[0])
    save_file(change, paths[1])
    save_file(
        {m: torch.where(torch.arange(5000) % 10 == 0, -v, v) for m, v in change.items()}, paths[2]
    )
    return paths[0], paths[1:]


@pytest.mark.parametrize("to_model", [False, True])
def test_a_merge_whose_constants_change_is_merged_twice(to_model, tmp_path):
    base, models = cancelling(tmp_path)
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    given = (base, models) if not to_model else (base, models, -0.5)
    local, on = (nm.merge_and_apply, merge_and_apply_on) if to_model else (nm.merge, merge_on)
    rule = {"rule": "ties", "options": {"density": 1.0}}
    local(*given, out=one, **rule)
    executor = Counting()
    on(executor, *given, out=two, ranges=4, **rule)
    assert one.read_bytes() == two.read_bytes()
    assert len(executor.ran) == len(set(executor.ran)) == 8  # no first pass for this density
    two.unlink()
    with pytest.raises(RuntimeError, match="the machine is gone"):
        on(Counting(fail_at=6), *given, out=two, ranges=4, **rule)
    again = Counting()
    on(again, *given, out=two, ranges=4, **rule)
    assert one.read_bytes() == two.read_bytes()
    assert len(again.ran) == 2  # of the second merge; the first one is not needed any more


def test_large_results_are_stored_on_disk(tmp_path, monkeypatch):
    base, models = make_pool(tmp_path)
    for rule in rules:
        local = nm.merge(base, models, rule, out=tmp_path / "one.safetensors").path
        monkeypatch.setattr("negmerge.merging.memory.LARGE", 1000)
        tau = merge_on(InProcess(None), base, models, rule, out=tmp_path / "two", ranges=4)
        monkeypatch.undo()
        assert tau.path.read_bytes() == local.read_bytes()


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


# ---------------------------------------------------------------------------------- going on later


@pytest.mark.parametrize("rule", ["consensus", "ties", "magmax"])
@pytest.mark.parametrize("to_model", [False, True])
def test_finished_ranges_are_not_computed_again(rule, to_model, tmp_path):
    base, models = make_pool(tmp_path)
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    given = (base, models) if not to_model else (base, models, -0.5)
    local, on = (nm.merge_and_apply, merge_and_apply_on) if to_model else (nm.merge, merge_on)
    local(*given, out=one, rule=rule)
    whole = Counting()
    on(whole, *given, out=two, rule=rule, ranges=5)
    two.unlink()
    ran: list[str] = []
    for attempt in range(20):
        executor = Counting(fail_at=2)
        try:
            on(executor, *given, out=two, rule=rule, ranges=5 + attempt)  # the number stays 5
            break
        except RuntimeError:
            assert not two.exists()
            assert folder_of(two).is_dir()
        finally:
            ran += executor.ran
    assert sorted(ran) == sorted(whole.ran)
    assert two.read_bytes() == one.read_bytes()
    assert left(two) == []


def merge_until(count: int, base: Path, models: list[Path], out: Path, to_model: bool) -> None:
    """Merge in this process, and kill it when some ranges are finished."""

    class Killed(Quiet):
        finished = 0

        def unit_changed(self, name, state, **facts):
            self.finished += state == "done"
            if self.finished == count:
                os.kill(os.getpid(), signal.SIGKILL)

    if to_model:
        merge_and_apply_on(InProcess(None), base, models, 1.5, out, ranges=4, progress=Killed())
    else:
        merge_on(InProcess(None), base, models, out=out, ranges=4, progress=Killed())


@pytest.mark.parametrize("to_model", [False, True])
def test_a_killed_driver(to_model, tmp_path):
    base, models = make_pool(tmp_path)
    out = tmp_path / "out.safetensors"
    # A forked process has the small segments of this one.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=merge_until, args=(2, base, models, out, to_model))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    executor = Counting()
    if to_model:
        merge_and_apply_on(executor, base, models, 1.5, out, ranges=4)
        nm.merge_and_apply(base, models, 1.5, tmp_path / "local.safetensors")
    else:
        merge_on(executor, base, models, out=out, ranges=4)
        nm.merge(base, models, out=tmp_path / "local.safetensors")
    assert len(executor.ran) == 2
    assert out.read_bytes() == (tmp_path / "local.safetensors").read_bytes()
    assert left(out) == []


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


@pytest.mark.parametrize(
    ("to_model", "damage"),
    [
        *((to_model, how) for to_model in (False, True) for how in ("noise", "cut", "another")),
        (True, "output"),
    ],
)
def test_a_damaged_or_foreign_part_is_computed_again(to_model, damage, tmp_path):
    base, models = make_pool(tmp_path)
    out = tmp_path / "out.safetensors"

    def run(executor):
        if to_model:
            return merge_and_apply_on(executor, base, models, -3.0, out, ranges=5).out
        return merge_on(executor, base, models, out=out, ranges=5).path

    first = Counting()
    whole = run(first).read_bytes()
    out.unlink()
    with pytest.raises(RuntimeError, match="gone"):
        run(Counting(fail_at=len(first.ran)))
    parts = sorted(folder_of(out).glob("*.part"))
    assert len(parts) == len(first.ran) > 3
    if damage == "noise":
        parts[1].write_bytes(b"damaged")
    elif damage == "cut":
        parts[1].write_bytes(parts[1].read_bytes()[:-100])
    elif damage == "another":
        parts[1].write_bytes(parts[2].read_bytes())
    else:
        with (folder_of(out) / "output").open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"abc")
    executor = Counting()
    assert run(executor).read_bytes() == whole
    assert len(executor.ran) == 1
    assert damage == "output" or executor.ran == [parts[1].stem]


def test_other_inputs_begin_anew(tmp_path):
    base, models = make_pool(tmp_path)
    out = tmp_path / "out.safetensors"
    with pytest.raises(RuntimeError, match="gone"):
        merge_on(Counting(fail_at=3), base, models, out=out, ranges=4)
    changed = load_file(models[0])
    changed["a.bias"] += 1
    save_file(changed, models[0])
    executor = Counting()
    merge_on(executor, base, models, out=out, ranges=4)
    assert len(executor.ran) == 4
    assert out.read_bytes() == nm.merge(base, models, out=tmp_path / "local").path.read_bytes()


def test_two_merges_to_one_output_are_refused(tmp_path):
    base, models = make_pool(tmp_path)
    out = tmp_path / "out.safetensors"

    class Second(Counting):
        def run(self, steps, watch, stage_size=None):
            with pytest.raises(FileError, match="another run is writing this output"):
                merge_on(InProcess(None), base, models, out=out)
            with pytest.raises(FileError, match="another run is writing this output"):
                merge_and_apply_on(InProcess(None), base, models, 1.0, out)
            yield from super().run(steps, watch, stage_size)

    merge_on(Second(), base, models, out=out, ranges=2)
    assert left(out) == []


# ------------------------------------------------------------------------------------------ errors


def broken(folder: Path, how: str) -> tuple[Path, list[Path]]:
    base, models = make_pool(folder)
    weights = load_file(models[1])
    if how == "nan":
        weights["s"] += float("nan")
        weights["z.weight"][4500] = float("inf")
    elif how == "overflow":
        first = load_file(base)
        first["z.weight"][4999] = 3e38
        weights["z.weight"][4999] = -3e38
        for path in models:
            other = load_file(path)
            other["z.weight"][4999] = -3e38
            save_file(other, path)
        save_file(first, base)
        return base, models
    elif how == "same as base":
        weights = load_file(base)
    elif how == "duplicate":
        weights = load_file(models[0])
    elif how == "shape":
        weights["s"] = torch.zeros(2)
    elif how == "keys":
        weights["more"] = torch.zeros(2)
    elif how == "integers":
        weights = {name: v.int() if name == "a.bias" else v for name, v in weights.items()}
    save_file(weights, models[1])
    return base, models


@pytest.mark.parametrize(
    "how", ["nan", "overflow", "same as base", "duplicate", "shape", "keys", "integers"]
)
def test_the_same_errors(how, tmp_path):
    base, models = broken(tmp_path, how)
    out = tmp_path / "out.safetensors"
    pairs = [
        (partial(nm.merge, base, models, out=out), partial(merge_on, out=out)),
        (
            partial(nm.merge_and_apply, base, models, 1e9, out),
            partial(merge_and_apply_on, scale=1e9, out=out),
        ),
    ]
    for local, on in pairs:
        with pytest.raises(NegMergeError) as wanted:
            local()
        for ranges in (1, 4):
            with pytest.raises(NegMergeError) as found:
                on(InProcess(None), base, models, ranges=ranges)
            assert (found.type, str(found.value)) == (wanted.type, str(wanted.value))
            assert not out.exists()
            assert left(out) == []


def test_a_sum_that_does_not_fit(tmp_path):
    base, models = make_pool(tmp_path, "F16")
    out = tmp_path / "out.safetensors"
    with pytest.raises(NegMergeError) as wanted:
        nm.merge_and_apply(base, models, 1e9, out)
    with pytest.raises(NegMergeError) as found:
        merge_and_apply_on(InProcess(None), base, models, 1e9, out, ranges=4)
    assert (found.type, str(found.value)) == (wanted.type, str(wanted.value))


def test_a_file_that_changes_during_the_merge(tmp_path):
    base, models = make_pool(tmp_path)

    class Changing(Counting):
        def run(self, steps, watch, stage_size=None):
            for found in super().run(steps, watch, stage_size):
                os.utime(models[0])
                yield found

    with pytest.raises(FileError, match=r"m1\.safetensors: changed"):
        merge_on(Changing(), base, models, out=tmp_path / "out", ranges=3)


def test_wrong_arguments(tmp_path):
    base, models = make_pool(tmp_path)
    state = {"w": np.ones(3, np.float32)}
    with pytest.raises(NegMergeError, match="base: is in the memory of this process"):
        merge_on(InProcess(None), state, [{"w": np.zeros(3, np.float32)}], out=tmp_path / "a")
    with pytest.raises(NegMergeError, match="is also an input"):
        merge_on(InProcess(None), base, models, out=models[0])
    with pytest.raises(NegMergeError, match="does not exist; create it first"):
        merge_on(InProcess(None), base, models, out=tmp_path / "no" / "a")
    with pytest.raises(NegMergeError, match="max-memory: 1 MB is too little"):
        merge_on(InProcess(None), base, models, out=tmp_path / "a", max_memory=10**6)
    assert left(tmp_path / "a") == []


# ------------------------------------------------------------------------------ plug-ins, progress


def squares(rows, size):
    mean = (rows[1:, :size].astype(np.float64) - rows[0, :size]).mean(0)
    return {"squares": (mean * mean).sum()}  # a part file cannot store a dictionary


@dataclass(frozen=True)
class Length(FirstPass):
    how: str = "blocks"

    def find(self, changes):
        total = np.zeros(changes.width)
        if self.how == "blocks":
            for block in changes.blocks():
                total += (block * block).sum(1)
        else:
            for found in changes.each(squares):
                total += found["squares"]
        return np.sqrt(total)


@pytest.mark.parametrize("how", ["blocks", "dictionary"])
def test_a_first_pass_that_others_cannot_compute(how, tmp_path):
    @dataclass(frozen=True)
    class Directed(Rule):
        statistics = (TOTAL,)

        def first_pass(self):
            return Length(of="mean", how=how)

        @staticmethod
        def finish(c, total):
            return total / c[0]

    rules.register("directed", Directed)
    try:
        base, models = make_pool(tmp_path)
        local = nm.merge(base, models, "directed", out=tmp_path / "one").path
        found = merge_on(InProcess(None), base, models, "directed", out=tmp_path / "two", ranges=3)
        assert found.path.read_bytes() == local.read_bytes()
    finally:
        rules.remove("directed")


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=3"], "--set 'seed=3': wanted executor.KEY=VALUE"),
        (["executor.kind=slurm"], "--set executor.kind: Input should be 'local' or 'ray'"),
        (["executor.speed=3"], "--set executor.speed: there is no such field"),
    ],
)
def test_only_the_executor_can_be_set(changes, message, tmp_path, capsys):
    base, models = make_pool(tmp_path)
    words = ["merge", base, *models, "-o", tmp_path / "out"]
    words += [word for change in changes for word in ("--set", change)]
    with pytest.raises(SystemExit, match="2"):
        main([str(word) for word in words])
    assert message in capsys.readouterr().err
