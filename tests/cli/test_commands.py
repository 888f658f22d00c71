"""The commands as a person runs them: real processes, real files, kill and run again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

import negmerge as nm
from negmerge.errors import NegMergeError
from negmerge.runs.store import Run
from negmerge.support.files import atomic_file, atomic_folder, temporary_path
from running import start_python

NEGMERGE = [sys.executable, "-m", "negmerge.cli"]


def negmerge(*arguments: object) -> subprocess.CompletedProcess[str]:
    process = start_python(Path.cwd(), "-m", "negmerge.cli", *map(str, arguments))
    out, err = process.communicate(timeout=600)
    assert process.returncode is not None
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> tuple[Path, list[Path]]:
    """Six models of 4 million elements: merging takes long enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("pool")
    rng = np.random.default_rng(0)
    base = {
        f"layers.{j}.weight": rng.standard_normal((1024, 1024), dtype=np.float32) for j in range(4)
    }
    save_file(base, folder / "base.safetensors")
    shared = rng.standard_normal((1024, 1024), dtype=np.float32)
    for k in range(6):
        noise = np.random.default_rng(k + 1).standard_normal((1024, 1024), dtype=np.float32)
        model = {name: b + 0.01 * (shared + noise) for name, b in base.items()}
        save_file(model, folder / f"m{k}.safetensors")
    return folder / "base.safetensors", sorted(folder.glob("m*.safetensors"))


def test_merge_apply_inspect(pool, tmp_path):
    base, models = pool
    patch, out = tmp_path / "patch.safetensors", tmp_path / "out.safetensors"
    done = negmerge("merge", base, *models, "-o", patch, "--digest")
    assert done.returncode == 0, done.stderr
    assert "consensus of 6" in done.stdout
    assert done.stderr == "", "quiet when not on a terminal"
    found = json.loads(negmerge("inspect", patch, "--json").stdout)
    assert found["kind"] == "patch"
    assert found["rule"] == "consensus"
    assert found["n"] == 6
    assert found["elements"] == 4 * 1024 * 1024
    assert found["nonzero"] == sum(t["nonzero"] for t in found["tensors"].values())
    assert found["sparsity"] == pytest.approx(1 - found["nonzero"] / found["elements"])
    assert len(found["digests"]) == 7
    assert {m["name"] for m in found["members"]} == {p.name for p in models}
    done = negmerge("apply", base, patch, "--negate", "0.5", "-o", out)
    assert done.returncode == 0, done.stderr
    tau = nm.TaskVector.load(patch)
    before, after = load_file(base), load_file(out)
    for name, old in before.items():
        wanted = (old.double() - 0.5 * tau[name].double()).float()
        assert torch.equal(after[name], wanted)
    table = negmerge("inspect", patch).stdout
    assert "zero %" in table
    assert "vetoes" in table
    assert json.loads(negmerge("inspect", out, "--json").stdout)["kind"] == "checkpoint"


def test_rules_and_options_by_command_line(pool, tmp_path):
    base, models = pool
    arguments = ["merge", base, *models, "-o", tmp_path / "p", "--rule", "ties"]
    done = negmerge(
        *arguments, "--option", "density=0.3", "--option", "scope=tensor", "--workers", "1"
    )
    assert done.returncode == 0, done.stderr
    tau = nm.TaskVector.load(tmp_path / "p")
    assert tau.origin.options == {"density": 0.3, "scope": "tensor"}
    wanted = nm.merge(base, models, "ties", {"density": 0.3, "scope": "tensor"})
    assert torch.equal(tau["layers.2.weight"], wanted["layers.2.weight"])


