"""Bad input ends with exit code 2 and one line that says what is wrong, and leaves no trace."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import negmerge
from hostile import (
    ALL,
    BLOCK,
    CASES,
    HEAD,
    INDEX,
    POOL,
    SHAPES,
    Case,
    Model,
    adapter_with,
    copied,
    edited,
    encoded,
    make_pool,
    make_sharded,
    packed,
    prefixed,
    put,
    raw_file,
    tensor,
    weights,
    write_damaged_patch,
    write_models,
)
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.cli import main
from negmerge.errors import FileError
from negmerge.support.bounds import bounded
from negmerge.support.progress import Quiet

Snapshot = dict[str, bytes | str]
NEW = "out/new.safetensors"
PATIENCE = 120.0
"""Seconds until a command counts as hanging; on a busy machine all takes long."""


class HangError(BaseException):
    """Not an Exception, so that nobody takes it for a fault of the disk."""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pool, and the current one; some levels down, for names that climb."""
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    make_pool(inner)
    monkeypatch.chdir(inner)
    return inner


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels are compiled and the pool is made before anybody becomes impatient."""
    make_pool(tmp_path_factory.mktemp("first"))


@pytest.fixture(autouse=True)
def _impatience(folder: Path) -> Iterator[None]:
    """Stop what hangs, and put back the handler that the command line sets."""

    def stop(*_: object) -> None:
        raise HangError

    before = {kind: signal.getsignal(kind) for kind in (signal.SIGALRM, signal.SIGTERM)}
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command line in this process, given as one text or as arguments."""

    def go(*arguments: str) -> Ended:
        words = shlex.split(arguments[0]) if len(arguments) == 1 else list(arguments)
        capsys.readouterr()
        code = 0
        try:
            main(words)
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
        return Ended(code, *capsys.readouterr())

    return go


def snapshot(folder: Path) -> Snapshot:
    """All that is in a folder, at any depth."""

    def content(path: Path) -> bytes | str:
        if path.is_symlink():
            return f"link to {path.readlink()}"
        return path.read_bytes() if path.is_file() else "not a file"

    return {str(p.relative_to(folder)): content(p) for p in folder.rglob("*")}


def printable(text: str) -> bool:
    return all(character.isprintable() for character in text.replace("\n", ""))


def check_refused(ended: Ended, wanted: tuple[str, ...]) -> None:
    assert "Traceback" not in ended.err, ended.err
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    assert printable(ended.err), ascii(ended.err)
    for fragment in wanted:
        assert fragment in ended.err


def ok(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    assert printable(ended.out + ended.err)
    return ended


def save(folder: Path, models: dict[str, Model]) -> None:
    for name, model in models.items():
        (folder / f"{name}.safetensors").write_bytes(packed(model))


# -------------------------------------------------------------------------------------- the corpus


def test_every_case_has_its_own_name() -> None:
    assert [name for name, count in Counter(c.name for c in CASES).items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Case, tmp_path: Path, folder: Path, run: Callable[..., Ended]) -> None:
    case.build(folder)
    before = snapshot(tmp_path)
    check_refused(run(*case.command), case.wanted)
    assert snapshot(tmp_path) == before


IN_A_PROCESS = (
    "cut-in-half-as-member",
    "fifo-as-base",
    "other-base",
    "path-with-control-characters",
)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in IN_A_PROCESS], ids=lambda c: c.name)
def test_refused_by_a_process(case: Case, tmp_path: Path, folder: Path) -> None:
    case.build(folder)
    before = snapshot(tmp_path)
    check_refused(in_a_process(*case.command), case.wanted)
    assert snapshot(tmp_path) == before


