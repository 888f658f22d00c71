"""Fuzz every reader of outside text: each case must give a result or a NegMergeError, in time.

    python benchmarks/fuzz.py --record     # writes benchmarks/results/fuzz.md
    python benchmarks/fuzz.py --cases 500 --only recipe scores --seed 3

A case is a valid seed with a few mutations: bytes flipped, cut, repeated or replaced by awkward
tokens, or, where the seed is JSON, values of its tree replaced, removed or nested. The same seed
number gives the same cases. A fault is written to a file under `--keep`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, markdown_table

from negmerge.errors import MismatchError, NegMergeError

CASES = 7000
"""The number of cases for each target."""
SECONDS = 10.0
"""A case that takes longer is a fault; the limit is generous because machines may be busy."""
ROOM = 3 << 30
"""The memory, in bytes, that the cases may use in addition to that of the process."""

Read = Callable[[Path], object]


@dataclass
class Target:
    """A reader to test.

    Args:
        name: of the reader.
        seeds: valid inputs.
        read: reads a file.
        whole: whether seeds are JSON, whose tree is also mutated.
        wrapped: turns the mutated JSON into the content of a file.
    """

    name: str
    seeds: list[bytes]
    read: Read
    whole: bool = False
    wrapped: Callable[[bytes], bytes] = lambda raw: raw


@dataclass
class Found:
    """The results of the cases of a target."""

    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


class HangError(BaseException):
    """A case took too long; not an Exception, so that no reader catches it."""


# ----------------------------------------------------------------------------------------- mutation

TOKENS = [
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"0x" + b"f" * 4000, b"1_0:59:59", b"[" * 300,
    b"{" * 50, b'{"a":', b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"../../x",
    b"/etc/passwd", b"x" * 5000, b"&a ", b"*a ", b"<<: *a\n", b"!!python/name:os.system ",
    b"!!bool ",
    b"!!int ''", b"!!timestamp x", b"? ", b"- - - ", b"| \n", b"\r\n", b"\t", b"\x1b[31m", b'"',
    b"'",
    b",", b"null", b"true", b"-1", b"1.5", b"~x/", b"#", b"\xe2\x80\xae", b"2020-01-01",
    b"PK\x03\x04",
    b"\x80\x02", b"c__builtin__\neval\n", b"%s{0}",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**39, 10**45, 0.5, 1e308, -0.0, "", "x",
    "\0",
    "a\nb", "\ud800", "x" * 600, "../x", "/etc/passwd", "F32", "[1]", [], {}, [[]], [None],
    {"": ""},
    [1, 2], {"a": {"b": []}}, "nan", "9" * 5000, [0] * 1000,
]  # fmt: skip


def mutated(draw: random.Random, raw: bytes) -> bytes:
    """The bytes with one to four changes."""
    for _ in range(draw.randint(1, 4)):
        at, to = sorted(draw.randint(0, len(raw)) for _ in range(2))
        to = min(to, at + draw.choice([1, 4, 40, 4000]))
        kind = draw.randrange(7)
        if kind == 0 and raw:
            place = min(at, len(raw) - 1)
            raw = raw[:place] + bytes([raw[place] ^ 1 << draw.randrange(8)]) + raw[place + 1 :]
        elif kind == 1:
            raw = raw[:at]
        elif kind == 2:
            raw = raw[:at] + raw[to:]
        elif kind == 3:
            raw = raw[:to] + raw[at:to] * draw.choice([1, 2, 30]) + raw[to:]
        elif kind == 4:
            raw = raw[:at] + draw.choice(TOKENS) + raw[at:]
        elif kind == 5:
            raw = raw[:at] + draw.choice(TOKENS) + raw[to:]
        else:
            raw = raw[:at] + draw.randbytes(draw.randint(1, 8)) + raw[to:]
    return raw[: 1 << 18]


def replanted(draw: random.Random, tree: Any) -> Any:
    """The tree with one to three of its values replaced, removed, renamed or nested."""
    tree = deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return draw.choice(VALUES)
        parent, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind <= 2:
            parent[key] = deepcopy(draw.choice(VALUES))
        elif kind == 3:
            del parent[key]
        elif kind == 4:
            for _ in range(draw.choice([1, 3, 70])):
                parent[key] = draw.choice([[parent[key]], {"a": parent[key]}])
        elif isinstance(parent, dict):
            parent[draw.choice([v for v in VALUES if isinstance(v, str)])] = parent.pop(key)
        else:
            parent.append(parent[key])
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield node, key
            if isinstance(value, dict | list):
                waiting.append(value)


def case_of(draw: random.Random, target: Target) -> bytes:
    """One input for a target."""
    seed = draw.choice(target.seeds)
    if target.whole and draw.random() < 0.6:
        tree = replanted(draw, json.loads(seed))
        seed = json.dumps(tree).encode()
        if draw.random() < 0.8:
            return target.wrapped(seed)
    return (
        target.wrapped(mutated(draw, seed))
        if draw.random() < 0.7
        else mutated(draw, target.wrapped(seed))
    )


# ------------------------------------------------------------------------------------------ targets


def targets(folder: Path) -> list[Target]:
    """All readers with their seeds; other files that readers need are written to the folder."""
    return [*_recipes(folder), *_lists(), *_models(folder), *_runs(folder), *_others(folder)]


RECIPE = b"""title: A small run
seed: 3
data: {name: fashion_small, limit: {train: 300, test: 100}}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: &t {epochs: 6, batch: 32, lr: 0.05, augment: {crop: 2, flip: true}}
pool:
  settings: {<<: *t, momentum: 0.9}
  grid: {epochs: [2, 3], label_smoothing: [0.0, 0.1]}
