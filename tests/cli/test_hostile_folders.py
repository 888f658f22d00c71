"""Every verb over hostile folders: no file outside is opened or changed, no code runs, no prompt.

All commands run in one process under an audit hook (`audited.py`). What must not be touched exists
and is worth stealing: a control at the end shows that the hook sees it touched.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Features
from datasets import Image as ImageFeature

from clips import make_clip, make_sets, png
from hostile import INDEX, make_pool, make_sharded, packed, weights
from negmerge.runs.recipe import check_recipe

SECRET = "CANARY-7f3a"  # noqa: S105
CLIP = {
    "data": {"name": "mnist"},
    "clip": {"control": {"name": "cifar10"}},
    "pool": {"grid": {"epochs": [1]}},
    "methods": ["consensus"],
}
TINY = {
    "title": SECRET,
    "data": {"name": "fashion_small", "limit": {"train": 60, "test": 30}},
    "retrain": None,
    "train": {"epochs": 1},
    "pool": {"grid": {"epochs": [1]}},
    "methods": ["consensus"],
}
CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast as Tokenizer
"""
AUTO_MAP = {"AutoTokenizer": ["canary_module.Tokenizer", "canary_module.Tokenizer"]}

Build = Callable[["Place"], object]


@dataclass
class Place:
    """The folder of a case, beside `outside`, which holds what it must not reach."""

    root: Path
    here: Path

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def json(self, name: str, tree: object) -> None:
        (self.here / name).parent.mkdir(parents=True, exist_ok=True)
        (self.here / name).write_text(json.dumps(tree))

    def link(self, name: str, target: str) -> None:
        """Replace a file or a folder of the case by a link to something outside."""
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        assert (self.outside / target).exists(), "a target that is missing proves nothing"
        path.symlink_to(self.outside / target)


@dataclass(frozen=True)
class Case:
    """A command over a folder that `build` makes; `wanted` is what its one line must hold."""

    name: str
    command: tuple[str, ...]
    build: Build
    wanted: tuple[str, ...] = ()
    code: int = 2


@dataclass
class Result:
    """What came of a command."""

    code: int = 0
    out: str = ""
    err: str = ""
    seen: list[str] = field(default_factory=list)


CASES: list[Case] = []


def case(name: str, command: str, build: Build, *wanted: str, code: int = 2) -> None:
    CASES.append(Case(name, tuple(command.split()), build, wanted, code))


# -------------------------------------------------------------------------------------------- CLIPs


def clip_folder(place: Place) -> Path:
    shutil.copytree(place.root / "clip", place.here, dirs_exist_ok=True)
    return place.here


def clip_with(section: str, fields: dict[str, Any], *more: Build) -> Build:
    """A CLIP whose configuration says more; `{root}` in a text is the place of all cases."""

    def build(place: Place) -> None:
        path = clip_folder(place) / "open_clip_config.json"
        tree = json.loads(path.read_text())
        at = tree
        for name in section.split("."):
            at = at.setdefault(name, {}) if name else at
        at.update(json.loads(json.dumps(fields).replace("{root}", str(place.root))))
        path.write_text(json.dumps(tree))
        for one in more:
            one(place)

    return build


def with_code(place: Place) -> None:
    """Python of the folder's own, and files that ask for it."""
    marker = str(place.root / "marker")
    (place.here / "canary_module.py").write_text(CODE.format(marker=marker))
    shutil.copyfile(place.root / "tokenizer.json", place.here / "tokenizer.json")
    place.json("tokenizer_config.json", {"auto_map": AUTO_MAP})


def with_tokenizer(place: Place, **fields: Any) -> None:
    shutil.copyfile(place.root / "tokenizer.json", place.here / "tokenizer.json")
    place.json("tokenizer_config.json", {"pad_token": "<pad>"} | fields)


def transformers_clip(place: Place) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "clip", "vision_config": small, "text_config": small}
    place.json("config.json", config | {"auto_map": {"AutoModel": "canary_module.Model"}})
    with_code(place)