def in_a_process(*command: str, timeout: float = PATIENCE) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "negmerge.cli", *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_an_endless_pattern_of_names_is_stopped(
    folder: Path, run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = {f"{'a' * 60}.lora_{part}.weight": ("F32", np.ones((2, 2))) for part in "AB"}
    adapter_with(matrices, rank_pattern={"(a|a)*!": 2})(folder)
    monkeypatch.setattr("negmerge.checkpoints.adapter.bounded", partial(bounded, 0.2))
    check_refused(run("inspect bad"), ("rank_pattern", "TimeoutError: takes longer than 0.2 s"))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_endless_shape_takes_no_time(folder: Path) -> None:
    """Multiplying 200 000 large numbers takes minutes, which no signal interrupts."""
    content = raw_file({"w": tensor(shape=[2**62] * 200_000)}, bytes(8))
    (folder / "bad.safetensors").write_bytes(content)
    ended = in_a_process("inspect", "bad.safetensors", timeout=60)
    check_refused(ended, ("bad.safetensors", "'w'", "shape"))


# ------------------------------------------------------------------------- changed during the run


class Meddler(Quiet):
    """Does harm once a stage begins: all files are open and their headers read."""

    def __init__(self, stage: str, harm: Callable[[], object]) -> None:
        self.at, self.harm = stage, harm

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        if name == self.at:
            self.harm()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def replace_in_place(path: Path) -> None:
    """Other bytes, the same size, and a later time of change."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


HARM = {cut: "became shorter while it was read", replace_in_place: "changed while it was read"}


def mixed(folder: Path) -> None:
    (folder / "m1.safetensors").write_bytes(packed(weights(1, "BF16")))


def with_counter(folder: Path) -> None:
    """The last tensor of the file is one that is only read for its checksum."""
    steps = {"steps": ("I64", np.arange(3))}
    save(folder, {name: weights(k) | steps for k, name in enumerate(POOL)})


@pytest.mark.parametrize("harm", HARM, ids=lambda f: f.__name__)
@pytest.mark.parametrize("victim", ["base", "m2"])
@pytest.mark.parametrize("build", [write_models, mixed, with_counter], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", ["consensus", "ties"])
def test_input_changed_during_merge(
    rule: str,
    build: Callable[[Path], None],
    victim: str,
    harm: Callable[[Path], None],
    folder: Path,
) -> None:
    build(folder)
    base, *models = (folder / f"{name}.safetensors" for name in POOL)
    meddler = Meddler("merging", lambda: harm(folder / f"{victim}.safetensors"))
    with pytest.raises(FileError, match=f"{victim}.safetensors.*{HARM[harm]}"):
        negmerge.merge(base, models, rule, out=NEW, progress=meddler)
    assert not list((folder / "out").iterdir())


@pytest.mark.parametrize("harm", HARM, ids=lambda f: f.__name__)
@pytest.mark.parametrize("out", [NEW, "out/new"])
def test_base_changed_during_apply(out: str, harm: Callable[[Path], None], folder: Path) -> None:
    tau = negmerge.TaskVector.load("patch.safetensors")
    meddler = Meddler("applying", lambda: harm(folder / "base.safetensors"))
    with pytest.raises(FileError, match=f"base.safetensors.*{HARM[harm]}"):
        negmerge.apply("base.safetensors", -1 * tau, out, progress=meddler)
    assert not list((folder / "out").iterdir())


def test_patch_cut_during_apply(folder: Path) -> None:
    tau = negmerge.TaskVector.load("patch.safetensors")
    meddler = Meddler("applying", lambda: os.truncate("patch.safetensors", 100))
    with pytest.raises(FileError, match=r"patch.safetensors.*became shorter while it was read"):
        negmerge.apply("base.safetensors", -1 * tau, NEW, progress=meddler)
    assert not list((folder / "out").iterdir())


def test_a_link_under_the_temporary_name_is_not_followed(
    folder: Path, run: Callable[..., Ended]
) -> None:
    (folder / "out/.new.safetensors.negmerge-tmp").symlink_to("../m1.safetensors")
    before = (folder / "m1.safetensors").read_bytes()
    run(f"{ALL} -o {NEW}")
    assert (folder / "m1.safetensors").read_bytes() == before


# ------------------------------------------------------------------------------- remedies that work


def remedy(ended: Ended) -> list[str]:
    """The arguments of the command that an error proposes."""
    name, *arguments = shlex.split(ended.err[ended.err.index("negmerge convert") :])
    assert name == "negmerge"
    return arguments


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
@pytest.mark.parametrize("place", ["m2.safetensors", "two words/m2.safetensors"])
def test_remedy_for_a_prefix(
    prefix: str, place: str, folder: Path, run: Callable[..., Ended]
) -> None:
    prefixed("m2", prefix)(folder)
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / "m2.safetensors").rename(place)
    first = run("merge", "base.safetensors", "m1.safetensors", place, "-o", NEW)
    check_refused(first, (place, f"--strip-prefix {prefix}"))
    ok(run(*remedy(first)))
    assert (folder / "fixed.safetensors").exists()
    ok(run(f"merge base.safetensors m1.safetensors fixed.safetensors -o {NEW}"))
    write_models(folder)
    ok(run("merge base.safetensors m1.safetensors m2.safetensors -o out/plain.safetensors"))
    assert values(NEW) == values("out/plain.safetensors")


def test_remedy_for_a_prefix_of_the_base(folder: Path, run: Callable[..., Ended]) -> None:
    (folder / "wrapped").mkdir()
    prefixed("base", "module.")(folder / "wrapped")
    (folder / "base.safetensors").unlink()
    first = run(f"merge wrapped/base.safetensors m1.safetensors -o {NEW}")
    check_refused(first, ("wrapped/base.safetensors", "--strip-prefix module."))
    ok(run(*remedy(first)))
    ok(run(f"merge base.safetensors m1.safetensors -o {NEW}"))


def test_remedy_for_a_pickle(folder: Path, run: Callable[..., Ended]) -> None:
    import torch

    state = {k: torch.from_numpy(v.astype(np.float32)) for k, (_, v) in weights(1).items()}
    torch.save(state, folder / "m1.safetensors")
    first = run(f"merge base.safetensors m1.safetensors -o {NEW}")
    check_refused(first, ("m1.safetensors", "--trust"))
    ok(run(*remedy(first)))
    ok(run(f"merge base.safetensors model.safetensors -o {NEW}"))


@pytest.mark.parametrize("other", ["m2.safetensors", "copy.safetensors"])
def test_duplicates_on_request(other: str, folder: Path, run: Callable[..., Ended]) -> None:
    copied("m2.safetensors", "copy.safetensors")(folder)
    pool = f"base.safetensors m1.safetensors m2.safetensors {other}"
    assert run(f"merge {pool} -o {NEW}").code == 2
    assert "of 3" in ok(run(f"merge {pool} --allow-duplicates -o {NEW}")).out


# --------------------------------------------------------------------- odd input that must be taken


def values(path: str) -> dict[str, bytes]:
    """The values of a patch, dense."""
    tau = negmerge.TaskVector.load(path)
    return {name: entry.dense().tobytes() for name, entry in tau.entries.items()}


def test_one_model_gives_its_task_vector(folder: Path, run: Callable[..., Ended]) -> None:
    ok(run(f"merge base.safetensors m1.safetensors -o {NEW}"))

    def single(k: int, name: str) -> np.ndarray:
        return weights(k)[name][1].astype(np.float32).astype(np.float64)

    wanted = {name: (single(1, name) - single(0, name)).astype(np.float32) for name in SHAPES}
    assert all(change.any() for change in wanted.values())
    assert values(NEW) == {name: change.tobytes() for name, change in wanted.items()}


def test_opposite_models_give_an_empty_patch(folder: Path, run: Callable[..., Ended]) -> None:
    base = {name: ("F32", np.arange(7.0)) for name in (BLOCK, HEAD)}
    moved = {
        f"m{k}": {n: (d, v + sign * 0.5) for n, (d, v) in base.items()}
        for k, sign in ((1, 1), (2, -1))
    }
    save(folder, {"base": base} | moved)
    ended = ok(run(f"merge base.safetensors m1.safetensors m2.safetensors -o {NEW}"))
    assert "0 of 14 elements" in ended.out
    assert ended.err.startswith("warning: the patch has only zeros")
    ok(run(f"apply base.safetensors {NEW} --negate 1 -o out/same.safetensors"))
    assert (folder / "out/same.safetensors").read_bytes() == packed(base)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_zero_scale_gives_the_bytes_of_the_base(
    dtype: str, folder: Path, run: Callable[..., Ended]
) -> None:
    edited(0, lambda model: put(model, -0.0, 1e-310, 6e-8), dtype)(folder)
    ok(run(f"{ALL} -o patch.safetensors"))
    ok(run(f"apply base.safetensors patch.safetensors --negate 0 -o {NEW}"))
    assert (folder / NEW).read_bytes() == (folder / "base.safetensors").read_bytes()


def test_zero_scale_gives_the_files_of_a_folder(folder: Path, run: Callable[..., Ended]) -> None:
    make_sharded(folder / "sharded", k=0)
    (folder / "sharded/config.json").write_text("{}")
    ok(run("apply sharded patch.safetensors --add 0 -o out/new"))
    (folder / "out/new/README.md").unlink()
    assert snapshot(folder / "out/new") == snapshot(folder / "sharded")


def test_empty_and_scalar_tensors(folder: Path, run: Callable[..., Ended]) -> None:
    models = {
        name: weights(k)
        | {"empty": ("F32", np.zeros((0, 3))), "scalar": ("F32", np.float64(k).reshape(()))}
        | {"no_steps": ("I64", np.zeros(0))}
        for k, name in enumerate(POOL)
    }
    save(folder, models)
    ok(run(f"{ALL} -o patch.safetensors"))
    assert values("patch.safetensors")["scalar"] == np.float32(2).tobytes()
    assert values("patch.safetensors")["empty"] == b""
    ok(run(f"apply base.safetensors patch.safetensors --add 0.5 -o {NEW}"))
    with Checkpoint(folder / NEW) as model:
        assert {n: model.tensors[n].shape for n in ("empty", "scalar")} == {
            "empty": (0, 3),
            "scalar": (),
        }
        assert model.read(model.tensors["scalar"]).view(np.float32) == 1
    ok(run("inspect patch.safetensors"))
    ok(run("convert base.safetensors -o out/copy.safetensors"))


def test_only_empty_tensors(folder: Path, run: Callable[..., Ended]) -> None:
    nothing: Model = {"empty": ("F32", np.zeros((0, 3)))}
    save(folder, {"base": nothing, "m1": nothing})
    ok(run(f"merge base.safetensors m1.safetensors --allow-duplicates -o {NEW}"))
    ok(run(f"apply base.safetensors {NEW} --negate 1 -o out/same.safetensors"))
    assert (folder / "out/same.safetensors").read_bytes() == packed(nothing)


def test_equal_float8_is_copied(folder: Path, run: Callable[..., Ended]) -> None:
    scale = ("F8_E4M3", np.arange(250, 256))
    save(folder, {name: weights(k) | {"scale": scale} for k, name in enumerate(POOL)})
    ok(run(f"{ALL} -o patch.safetensors"))
    ok(run(f"apply base.safetensors patch.safetensors --negate 1 --dtype bfloat16 -o {NEW}"))
    with Checkpoint(folder / NEW) as model:
        assert model.tensors["scale"].dtype == "F8_E4M3"
        assert model.read(model.tensors["scale"]).tobytes() == encoded(*scale)


def test_hugging_face_cache(folder: Path, run: Callable[..., Ended]) -> None:
    cache = folder / "hub/models--x--y"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/rev").mkdir(parents=True)
    (folder / "m1.safetensors").rename(cache / "blobs/abc")
    (cache / "snapshots/rev/model.safetensors").symlink_to("../../blobs/abc")
    ok(run(f"merge base.safetensors {cache}/snapshots/rev m2.safetensors -o {NEW}"))


def test_revisions_may_share_a_shard(folder: Path, run: Callable[..., Ended]) -> None:
    """The cache stores equal shards once: two revisions are still two models."""
    cache = folder / "hub/models--x--y"
    make_sharded(folder / "base", k=0)
    (cache / "blobs").mkdir(parents=True)
    for k in (1, 2):
        revision = cache / f"snapshots/rev{k}"
        make_sharded(revision, k)
        (revision / "a.safetensors").rename(cache / "blobs/abc")
        (revision / "a.safetensors").symlink_to("../../blobs/abc")
    ok(run(f"merge base {cache}/snapshots/rev1 {cache}/snapshots/rev2 -o {NEW}"))


def test_names_are_never_paths_nor_markup(
    tmp_path: Path, folder: Path, run: Callable[..., Ended]
) -> None:
    odd = ["../../x", "/etc/x", "[/]", "[bold]x", "x\\", '"x"', "größe", "-o", "%s{0}"]
    models = {
        name: {o: ("F32", v) for o in odd for _, v in [weights(k)[HEAD]]}
        for k, name in enumerate(POOL)
    }
    save(folder, models)
    before = snapshot(tmp_path)
    ok(run(f"{ALL} -o out/p.safetensors"))
    ok(run("apply base.safetensors out/p.safetensors --negate 1 --shard-size 50B -o out/model"))
    for file in ("out/p.safetensors", "out/model", "base.safetensors"):
        assert "../../x" in ok(run(f"inspect {file}")).out
    new = {name for name in snapshot(tmp_path) if name not in before}
    assert all(name.startswith(("a/b/out/p.safetensors", "a/b/out/model")) for name in new)
    with Checkpoint("out/model") as model:
        assert sorted(model.tensors) == sorted(odd)


def test_the_longest_names_survive_the_patch(folder: Path, run: Callable[..., Ended]) -> None:
    long = "x" * 512
    save(folder, {name: {long: weights(k)[HEAD]} for k, name in enumerate(POOL)})
    ok(run(f"{ALL} --layout sparse -o {NEW}"))
    assert list(values(NEW)) == [long]


def test_a_file_name_that_is_not_utf_8(folder: Path, run: Callable[..., Ended]) -> None:
    odd = os.fsdecode(b"m\xff.safetensors")
    (folder / "m1.safetensors").rename(odd)
    ok(run("merge", "base.safetensors", odd, "m2.safetensors", "m3.safetensors", "-o", NEW))
    ok(run(f"inspect {NEW}"))


def test_many_kept_tensors_fit_the_patch(folder: Path, run: Callable[..., Ended]) -> None:
    kept = {f"{'long.name.' * 10}{k}": ("I64", np.zeros(1)) for k in range(300)}
    save(folder, {name: weights(k) | kept for k, name in enumerate(POOL)})
    ok(run(f"{ALL} -o {NEW}"))
    assert len(negmerge.TaskVector.load(NEW).origin.kept) == 300


def test_long_odd_file_names_fit_the_patch(folder: Path, run: Callable[..., Ended]) -> None:
    names = [f"{'é' * 110}{k}.safetensors" for k in range(20)]
    for k, name in enumerate(names):
        (folder / name).write_bytes(packed(weights(k + 1)))
    ok(run("merge", "base.safetensors", *names, "--digest", "-o", NEW))


@pytest.mark.parametrize(
    "text", ["[/x]", "[red", "\x1b[31mred", "\x1b]0;title\x07", "\u202e"], ids=ascii
)
@pytest.mark.parametrize("key", ["rule", "base", "options", "versions", "members"])
def test_inspect_shows_hostile_metadata_harmlessly(
    key: str, text: str, folder: Path, run: Callable[..., Ended]
) -> None:
    def change(metadata: dict[str, str]) -> None:
        members = json.loads(metadata["members"])
        members[0] |= {"fingerprint": text, "name": text}
        new = {"members": members, "options": {text: text}, "versions": {text: text}}
        metadata[key] = json.dumps(new[key]) if key in new else text

    write_damaged_patch(change, folder)
    ok(run("inspect bad.safetensors"))
    ok(run("inspect bad.safetensors --json"))


def test_the_index_may_be_formatted(folder: Path, run: Callable[..., Ended]) -> None:
    """The folders of the corpus are bad for one reason only: without it they are taken."""
    weight_map = make_sharded(folder / "good")
    text = json.dumps({"metadata": {"total_size": 124}, "weight_map": weight_map}, indent=2)
    (folder / "good" / INDEX).write_text(text + "\n")
    for command in ("merge base.safetensors good m2.safetensors", "convert good"):
        ok(run(f"{command} -o {NEW}"))
    ok(run("inspect good"))
