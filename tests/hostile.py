"""A corpus of hostile input: files, folders, values and command lines that must be refused.

A case is a command line, a function that makes its input, and what the error must say. All paths
are relative to a folder that `make_pool` has filled: a base, three models fine-tuned from it, the
patch they merge to, and an empty folder `out`.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Build = Callable[[Path], object]
Model = dict[str, tuple[str, NDArray[Any]]]
"""Tensors by name: a dtype of safetensors, and values for `encoded`."""

BLOCK, HEAD = "blocks.0.weight", "head.bias"
SHAPES = {BLOCK: (4, 6), HEAD: (7,)}
POOL = ("base", "m1", "m2", "m3")
INDEX = "model.safetensors.index.json"
BAD = "bad.safetensors"
NEW = "-o out/new.safetensors"


@dataclass(frozen=True)
class Case:
    """A command that must end with one line on standard error that holds all of `wanted`."""

    name: str
    command: tuple[str, ...]
    wanted: tuple[str, ...]
    build: Build


CASES: list[Case] = []


def case(name: str, command: str, *wanted: str, build: Build = lambda _: None) -> None:
    """Register a case; the command is split like a shell would."""
    CASES.append(Case(name, tuple(shlex.split(command)), wanted, build))


# ----------------------------------------------------------------------------------- honest content


def encoded(dtype: str, values: NDArray[Any]) -> bytes:
    """The bytes of values in a dtype; types numpy lacks are given as their bits."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}
    return values.astype(kinds.get(dtype, np.uint8)).tobytes()


def packed(model: Model, metadata: Mapping[str, str] | None = None) -> bytes:
    """A valid safetensors file."""
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, values) in model.items():
        raw = encoded(dtype, values)
        fields[name] = tensor(dtype, values.shape, (len(data), len(data) + len(raw)))
        data += raw
    return raw_file(fields, data)


def weights(k: int, dtype: str = "F32") -> Model:
    """The base (k = 0) or a model fine-tuned from it."""
    base, change = np.random.default_rng(0), np.random.default_rng(k)
    return {
        name: (dtype, base.standard_normal(shape) + 0.1 * bool(k) * change.standard_normal(shape))
        for name, shape in SHAPES.items()
    }


def lora() -> Model:
    """What PEFT saves of a model with low-rank matrices beside its weights."""
    stem = "base_model.model.blocks.0"
    return {f"{stem}.lora_{part}.weight": ("F32", np.ones((2, 2))) for part in "AB"}


def write_models(folder: Path, dtype: str = "F32") -> None:
    """Base and models as files."""
    for k, name in enumerate(POOL):
        (folder / f"{name}.safetensors").write_bytes(packed(weights(k, dtype)))


def make_pool(folder: Path) -> None:
    """What every case starts from."""
    write_models(folder)
    (folder / "patch.safetensors").write_bytes(patch())
    (folder / "out").mkdir()


@cache
def patch() -> bytes:
    """The patch that the pool merges to; its tensors are sparse."""
    import negmerge

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        base, *models = (folder / f"{name}.safetensors" for name in POOL)
        negmerge.merge(base, models, out=folder / "patch.safetensors", layout="sparse")
        return (folder / "patch.safetensors").read_bytes()


def make_sharded(folder: Path, k: int = 1, text: str | None = None) -> dict[str, str]:
    """A Hugging Face folder with a tensor in each of two shards; returns its weight map."""
    folder.mkdir(parents=True)
    model = weights(k)
    (folder / "a.safetensors").write_bytes(packed({BLOCK: model[BLOCK]}))
    (folder / "b.safetensors").write_bytes(packed({HEAD: model[HEAD]}))
    weight_map = {BLOCK: "a.safetensors", HEAD: "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}) if text is None else text)
    return weight_map


# --------------------------------------------------------------------------------- files by content

ROLES = {
    "member": "merge base.safetensors m1.safetensors {} " + NEW,
    "base": "merge {} m1.safetensors m2.safetensors " + NEW,
    "target": "apply {} patch.safetensors --negate 1 " + NEW,
    "patch": "apply base.safetensors {} --negate 1 " + NEW,
    "inspect": "inspect {}",
    "convert": "convert {} " + NEW,
}
MODEL_ROLES = ("member", "base", "target")
FOLDER_ROLES = (*MODEL_ROLES, "inspect", "convert")


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Length, header and data, whatever they are; text is taken as it is."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def in_roles(
    name: str, build: Build, *wanted: str, roles: Sequence[str] = tuple(ROLES), path: str = BAD
) -> None:
    """A bad file or folder, in every role it can have."""
    for role in roles:
        case(f"{name}-as-{role}", ROLES[role].format(path), path, *wanted, build=build)


def bad(name: str, content: bytes, *wanted: str, roles: Sequence[str] = tuple(ROLES)) -> None:
    """A bad file, by its bytes."""
    in_roles(name, lambda folder: (folder / BAD).write_bytes(content), *wanted, roles=roles)


def bad_tensor(name: str, entry: object, *wanted: str) -> None:
    """A file whose one tensor has a bad entry."""
    bad(name, raw_file({"w": entry}, bytes(8)), "'w'", *wanted)


