"""The Hugging Face Hub by the command line, with the real client and a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save

from adapters import write_adapter
from hub_server import TOKEN, HubServer, Repo
from image_folders import vit
from negmerge.api.push import push
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.errors import FileError
from negmerge.runs.store import Run
from negmerge.vectors.task_vector import TaskVector
from toys import run_toy, toy_scenario

MANY = """
import contextlib, io, json, os, sys
from negmerge.cli import main
for line in sys.stdin:
    asked = json.loads(line)
    os.environ |= asked["environment"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(asked["code"]) if "code" in asked else main(asked["words"])
        except SystemExit as ending:
            code = ending.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""
"""Runs one command after the other: each would import the same libraries for seconds."""
TOY = str(Path(__file__).parents[1] / "toy.py")
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with HubServer().running() as running:
        yield running


class Client:
    """Python with the environment of a user of this Hub, which runs one command after the other."""

    def __init__(self, server: HubServer, place: Path) -> None:
        home = {"HF_HOME": str(place / "hf"), "NEGMERGE_SCRATCH": str(place / "scratch")}
        variables = os.environ | ONLINE | home | {"HF_ENDPOINT": server.url, "COLUMNS": "150"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", MANY],
            cwd=place,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(
        self, *words: str, code: int = 0, source: str | None = None, **environment: str
    ) -> tuple[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {"words": words, "environment": {"HF_TOKEN": TOKEN} | environment}
        asked |= {} if source is None else {"code": source}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        ended, out, err = json.loads(self.process.stdout.readline())
        assert ended == code, err or out
        assert TOKEN not in out + err
        return out, err

    def python(self, code: str) -> str:
        """What some Python prints."""
        return self(code=0, source=code)[0]

    def refused(self, *words: str, **environment: str) -> str:
        """The one line of a command that fails."""
        out, err = self(*words, code=2, **environment)
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("error: ")
        return err.removeprefix("error: ")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    with toy_scenario():
        return run_toy(place / "run", title="Numbers | <b>are</b> forgotten")


@pytest.fixture(scope="module")
def client(server: HubServer, place: Path) -> Iterator[Client]:
    made = Client(server, place)
    yield made
    made.process.kill()
    made.process.communicate()


# ------------------------------------------------------------------------------------------ pushing


def test_a_dry_run_shows_what_would_be_sent_and_asks_for_nothing(run, client, server):
    server.requests.clear()
    push = ["push", "run", "me/forgot", "--what", "both", "--plugin", TOY]
    out, err = client(*push, "--dry-run")
    assert server.requests == []
    assert err == ""
    told = json.loads(client(*push, "--dry-run", "--json")[0])
    assert told["commit"] is None
    assert {*told["files"]} == {"model.safetensors", "patch.safetensors", "README.md"}
    assert told["card"] in out
    for name, size in told["files"].items():
        assert f"{size:,}  {name}\n" in out
    assert server.requests == []
    client(*push)
    sent = server.files("me/forgot")
    assert {name: len(raw) for name, raw in sent.items() if name != ".gitattributes"} == told[
        "files"
    ]
    assert sent["README.md"].decode() == told["card"]
    assert sent["model.safetensors"] == run.unlearned.read_bytes()
    assert sent["patch.safetensors"] == run.patch("consensus").read_bytes()
    assert server.tokens == {f"Bearer {TOKEN}"}
    assert len(server.repos["me/forgot"].commits) == 2  # one commit beside that of the Hub


def test_a_patch_is_applied_by_ids_alone(run, client, server, place):
    sha = server.add("me/original", {"model.safetensors": run.base.read_bytes()})
    client("push", "run", "me/patch", "--what", "patch", "--plugin", TOY)
    scale = str(run.result.first.scale)
    client("apply", "me/original", "me/patch", "--negate", scale, "-o", "by_id")
    made = (place / "by_id" / "model.safetensors").read_bytes()
    with Checkpoint(place / "by_id") as ours, Checkpoint(run.unlearned) as wanted:
        assert {*ours.tensors} == {*wanted.tensors}
        for name, info in wanted.tensors.items():
            assert bytes(ours.read(ours.tensors[name])) == bytes(wanted.read(info))
    card = (place / "by_id" / "README.md").read_text()
    assert f"`me/original@{sha}`" in card
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata == {"base_model": "me/original", "tags": ["negmerge"]}
    patch_sha = server.repos["me/patch"].sha("main")
    command = f"negmerge apply me/original@{sha} hf://me/patch@{patch_sha}/patch.safetensors"
    assert command in card
    words = [*command.split()[1:], "--negate", scale, "-o", "again"]
    client(*words)
    assert (place / "again" / "model.safetensors").read_bytes() == made
    assert '"kind": "patch"' in client("inspect", "me/patch", "--json")[0]
    assert '"kind": "checkpoint"' in client("inspect", "me/forgot", "--json")[0]


def test_private_is_private_and_never_a_public_model(run, client, server):
    push = ["push", "run", "--plugin", TOY, "--private"]
    client(*push, "me/hidden")
    assert server.repos["me/hidden"].private
    server.repos["me/seen"] = Repo(private=False)
    server.add("me/seen", {"README.md": b"mine"})
    assert "me/seen: is public, and --private was asked for" in client.refused(*push, "me/seen")
    assert server.files("me/seen") == {"README.md": b"mine"}


def test_errors_of_push_are_one_line(run, client, server, place):
    push = ["push", "run", "me/errors", "--plugin", TOY]
    assert "there is no token for the Hub; log in with" in client.refused(*push, HF_TOKEN="")
    assert "the Hub does not know the token (401)" in client.refused(*push, HF_TOKEN=TOKEN[::-1])
    refused = client.refused("push", "run", "others/forgot", "--plugin", TOY)
    assert "the token has no right to write to others (403)" in refused
    assert "wanted the id of a model on the Hub, USER/NAME" in client.refused("push", "run", "x")
    assert "is not a run" in client.refused("push", str(place), "me/errors")
    assert "me/errors" not in server.repos
    unfinished = place / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text("seed: 1\n")
    assert "is not finished" in client.refused("push", "unfinished", "me/errors")
    before = run.unlearned.read_bytes()
    run.unlearned.write_bytes(before[:-1] + b"x")
    try:
        assert "model.safetensors: has changed: sha256 " in client.refused(*push)
        assert "has changed" in client.refused(*push, "--dry-run")
    finally:
        run.unlearned.write_bytes(before)
    assert "me/errors" not in server.repos


def test_a_hub_that_is_away_is_one_line(run, client, server, monkeypatch):
    server.away = True
    try:
        err = client.refused("push", "run", "me/away", "--plugin", TOY)
        assert err.startswith("me/away: the Hub does not take the files: ")
        err = client.refused("inspect", "me/away")
        assert err.startswith("me/away: the Hub cannot be asked for this model: ")
    finally:
        server.away = False
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # this process is offline
    with toy_scenario(), pytest.raises(FileError, match=r"HF_HUB_OFFLINE is set; unset it$"):
        push(run, "me/away")


# ------------------------------------------------------------------------------------------ reading


@pytest.fixture(scope="module")
def pool(server: HubServer, place: Path, run: Run) -> list[str]:
    """A base and two members on the Hub, one of them with a tag."""
    import numpy as np
    from safetensors.numpy import load, save

    base = load(run.base.read_bytes())
    server.add("ours/base", {"model.safetensors": save(base), "config.json": b"{}"})
    for k in (1, 2):
        changed = {name: (w + k * np.float32(0.1)).astype(w.dtype) for name, w in base.items()}
        sha = server.add(f"ours/member{k}", {"model.safetensors": save(changed)})
        server.repos[f"ours/member{k}"].tags["v1"] = sha
    server.add("ours/member1", {"model.safetensors": b"a later commit"})
    return ["ours/base", "ours/member1@v1", "ours/member2"]


def test_models_are_merged_by_id_and_the_patch_records_commits(pool, client, server, place):
    client("merge", *pool, "-o", "merged.safetensors")
    origin = TaskVector.load(place / "merged.safetensors").origin
    first = server.repos["ours/member1"].tags["v1"]
    wanted = {f"ours/member1@{first}", f"ours/member2@{server.repos['ours/member2'].sha('main')}"}
    assert {origin.hub["0"], origin.hub["1"]} == wanted
    assert origin.hub["base"] == f"ours/base@{server.repos['ours/base'].sha('main')}"
    by_name = {member["name"]: origin.hub[str(k)] for k, member in enumerate(origin.members)}
    assert by_name["member1"].startswith("ours/member1@")
    for name in ("base", "member2"):
        folder = place / "local" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(
            server.files(f"ours/{name}")["model.safetensors"]
        )
    folder = place / "local" / "member1"
    folder.mkdir()
    files = server.repos["ours/member1"].commits[first]
    (folder / "model.safetensors").write_bytes(files["model.safetensors"])
    names = [f"local/{name}" for name in ("base", "member1", "member2")]
    client("merge", *names, "-o", "here.safetensors")
    here = TaskVector.load(place / "here.safetensors")
    assert here.origin.hub == {}
    assert here.origin.members == origin.members
    told = json.loads(client("inspect", "merged.safetensors", "--json")[0])
    assert told["hub"] == origin.hub
    assert "on the Hub" in client("inspect", "merged.safetensors")[0]


def test_a_local_folder_comes_before_a_model_of_the_hub(pool, client, server, place):
    (place / "ours" / "base").mkdir(parents=True)
    (place / "ours" / "base" / "model.safetensors").write_bytes(
        server.files("ours/base")["model.safetensors"]
    )
    server.requests.clear()
    client("inspect", "ours/base")
    assert server.requests == []


def test_what_is_neither_here_nor_there_is_one_line(client, server):
    err = client.refused("inspect", "ours/nothing")
    assert "ours/nothing: the Hub has no such model, or hides it" in err
    assert "there is no such file or folder here, either" in err
    err = client.refused("inspect", "ours/member2@v9")
    assert "ours/member2: the Hub has no such revision of it" in err
    server.requests.clear()
    assert "no such file" in client.refused("inspect", "ours/nothing.safetensors")
    assert server.requests == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_is_a_member_by_its_id(client, server, place):
    base = {"q.weight": torch.eye(4), "k.weight": torch.ones(3, 4)}
    server.add("ours/small", {"model.safetensors": save(base), "config.json": b"{}"})
    pair = {"q.lora_A.weight": torch.ones(2, 4), "q.lora_B.weight": torch.ones(4, 2)}
    folder = write_adapter(place / "adapter", pair, base_model_name_or_path="ours/small")
    sha = server.add("ours/lora", contents(folder))
    client("merge", "ours/small", "ours/lora", "-o", "lora.safetensors")
    made = TaskVector.load(place / "lora.safetensors")
    assert made.origin.hub["0"] == f"ours/lora@{sha}"
    assert torch.equal(made["q.weight"], torch.full((4, 4), 4.0))  # alpha / r · BA


CLASSIFIER = """
from negmerge.checkpoints.model_folder import base_of
from negmerge.vision.pretrained import image_model
model = image_model("ours/vit")
print(model.classes, model.preparation.size, base_of(model.name, model.path))
"""
CLIP = """
from negmerge.scenarios.clip.pretrained import ClipSource
source = ClipSource("ours/clip")
print(source.size, source.base)
"""


@pytest.mark.slow
def test_models_of_runs_are_found_by_id(client, server, place):
    """Of a repository with pickles and code, neither is fetched."""
    card = b"---\nlicense: apache-2.0\n---\n"
    more = {"README.md": card, "pytorch_model.bin": b"a pickle", "model.py": b"raise SystemExit"}
    sha = server.add("ours/vit", contents(vit(place / "vit")) | more)
    config = {"model_cfg": {"embed_dim": 8, "vision_cfg": {"image_size": 16}, "text_cfg": {}}}
    files = {"open_clip_config.json": json.dumps(config).encode(), "README.md": card}
    clip_sha = server.add("ours/clip", files | {"open_clip_pytorch_model.bin": b"a pickle"})
    server.requests.clear()
    base = {"base_model": "ours/vit", "base_commit": sha, "licence": "apache-2.0"}
    assert client.python(CLASSIFIER) == f"10 16 {base}\n"
    base = {"base_model": "ours/clip", "base_commit": clip_sha, "licence": "apache-2.0"}
    assert client.python(CLIP) == f"16 {base}\n"
    fetched = " ".join(server.requests)
    assert "model.safetensors" in fetched
    assert ".bin" not in fetched
    assert ".py" not in fetched