OWN = {"hf_tokenizer_name": "own"}
UNLEARN_CLIP = "unlearn {root}/clip.yaml --set model.name={here} --out {here}/out"


def clip_cases() -> None:
    def refused(name: str, build: Build, *wanted: str) -> None:
        case(f"clip-{name}", UNLEARN_CLIP, build, *wanted)

    trusted = OWN | {"tokenizer_kwargs": {"trust_remote_code": True}}
    refused(
        "trusts-its-own-code",
        clip_with("model_cfg.text_cfg", trusted, with_code),
        "open_clip_config.json: model_cfg.text_cfg.tokenizer_kwargs.trust_remote_code",
    )
    asks = clip_with("model_cfg.text_cfg", OWN, with_code)
    refused("asks-for-its-code", asks, "tokenizer_config.json: auto_map")
    text = "open_clip_config.json: model_cfg.text_cfg"
    for name, fields, wanted in (
        ("text-from-a-folder", {"hf_model_name": "{root}/outside/model"}, "hf_model_name"),
        ("text-from-the-hub", {"hf_model_name": "someone/evil"}, "hf_model_name"),
        ("merges", {"tokenizer_kwargs": {"bpe_path": "{root}/outside/bpe.gz"}}, "bpe_path"),
        ("gguf", OWN | {"tokenizer_kwargs": {"gguf_file": "../outside/a.gguf"}}, "gguf_file"),
        ("syntax", {"tokenizer_kwargs": {"reduction_mask": "syntax"}}, "reduction_mask"),
        ("layers", {"layers": 10**12}, "layers"),
        ("width", {"width": -1}, "width"),
        ("unknown", {"no_such_field": 1}, "no_such_field"),
    ):
        refused(f"text-{name}", clip_with("model_cfg.text_cfg", fields), text, wanted)
    for name in ("local-dir:{root}/outside/model", "hf-hub:someone/evil", "../x"):
        fields = {"timm_model_name": name}
        build = clip_with("model_cfg.vision_cfg", fields)
        refused(f"timm-{name.partition(':')[0]}", build, "model_cfg.vision_cfg.timm_model_name")
    refused("class", clip_with("model_cfg", {"cast_dtype": "x"}), "model_cfg.cast_dtype")
    refused("top", clip_with("", {"auto_map": AUTO_MAP}), "open_clip_config.json: auto_map")
    shown = clip_with("preprocess_cfg", {"transform": "x"})
    refused("preprocess", shown, "preprocess_cfg.transform")

    def names_a_file(place: Place) -> None:
        (place.here / "tokenizer.json").unlink(missing_ok=True)
        there = str(place.outside / "tokenizer.json")
        place.json("tokenizer_config.json", {"tokenizer_file": there, "vocab_file": there})

    build = clip_with("model_cfg.text_cfg", OWN, names_a_file)
    refused("tokenizer-elsewhere", build, "tokenizer.json")
    refused("transformers", transformers_clip, "config.json: auto_map")

    for name, target in (
        ("open_clip_config.json", "open_clip_config.json"),
        ("open_clip_model.safetensors", "model.safetensors"),
        ("class_embeddings.safetensors", "model.safetensors"),
    ):
        build = clip_with("", {}, lambda p, n=name, t=target: p.link(n, t))
        refused(f"link-{name}", build, name, "links to", "outside")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        build = clip_with(
            "model_cfg.text_cfg", OWN, with_tokenizer, lambda p, n=name: p.link(n, "tokenizer.json")
        )
        refused(f"link-{name}", build, name, "links to", "outside")
    case(
        "reproduce",
        "reproduce T3 --set model.name={here} --set data.root={root}/data --out {here}/out",
        clip_with("model_cfg.text_cfg", trusted, with_code),
        "trust_remote_code",
    )


# ----------------------------------------------------------------------------------- model folders


def model_folder(place: Place) -> Path:
    folder = place.here / "model"
    make_sharded(folder, 0)
    (folder / "config.json").write_text("{}")
    return folder