def file_cases() -> None:
    good = packed(weights(1))
    header = int.from_bytes(good[:8], "little")
    bad("cut-by-one-byte", good[:-1], f"{len(good) - 1} bytes", f"wanted {len(good)}", "cut off")
    bad("cut-in-half", good[: 8 + header + 20], f"wanted {len(good)}", "cut off")
    bad("cut-after-header", good[: 8 + header], f"wanted {len(good)}", "cut off")
    bad("cut-in-header", good[: 8 + header // 2], f"header length {header}", "cut off")
    bad("empty", b"", "0 bytes", "too short")
    bad("seven-bytes", good[:7], "7 bytes", "too short")
    bad("length-0", bytes(8) + b"{}", "header length 0", "wanted 2 to")
    bad("length-2^63", raw_file("{}", length=2**63), f"header length {2**63}", "wanted 2 to")
    bad("length-99MB", raw_file("{}", length=99_000_000), "header length 99000000", "wanted 2 to")
    bad("trailing-data", good + b"x", "1 bytes too many")
    bad("zip-pickle", b"PK\x03\x04\0\0\x08\x08" + bytes(99), "pickle", "negmerge convert")
    bad("plain-pickle", b"\x80\x02}q\0X\1\0\0\0w" + bytes(99), "pickle", "negmerge convert")
    bad("no-tensors", raw_file({}), "contains no tensors", roles=(*MODEL_ROLES, "convert"))

    def two(second: tuple[int, int], size: int) -> bytes:
        return raw_file({"a": tensor(), "b": tensor(offsets=second)}, bytes(size))

    bad("overlapping", two((4, 12), 12), "'b'", "overlaps")
    bad("aliased", two((0, 8), 8), "overlaps")
    bad("holed", two((12, 20), 20), "'b'", "gap")
    bad("hole-at-start", raw_file({"w": tensor(offsets=(4, 12))}, bytes(12)), "'w'", "gap")

    entry = json.dumps(tensor())
    bad("key-twice", raw_file(f'{{"w":{entry},"w":{entry}}}', bytes(8)), "'w'", "duplicate key")
    bad("field-twice", raw_file(f'{{"w":{{"dtype":"F32",{entry[1:]}}}', bytes(8)), "duplicate key")
    bad("json-list", raw_file(f"[{entry}]", bytes(8)), "does not start with '{'")
    bad("json-broken", raw_file('{"w":', bytes(8)), "not valid JSON")
    bad("json-two-values", raw_file(f'{{"w":{entry}}} {{}}', bytes(8)), "not valid JSON")
    bad("json-nan", raw_file('{"w":NaN}'), "NaN is not JSON")
    bad("json-infinity", raw_file('{"w":-Infinity}'), "-Infinity is not JSON")
    bad("json-nested", raw_file('{"w":' + "[" * 100_000), "not valid JSON")
    bad("json-long-number", raw_file('{"w":' + "9" * 10_000 + "}"), "not valid JSON")
    bad("json-not-utf-8", raw_file(b'{"\xff":1}'), "not valid JSON")
    bad("json-utf-16", raw_file(f'{{"w":{entry}}}'.encode("utf-16-le"), bytes(8)), "JSON")

    for kind in ("F4", "F6_E2M3", "Q8", "f32", "F32\x1b[31m", "", None, 5, ["F32"]):
        bad_tensor(f"dtype-{kind!a}", tensor(kind), "unknown dtype")
    for shape in (-1, 2.0, True, None, "2", 2**63, [2]):
        bad_tensor(f"shape-{shape!a}", tensor(shape=[shape]), "shape", str(shape)[:9])
    bad_tensor("shape-not-a-list", tensor(shape=2), "shape", "'2'")
    bad_tensor("shape-overflowing", tensor(shape=[2**32, 2**32]), "shape", "4294967296")
    bad_tensor("shape-too-large", tensor(shape=[3]), "8 bytes", "needs 12")
    for offsets in ([0, 4], [0, 2**62]):
        bad_tensor(f"offsets-{offsets}", tensor(offsets=offsets), "bytes in the file", "needs 8")
    for offsets in ([8, 0], [-8, 0], [0.0, 8.0], [False, 8], [0], [0, 4, 8], {"0": 8}, "08", None):
        bad_tensor(f"offsets-{offsets}", tensor(offsets=offsets), "data_offsets")
    bad_tensor("offsets-past-the-end", tensor(offsets=[800, 808]), "gap")
    bad_tensor("field-missing", {"dtype": "F32", "shape": [2]}, "dtype, shape, data_offsets")
    bad_tensor("field-unknown", tensor() | {"x": 1}, "dtype, shape, data_offsets")
    bad_tensor("entry-not-an-object", 5, "dtype, shape, data_offsets")

    for metadata in ([], "x", 5, {"a": 5}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}):
        content = raw_file({"__metadata__": metadata, "w": tensor()}, bytes(8))
        bad(f"metadata-{metadata}", content, "__metadata__ must map strings to strings")
    content = raw_file({"__metadata__": {"a": "\ud800"}, "w": tensor()}, bytes(8))
    bad("metadata-half-a-surrogate", content, roles=("base", "inspect", "convert"))

    names = {"control": "w\x1b[31m", "newline": "w\nx", "nul": "w\0", "delete": "w\x7f"}
    names |= {"right-to-left": "w\u202e", "surrogate": "w\ud800", "empty": "", "long": "w" * 513}
    for kind, name in names.items():
        content = raw_file({name: tensor()}, bytes(8))
        bad(f"name-{kind}", content, "printable and 1 to 512", ascii(name)[:100].rstrip("'"))

    many = "{" + ",".join(f'"{k:x}":0' for k in range(1_000_001)) + "}"
    bad("million-tensors", raw_file(many), "1000001 tensors", "1000000", roles=["inspect"])

    def long_header(folder: Path) -> None:
        with (folder / BAD).open("wb") as file:
            file.write(raw_file("{}", length=101_000_000))
            file.truncate(110_000_000)

    wanted = ("header length 101000000", "wanted 2 to 100000000")
    in_roles("length-101MB", long_header, *wanted, roles=["member", "inspect"])
    lists = raw_file('{"w":[' + "[]," * 8_000_001 + "0]}")
    bad("million-lists", lists, "more than 1000000 tensors", roles=["inspect"])
    in_roles("fifo", lambda folder: os.mkfifo(folder / BAD), "not a regular file")
    in_roles("device", lambda folder: (folder / BAD).symlink_to("/dev/zero"), "not a regular file")
    in_roles("missing", lambda _: None, "no such file")
    in_roles("dangling", lambda folder: (folder / BAD).symlink_to("x"), "no such file")
    in_roles("link-to-itself", lambda folder: (folder / BAD).symlink_to(BAD), "cannot open")
    in_roles("path-too-long", lambda _: None, "too long", path="x" * 300 + ".safetensors")
    case(
        "path-with-control-characters",
        "merge base.safetensors 'm\x1b[31m.safetensors' " + NEW,
        "31m.safetensors",
        "too short",
        build=lambda folder: (folder / "m\x1b[31m.safetensors").write_bytes(b""),
    )


def patch_cases() -> None:
    case("model-as-patch", ROLES["patch"].format("m1.safetensors"), "m1.safetensors", "not a patch")
    for role in ("member", "base"):
        command = ROLES[role].format("patch.safetensors")
        case(f"patch-as-{role}", command, "patch.safetensors", "negmerge-patch/1", "wanted a model")
    hostile = packed(weights(1), {"format": "negmerge-\x1b[31m"})
    bad("patch-of-hostile-format", hostile, "wanted a model", roles=("member", "base"))

    def damaged(name: str, change: Callable[[dict[str, Any]], object], *wanted: str) -> None:
        build = partial(write_damaged_patch, change)
        in_roles(f"patch-{name}", build, *wanted, roles=("patch", "inspect"))

    def row(value: object) -> Callable[[dict[str, Any]], object]:
        def change(metadata: dict[str, Any]) -> None:
            table = json.loads(metadata["tensors"])
            metadata["tensors"] = json.dumps(table | {BLOCK: value})

        return change

    later = partial(write_damaged_patch, lambda m: m.update(format="negmerge-patch/9"))
    roles = ("patch", "member", "base")
    in_roles("patch-of-version-9", later, "negmerge-patch/9", roles=roles)
    damaged("without-rule", lambda m: m.pop("rule"), "damaged", "rule")
    damaged("without-table", lambda m: m.pop("tensors"), "JSON")

    def table(text: bytes, kind: str, keep: bool) -> Build:
        """The patch with a table as a tensor of its own."""

        def build(folder: Path) -> None:
            raw = patch()
            end = 8 + int.from_bytes(raw[:8], "little")
            fields, at = json.loads(raw[8:end]), len(raw) - end
            if not keep:
                del fields["__metadata__"]["tensors"]
            fields["patch#tensors"] = tensor(kind, [len(text)], [at, at + len(text)])
            (folder / BAD).write_bytes(raw_file(fields, raw[end:] + text))

        return build

    roles = ("patch", "inspect")
    in_roles("patch-with-two-tables", table(b"{}", "U8", True), "two tables", roles=roles)
    in_roles("patch-with-odd-table", table(b"{}", "I8", False), "damaged", roles=roles)
    in_roles("patch-with-broken-table", table(b"{", "U8", False), "JSON", roles=roles)
    in_roles("patch-with-short-table", table(b"{}", "U8", False), "not listed", roles=roles)
    two_lines = partial(write_damaged_patch, lambda m: m.update(base="a\nb"))
    command = ROLES["patch"].format(BAD)
    case("patch-with-a-base-of-two-lines", command, "wanted a\\nb; name", build=two_lines)
    damaged("with-broken-json", lambda m: m.update(members="["), "damaged")
    damaged("with-nested-json", lambda m: m.update(members="[" * 100_000), "damaged")
    for key, value in {"options": "[]", "members": "5", "n": '"x"', "kept": "{}"}.items():
        damaged(f"with-{key}-{value}", lambda m, k=key, v=value: m.update({k: v}), "damaged", key)
    for value in (
        "[]", "0.5", '"x"', "NaN", '{"pairs":4}', '{"pairs":4,"agreeing":5}',
        '{"pairs":4,"agreeing":-1}', '{"pairs":0,"agreeing":0}', '{"pairs":4.5,"agreeing":1}',
        '{"pairs":true,"agreeing":true}', '{"pairs":"4","agreeing":"1"}',
        '{"pairs":1e999,"agreeing":1}', '{"pairs":4,"agreeing":NaN}',
    ):  # fmt: skip
        damaged(f"with-agreement-{value}", lambda m, v=value: m.update(agreement=v), "damaged")
    for value in ("1e999", "-1", "2", "true", '"x"'):
        text = '[{"name":"a","fingerprint":"b","sole_dissent":' + value + "}]"
        damaged(f"with-dissent-{value}", lambda m, t=text: m.update(members=t), "damaged")
    damaged("with-members-of-numbers", lambda m: m.update(members="[5]"), "damaged", "members")
    damaged("with-a-bad-row", row(["F32", [4, 6], "sparse", -1]), BLOCK, "damaged")
    damaged("with-a-wrong-shape", row(["F32", [99, 6], "sparse", 5]), BLOCK, "as listed")
    damaged("with-an-unlisted-tensor", row(["F32", [4, 6], "zero", 0]), BLOCK, "not listed")

    def overwritten(name: str, part: str, change: Callable[[int], int]) -> None:
        """The patch with the bytes of one of its tensors changed, taken as one long number."""

        def build(folder: Path) -> None:
            raw = bytearray(patch())
            end = 8 + int.from_bytes(raw[:8], "little")
            start, stop = (end + x for x in json.loads(raw[8:end])[part]["data_offsets"])
            number = change(int.from_bytes(raw[start:stop], "little"))
            raw[start:stop] = number.to_bytes(stop - start, "little")
            (folder / BAD).write_bytes(raw)

        in_roles(f"patch-{name}", build, part.partition("#")[0], roles=["patch"])

    listed_cases()
    overwritten("with-a-bit-too-many", BLOCK + "#mask", lambda bits: bits | (bits + 1))
    overwritten("with-a-bit-too-few", BLOCK + "#mask", lambda bits: bits & (bits - 1))
    overwritten("with-a-bit-past-the-end", HEAD + "#mask", lambda bits: bits | 128)
    overwritten("with-nan", HEAD + "#values", lambda bits: bits | 0x7FFFFFFF)


def listed_cases() -> None:
    """Patches whose positions are listed: for 24 elements one block, its count, and positions."""
    good = [3, 0, 1, 5, 9]
    for name, words, wanted in (
        ("unsorted", [3, 0, 5, 1, 9], "not in order"),
        ("repeated", [3, 0, 5, 5, 9], "not in order"),
        ("past-the-end", [3, 0, 1, 5, 24], "after the last of 24"),
        ("count-too-small", [2, 0, 1, 5, 9], "2 positions are listed for 3"),
        ("count-too-large", [4, 0, 1, 5, 9], "4 positions are listed for 3"),
        ("count-of-65539", [3, 1, 1, 5, 9], "65539 positions are listed for 3"),
    ):
        build = partial(write_listed_patch, words, "negmerge-patch/2")
        in_roles(f"patch-listed-{name}", build, BLOCK, wanted, "damaged", roles=["patch"])
    short = partial(write_listed_patch, good[:-1], "negmerge-patch/2")
    in_roles("patch-listed-short", short, BLOCK, "as listed", roles=("patch", "inspect"))
    early = partial(write_listed_patch, good, "negmerge-patch/1")
    in_roles("patch-listed-too-early", early, BLOCK, "not allowed", roles=("patch", "inspect"))


def write_listed_patch(words: list[int], version: str, folder: Path) -> None:
    """The patch with three listed positions instead of a mask."""
    raw = patch()
    end = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:end])
    metadata = fields.pop("__metadata__")
    row = ["F32", list(SHAPES[BLOCK]), "listed", 3]
    rows = json.loads(metadata["tensors"]) | {BLOCK: row}
    parts = {
        name: (f["dtype"], f["shape"], raw[end + f["data_offsets"][0] : end + f["data_offsets"][1]])
        for name, f in fields.items()
        if not name.startswith(BLOCK)
    }
    parts[f"{BLOCK}#values"] = ("F32", [3], np.ones(3, np.float32).tobytes())
    parts[f"{BLOCK}#list"] = ("U16", [len(words)], np.array(words, np.uint16).tobytes())
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, own) in parts.items():
        header[name] = tensor(dtype, shape, (len(data), len(data) + len(own)))
        data += own
    header["__metadata__"] = metadata | {"format": version, "tensors": json.dumps(rows)}
    (folder / BAD).write_bytes(raw_file(header, data))