methods: [ties, {name: consensus, options: {quorum: 0.7}, label: most}, {name: salun, tune: true}]
search: {stop: 1.0, count: 5, limit: 2.0}
"""
CLIP = b"{data: {name: cars}, clip: {pretrained: openai, control: {name: imagenet}}, pool: {}}"
CHANGES = [b"seed=3", b"pool.grid={lr: [0.1, 0.2]}", b"methods=[ties, {name: magmax}]", b"a.b=c"]


def _recipes(folder: Path) -> list[Target]:
    from negmerge.cli.arguments import key_values, size
    from negmerge.runs.checks import check_methods
    from negmerge.runs.recipe import load_recipe

    def recipe(path: Path) -> None:
        found = load_recipe(path)
        check_methods(found)
        found.dump()

    small = folder / "small.yaml"
    small.write_text("{seed: 1, search: {stop: 1.0}}")

    def change(path: Path) -> None:
        load_recipe(small, [path.read_bytes().decode(errors="surrogateescape")])

    def option(path: Path) -> None:
        key_values([path.read_bytes().decode(errors="surrogateescape")])

    def memory(path: Path) -> None:
        size(path.read_bytes().decode(errors="surrogateescape"), "--max-memory")

    as_json = json.dumps({"data": {"name": "mnist"}, "pool": {"grid": {"lr": [1, 2]}}}).encode()
    return [
        Target("recipe", [RECIPE, CLIP, as_json], recipe),
        Target("recipe tree", [as_json, _recipe_tree()], recipe, whole=True),
        Target("--set", CHANGES, change),
        Target("--option", [b"quorum=0.8", b"reduce=min"], option),
        Target("sizes", [b"1.5GiB", b"500MB"], memory),
    ]


def _recipe_tree() -> bytes:
    from negmerge.runs.recipe import load_recipe

    return json.dumps(load_recipe("demo").model_dump(mode="json", by_alias=True)).encode()


def _lists() -> list[Target]:
    import numpy as np

    from negmerge.evaluation.search import read_rows
    from negmerge.vision.datasets import Images
    from negmerge.vision.records import listed_positions
    from negmerge.vision.settings import Forget
    from negmerge.vision.splits import class_index

    ids = np.array([f"img/{k}.png" for k in range(30)])

    blank = np.zeros((30, 1, 1, 1), np.uint8)
    images = Images(blank, np.zeros(30, np.int64), ids, ("cat", "dog"), "f")

    def indices(path: Path) -> None:
        listed_positions(images, images, Forget(indices=path))

    def records(path: Path) -> None:
        listed_positions(images, images, Forget(ids=path))

    def name(path: Path) -> None:
        class_index(path.read_bytes().decode(errors="replace"), ("cat", "dog"))

    rows = b"scale,acc_forget,acc_retain\n0.0,93.1,99.0\n0.5,12.25,98.5\n"
    return [
        Target("indices", [b"0\n3\n# x\n17\n", "\u00b2\n".encode()], indices),
        Target("ids", ["\n".join(ids[:5]).encode()], records),
        Target("class", [b"cat", b"1", "\u00b2".encode()], name),
        Target("sweep", [rows], read_rows),
    ]


def packed(fields: bytes, data: bytes) -> bytes:
    """A safetensors file with this header."""
    return len(fields).to_bytes(8, "little") + fields + data


def parts_of(raw: bytes) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def _models(folder: Path) -> list[Target]:
    import numpy as np
    from safetensors.numpy import save_file

    import negmerge as nm
    from negmerge.checkpoints.checkpoint import INDEX_FILE, Checkpoint
    from negmerge.merging.accumulator import Accumulator
    from negmerge.vectors.inspection import inspect, render

    draw = np.random.default_rng(0)
    models = [folder / f"{name}.safetensors" for name in ("base", "m1", "m2", "m3")]
    for path in models:
        weights = {"a.weight": draw.standard_normal((4, 6)), "b": draw.standard_normal(3)}
        save_file({k: v.astype(np.float32) for k, v in weights.items()}, path)
    base, pool = models[0], models[1:]
    nm.merge(base, pool, out=folder / "patch.safetensors", layout="sparse")
    long = [folder / f"{name}.safetensors" for name in ("long", "changed")]
    for k, path in enumerate(long):
        save_file({"w": np.where(np.arange(900) % 400 == 7, k, 1).astype(np.float32)}, path)
    nm.merge(long[0], long[1:], out=folder / "listed.safetensors", values="bfloat16")
    accumulator = Accumulator(base, {"consensus": {}, "ties": {}})
    for path in pool:
        accumulator.add(path)
    accumulator.save(folder / "accumulator.safetensors")
    shards = folder / "shards"
    shards.mkdir()
    (shards / "a.safetensors").write_bytes(base.read_bytes())

    def opened(path: Path) -> None:
        with Checkpoint(path):
            pass

    def patch(path: Path) -> None:
        render(inspect(path))
        nm.apply(base, -0.5 * nm.TaskVector.load(path), folder / "applied.safetensors")

    def listed(path: Path) -> None:
        render(inspect(path))
        nm.apply(long[0], -0.5 * nm.TaskVector.load(path), folder / "applied.safetensors")

    def folded(path: Path) -> None:
        Accumulator.load(path, base).finish("consensus")

    def sharded(path: Path) -> None:
        path.replace(shards / INDEX_FILE)
        opened(shards)

    def with_data(name: str) -> tuple[bytes, Callable[[bytes], bytes]]:
        header, data = parts_of((folder / f"{name}.safetensors").read_bytes())
        return header, lambda fields: packed(fields, data)

    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(("a.weight", "b"), "a.safetensors"),
    }
    found = [Target("shard index", [json.dumps(index).encode()], sharded, whole=True)]
    for name, file, read in (
        ("header", "base", opened),
        ("patch", "patch", patch),
        ("listed patch", "listed", listed),
        ("accumulator", "accumulator", folded),
    ):
        header, wrapped = with_data(file)
        found.append(Target(name, [header], read, whole=True, wrapped=wrapped))
    for name, file, read in (
        ("patch metadata", "patch", patch),
        ("listed patch metadata", "listed", listed),
        ("accumulator metadata", "accumulator", folded),
    ):
        header, wrapped = with_data(file)
        fields = json.loads(header)
        texts = {k: _parsed(v) for k, v in fields["__metadata__"].items()}

        def rewrapped(raw: bytes, fields: Any = fields, wrapped: Any = wrapped) -> bytes:
            try:
                tree = json.loads(raw)
                own = {k: v if isinstance(v, str) else json.dumps(v) for k, v in tree.items()}
            except (ValueError, AttributeError, RecursionError):
                own = {"format": raw.decode(errors="replace")}
            return wrapped(json.dumps(fields | {"__metadata__": own}).encode())

        found.append(
            Target(name, [json.dumps(texts).encode()], read, whole=True, wrapped=rewrapped)
        )
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


ROW: dict[str, Any] = {
    "acc_retain": 99.0, "acc_forget": 93.0, "acc_test": 93.5, "mia": 12.0, "seconds": 3.5,
    "intervals": {
        "acc_retain": [98.0, 99.5], "acc_forget": [90.0, 95.0], "acc_test": [92.0, 95.0],
        "mia": [10.0, 14.0],
    },
    "samples_processed": 270,
    "samples": {"retain": 122, "forget": 14, "test": 200},
}  # fmt: skip
METHOD = ROW | {
    "method": "consensus", "splits": "forget", "scale": 0.5, "sparsity": 60.0, "avg_gap": 1.0,
    "cost_ratio": 0.3, "seconds_search": 1.0, "seconds_merge": 0.1, "evaluations": 6,
    "criterion": "match_holdout", "looked": False, "edge": True,
}  # fmt: skip
RIVAL = METHOD | {
    "method": "salun", "scale": None, "sparsity": None, "settings": {"lr": 0.1},
    "options": {"keep": 0.5},
    "tried": [{"options": {"lr": 0.1, "keep": 0.5}, "loss": None}],
}  # fmt: skip
SCORES = {
    "title": "A run", "seed": 0, "original": ROW, "retrain": ROW, "methods": [METHOD, RIVAL],
    "splits": {
        "data": "fashion_small", "forgotten_class": None, "looked": False, "fingerprint": "ab",
        "sizes": {"retain": 243, "forget": 27, "validation": 30, "test": 200},
        "chosen_on": {"retain": 121, "forget": 13},
    },
    "pool": [{"id": "ab", "settings": {"lr": 0.1}, "samples": 27, "seconds": 0.1}],
    "warnings": ["one"],
}  # fmt: skip
VALUES_OF_STEPS: list[Any] = [
    {
        "values": {"acc_forget": 93.0, "mia": None}, "intervals": {"acc_forget": [90.0, 95.0]},
        "samples": {"forget": 14}, "bins": {"mia": [{"set": "forget", "low": 0.0, "count": 3}]},
    },
    {"acc_forget": 93.0, "acc_retain": 99.0},
    0.5,
    [0, 2, 1],
]  # fmt: skip
STATES = [{"id": "x", "seconds": 1.0, "value": value} for value in VALUES_OF_STEPS]
UNIT = {"id": "f19b", "sha256": "0" * 64, "seconds": 5.0, "evaluations": 3}


def _runs(folder: Path) -> list[Target]:
    from negmerge.evaluation.metrics import metrics
    from negmerge.merging.select import Greedy
    from negmerge.reports.frames import bins_of, panel_of
    from negmerge.reports.inspection import scores_table
    from negmerge.reports.page_data import PageData
    from negmerge.reports.summary import summary_of
    from negmerge.runs.measurements import Evaluation, GreedySelection, MeanLoss, Measurement
    from negmerge.runs.merges import Merge
    from negmerge.runs.recipe import load_recipe
    from negmerge.runs.records import Cost, read_record
    from negmerge.runs.steps import ValueStep
    from negmerge.runs.store import Run
    from negmerge.runs.terms import Terms

    run = Run(folder / "run")
    (run.folder / "report/data").mkdir(parents=True)
    (run.folder / "patches").mkdir()
    run.patch("a").write_bytes(RECIPE)
    run.recipe.write_bytes(RECIPE)
    run.scores.write_text(json.dumps(SCORES))
    (run.data / "one.png").write_bytes(b"\x89PNG")

    def at(name: str, read: Callable[[Run], object]) -> Read:
        """Put the file to its place in the run, and read the run."""

        def go(path: Path) -> None:
            path.replace(run.folder / name)
            read(Run(run.folder))

        return go

    def scores(own: Run) -> None:
        scores_table(own.result)

    def journal(own: Run) -> None:
        own.find(Merge("f19b", own.base, (), "ties", Terms(), own.patch("a")))
        sum(unit.seconds + unit.evaluations for unit in own.journal.values())

    def state(path: Path) -> None:
        """As every step that keeps its value in a file reads it; one of them must take it."""
        refused: list[NegMergeError] = []
        steps: list[ValueStep[Any]] = [
            Evaluation("x", path, path),
            Measurement("x", path, path),
            MeanLoss("x", path, (), Terms(), "retain", 1.0, path),
            GreedySelection("x", Greedy(), (), (), path, path),
        ]
        for step in steps:
            try:
                run.find(step)
            except NegMergeError as error:
                refused.append(error)
        if len(refused) == len(steps):
            raise refused[0]

    def manifest(own: Run) -> None:
        own.finished_with("x")
        with suppress(MismatchError):  # its hashes are not those of the files
            own.verify()

    def page(own: Run) -> None:
        """As the page does it, which says of whatever else is raised that it is damaged."""
        from negmerge.reports.page import BROKEN

        attack = metrics.get("mia").histogram
        assert attack is not None
        with suppress(*BROKEN):
            panel_of(own, "gradcam")
            bins_of(own, attack)
            summary_of(PageData(own, load_recipe(own.recipe), own.result))

    files = {
        "recipe.yaml": {"bytes": 3, "sha256": "0" * 64},
        "scores.json": {"bytes": 3, "sha256": "1" * 64},
    }
    sealed = {
        "format": "negmerge-run/1",
        "problem": "x",
        "result": "y",
        "versions": {"python": "3"},
        "files": files,
    }
    seen = {
        "text": "t",
        "columns": ["a"],
        "rows": [{"cells": [{"file": "one.png", "caption": "c", "alt": "d"}]}],
    }
    attack = b"model,set,low,high,count,member\noriginal,forget,0.0,0.1,3,1\n"

    def whole(name: str, tree: Any, read: Read) -> Target:
        return Target(name, [json.dumps(tree).encode()], read, whole=True)

    restored = at("scores.json", scores)

    def with_scores(read: Read) -> Read:
        def go(path: Path) -> None:
            run.scores.write_text(json.dumps(SCORES))
            read(path)

        return go

    return [
        whole("scores", SCORES, restored),
        whole("manifest", sealed, with_scores(at("manifest.json", manifest))),
        whole("journal", {"patches/a": UNIT, "sweeps/a": UNIT}, at("journal.json", journal)),
        Target("states", [json.dumps(tree).encode() for tree in STATES], state, whole=True),
        whole(
            "training cost",
            {"id": "x", "samples": 3, "seconds": 1.0},
            lambda path: read_record(path, Cost, ""),
        ),
        whole("pictures", seen, with_scores(at("report/data/gradcam.json", page))),
        Target("attack", [attack], with_scores(at("report/data/attack.csv", page))),
    ]


def _others(folder: Path) -> list[Target]:
    import torch

    from negmerge.checkpoints.convert import convert
    from negmerge.scenarios.clip.heads import ready_head
    from negmerge.scenarios.clip.pretrained import ClipSource
    from negmerge.support.reading import parse_json
    from negmerge.training.states import Position, StateSaver, load_state
    from negmerge.training.weights import load_tensors, save_tensors
    from negmerge.vision.cache import open_entry
    from negmerge.vision.places import Snapshot

    clip = folder / "clip"
    clip.mkdir()

    def configured(name: str) -> Read:
        def go(path: Path) -> None:
            for old in clip.iterdir():
                old.unlink()
            path.replace(clip / name)
            if name == "preprocessor_config.json":
                (clip / "config.json").write_text('{"model_type": "clip"}')
            source = ClipSource(str(clip))
            for part in ("config", "size", "mean", "std", "fit", "interpolation"):
                getattr(source, part)

        return go

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 99, "width": 64, "heads": 2, "layers": 1}
    model = {"embed_dim": 32, "quick_gelu": False, "vision_cfg": vision, "text_cfg": text}
    shown_as = {
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    config = {"model_cfg": model, "preprocess_cfg": shown_as}
    foreign = {
        "model_type": "clip",
        "projection_dim": 8,
        "vision_config": {"hidden_size": 24, "num_attention_heads": 3, "hidden_act": "gelu"},
        "text_config": {"hidden_act": "gelu"},
    }
    prepared = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "size": {"shortest_edge": 224},
        "crop_size": 224,
    }

    def whole(name: str, tree: Any, read: Read) -> Target:
        return Target(name, [json.dumps(tree).encode()], read, whole=True)

    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    with StateSaver(folder / "state", network, optimizer, 0) as saver:
        saver.save(Position(3, 4, 0.5, 1.0))
    state, data = parts_of((folder / "state").read_bytes())
    heads = {"mnist": torch.ones(2, 3), "logit_scale": torch.tensor(1.0)}
    save_tensors(folder / "heads", heads, {"classes": json.dumps({"mnist": ["a", "b"]})})
    head, head_data = parts_of((folder / "heads").read_bytes())
    torch.save(
        {"state_dict": {"w": torch.ones(2, 3), "b": torch.arange(3)}, "epoch": 3}, folder / "a.pt"
    )
    torch.save({"w": torch.ones(2)}, folder / "b.pt", _use_new_zipfile_serialization=False)
    pickles = [(folder / name).read_bytes() for name in ("a.pt", "b.pt")]

    class Ready:
        def __init__(self, path: Path) -> None:
            self.embeddings = path
            self.config = {"model_cfg": {"embed_dim": 3}}

    def converted(path: Path) -> None:
        out = folder / "converted.safetensors"
        convert(path, out, trust=True)
        load_tensors(out)

    entry = folder / "entry"
    entry.mkdir()
    notes = {
        "format": "negmerge-images/2",
        "classes": ["a"],
        "hashes": {"pixels": "x", "labels": "y"},
        "stamps": {},
    }

    def cached(path: Path) -> None:
        path.replace(entry / "entry.json")
        open_entry(entry, Snapshot("x"))

    return [
        whole("CLIP config", config, configured("open_clip_config.json")),
        whole("transformers config", foreign, configured("config.json")),
        whole("preprocessor config", prepared, configured("preprocessor_config.json")),
        Target(
            "head metadata",
            [head],
            lambda path: ready_head(Ready(path), "mnist", ["a", "b"]),
            True,
            lambda raw: packed(raw, head_data),
        ),  # pyright: ignore
        Target(
            "training state",
            [state],
            lambda path: load_state(path, network, optimizer),
            True,
            lambda raw: packed(raw, data),
        ),
        whole("cache entry", notes, cached),
        whole(
            "JSON",
            {"a": [1, 2.5, "x", None]},
            lambda path: parse_json(path.read_bytes(), path, "content"),
        ),
        Target("convert", pickles, converted),
    ]


# ------------------------------------------------------------------------------------------ running


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the time and the memory of the cases."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, limits[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(target: Target, cases: int, seed: int, folder: Path, keep: Path | None = None) -> Found:
    """Run the cases of a target; any exception but NegMergeError is a fault."""
    draw = random.Random(f"{target.name} {seed}")
    found, path = Found(), folder / "case"
    if not any(_taken(target, raw, path) for raw in target.seeds):
        found.faults["every seed is refused, so that valid input is not tested"] += 1
    for _ in range(cases):
        raw = case_of(draw, target)
        path.write_bytes(raw)
        begun = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            target.read(path)
        except NegMergeError as error:
            found.refused += 1
            fault = "" if str(error).count("\n") == 0 else "an error of several lines"
        except HangError:
            fault = f"takes more than {SECONDS:g} s"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
        else:
            fault = ""
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        took = time.perf_counter() - begun
        found.cases += 1
        found.seconds += took
        found.slowest = max(found.slowest, took)
        if fault:
            found.faults[fault] += 1
            if keep is not None and found.faults[fault] == 1:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{target.name} {fault}".replace("/", "_")).write_bytes(raw)
    return found


def _taken(target: Target, raw: bytes, path: Path) -> bool:
    path.write_bytes(target.wrapped(raw))
    try:
        target.read(path)
    except NegMergeError:
        return False
    return True


def table(results: dict[str, Found]) -> str:
    """The results as Markdown."""
    rows = [
        {
            "reader": name,
            "cases": f"{one.cases:,}",
            "refused": f"{one.refused:,}",
            "taken": f"{one.cases - one.refused - sum(one.faults.values()):,}",
            "slowest, ms": f"{1000 * one.slowest:.0f}",
            "faults": "; ".join(f"{k} ({n})" for k, n in one.faults.items()) or "none",
        }
        for name, one in results.items()
    ]
    return markdown_table(rows) + "\n"


MENDED = "## Found and mended"
"""The heading of the part of the record that is written by hand and preserved."""
RECORD = Path(__file__).parent / "results" / "fuzz.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=CASES, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="names of readers")
    parser.add_argument("--keep", type=Path, help="a folder for inputs that make faults")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = [t for t in targets(folder) if not given.only or t.name in given.only]
        with bounded():
            for k, target in enumerate(chosen, 1):
                found = results[target.name] = fuzz(
                    target, given.cases, given.seed, folder, given.keep
                )
                faults = sum(found.faults.values())
                print(
                    f"{k}/{len(chosen)} {target.name}: {found.cases:,} cases, {found.refused:,} "
                    f"refused, {faults} faults, {found.seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(table(results))
    if given.record:
        total = sum(one.cases for one in results.values())
        command = f"python benchmarks/fuzz.py --cases {given.cases} --seed {given.seed} --record"
        head = f"# Fuzzing the readers\n\n`{command}` on {describe()}: {total:,} cases.\n\n"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        tail = f"\nLargest memory of the process: {peak:.1f} GB, libraries included.\n"
        old = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
        kept = old[old.index(MENDED) :] if MENDED in old else ""
        RECORD.write_text(f"{head}{table(results)}{tail}\n{kept}", encoding="utf-8")
    sys.exit(any(one.faults for one in results.values()))


if __name__ == "__main__":
    main()