def side_file(make: Callable[[Path, Place], object]) -> Build:
    return lambda place: make(model_folder(place) / "tokenizer.json", place)


def model_cases() -> None:
    apply = "apply {here}/model {root}/patch.safetensors --negate 1 -o {here}/out"
    out = side_file(lambda path, p: path.symlink_to(p.outside / "secret.txt"))
    case("side-link", apply, out, "tokenizer.json", "links to", "outside")
    case("side-link-other-dtype", f"{apply} --dtype bfloat16", out, "tokenizer.json", "links to")
    device = side_file(lambda path, p: path.symlink_to("/dev/zero"))
    case("side-device", apply, device, "tokenizer.json", "links to /dev/zero")
    fifo = side_file(lambda path, p: os.mkfifo(path))
    case("side-fifo", apply, fifo, "tokenizer.json", "not a regular file")
    nowhere = side_file(lambda path, p: path.symlink_to("nowhere"))
    case("side-dangling", apply, nowhere, "tokenizer.json", "no such file")
    for name, command in (
        ("file", apply + ".safetensors"),
        ("inspect", "inspect {here}/model"),
        ("convert", "convert {here}/model -o {here}/out.safetensors"),
    ):
        case(f"side-link-{name}", command, out, code=0)

    def index(place: Place) -> None:
        model_folder(place)
        place.link(f"model/{INDEX}", "index.json")

    member = "{root}/m1.safetensors"
    for name, command in (
        ("apply", apply),
        ("base", f"merge {{here}}/model {member} -o {{here}}/out.safetensors"),
        ("member", f"merge {member} {{here}}/model -o {{here}}/out.safetensors"),
        ("inspect", "inspect {here}/model"),
        ("convert", "convert {here}/model -o {here}/out.safetensors"),
    ):
        case(f"index-link-{name}", command, index, INDEX, "links to", "outside")

    def cached(target: str) -> Build:
        def build(place: Place) -> None:
            folder = place.here / "hub/models--x--y/snapshots/rev"
            make_sharded(folder, 0)
            blob = place.here / "hub/models--x--y/blobs/abc"
            blob.parent.mkdir()
            blob.write_text("honest")
            (folder / "tokenizer.json").symlink_to(target.format(outside=place.outside))

        return build

    snapshot = "{here}/hub/models--x--y/snapshots/rev"
    applied = f"apply {snapshot} {{root}}/patch.safetensors --negate 1 -o {{here}}/out"
    case("side-cache", applied, cached("../../blobs/abc"), code=0)
    case("side-cache-out", applied, cached("{outside}/secret.txt"), "tokenizer.json", "links to")

    def pickle(place: Place) -> None:
        class Evil:
            def __reduce__(self):
                return Path.write_text, (place.root / "marker", "ran")

        torch.save({"w": torch.ones(2), "evil": Evil()}, place.here / "a.pt")

    case("pickle", "convert {here}/a.pt -o {here}/a.safetensors", pickle, "--trust")
    trusted = "convert {here}/a.pt --trust -o {here}/a.safetensors"
    case("pickle-trusted", trusted, pickle, "cannot be read as plain weights")


# ------------------------------------------------------------------------------------- run folders

VERBS = {
    "unlearn": "unlearn {root}/tiny.yaml --out {here}/run",
    "report": "report {here}/run",
    "verify": "verify {here}/run",
    "inspect": "inspect {here}/run",
}
LINKS = {
    "patches": "keep",
    "sweeps": "keep",
    "pool": "keep",
    "rivals": "keep",
    "report": "keep",
    "report/data": "keep",
    "report/tables": "keep",
    "report/figures": "keep",
    ".state": "keep",
    "unlearned": "keep",
    "recipe.yaml": "recipe.yaml",
    "scores.json": "scores.json",
    "manifest.json": "scores.json",
    "journal.json": "scores.json",
    "base.safetensors": "model.safetensors",
    "report/index.html": "secret.txt",
    "pool/a/b/c": "secret.txt",
    ".lock": "secret.txt",
}