def write_damaged_patch(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The patch with changed metadata."""
    raw = patch()
    end = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:end])
    change(fields["__metadata__"])
    (folder / BAD).write_bytes(raw_file(fields, raw[end:]))


# ------------------------------------------------------------------------------------------ folders


def adapter_with(model: Model | None = None, **fields: object) -> Build:
    """A folder with an adapter, whose configuration has these fields."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | fields

    def build(folder: Path) -> None:
        (folder / "bad").mkdir()
        (folder / "bad/adapter_config.json").write_text(json.dumps(config))
        content = packed(lora() if model is None else model)
        (folder / "bad/adapter_model.safetensors").write_bytes(content)

    return build


def adapter_cases() -> None:
    """Adapters that are no plain LoRA, as members and under `inspect`."""

    def refused(name: str, build: Build, *wanted: str) -> None:
        in_roles(f"adapter-{name}", build, *wanted, roles=("member", "inspect"), path="bad")

    refused("of-another-type", adapter_with(peft_type="IA3"), "peft_type", "'IA3'", "'LORA'")
    refused("without-type", adapter_with(peft_type=None), "peft_type", "'None'")
    refused("with-dora", adapter_with(use_dora=True), "use_dora", "merge_and_unload")
    refused("with-bias-of-b", adapter_with(lora_bias=True), "lora_bias")
    refused("with-tokens", adapter_with(trainable_token_indices=[1]), "trainable_token_indices")
    refused("with-pissa", adapter_with(init_lora_weights="pissa_niter_4"), "changes the base")
    for value in (None, 0, -1, "2", True, [2]):
        refused(f"with-rank-{value!a}", adapter_with(r=value), "r: got", "wanted a number above 0")
        refused(f"with-alpha-{value!a}", adapter_with(lora_alpha=value), "lora_alpha: got")
    refused("of-another-rank", adapter_with(r=3), "blocks.0", "wanted rank 3")
    for field in ("use_rslora", "fan_in_fan_out"):
        refused(f"with-a-text-for-{field}", adapter_with(**{field: "true"}), field, "true or false")
    for field in ("rank_pattern", "alpha_pattern"):
        refused(f"with-a-list-for-{field}", adapter_with(**{field: ["a"]}), field, "an object")
    for kind, pattern in {
        "broken": "(",
        "huge": "x{99999999999}",
        "deep": "(" * 5000 + ")" * 5000,
    }.items():
        given = adapter_with(rank_pattern={pattern: 2})
        refused(f"with-a-{kind}-pattern", given, "rank_pattern", "is no pattern of names")
    stem = "base_model.model.blocks.0"
    pair = lora()
    half = {f"{stem}.lora_A.weight": pair[f"{stem}.lora_A.weight"]}
    refused("with-half", adapter_with(half), "blocks.0", "only one of lora_A and lora_B")
    vector = pair | {f"{stem}.lora_magnitude_vector": ("F32", np.ones(2))}
    refused("with-magnitudes", adapter_with(vector), "lora_magnitude_vector", "plain LoRA")
    whole = {name: ("I64", values) for name, (_, values) in pair.items()}
    refused("of-integers", adapter_with(whole), "I64", "F32")
    twice = pair | {"blocks.0.lora_A.weight": ("F32", np.ones((2, 2)))}
    refused("with-a-second-a", adapter_with(twice), "blocks.0.lora_A", "a second time")

    def without_weights(folder: Path) -> None:
        adapter_with()(folder)
        (folder / "bad/adapter_model.safetensors").rename(folder / "bad/adapter_model.bin")

    refused("pickled", without_weights, "no adapter_model.safetensors", "save it again")

    def member(name: str, build: Build, *wanted: str) -> None:
        in_roles(f"adapter-{name}", build, *wanted, roles=("member",), path="bad")

    member("of-another-shape", adapter_with(), "blocks.0.weight", "(4, 6)", "(2, 2)")
    named = adapter_with(
        {name.replace("blocks.0", "layers.9"): m for name, m in pair.items()},
        base_model_name_or_path="other/base",
    )
    member("of-another-base", named, "'layers.9.weight'", "no such tensor", "'other/base'")
    both = {
        f"base_model.model.{start}blocks.0.lora_{part}.weight": ("F32", np.ones(shape))
        for start in ("model.", "")
        for part, shape in {"A": (2, 6), "B": (4, 2)}.items()
    }
    member("with-two-names-for-a-tensor", adapter_with(both), "'model.blocks.0.weight'", "no such")
    broken = {
        f"{stem}.lora_{part}.weight": ("F32", np.full(shape, value))
        for part, shape, value in (("A", (2, 6), np.nan), ("B", (4, 2), 1.0))
    }
    member("with-nan", adapter_with(broken), "blocks.0.weight", "NaN")
    case(
        "adapter-of-a-huge-rank",
        "adapter patch.safetensors --rank 99999999999 --negate 1 -o out/new",
        "rank: got 99999999999",
        "wanted a whole number from 1 to 4",
    )


def folder_cases() -> None:
    refused = partial(in_roles, roles=FOLDER_ROLES, path="bad")

    def indexed(name: str, change: Callable[[Path, dict[str, str]], object], *wanted: str) -> None:
        """A folder whose weight map `change` spoils."""

        def build(folder: Path) -> None:
            weight_map = make_sharded(folder / "bad")
            (folder / "outside.safetensors").write_bytes(packed({HEAD: weights(1)[HEAD]}))
            change(folder / "bad", weight_map)
            (folder / "bad" / INDEX).write_text(json.dumps({"weight_map": weight_map}))

        refused(f"index-{name}", build, *wanted)

    def points(shard: object) -> Callable[[Path, dict[str, Any]], object]:
        return lambda _, weight_map: weight_map.update({HEAD: shard})

    def absolute(folder: Path, weight_map: dict[str, str]) -> None:
        weight_map[HEAD] = str((folder.parent / "outside.safetensors").absolute())

    def in_sub_folder(folder: Path, weight_map: dict[str, str]) -> None:
        (folder / "sub").mkdir()
        (folder / "b.safetensors").rename(folder / "sub/b.safetensors")
        weight_map[HEAD] = "sub/b.safetensors"

    def linked(target: str) -> Callable[[Path, dict[str, str]], object]:
        def change(folder: Path, _: dict[str, str]) -> None:
            (folder / "b.safetensors").unlink()
            (folder / "b.safetensors").symlink_to(target)

        return change

    def in_both(folder: Path, _: dict[str, str]) -> None:
        (folder / "a.safetensors").write_bytes(packed(weights(1)))

    def shard_is(make: Callable[[Path], object]) -> Callable[[Path, dict[str, str]], object]:
        def change(folder: Path, _: dict[str, str]) -> None:
            (folder / "b.safetensors").unlink()
            make(folder / "b.safetensors")

        return change

    plain = (f"'{HEAD}'", "wanted the name of a file")
    indexed("absolute", absolute, *plain)
    indexed("parent", points("../outside.safetensors"), "'../outside.safetensors'", *plain)
    indexed("sub-folder", in_sub_folder, "'sub/b.safetensors'", *plain)
    for shard in (5, None, ["b.safetensors"], "", ".", "..", "b\x1b.safetensors", "b\0"):
        indexed(f"shard-{shard!a}", points(shard), *plain)
    indexed("link-out", linked("../outside.safetensors"), "b.safetensors", "links to", "outside")
    indexed("link-to-itself", linked("b.safetensors"), "b.safetensors")
    indexed("shard-missing", shard_is(lambda _: None), "b.safetensors: no such file")
    indexed("shard-fifo", shard_is(os.mkfifo), "b.safetensors: not a regular file")
    indexed("shard-folder", shard_is(Path.mkdir), "b.safetensors: not a regular file")
    indexed("shard-cut", shard_is(lambda p: p.write_bytes(b"")), "b.safetensors: 0 bytes")
    indexed("shard-name-too-long", points("x" * 300), "cannot open", "too long")
    swapped = {BLOCK: "b.safetensors", HEAD: "a.safetensors"}
    indexed("other-shard", lambda _, m: m.update(swapped), "index says", "found in")
    indexed("key-absent", lambda _, m: m.update(x="a.safetensors"), "'x'", "no shard")
    indexed("key-in-both", in_both, f"'{HEAD}'", "wanted in one shard")
    indexed(
        "key-unlisted",
        lambda p, m: (in_both(p, m), (p / "b.safetensors").unlink(), m.pop(HEAD)),
        f"'{HEAD}'",
        "index says no shard",
    )

    def text(name: str, content: str, *wanted: str) -> None:
        """A folder whose index is this text."""
        build = lambda folder: make_sharded(folder / "bad", text=content)  # noqa: E731
        refused(f"index-{name}", build, INDEX, *wanted)

    text("empty", "", "not valid JSON")
    text("broken", '{"weight_map": {', "not valid JSON")
    text("list", "[]", "wanted an object")
    text("without-map", '{"metadata": {}}', "weight_map")
    text("map-is-list", '{"weight_map": ["a.safetensors"]}', "weight_map")
    text("map-is-empty", '{"weight_map": {}}', "weight_map")
    text("key-twice", '{"weight_map": {"x": "a", "x": "b"}}', "'x'", "duplicate key")

    def index_is(make: Callable[[Path], object]) -> Build:
        def build(folder: Path) -> None:
            make_sharded(folder / "bad")
            (folder / "bad" / INDEX).unlink()
            make(folder / "bad" / INDEX)

        return build

    in_roles("index-fifo", index_is(os.mkfifo), INDEX, roles=["inspect"], path="bad")
    refused("index-folder", index_is(Path.mkdir), INDEX)
    large = index_is(lambda path: (path.touch(), os.truncate(path, 100_000_001)))
    wanted = ("larger than 100000000 bytes",)
    in_roles("index-too-large", large, INDEX, *wanted, roles=["inspect"], path="bad")

    def folder_with(*files: str) -> Build:
        def build(folder: Path) -> None:
            (folder / "bad").mkdir()
            for name in files:
                (folder / "bad" / name).write_bytes(packed(weights(1)))

        return build

    wanted = ("a PEFT adapter", "merge_and_unload", "save_pretrained")
    roles = ("base", "target", "convert")
    in_roles("folder-of-an-adapter", adapter_with(), *wanted, roles=roles, path="bad")
    in_roles(
        "file-of-an-adapter",
        lambda folder: (folder / BAD).write_bytes(packed(lora())),
        *wanted,
        roles=["member", "base"],
    )

    lacking = ("contains neither model.safetensors nor model.safetensors.index.json",)
    refused("folder-empty", folder_with(), *lacking)
    refused("folder-other-name", folder_with("a.safetensors"), *lacking, "a.safetensors")
    refused("folder-hostile-name", folder_with("a\x1b[31m.safetensors"), *lacking)

    def link_out(folder: Path) -> None:
        (folder / "bad").mkdir()
        (folder / "bad/model.safetensors").symlink_to("../m3.safetensors")

    refused("folder-link-out", link_out, "model.safetensors: links to", "m3.safetensors")

    cached = "hub/models--x--y/snapshots/rev"

    def other_repository(folder: Path) -> None:
        (folder / cached).mkdir(parents=True)
        (folder / "hub/models--x--z").mkdir()
        (folder / "m3.safetensors").rename(folder / "hub/models--x--z/blob")
        (folder / cached / "model.safetensors").symlink_to("../../../models--x--z/blob")

    in_roles("cache-link-out", other_repository, "links to", roles=FOLDER_ROLES, path=cached)


# ------------------------------------------------------------------------------------------- values

ALL = "merge base.safetensors m1.safetensors m2.safetensors m3.safetensors "


def edited(k: int, change: Callable[[Model], object], dtype: str = "F32") -> Build:
    """A pool in one dtype in which one model is changed."""

    def build(folder: Path) -> None:
        write_models(folder, dtype)
        model = weights(k, dtype)
        change(model)
        (folder / f"{POOL[k]}.safetensors").write_bytes(packed(model))

    return build


def put(model: Model, *values: float, name: str = HEAD) -> None:
    """Replace the first values of a tensor."""
    model[name][1].reshape(-1)[: len(values)] = values


def value_cases() -> None:
    nan, inf = float("nan"), float("inf")
    for dtype in ("F32", "F16", "BF16", "F64"):
        for k in (0, 2):
            for values in ((nan, nan), (inf,), (-inf, inf, nan)):
                case(
                    f"{dtype}-{values}-in-{POOL[k]}",
                    ALL + NEW,
                    f"{POOL[k]}.safetensors '{HEAD}': {len(values)} of 7 values are NaN or inf",
                    build=edited(k, lambda m, v=values: put(m, *v), dtype),
                )
    others = ("conflict", "localize", "magmax", "shrink", "soft", "tall", "ties", "uniform")
    for rule in (*others, "consensus --equalise"):
        for value in (nan, -inf):
            case(
                f"{value}-by-{rule}",
                f"{ALL} --rule {rule} {NEW}",
                f"m3.safetensors '{HEAD}': 1 of 7 values are NaN or inf",
                build=edited(3, lambda m, v=value: put(m, v)),
            )
    case(
        "nan-in-mixed-pool",
        ALL + NEW,
        f"m1.safetensors '{HEAD}': 1 of 7 values",
        build=lambda folder: (
            edited(1, lambda m: put(m, nan), "BF16")(folder),
            (folder / "base.safetensors").write_bytes(packed(weights(0))),
        ),
    )

    def far_apart(folder: Path) -> None:
        base, model = weights(0), weights(1)
        put(base, -3e38)
        put(model, 3e38)
        (folder / "base.safetensors").write_bytes(packed(base))
        (folder / "m1.safetensors").write_bytes(packed(model))

    command = "merge base.safetensors m1.safetensors " + NEW
    case("merge-overflows", command, f"'{HEAD}'", "does not fit F32", build=far_apart)

    def large_base(dtype: str, value: float) -> Build:
        """A base with one large value, and a patch for it."""

        def build(folder: Path) -> None:
            import negmerge

            edited(0, lambda m: put(m, value), dtype)(folder)
            base, model = folder / "base.safetensors", folder / "m1.safetensors"
            negmerge.merge(base, [model], out=folder / "patch.safetensors")

        return build

    apply = "apply base.safetensors patch.safetensors "
    case(
        "float16-overflows",
        f"{apply} --negate 0.5 --dtype float16 {NEW}",
        f"'{HEAD}': 1 values do not fit F16",
        "bfloat16",
        build=large_base("F32", 3e5),
    )
    case(
        "float16-folder-overflows",
        f"{apply} --negate 0.5 --dtype float16 -o out/new",
        f"'{HEAD}': 1 values do not fit F16",
        build=large_base("F32", 3e5),
    )
    for dtype, value in (("F16", 6e4), ("BF16", 3e38), ("F32", 3e38), ("F64", 1e308)):
        case(
            f"apply-overflows-{dtype}",
            f"{apply} --negate 3 {NEW}",
            f"'{HEAD}'",
            f"does not fit {dtype}",
            "smaller scale",
            build=large_base(dtype, value),
        )


def fit_cases() -> None:
    def refused(name: str, change: Callable[[Model], object], *wanted: str) -> None:
        case(name, ALL + NEW, "m2.safetensors", *wanted, build=edited(2, change))

    odd = np.zeros((4, 5))
    refused("shape", lambda m: m.update({BLOCK: ("F32", odd)}), BLOCK, "(4, 5)", "(4, 6)")
    refused("flat", lambda m: m.update({BLOCK: ("F32", np.zeros(24))}), BLOCK, "(24,)", "(4, 6)")
    refused("key-missing", lambda m: m.pop(HEAD), "1 tensors of the base are missing", f"'{HEAD}'")
    refused("key-extra", lambda m: m.update(x=("F32", odd)), "1 are not in the base", "'x'")
    refused("key-renamed", lambda m: m.update(x=m.pop(HEAD)), "missing", f"'{HEAD}'", "'x'")
    ints = np.zeros(7)
    refused("integer", lambda m: m.update({HEAD: ("I64", ints)}), f"'{HEAD}'", "I64", "F32")
    refused("float8", lambda m: m.update({HEAD: ("F8_E4M3", ints)}), f"'{HEAD}'", "F8_E4M3", "F32")
    for prefix in ("module.", "_orig_mod."):
        case(
            f"prefix-{prefix}",
            ALL + NEW,
            "m2.safetensors",
            f"'{prefix}'",
            f"negmerge convert m2.safetensors --strip-prefix {prefix}",
            build=prefixed("m2", prefix),
        )

    def float8(folder: Path) -> None:
        for k, name in enumerate(POOL):
            model = weights(k) | {"scale": ("F8_E4M3", np.full(3, 56 + (k == 2)))}
            (folder / f"{name}.safetensors").write_bytes(packed(model))

    wanted = ("m2.safetensors 'scale'", "F8_E4M3 cannot be merged")
    case("float8-differs", ALL + NEW, *wanted, build=float8)
    no_floats = {"n": ("I64", np.zeros(3))}
    case(
        "no-floats",
        "merge base.safetensors m1.safetensors " + NEW,
        "base.safetensors",
        "no float tensor",
        build=lambda folder: [
            (folder / f"{name}.safetensors").write_bytes(packed(no_floats)) for name in POOL[:2]
        ],
    )
    taken = {HEAD + "#mask": ("F32", np.zeros(3))}
    case(
        "reserved-name",
        "merge base.safetensors m1.safetensors " + NEW,
        f"'{HEAD}#mask'",
        "reserved",
        build=lambda folder: [
            (folder / f"{name}.safetensors").write_bytes(packed(weights(k) | taken))
            for k, name in enumerate(POOL[:2])
        ],
    )


def prefixed(file: str, prefix: str) -> Build:
    """All names of a model with a prefix, as wrappers leave them."""
    k = POOL.index(file)
    model = {prefix + name: value for name, value in weights(k).items()}
    return lambda folder: (folder / f"{file}.safetensors").write_bytes(packed(model))


# ------------------------------------------------------------------------------------- command line


def copied(source: str, target: str) -> Build:
    """The same content under two names."""
    return lambda folder: (folder / target).write_bytes((folder / source).read_bytes())


def pool_cases() -> None:
    merge = "merge base.safetensors m1.safetensors m2.safetensors "
    case("pool-empty", f"merge base.safetensors {NEW}", "pool is empty")
    case("same-path-twice", f"{merge} m2.safetensors {NEW}", "m2.safetensors", "listed twice")
    case("same-path-spelt-otherwise", f"{merge} out/../m2.safetensors {NEW}", "listed twice")
    case("base-as-member", f"{merge} base.safetensors {NEW}", "base.safetensors", "listed twice")
    case(
        "same-content",
        ALL + NEW,
        "m2.safetensors",
        "m3.safetensors",
        "the same weights",
        build=copied("m2.safetensors", "m3.safetensors"),
    )
    case(
        "same-as-base",
        ALL + NEW,
        "m3.safetensors",
        "has the weights of the base",
        build=copied("base.safetensors", "m3.safetensors"),
    )

    for rule, near in (("consensu", "consensus"), ("tie", "ties"), ("UNIFORM", "There are")):
        case(f"rule-{rule}", f"{merge} --rule {rule} {NEW}", f"unknown rule '{rule}'", near)
    for rule, option, *wanted in (
        ("consensus", "quorum=0.5", "quorum", "0.5", "more than 0.5"),
        ("consensus", "quorum=1.1", "quorum", "1.1", "at most 1"),
        ("consensus", "quorum=nan", "quorum", "nan"),
        ("consensus", "quorum=x", "quorum", "'x'", "number"),
        ("consensus", "reduce=median", "reduce", "'median'", "mean|min|max"),
        ("consensus", "signed=maybe", "signed", "'maybe'", "true|false"),
        ("consensus", "quroum=0.8", "'quroum'", "its options", "quorum"),
        ("consensus", "quorum", "'quorum'", "key=value"),
        ("consensus", "=0.8", "'=0.8'", "key=value"),
        ("consensus", "quorum=0.8 --option quorum=0.9", "quorum", "twice"),
        ("uniform", "quorum=0.8", "'quorum'", "none"),
        ("ties", "density=0", "density", "got 0.0", "more than 0"),
        ("ties", "density=nan", "density", "got nan"),
        ("localize", "density=-0.1", "density", "got -0.1"),
        ("localize", "density=inf", "density", "got inf"),
        ("tall", "factor=nan", "factor", "nan"),
        ("tall", "agree=1.5", "agree", "'1.5'", "whole number"),
        ("soft", "power=2.5", "power", "'2.5'", "whole number"),
        ("soft", "power=5", "power", "got 5", "from 1 to 4"),
        ("shrink", "errors=-1", "errors", "got -1", "from 0 to"),
        ("shrink", "by=sign", "by", "'sign'", "threshold|james_stein"),
    ):
        command = f"{merge} --rule {rule} --option {option} {NEW}"
        case(f"{rule}-{option}", command, *wanted)
    for arguments, *wanted in (
        ("--frobnicate", "--frobnicate"),
        ("--rule", "--rule"),
        ("--layout odd", "odd", "sparse"),
        ("--buffers odd", "odd", "keep"),
        ("--buffers 'o\x1b[31m'", "keep"),
        ("--max-memory lots", "--max-memory 'lots'", "500MB"),
        ("--max-memory 0", "--max-memory '0'", "500MB"),
        ("--max-memory -5GB", "--max-memory"),
        (f"--max-memory {'9' * 400}", "--max-memory"),
        ("--max-memory 1MB", "too little", "at least"),
        ("--workers 0", "workers 0", "wanted 1 to 1024"),
        ("--workers -2", "workers -2", "wanted 1 to 1024"),
        ("--workers many", "many", "--workers"),
        ("--device tpu", "'tpu'", "cpu or cuda"),
    ):
        case(f"merge{arguments[:40]!a}", f"{merge} {arguments} {NEW}", *wanted)


def out_cases() -> None:
    merge = "merge base.safetensors m1.safetensors m2.safetensors "
    apply = "apply base.safetensors patch.safetensors --negate 1 "
    convert = "convert m1.safetensors "
    write_text: Build = lambda folder: (folder / "file.txt").write_text("x")  # noqa: E731
    for verb, command in (("merge", merge), ("apply", apply), ("convert", convert)):
        refused = partial(case, build=write_text)
        missing = "missing/new.safetensors"
        refused(f"{verb}-without-out", command, "--out")
        refused(f"{verb}-folder-missing", f"{command} -o {missing}", missing, "does not exist")
        refused(
            f"{verb}-below-a-file",
            f"{command} -o file.txt/new.safetensors",
            "file.txt",
            "not exist",
        )
        refused(f"{verb}-name-too-long", f"{command} -o out/{'x' * 300}.safetensors", "too long")
    case("merge-to-a-folder", f"{merge} -o out", "out", "is a folder")
    case(
        "apply-to-a-folder-with-suffix",
        f"{apply} -o d.safetensors",
        "d.safetensors",
        "is a folder",
        build=lambda folder: (folder / "d.safetensors").mkdir(),
    )
    case("apply-to-a-full-folder", f"{apply} -o out/..", "cannot be the name of an output")
    case("apply-to-a-folder-of-files", f"{apply} -o ../b", "not an empty folder")
    case("apply-to-a-file", f"{apply} -o file.txt", "file.txt", "not an empty", build=write_text)
    case("apply-to-missing", f"{apply} -o missing/new", "missing/new:", "does not exist")
    below = "file.txt/new"
    case("apply-to-below-a-file", f"{apply} -o {below}", f"{below}:", "not exist", build=write_text)

    also = "is also"
    case("out-is-a-member", f"{merge} -o m1.safetensors", "m1.safetensors", also)
    case("out-is-the-base", f"{merge} -o ./base.safetensors", "base.safetensors", also)
    case(
        "out-links-to-a-member",
        f"{merge} -o out/link.safetensors",
        "out/link.safetensors",
        also,
        build=lambda folder: (folder / "out/link.safetensors").hardlink_to(
            folder / "m1.safetensors"
        ),
    )
    case("apply-out-is-the-base", f"{apply} -o base.safetensors", "base.safetensors", also)
    case("apply-out-is-the-patch", f"{apply} -o patch.safetensors", "patch.safetensors", also)
    case("convert-out-is-the-input", f"{convert} -o m1.safetensors", "m1.safetensors", also)


def apply_cases() -> None:
    apply = "apply base.safetensors patch.safetensors "
    either = ("--negate", "--add")
    for arguments, *wanted in (
        ("--negate nan", "--negate nan", "finite"),
        ("--negate -1", "--negate -1", "≥ 0"),
        ("--negate inf", "--negate inf", "finite"),
        ("--add -0.5", "--add -0.5", "≥ 0"),
        ("--add nan", "--add nan", "finite"),
        ("--negate 1e999", "--negate inf", "finite"),
        ("--negate much", "much", "--negate"),
        ("--negate 1 --add 1", *either),
        ("", *either),
        ("--negate 1 --dtype float8", "float8", "float16"),
        ("--negate 1 --workers 0", "workers 0"),
        ("--negate 1 --shard-size 5GB", "out/new.safetensors", "folder"),
        ("--negate 1 --shard-size big", "'big'", "500MB"),
    ):
        case(f"apply{arguments!a}", f"{apply} {arguments} {NEW}", *wanted)

    def other_shapes(folder: Path) -> None:
        model = weights(0) | {BLOCK: ("F32", np.zeros((6, 4)))}
        (folder / "base.safetensors").write_bytes(packed(model))

    another = partial(case, build=copied("m1.safetensors", "base.safetensors"))
    wanted = ("base.safetensors", "is not the base of this patch")
    another("other-base", f"{apply} --negate 1 {NEW}", *wanted)
    another("other-base-with-zero-scale", f"{apply} --negate 0 {NEW}", *wanted)
    another("other-base-to-folder", f"{apply} --negate 1 -o out/new", *wanted)
    another("other-base-as-float16", f"{apply} --negate 1 --dtype float16 {NEW}", *wanted)
    wanted = ("base.safetensors", f"'{BLOCK}'", "(6, 4)", "(4, 6)", "name the base")
    case("other-shapes", f"{apply} --negate 1 {NEW}", *wanted, build=other_shapes)
    case(
        "other-names",
        f"{apply} --negate 1 {NEW}",
        "base.safetensors",
        "is missing",
        "name the base",
        build=prefixed("base", "module."),
    )
    convert = f"convert m1.safetensors --strip-prefix module. {NEW}"
    case("convert-prefix-absent", convert, "m1.safetensors", "'module.'")
    case(
        "convert-without-trust",
        f"convert m.pt {NEW}",
        "m.pt",
        "--trust",
        build=lambda folder: (folder / "m.pt").write_bytes(b"PK\x03\x04"),
    )
    case(
        "convert-not-a-pickle",
        f"convert m.pt --trust {NEW}",
        "m.pt",
        build=lambda folder: (folder / "m.pt").write_bytes(b"PK\x03\x04"),
    )


# ------------------------------------------------------------------------------------------ recipes

BOMB = "\n".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}' if k else 'x'] * 9)}]" for k in range(12))
MERGED = "\n".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 12))


