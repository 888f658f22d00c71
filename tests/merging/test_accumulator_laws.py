"""Folding one member at a time gives what merging them together gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import negmerge as nm
from negmerge.errors import NegMergeError
from negmerge.merging.rules import make_rule
from negmerge.support.progress import Quiet
from storage import dense

SERVED = ["uniform", "consensus", "conflict", "localize", "magmax", "ties", "soft", "shrink"]


@pytest.fixture
def pool(tmp_path):
    generator = torch.Generator().manual_seed(5)
    base = {"w": torch.randn(50, 41, generator=generator), "b": torch.randn(9, generator=generator)}
    base["bn.running_mean"] = torch.randn(9, generator=generator)
    base["steps"] = torch.tensor(3)
    save_file(base, tmp_path / "base.safetensors")
    paths = []
    for k in range(6):
        model = {
            n: v + 0.1 * torch.randn(v.shape, generator=generator) if v.is_floating_point() else v
            for n, v in base.items()
        }
        paths.append(tmp_path / f"m{k}.safetensors")
        save_file(model, paths[-1])
    return tmp_path / "base.safetensors", paths


def same(left: nm.TaskVector, right: nm.TaskVector) -> None:
    one, two = dense(left), dense(right)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    assert left.origin.base == right.origin.base
    prints = [{m["fingerprint"] for m in t.origin.members} for t in (left, right)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("rule", SERVED)
def test_fold_equals_streaming_in_any_order(pool, rule):
    base, paths = pool
    wanted = nm.merge(base, paths, rule)
    for order in (paths, paths[::-1]):
        acc = nm.Accumulator(base, rules=[rule])
        for path in order:
            assert acc.add(path)
        same(acc.finish(rule), wanted)


@pytest.mark.parametrize(
    "options", [{"reduce": "min"}, {"reduce": "max", "signed": True}, {"quorum": 0.6}]
)
def test_options_are_served(pool, options):
    base, paths = pool
    acc = nm.Accumulator(base, rules={"consensus": options})
    for path in paths:
        acc.add(path)
    same(acc.finish("consensus"), nm.merge(base, paths, "consensus", options))


@pytest.mark.parametrize("rule", SERVED)
def test_two_accumulators_merge_into_one(pool, rule):
    base, paths = pool
    halves = [nm.Accumulator(base, rules=[rule]) for _ in range(2)]
    for path in paths[:2]:
        halves[0].add(path)
    for path in paths[2:]:
        halves[1].add(path)
    halves[0].merge(halves[1])
    same(halves[0].finish(rule), nm.merge(base, paths, rule))
    with pytest.raises(NegMergeError, match="each member counts once"):
        halves[0].merge(halves[1])


def test_saved_state_goes_on_where_it_stopped(pool, tmp_path):
    base, paths = pool
    acc = nm.Accumulator(base)
    for path in paths[:3]:
        acc.add(path)
        acc.save(tmp_path / "state")
        path.rename(tmp_path / f"gone-{path.name}")
    acc = nm.Accumulator.load(tmp_path / "state", base)
    assert acc.n == 3
    assert not acc.add(tmp_path / f"gone-{paths[0].name}"), "a member is counted once"
    for path in paths[3:]:
        assert acc.add(path)
    gone = [tmp_path / f"gone-{p.name}" for p in paths[:3]]
    same(acc.finish(), nm.merge(base, gone + paths[3:]))


def test_state_does_not_grow_with_the_pool(pool, tmp_path):
    base, paths = pool
    acc = nm.Accumulator(base)
    sizes = []
    for path in paths:
        acc.add(path)
        acc.save(tmp_path / "state")
        sizes.append((tmp_path / "state").stat().st_size)
    assert sizes[-1] - sizes[0] < 200 * len(paths), "only the list of members may grow"


def test_what_it_cannot_serve_is_refused(pool, tmp_path):
    base, paths = pool
    acc = nm.Accumulator(base)
    with pytest.raises(NegMergeError, match="is empty"):
        acc.finish()
    acc.add(paths[0])
    with pytest.raises(NegMergeError, match="cannot finish 'magmax'"):
        acc.finish("magmax")
    with pytest.raises(NegMergeError, match="all members at once and cannot be accumulated"):
        nm.Accumulator(base, rules=["tall"])
    with pytest.raises(NegMergeError, match="has the weights of the base"):
        acc.add(base)
    with pytest.raises(NegMergeError, match="cannot finish 'ties'"):
        acc.finish("ties")
    acc.save(tmp_path / "state")
    with pytest.raises(NegMergeError, match="is not the base of"):
        nm.Accumulator.load(tmp_path / "state", paths[1])
    with pytest.raises(NegMergeError, match="not an accumulator"):
        nm.Accumulator.load(base, base)


class Interrupted(Quiet):
    def advance(self, count: int) -> None:
        raise KeyboardInterrupt


def test_a_member_that_was_folded_in_part_is_not_forgotten(pool, tmp_path):
    base, models = pool
    acc = nm.Accumulator(base)
    acc.add(models[0])
    acc.save(tmp_path / "acc.safetensors")
    with pytest.raises(KeyboardInterrupt):
        acc.add(models[1], Interrupted())
    whole = nm.Accumulator.load(tmp_path / "acc.safetensors", base)
    for use in (
        lambda: acc.add(models[1]),
        lambda: acc.finish(),
        lambda: acc.save(tmp_path / "half.safetensors"),
        lambda: acc.merge(whole),
        lambda: whole.merge(acc),
    ):
        with pytest.raises(NegMergeError, match=rf"{models[1].name}.*in part.*load the state"):
            use()
    assert not (tmp_path / "half.safetensors").exists()
    assert whole.add(models[1])


class Overwriting(Quiet):
    """Changes a file as soon as its model is being folded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        os.utime(self.path, (1, 1))