def run_folder(place: Place, **changes: Any) -> None:
    run = place.here / "run"
    for name in ("patches", "sweeps", "pool", "report/data"):
        (run / name).mkdir(parents=True)
    recipe = check_recipe(TINY | {"title": "honest"}, "tiny").dump()
    (run / "recipe.yaml").write_text(recipe)
    manifest = {"format": "negmerge-run/1", "files": {}, "versions": {}, "result": ""} | {
        "problem": ""
    }
    scores: dict[str, Any] = {"methods": [], "pool": [], "retrain": None, "warnings": []}
    for name, tree in (("manifest.json", manifest), ("scores.json", scores)):
        place.json(f"run/{name}", tree | changes.get(name.partition(".")[0], {}))


def run_cases() -> None:
    for name, target in LINKS.items():
        for verb, command in VERBS.items():

            def build(place: Place, name: str = name, target: str = target) -> None:
                run_folder(place)
                place.link(f"run/{name}", target)

            case(f"run-{verb}-{name}", command, build, f"run/{name}: is a link", "remove it")
    for verb in ("report", "inspect"):

        def reached(place: Place) -> None:
            run_folder(place)
            (place.here / "run/manifest.json").unlink()
            (place.here / "run").rename(place.here / "elsewhere")
            (place.here / "run").symlink_to(place.here / "elsewhere")

        case(f"run-{verb}-reached-by-a-link", VERBS[verb], reached, code=0)

    def fifo(place: Place) -> None:
        run_folder(place)
        os.mkfifo(place.here / "run/sweeps/consensus.csv")

    for verb, command in VERBS.items():
        case(f"run-{verb}-fifo", command, fifo, "consensus.csv: is neither a file nor a folder")
    up = "../../../../outside/sweep"
    method = {"method": up, "scale": 0.5, "criterion": "keep_retain", "sparsity": 0.5}
    named = {"methods": [method]}
    case("run-scores-names", VERBS["report"], lambda p: run_folder(p, scores=named), code=0)
    listed = {"files": {"../../../outside/sweep.csv": {"bytes": 1, "sha256": "0" * 64}}}
    for verb, code in (("report", 0), ("verify", 2)):
        said = ["leads out of the run"] if code else []
        build = lambda p: run_folder(p, manifest=listed)  # noqa: E731
        case(f"run-{verb}-manifest-names", VERBS[verb], build, *said, code=code)


# ------------------------------------------------------------------------------------ data folders

UNLEARN_SET = (
    "unlearn {root}/tiny.yaml --set data.name={here}/set --set data.size=8 "
    "--set data.limit={{}} --out {here}/out"
)


def card(text: str, name: str = "README.md") -> Build:
    def build(place: Place) -> None:
        (place.here / "set").mkdir()
        text_ = text.replace("{root}", str(place.root))
        (place.here / "set" / name).write_text(f"---\n{text_}\n---\n" if name[0] != "." else text_)

    return build