def recipe_cases() -> None:
    unlearn = "unlearn r.yaml -o out/run"

    def refused(name: str, text: str | bytes, *wanted: str) -> None:
        raw = text.encode() if isinstance(text, str) else text
        build: Build = lambda folder: (folder / "r.yaml").write_bytes(raw)  # noqa: E731
        case(f"recipe-{name}", unlearn, "r.yaml", *wanted, build=build)

    refused("key-twice", "title: a\nseed: 1\nseed: 2\n", "line 3", "'seed'", "duplicate key")
    refused(
        "inner-key-twice", "search: {stop: 1.0, 'stop': 2.0}", "line 1", "'stop'", "duplicate key"
    )
    refused("number-key-twice", "1: a\n0x1: b\n", "'1'", "duplicate key")
    refused("alias-bomb", BOMB, "aliases", "1,000,000")
    refused("alias-bomb-of-keys", "a0: &a0 {x: y}\n" + MERGED, "aliases", "1,000,000")
    refused("alias-of-itself", "title: &a [*a]", "alias")
    refused("alias-of-a-long-text", f"a: &a {'x' * 4000}\nb: [{'*a, ' * 9000}]", "aliases")
    refused("nested", "title: " + "[" * 200 + "]" * 200, "nested")
    refused("nested-far", "title: " + "[" * 5000 + "]" * 5000, "r.yaml")
    refused("huge-number", "seed: 0x" + "f" * 4000, "40 digits")
    refused("huge-key", "? 0x" + "f" * 4000 + "\n: 1", "40 digits")
    refused("date", "title: 2020-02-02", "date", "quotes")
    refused("tag-that-does-not-fit", "seed: !!bool maybe", "not YAML")
    refused("empty-number", "seed: !!int ''", "not YAML")
    refused("nul", 'data: {name: "a\\0b"}', "NUL")
    refused("surrogate", 'title: "\\ud800"', "surrogate")
    refused("nul-byte", b"title: a\0b", "NUL")
    refused("not-utf-8", b"title: \xff\xfe", "UTF-8")
    refused("long-text", f"title: {'x' * 5000}", "4096 characters")
    refused("too-large", "# " + "x" * 300_000, "larger than 262144 bytes")
    for field in ("data", "model"):
        refused(f"long-{field}", f"{field}: {{name: {'x' * 4000}}}", f"{field}.name", "too long")
    refused("home-of-nobody", "data: {name: ~nobody-here/x}", "data.name", "cannot be a path")
    refused("grid-of-10^9", "pool: {grid: {lr: &v [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], batch: *v, "
            "epochs: *v, warmup: *v, weight_decay: *v, label_smoothing: *v, momentum: *v, "
            "clip: *v, precision: *v}}", "pool: grid", "1000000000", "at most 10,000")  # fmt: skip
    refused("search-count", "search: {count: 2.0e+9}", "search.count", "10000")
    refused("search-tries", "search: {tries: 2000000000}", "search.tries", "1000")
    refused("search-scales", f"search: {{scales: [{'0.5,' * 20_000}]}}", "search.scales", "10000")
    refused("search-steps", "search: {stop: 1.0e-12, limit: 1.0}", "search", "raise stop")
    refused("workers", "workers: 100000", "workers", "1024")
    refused("image-size", "data: {size: 1000000000}", "data.size", "4096")
    refused("crop", "train: {augment: {crop: 1000000000}}", "train.augment.crop", "1024")
    refused("many-methods", f"methods: [{'ties, ' * 2000}]", "methods", "1000")
    refused("save-never", "save_every: .inf", "save_every", "finite")

    def is_a(name: str, make: Callable[[Path], object], *wanted: str) -> None:
        case(f"recipe-is-a-{name}", unlearn, "r.yaml", *wanted, build=lambda f: make(f / "r.yaml"))

    is_a("fifo", os.mkfifo, "not a regular file")
    is_a("device", lambda path: path.symlink_to("/dev/zero"), "not a regular file")
    is_a("folder", Path.mkdir, "not a regular file")
    case("recipe-of-no-name", "unlearn '' -o out/run", "not a regular file")
    case("recipe-of-a-long-name", f"unlearn {'x' * 5000} -o out/run", "too long", "demo")

    def changed(name: str, change: str, *wanted: str) -> None:
        command = f"unlearn demo -o out/run --set {shlex.quote(change)}"
        case(f"set-{name}", command, *wanted)

    bomb = "[&a [x,x,x,x,x,x,x,x,x]" + "".join(
        f", &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 9)}]" for k in range(9)
    )
    changed("alias-bomb", f"title={bomb}]", "--set title", "aliases")
    changed("key-twice", "search={stop: 1, stop: 2}", "--set search", "'stop'", "duplicate key")
    changed("huge-number", "seed=0x" + "f" * 4000, "--set seed", "40 digits")
    changed("nul", 'data.name="a\\0b"', "--set data.name", "NUL")
    changed("deep-key", ".".join("a" * 1000) + "=1", "--set", "key=value")
    changed("long-text", f"seed={'x' * 4000}", "seed", "…")


