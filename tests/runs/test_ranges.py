"""A merge in ranges has the bytes and the errors of a merge by one process."""

from __future__ import annotations

import json
import os
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
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.part_file import PartFile, PartWriter
from negmerge.merging.rules import Localize, rules
from negmerge.runs.executors import InProcess
from negmerge.runs.parts_folder import folder_of
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from small_pools import VARIANTS, Counting, left, make_pool, small_segments  # noqa: F401

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
    st.booleans(),
)
def test_a_patch_has_the_same_bytes(variant, ranges, n, dtype, buffers, layout, values, equalise):
    rule, options = variant
    with tempfile.TemporaryDirectory() as folder:
        base, models = make_pool(Path(folder), dtype, max(n, rules.get(rule).least_members))
        given = {"buffers": buffers, "layout": layout, "values": values, "digest": True}
        given |= {"equalise": equalise}
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
    st.booleans(),
)
def test_a_model_has_the_same_bytes(variant, ranges, dtype, buffers, wanted, equalise):
    rule, options = variant
    with tempfile.TemporaryDirectory() as folder:
        base, models = make_pool(Path(folder), dtype)
        given = {"buffers": buffers, "dtype": wanted, "equalise": equalise}
        one, two = Path(folder, "one.safetensors"), Path(folder, "two.safetensors")
        local = nm.merge_and_apply(base, models, -0.7, one, rule, options, **given)
        done = merge_and_apply_on(
            InProcess(None), base, models, -0.7, two, rule, options, ranges=ranges, **given
        )
        assert two.read_bytes() == one.read_bytes()
        done.out = local.out
        assert done == local
        assert left(two) == []


@pytest.mark.parametrize("rule", ["consensus", "uniform", "ties"])
def test_a_part_has_the_same_bytes_whoever_computes_it(rule, tmp_path):
    base, models = make_pool(tmp_path)

    class Twice(InProcess):
        parts = 0

        def run(self, steps, watch, stage_size=None):
            for position, done in super().run(steps, watch, stage_size):
                step = steps[position]
                step.part.run(tmp_path / "again", 3, print)
                assert (tmp_path / "again").read_bytes() == step.out.read_bytes()
                assert step.part.is_done(tmp_path / "again")
                before = step.out.stat().st_mtime_ns
                step.run(None, print)  # is done, and is not computed again
                assert step.out.stat().st_mtime_ns == before
                self.parts += 1
                yield position, done

    executor = Twice(None)
    merge_on(executor, base, models, rule, out=tmp_path / "out", ranges=3)
    assert executor.parts >= 3


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
class Size(FirstPass):
    """The root of the mean square of a vector."""

    how: str = "blocks"

    def find(self, changes):
        total = np.zeros(changes.width)
        if self.how == "blocks":
            for block in changes.blocks():
                total += (block * block).sum(1)
        else:
            for found in changes.each(squares):
                total += found["squares"]
        return np.sqrt(total / changes.elements)


@pytest.mark.parametrize("how", ["blocks", "dictionary"])
def test_a_first_pass_that_others_cannot_compute(how, tmp_path):
    @dataclass(frozen=True)
    class Larger(Localize):
        def first_pass(self):
            return Size(of="mean", how=how)

    rules.register("larger", Larger)
    try:
        base, models = make_pool(tmp_path)
        local = nm.merge(base, models, "larger", out=tmp_path / "one")
        found = merge_on(InProcess(None), base, models, "larger", out=tmp_path / "two", ranges=3)
        assert found.path.read_bytes() == local.path.read_bytes()
        assert 0 < found.nonzero < found.elements
    finally:
        rules.remove("larger")


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


# ---------------------------------------------------------------------- damaged and hostile folders


@pytest.mark.parametrize(
    "state",
    [
        {"ranges": 10**30},
        {"ranges": "many", "sums": "many"},
        {"ranges": True, "sums": [1.5, None]},
        {"ranges": -1, "sums": [7, 7, 7]},
        {"ranges": 2, "sums": [10**30]},
    ],
)
@pytest.mark.parametrize("rule", ["consensus", "tall"])
def test_a_strange_state_changes_nothing(state, rule, tmp_path):
    base, models = make_pool(tmp_path)
    local = nm.merge(base, models, rule, out=tmp_path / "local.safetensors").path.read_bytes()
    out = tmp_path / "out.safetensors"
    with pytest.raises(RuntimeError, match="gone"):
        merge_on(Counting(fail_at=1), base, models, rule, out=out, ranges=3)
    path = folder_of(out) / "merge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | state))
    assert merge_on(Counting(), base, models, rule, out=out, ranges=3).path.read_bytes() == local
    assert left(out) == []


@pytest.mark.parametrize(
    "result",
    [
        {"array": []}, {"array": ["<f4", 0, 10**30]}, {"array": ["<f4", -1]}, {"array": ["O", 1]},
        {"array": ["no", 1]}, {"array": 3}, {"array": ["<f4", 10**15]}, {}, {"tuple": [{}]},
    ],
)  # fmt: skip
def test_a_result_that_no_part_has_is_damage(result, tmp_path):
    path = tmp_path / "a.part"
    with path.open("wb") as file, PartWriter(file.fileno()) as writer:
        writer.add(np.arange(4))
        writer._results[:] = [result]
        writer.finish({"key": "a"})
    with PartFile(path) as part, pytest.raises(FileError, match="is damaged"):
        list(part)