def data_cases() -> None:
    def refused(name: str, build: Build, *wanted: str) -> None:
        case(f"data-{name}", UNLEARN_SET, build, *wanted)

    def script(place: Place) -> None:
        (place.here / "set").mkdir()
        for name in ("set.py", "canary_module.py"):
            marker = str(place.root / "marker")
            (place.here / "set" / name).write_text(CODE.format(marker=marker))

    refused("script", script, "cannot be read")
    files = "configs:\n- config_name: default\n  data_files: {}"
    for name, where in (
        ("up", "../../../outside/pictures.parquet"),
        ("absolute", "{root}/outside/pictures.parquet"),
        ("url", "https://example.invalid/a.parquet"),
        ("hops", "zip://a.parquet::{root}/outside/a.zip"),
    ):
        wanted = ("README.md", "configs.0.data_files")
        refused(f"card-{name}", card(files.format(where)), *wanted)
    split = "\n  - split: train\n    path: [a.parquet, ../../../outside/pictures.parquet]"
    refused("card-split", card(files.format(split)), "README.md", "configs.0.data_files.0.path.1")
    folder = "configs:\n- config_name: default\n  data_dir: ../../../outside"
    refused("card-folder", card(folder), "README.md", "configs.0.data_dir")
    refused("card-hidden", card(files.format("../x.parquet"), ".huggingface.yaml"), "data_files")

    def linked(place: Place) -> None:
        (place.here / "set").mkdir()
        place.link("set/README.md", "card.md")

    refused("card-link", linked, "README.md", "links to")

    def rows(place: Place) -> None:
        (place.here / "set").mkdir()
        path = str(place.outside / "secret.png")
        lines = [{"image": {"bytes": None, "path": path}, "label": k % 2} for k in range(4)]
        for split in ("train", "test"):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (place.here / "set" / f"{split}.jsonl").write_text(text)

    refused("json-paths", rows, "json", "wanted parquet")

    def arrow(place: Place) -> None:
        (place.here / "set").mkdir()
        path = str(place.outside / "secret.png")
        columns = {"image": [{"bytes": None, "path": path}] * 4, "label": [0, 1, 0, 1]}
        features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
        table = pa.table(columns, schema=features.arrow_schema)
        for split in ("train", "test"):
            with pa.ipc.new_stream(str(place.here / f"set/{split}.arrow"), table.schema) as file:
                file.write_table(table)

    refused("arrow-paths", arrow, "arrow", "wanted parquet")

    def metadata(place: Place) -> None:
        for split in ("train", "test"):
            (place.here / "set" / split).mkdir(parents=True)
            shutil.copyfile(place.root / "honest.png", place.here / "set" / split / "a.png")
            lines = f"file_name,label\n../../../../outside/secret.png,0\na.png,1\n{split}"
            (place.here / "set" / split / "metadata.csv").write_text(lines)

    refused("metadata", metadata, "set: cannot be read")


clip_cases()
model_cases()
run_cases()
data_cases()
for kind in ("rules", "datasets", "models", "recipes", "tables"):
    case(f"list-{kind}", f"list {kind}", clip_with("model_cfg.text_cfg", OWN, with_code), code=0)


# ---------------------------------------------------------------------------------------- the tests