def strange_name_cases() -> None:
    """Names of 5,000 characters, empty ones, and ones with NUL, wherever a path is taken."""
    long, nul = "x" * 5000, "a\0b"
    for path, wanted in ((long, "too long"), (nul, "null")):
        for role in ROLES:
            name = "nul" if path is nul else "5000-characters"
            command = [word.replace("{}", path) for word in shlex.split(ROLES[role])]
            CASES.append(Case(f"{name}-as-{role}", tuple(command), (wanted,), lambda _: None))
        for verb in ("verify", "inspect"):
            CASES.append(Case(f"{name}-{verb}", (verb, path), (wanted,), lambda _: None))
    outputs = {
        "merge": ("merge", "base.safetensors", "m1.safetensors", "m2.safetensors"),
        "apply": ("apply", "base.safetensors", "patch.safetensors", "--negate", "1"),
        "convert": ("convert", "m1.safetensors"),
        "unlearn": ("unlearn", "demo", "--set", "data.limit.train=9"),
        "reproduce": ("reproduce", "T2"),
    }
    for verb, command in outputs.items():
        CASES.append(
            Case(f"{verb}-to-nothing", (*command, "-o", ""), ("-o", "is empty"), lambda _: None)
        )
    for verb in ("merge", "apply", "convert"):
        for name, out, wanted in (
            ("here", ".", "cannot be the name"),
            ("root", "/", "cannot be the name"),
            ("above", "..", "cannot be the name"),
            ("nul", nul, "cannot be the name"),
            ("5000-characters", long, "too long"),
            ("5000-characters-of-suffix", long + ".safetensors", "too long"),
            ("5000-characters-above", long + "/x", "too long"),
        ):
            full = (*outputs[verb], "-o", out)
            CASES.append(Case(f"{verb}-to-{name}", full, (wanted,), lambda _: None))
    merge = "merge base.safetensors m1.safetensors m2.safetensors"
    apply = "apply base.safetensors patch.safetensors --negate 1"
    for command in (merge, apply):
        case(
            f"{command[:5]}-workers", f"{command} --workers 100000 {NEW}", "workers 100000", "1024"
        )
    case("plan-to-nowhere", f"{merge} --dry-run -o no/p.safetensors", "/no: does not exist")
    for name, change, *wanted in (
        ("without-ray", "executor.address=auto", "executor.address: ", "executor.kind to ray"),
        ("of-no-port", "executor.address=host", "executor.address: wanted HOST:PORT", "'host'"),
        ("of-a-large-port", "executor.address=host:65536", "executor.address: wanted HOST:PORT"),
        ("unknown", "executor.adress=auto", "executor.adress: there is no such field"),
        ("of-a-run", "threads=2", "wanted executor.KEY=VALUE"),
    ):
        case(f"setting-{name}", f"{merge} --set {change} {NEW}", *wanted)


file_cases()
patch_cases()
recipe_cases()
strange_name_cases()
folder_cases()
adapter_cases()
value_cases()
fit_cases()
pool_cases()
out_cases()
apply_cases()