def test_a_member_that_changes_while_it_is_folded_is_not_counted(pool):
    base, models = pool
    acc = nm.Accumulator(base)
    with pytest.raises(NegMergeError, match="changed while it was read"):
        acc.add(models[0], Overwriting(models[0]))
    assert acc.n == 0


def test_one_rule_without_brackets_is_told(pool):
    with pytest.raises(NegMergeError, match=r"rules: got 'ties', wanted a list of names"):
        nm.Accumulator(pool[0], "ties")


def test_a_refused_member_changes_nothing(pool, tmp_path):
    base, paths = pool
    acc = nm.Accumulator(base)
    acc.add(paths[0])
    before = dense(acc.finish())
    broken = {"w": torch.full((50, 41), float("nan")), "b": torch.zeros(9)}
    broken |= {"bn.running_mean": torch.zeros(9), "steps": torch.tensor(3)}
    save_file(broken, tmp_path / "nan.safetensors")
    with pytest.raises(NegMergeError, match="2050 changes are NaN"):
        acc.add(tmp_path / "nan.safetensors")
    assert acc.n == 1
    for name, values in dense(acc.finish()).items():
        np.testing.assert_array_equal(values, before[name])


LOOP = """
import sys, negmerge as nm
from pathlib import Path
folder = Path(sys.argv[1]); state = folder / "state"; base = folder / "base.safetensors"
acc = nm.Accumulator.load(state, base) if state.exists() else nm.Accumulator(base)
for path in sorted(folder.glob("m*.safetensors")):
    acc.add(path); acc.save(state); print(path.name, flush=True)
acc.finish().save(folder / "patch.safetensors")
"""


def test_killed_at_any_moment_it_counts_every_member_once(pool, tmp_path):
    base, paths = pool
    command = [sys.executable, "-c", LOOP, str(tmp_path)]
    for lines in (1, 2, 4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(0.002 * lines)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = nm.TaskVector.load(tmp_path / "patch.safetensors")
    assert found.origin.n == len(paths)
    same(found, nm.merge(base, paths))
    assert not list(Path(tmp_path).glob(".*"))


def test_options_of_a_rule_are_part_of_the_state(pool, tmp_path):
    base, paths = pool
    acc = nm.Accumulator(base, rules={"ties": {"density": 0.5}})
    for path in paths:
        acc.add(path)
    acc.save(tmp_path / "state")
    again = nm.Accumulator.load(tmp_path / "state", base)
    same(again.finish("ties"), nm.merge(base, paths, "ties", {"density": 0.5}))
    with pytest.raises(NegMergeError, match="cannot finish 'ties'"):
        again.finish("ties", make_rule("ties").options)


def test_more_tensors_than_a_header_can_list_are_saved_in_another_layout(
    pool, tmp_path, monkeypatch
):
    base, paths = pool
    acc = nm.Accumulator(base)
    for path in paths[:4]:
        acc.add(path)
    acc.save(tmp_path / "listed")
    monkeypatch.setattr(
        "negmerge.checkpoints.header.MAX_TENSORS", 5
    )  # two tensors of three statistics
    acc.save(tmp_path / "compact")
    monkeypatch.undo()
    formats = {}
    for name in ("listed", "compact"):
        with safe_open(tmp_path / name, "pt") as file:
            formats[name] = file.metadata()["format"]
        again = nm.Accumulator.load(tmp_path / name, base)
        assert again.add(paths[4])
        same(again.finish(), nm.merge(base, paths[:5]))
    assert formats == {
        "listed": "negmerge-accumulator/1",
        "compact": "negmerge-accumulator/2",
    }


def test_what_could_not_be_written_is_refused_before_a_member_is_made(pool, monkeypatch):
    base, _ = pool
    monkeypatch.setattr("negmerge.checkpoints.header.MAX_HEADER", 4_000)
    with pytest.raises(NegMergeError, match=r"a patch of 2 tensors .* cannot be written"):
        nm.Accumulator(base)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("members", "5"),
        ("members", "[5]"),
        ("members", '[{"name": 1, "fingerprint": "x"}]'),
        ("members", "[" * 5000),
        ("rules", "[]"),
        ("rules", '{"consensus": 5}'),
        ("rules", '{"consensus": {"quorum": []}}'),
        ("rules", '{"nobody": {}}'),
        ("rules", '{"consensus": {}, "consensus": {}}'),
        ("dtypes", '{"w": "F16"}'),
        ("dtypes", "{}"),
        ("buffers", "odd"),
        ("base", "x"),
    ],
)
def test_damaged_metadata_is_told(pool, tmp_path, key, value):
    base, paths = pool
    acc = nm.Accumulator(base)
    acc.add(paths[0])
    acc.save(tmp_path / "acc")
    raw = (tmp_path / "acc").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:end])
    fields["__metadata__"][key] = value
    header = json.dumps(fields).encode()
    (tmp_path / "acc").write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    with pytest.raises(NegMergeError, match="acc"):
        nm.Accumulator.load(tmp_path / "acc", base)