def fill_outside(outside: Path, root: Path) -> None:
    """What hostile folders lead to: each file is whole and of the kind that is asked for."""
    (outside / "keep").mkdir(parents=True)
    for name in ("secret.txt", "keep/one.safetensors", "keep/two.csv", "keep/three.txt"):
        (outside / name).write_text(SECRET)
    (outside / "recipe.yaml").write_text(check_recipe(TINY, "tiny").dump())
    scores = {"format": "negmerge-run/1", "title": SECRET, "files": {}, "versions": {}}
    (outside / "scores.json").write_text(json.dumps(scores | {"result": SECRET, "methods": []}))
    (outside / "model.safetensors").write_bytes(packed(weights(0)))
    for name in ("a.safetensors", "b.safetensors"):
        (outside / name).write_bytes(packed(weights(0)))
    weight_map = {"blocks.0.weight": "a.safetensors", "head.bias": "b.safetensors"}
    (outside / "index.json").write_text(json.dumps({"weight_map": weight_map, "x": SECRET}))
    for name in ("sweep.csv", "sweep.safetensors"):
        (outside / name).write_text(f"scale,acc_retain,acc_forget,{SECRET}\n0.5,90,10,1\n")
    shutil.copyfile(root / "clip/open_clip_config.json", outside / "open_clip_config.json")
    shutil.copyfile(root / "tokenizer.json", outside / "tokenizer.json")
    (outside / "bpe.gz").write_bytes(gzip.compress(SECRET.encode()))
    (outside / "a.gguf").write_text(SECRET)
    (outside / "model").mkdir()
    (outside / "model/config.json").write_text(json.dumps({"auto_map": AUTO_MAP}))
    (outside / "secret.png").write_bytes((root / "honest.png").read_bytes())
    shutil.copyfile(root / "data/cifar10/train.parquet", outside / "pictures.parquet")
    (outside / "card.md").write_text(f"---\ntitle: {SECRET}\n---\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    make_sets(root / "data", train=20, test=10)
    make_clip(root / "clip")
    desk = Path(sys.modules["negmerge"].__file__ or "").parent / "assets/desk_clip"
    shutil.copyfile(desk / "tokenizer.json", root / "tokenizer.json")
    picture: Any = png(np.zeros((8, 8, 3), np.uint8))["bytes"]
    (root / "honest.png").write_bytes(picture)
    make_pool(root)
    fill_outside(root / "outside", root)
    clip = CLIP | {"data": CLIP["data"] | {"root": str(root / "data")}}
    (root / "clip.yaml").write_text(json.dumps(clip))
    (root / "tiny.yaml").write_text(json.dumps(TINY | {"title": "honest"}))
    return root


def tree_of(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def written(folder: Path) -> Iterator[Path]:
    """The files that a command could have written: no links, nothing behind them."""
    for here, _, names in os.walk(folder):
        for name in names:
            path = Path(here, name)
            if path.is_file() and not path.is_symlink():
                yield path


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, Result]:
    """What came of every command, and of the control."""
    commands: list[list[str]] = []
    for number, one in enumerate(CASES):
        here = place / "cases" / str(number)
        here.mkdir(parents=True)
        one.build(Place(place, here))
        commands.append([part.format(root=place, here=here) for part in one.command])
    trusted = next(k for k, one in enumerate(CASES) if one.name == "clip-trusts-its-own-code")
    control = f"""
import socket
from transformers import AutoTokenizer
open({str(place / "cases" / str(LINKED) / "model/tokenizer.json")!r}).close()
AutoTokenizer.from_pretrained({str(place / "cases" / str(trusted))!r}, trust_remote_code=True)
try:
    input()
except EOFError:
    pass
"""
    plan = {"outside": [str(place / "outside")], "commands": commands, "control": control}
    plan |= {"marker": str(place / "marker")}
    (place / "plan.json").write_text(json.dumps(plan))
    before = tree_of(place / "outside")
    with (place / "stdin").open("w+") as stdin:
        stdin.write("y\n" * 100)
        stdin.flush()
        stdin.seek(0)
        process = subprocess.run(
            [sys.executable, str(Path(__file__).parents[1] / "audited.py"), "plan.json"],
            cwd=place,
            env=os.environ | {"NEGMERGE_CACHE": str(place / "cache"), "HF_HOME": str(place / "hf")},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    assert tree_of(place / "outside") == before
    lines = [Result(**json.loads(line)) for line in process.stdout.splitlines()]
    return dict(zip([*(one.name for one in CASES), "control"], lines, strict=True))


LINKED = next(k for k, one in enumerate(CASES) if one.name == "side-link")


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_nothing_outside_is_touched_and_no_code_runs(
    one: Case, results: dict[str, Result], place: Path
):
    result = results[one.name]
    assert result.seen == []
    assert result.code == one.code, result.err
    assert SECRET not in result.out + result.err
    if one.code:
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1
    for part in one.wanted:
        assert part in result.err
    here = place / "cases" / str(CASES.index(one))
    assert not (here / "out").exists() or not one.code
    for path in written(here):
        assert SECRET.encode() not in path.read_bytes(), path


def test_the_hook_sees_what_is_forbidden(results: dict[str, Result], place: Path):
    """Without this, an empty record would prove nothing."""
    assert results["control"].code == 0, "a command read from standard input"
    assert results["control"].err == ""
    assert (place / "marker").read_text() == "ran", "the control ran the hostile code"
    seen = " ".join(results["control"].seen)
    assert "model/tokenizer.json" in seen
    assert "exec of canary_module" in seen
    assert "builtins.input" in seen