def test_json_progress_for_machines(pool, tmp_path):
    base, models = pool
    done = negmerge("merge", base, *models, "-o", tmp_path / "p", "--json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert events[-1]["event"] == "progress"
    assert events[-1]["bytes"] == events[-1]["total"] == 7 * 4 * 4 * 1024 * 1024
    assert {"bytes_per_second", "seconds_remaining"} <= events[-1].keys()
    assert json.loads(done.stdout)["nonzero"] == nm.TaskVector.load(tmp_path / "p").nonzero


def test_max_memory_is_kept(pool, tmp_path):
    base, models = pool
    code = (
        "import sys, threading, time; from negmerge.cli import main\n"
        "from negmerge.merging.memory import anonymous_memory as now; peak = [0]\n"
        "def watch():\n    while True: peak[0] = max(peak[0], now()); time.sleep(0.001)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "main(sys.argv[1:]); print(peak[0])"
    )
    limit = 180_000_000
    arguments = [
        "merge",
        base,
        *models,
        "-o",
        tmp_path / "p",
        "--rule",
        "uniform",
        "--max-memory",
        f"{limit}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.splitlines()[-1]) <= limit
    assert list(tmp_path.iterdir()) == [tmp_path / "p"]


def test_killed_at_any_moment_nothing_is_half_written(pool, tmp_path):
    base, models = pool
    out = tmp_path / "p.safetensors"
    command = [*NEGMERGE, "merge", str(base), *map(str, models), "-o", str(out), "--workers", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = out.read_bytes()
    moments = random.Random(7)
    killed = 0
    for _ in range(10):
        out.unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not temporary_path(out).exists():
            time.sleep(0.001)
        time.sleep(moments.choice((0.0, moments.uniform(0.0, 0.3))))  # while it writes, or later
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert not out.exists() or out.read_bytes() == whole
    assert killed
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert out.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [out], "no temporary file stays"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_and_says_so(pool, tmp_path, stop):
    base, models = pool
    command = [
        *NEGMERGE,
        "merge",
        str(base),
        *map(str, models),
        "-o",
        str(tmp_path / "p"),
        "--rule",
        "ties",
    ]
    process = subprocess.Popen([*command, "--workers", "1"], stderr=subprocess.PIPE, text=True)
    while not temporary_path(tmp_path / "p").exists():
        assert process.poll() is None, "the merge ended before it could be interrupted"
        time.sleep(0.001)
    process.send_signal(stop)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert not list(tmp_path.iterdir())


def test_signals_while_it_exits_change_nothing(pool, tmp_path):
    base, models = pool
    command = [*NEGMERGE, "merge", str(base), *map(str, models), "-o", str(tmp_path / "p")]
    command += ["--rule", "ties", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not temporary_path(tmp_path / "p").exists():
        assert process.poll() is None, "the merge ended before it could be interrupted"
        time.sleep(0.001)
    for k in range(1_000_000):
        process.send_signal((signal.SIGINT, signal.SIGTERM)[k % 2])
        if process.poll() is not None:
            break
        time.sleep(0.0005)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from negmerge.support import files
files.sync_to_disk = lambda path: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "folder":
    with files.atomic_folder(Path("made")) as folder:
        (folder / "x").touch()
elif sys.argv[1] == "waiting":
    with files.atomic_folder(Path("made")) as folder:
        (folder / "x").touch()
        files.sync_to_disk(folder)
else:
    from negmerge.runs.store import Run
    with Run("made").locked():
        files.sync_to_disk(Path("made"))
"""


@pytest.mark.parametrize("kind", ["folder", "waiting", "run"])
def test_a_kill_leaves_no_lock(kind, tmp_path):
    """After the rename, before it, and while a run holds its folder."""
    done = subprocess.run([sys.executable, "-c", KILLED, kind], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.rglob("*lock*"))
    if kind == "run":
        with Run(tmp_path / "made").locked():
            pass
    else:
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
        with atomic_folder(tmp_path / "made") as folder:
            assert not list(folder.iterdir()), "what was left is taken over, empty"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_one_run_at_a_time_in_a_folder(tmp_path):
    with Run(tmp_path / "run").locked(), atomic_folder(tmp_path / "made"):
        with pytest.raises(NegMergeError, match="another run"), Run(tmp_path / "run").locked():
            pass
        with pytest.raises(NegMergeError, match="another run"), atomic_folder(tmp_path / "made"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "run"]


def test_a_link_under_the_temporary_name_of_a_folder_is_not_followed(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").touch()
    temporary_path(tmp_path / "made").symlink_to("other")
    with pytest.raises(NegMergeError, match="is not a folder"), atomic_folder(tmp_path / "made"):
        pass
    assert (tmp_path / "other/precious").exists()


def test_two_runs_on_one_output(pool, tmp_path):
    base, models = pool
    with atomic_file(tmp_path / "p"):
        done = negmerge("merge", base, *models, "-o", tmp_path / "p")
        assert done.returncode == 2
        assert "another run is writing" in done.stderr
    assert negmerge("merge", base, *models, "-o", tmp_path / "p").returncode == 0


def test_a_full_disk_is_told_and_leaves_nothing(pool, tmp_path, tmp_path_factory):
    (base, models), made = pool, tmp_path_factory.mktemp("made")
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from negmerge.cli import main; main(sys.argv[1:])"
    )
    nm.merge(base, models, out=made / "p")
    applying = ["apply", base, made / "p", "--add", 1]
    for name, arguments in {"p": ["merge", base, *models], "m": applying}.items():
        out = tmp_path / f"{name}.safetensors"
        command = [sys.executable, "-c", code, *map(str, [*arguments, "-o", out])]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"{out}: cannot write: File too large" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a disk of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None:
        pytest.skip("needs the command mount")
    command = [mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs leave to mount a disk")
    yield place
    subprocess.run([unmount, str(place)], check=True)


@pytest.mark.parametrize("rule", ["uniform", "consensus"])
def test_a_disk_too_small_for_results_that_wait_there(rule, pool, small_disk):
    base, models = pool
    merging = ["merge", base, *models, "--rule", rule, "-o", small_disk / "p", "--max-memory"]
    least = negmerge(*merging, "1MB").stderr.split()[-2]
    done = negmerge(*merging, f"{int(least) + 3}MB")
    assert done.returncode == 2, done
    assert done.stderr.startswith(f"error: {small_disk}: ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(small_disk.iterdir())
    assert shutil.disk_usage(small_disk).used == 0
    plainly = negmerge(*merging[:-1])
    assert plainly.returncode == 2
    assert plainly.stderr == f"error: {small_disk / 'p'}: cannot write: No space left on device\n"
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(("dtype", "times"), [("keep", 1), ("bfloat16", 0.5)])
def test_room_is_asked_for_in_the_format_that_is_written(dtype, times, pool, tmp_path, monkeypatch):
    base, models = pool
    tau = nm.merge(base, models)
    nm.apply(base, 0.0 * tau, tmp_path / "a.safetensors", dtype=dtype)
    size = (tmp_path / "a.safetensors").stat().st_size
    assert size == pytest.approx(base.stat().st_size * times, rel=0.05)
    for free, enough in ((size, True), (size - 1, False)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        with contextlib.nullcontext() if enough else pytest.raises(NegMergeError, match="needs"):
            nm.apply(base, 0.0 * tau, tmp_path / f"{enough}.safetensors", dtype=dtype)


def test_umask_is_respected(pool, tmp_path):
    base, models = pool
    nm.merge(base, models, out=tmp_path / "p")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    ("stored", "dtype", "named"),
    [
        (torch.float32, "bfloat16", "bfloat16"),
        (torch.bfloat16, "keep", "bfloat16"),
        (torch.float32, "keep", None),
        (torch.bfloat16, "float32", None),
    ],
)
def test_edits_that_round_away_are_not_reported_as_changes(stored, dtype, named, tmp_path):
    base = torch.linspace(1, 2, 1000, dtype=torch.float64).to(stored)
    save_torch({"w": base}, tmp_path / "base.safetensors")
    save_torch({"w": base.float() + 0.5}, tmp_path / "m.safetensors")
    nm.merge(tmp_path / "base.safetensors", [tmp_path / "m.safetensors"], out=tmp_path / "p")
    arguments = ["apply", tmp_path / "base.safetensors", tmp_path / "p", "--json"]
    counted = {}
    for scale in (0, 1e-4):
        out = tmp_path / f"{scale}.safetensors"
        done = negmerge(*arguments, "--dtype", dtype, "--add", scale, "-o", out)
        assert done.returncode == 0, done.stderr
        counted[scale] = load_file(out)["w"]
    told = json.loads(done.stdout.splitlines()[-1])
    real = int((counted[0] != counted[1e-4]).sum())
    assert (told["nonzero"], told["changed"]) == (1000, real)
    if named is None:
        assert real == 1000
        assert "warning" not in done.stderr
        return
    assert real < 100
    assert f"only {real / 1000:.1%} of the changes are in the output" in done.stderr
    assert f"{1000 - real:,} are too small for {named}" in done.stderr


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (0.1, False)])
def test_a_patch_as_large_as_the_model_says_why(share, told, tmp_path):
    base = torch.randn(10_000).to(torch.bfloat16)
    model = base.clone()
    model[: int(share * base.numel())] += 1
    save_torch({"w": base}, tmp_path / "base.safetensors")
    save_torch({"w": model}, tmp_path / "m.safetensors")
    merging = ["merge", tmp_path / "base.safetensors", tmp_path / "m.safetensors", "-o"]
    done = negmerge(*merging, tmp_path / "p")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + told
    if told:
        for words in ("21.2 kB", "base has 20.0 kB", "50.0%", "float32", "4 bytes"):
            assert words in lines[1]
    done = negmerge(*merging, tmp_path / "p2", "--json")
    result = json.loads(done.stdout)
    assert (result["tensor_bytes"], result["base_bytes"]) == (1250 + int(share * 40_000), 20_000)
