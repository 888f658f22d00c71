"""A merge that was killed computes no finished range again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.errors import FileError
from negmerge.runs.executors import InProcess
from negmerge.runs.parts_folder import folder_of
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from negmerge.support.progress import Quiet
from small_pools import Counting, left, make_pool, small_segments  # noqa: F401

pytestmark = pytest.mark.slow


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
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
        with next(folder_of(out).glob("*.output")).open("r+b") as file:
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
