"""Checkpoints in the layout of the authors' release are converted to the names of open_clip."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from negmerge.checkpoints.convert import convert
from negmerge.errors import FileError, OptionError
from running import negmerge

RELEASE = '''
"""A module that writes a file when it is imported, as no converter may do."""
from pathlib import Path
import torch
from torch import nn
Path("imported").write_text("")

def resize(image):
    return image

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.Q, self.K, self.V, self.O = (nn.Linear(width, width) for _ in range(4))

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)

class Visual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Parameter(torch.randn(width, 3))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList([Block(width), Block(width)])
        self.register_buffer("hidden", torch.ones(2), persistent=False)

class Clip(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.visual = Visual(width)
        self.logit_scale = nn.Parameter(torch.ones([]))

class ImageEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model, self.train_preprocess = Clip(width), resize

class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image_encoder = ImageEncoder(width)
        self.classification_head = nn.Linear(3, 4)
'''

SAVE = """
import sys, torch, release
torch.manual_seed(int(sys.argv[1]))
encoder = release.ImageEncoder(6)
torch.save(encoder.state_dict(), "plain.pt")
torch.save(encoder, "module.pt")
torch.save(release.Classifier(6), "classifier.pt")
torch.save(torch.nn.DataParallel(encoder).state_dict(), "parallel.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints that a process of its own saved, beside their classes."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "release.py").write_text(RELEASE)
    command = [sys.executable, "-c", SAVE, "3"]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": "."})
    (folder / "imported").unlink()
    return folder


@pytest.fixture
def files(saved: Path, tmp_path: Path) -> Path:
    """A folder with checkpoints whose classes are no longer there."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def wanted(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The state dict with Q, K and V stacked, written out for two blocks."""
    made = {
        "visual.proj": state[f"{prefix}visual.proj"],
        "logit_scale": state[f"{prefix}logit_scale"],
    }
    for k in range(2):
        old, new = (
            f"{prefix}visual.transformer.resblocks.{k}.",
            f"visual.transformer.resblocks.{k}.",
        )
        for kind in ("weight", "bias"):
            made[f"{new}ln_1.{kind}"] = state[f"{old}ln_1.{kind}"]
            made[f"{new}attn.out_proj.{kind}"] = state[f"{old}attn.O.{kind}"]
            stacked = [state[f"{old}attn.{letter}.{kind}"] for letter in "QKV"]
            made[f"{new}attn.in_proj_{kind}"] = torch.cat(stacked)
    return made


@pytest.mark.parametrize("name", ["plain", "parallel", "module"])
def test_every_kind_of_file_gets_the_names_of_open_clip(files: Path, name: str):
    state = torch.load(files / "plain.pt", weights_only=True)
    negmerge(files, "convert", f"{name}.pt", "--trust", "-o", "out.safetensors")
    found, made = load_file(files / "out.safetensors"), wanted(state, "model.")
    assert found.keys() == made.keys()
    for key, tensor in made.items():
        assert torch.equal(found[key], tensor), key
    assert not (files / "imported").exists()


def test_a_classifier_keeps_its_head(files: Path):
    convert(files / "classifier.pt", files / "out.safetensors", trust=True)
    found = load_file(files / "out.safetensors")
    assert found["classification_head.weight"].shape == (4, 3)
    assert found["visual.transformer.resblocks.1.attn.in_proj_weight"].shape == (18, 6)


def test_an_attention_layer_without_a_part_is_refused(files: Path):
    state = torch.load(files / "plain.pt", weights_only=True)
    del state["model.visual.transformer.resblocks.1.attn.V.bias"]
    torch.save(state, files / "part.pt")
    with pytest.raises(FileError, match=r"part\.pt: has .*Q\.bias' but not .*V\.bias'"):
        convert(files / "part.pt", files / "out.safetensors", trust=True)
    assert not (files / "out.safetensors").exists()


class Runs:
    """An object whose pickle runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("place", ["alone", "in a module"])
def test_a_pickle_that_runs_a_command_runs_nothing(tmp_path: Path, monkeypatch, place: str):
    monkeypatch.chdir(tmp_path)
    module = torch.nn.Linear(2, 2)
    if place == "in a module":
        module.extra = Runs()
    torch.save(module if place == "in a module" else Runs(), "a.pt")
    if place == "alone":
        why = r"a\.pt: cannot be read as plain weights: it names 'posix\.system', which could run"
        with pytest.raises(FileError, match=why):
            convert("a.pt", "out.safetensors", trust=True)
    else:
        assert convert("a.pt", "out.safetensors", trust=True) == 2
    assert not Path("ran").exists()


def test_modules_that_share_others_end(tmp_path: Path):
    """A file of a few kilobytes that lists 2⁶⁰ modules."""
    module = torch.nn.Linear(2, 2)
    for _ in range(60):
        module = torch.nn.Sequential(module, module)
    torch.save(module, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"a\.pt: .*: more than 100,000 modules$"):
        convert(tmp_path / "a.pt", tmp_path / "out.safetensors", trust=True)


def test_an_old_pickle_of_a_module_is_refused(tmp_path: Path):
    path = tmp_path / "old.pt"
    torch.save(torch.nn.Linear(2, 2), path, _use_new_zipfile_serialization=False)
    with pytest.raises(FileError, match=r"before 1\.6: .*save it again with torch\.save"):
        convert(path, tmp_path / "out.safetensors", trust=True)
    path.write_bytes(pickle.dumps({"a": Runs()}))
    with pytest.raises(FileError, match=r"cannot be read as plain weights(?!.*before 1\.6)"):
        convert(path, tmp_path / "out.safetensors", trust=True)


def test_an_old_pickle_of_a_state_dict_is_read(files: Path):
    state = torch.load(files / "plain.pt", weights_only=True)
    torch.save(state, files / "old.pt", _use_new_zipfile_serialization=False)
    convert(files / "old.pt", files / "out.safetensors", trust=True)
    same(load_file(files / "out.safetensors"), wanted(state, "model."))


# ------------------------------------------------------------------------------ unusual checkpoints

BLOCK = "visual.transformer.resblocks.0."


def split_state(prefix: str = "", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One block with split attention, and a few other tensors."""
    torch.manual_seed(0)
    state = {f"{prefix}{BLOCK}attn.{k}.weight": torch.randn(4, 4) for k in "QKVO"}
    state |= {f"{prefix}{BLOCK}attn.{k}.bias": torch.randn(4) for k in "QKVO"}
    state |= {f"{prefix}visual.proj": torch.randn(4, 2), f"{prefix}logit_scale": torch.ones([])}
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def joined_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same with the names of open_clip."""
    state = split_state("", dtype)
    made = {name: state[name] for name in ("visual.proj", "logit_scale")}
    for kind in ("weight", "bias"):
        parts = [state[f"{BLOCK}attn.{k}.{kind}"] for k in "QKV"]
        made[f"{BLOCK}attn.in_proj_{kind}"] = torch.cat(parts)
        made[f"{BLOCK}attn.out_proj.{kind}"] = state[f"{BLOCK}attn.O.{kind}"]
    return made


def same(found: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
    assert found.keys() == made.keys()
    for key, tensor in made.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def converted(content: object, place: Path, **options: str) -> dict[str, torch.Tensor]:
    torch.save(content, place / "in.pt")
    convert(place / "in.pt", place / "out.safetensors", trust=True, **options)
    return load_file(place / "out.safetensors")


def refused(content: object, place: Path, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        converted(content, place)
    assert "\n" not in str(caught.value)
    assert not (place / "out.safetensors").exists()


PREFIXES = [
    "", "module.", "model.", "module.image_encoder.model.", "my_visual.", "visual.old.",
    "transformer.model.", "_orig_mod.", "a.visual.transformer.b.",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix_is_removed(prefix: str, tmp_path: Path):
    found = converted(split_state(prefix) | {"head.weight": torch.ones(3)}, tmp_path)
    same(found, joined_state() | {"head.weight": torch.ones(3)})
    if prefix:
        same(converted(split_state(prefix), tmp_path, strip_prefix=prefix), joined_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_number_formats_stay(dtype: torch.dtype, tmp_path: Path):
    same(converted(split_state("model.", dtype), tmp_path), joined_state(dtype))


def test_biases_may_be_missing(tmp_path: Path):
    state = {name: t for name, t in split_state("model.").items() if not name.endswith(".bias")}
    made = {name: t for name, t in joined_state().items() if "bias" not in name}
    same(converted(state, tmp_path), made)


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path):
    state = split_state()
    whole = torch.cat([state[f"{BLOCK}attn.{k}.weight"] for k in "QKV"])
    for letter, part in zip("QKV", whole.chunk(3), strict=True):
        state[f"{BLOCK}attn.{letter}.weight"] = part
    state["tied"] = state["visual.proj"]
    state["turned"] = state["visual.proj"].T
    proj = state["visual.proj"]
    same(converted(state, tmp_path), joined_state() | {"tied": proj, "turned": proj.T.contiguous()})


def test_the_state_of_an_optimiser_is_left_out(files: Path):
    state = torch.load(files / "plain.pt", weights_only=True)
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    optimiser = torch.optim.AdamW(layer.parameters())
    optimiser.step()
    whole = {"state_dict": state, "optimizer": optimiser.state_dict(), "epoch": 3}
    same(converted(whole, files), wanted(state, "model."))
    made = converted({"model": layer, "optimizer": optimiser.state_dict()}, files)
    same(made, {name: tensor.detach() for name, tensor in layer.state_dict().items()})
    two = {"model": layer, "average": torch.nn.Linear(2, 2)}
    with pytest.raises(OptionError, match="weights under several keys: 'model', 'average'; choose"):
        converted(two, files)
    assert converted(two, files, key="average").keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(f"{BLOCK}attn.Q.weight"), r"K\.weight' but not .*Q\.weight'"),
        (lambda s: s.pop(f"{BLOCK}attn.K.bias"), r"Q\.bias' but not .*K\.bias'"),
        (lambda s: s.pop(f"{BLOCK}attn.Q.bias"), r"K\.bias' but not .*Q\.bias'"),
        (
            lambda s: s.update({f"{BLOCK}attn.in_proj_weight": torch.ones(12, 4)}),
            r"Q\.weight' becomes .*in_proj_weight', which the file has too; remove",
        ),
        (
            lambda s: s.update({f"{BLOCK}attn.out_proj.bias": torch.ones(4)}),
            r"O\.bias' becomes .*out_proj\.bias', which the file has too; remove",
        ),
        (
            lambda s: s.update({f"model.{name}": t for name, t in s.items() if "attn" not in name}
                               | {f"model.{n}": s.pop(n) for n in [*s] if "attn" in n}),
            r"'model\.visual\.proj' becomes 'visual\.proj', which the file has too",
        ),
        (
            lambda s: s.update({f"{BLOCK}attn.K.weight": torch.ones(4, 4).half()}),
            r"K\.weight': is torch\.float16 \(4, 4\), .* wanted Q, K and V of one shape",
        ),
        (
            lambda s: s.update({f"{BLOCK}attn.V.weight": torch.ones(4, 3)}),
            r"V\.weight': is torch\.float32 \(4, 3\)",
        ),
        (
            lambda s: s.update({f"{BLOCK}attn.{k}.bias": torch.ones([]) for k in "QKV"}),
            r"Q\.bias': is torch\.float32 \(\)",
        ),
        (
            lambda s: s.update({f"{BLOCK}attn.Q.weight": torch.eye(4).to_sparse()}),
            "the tensor is sparse",
        ),
    ],
)  # fmt: skip
def test_split_attention_that_fits_nothing_is_refused(change, message: str, tmp_path: Path):
    state = split_state()
    change(state)
    refused(state, tmp_path, message)


# ---------------------------------------------------------------------------------- hostile pickles


def archive(opcodes: bytes) -> bytes:
    """A file as `torch.save` writes it, with other opcodes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", opcodes)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def setting(module: str, name: str, attribute: str) -> bytes:
    """Opcodes that set an attribute of something that they import to a class of the pickle."""
    thing = f"c{module}\n{name}\n".encode()
    return b"\x80\x02" + thing + b"N}X" + len(attribute).to_bytes(4, "little") + (
        attribute.encode() + b"cevil\nEvil\ns\x86b."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
        ("torch.nn.parameter", "Parameter"), ("torch.storage", "UntypedStorage"),
        ("torch", "FloatStorage"), ("torch", "Size"), ("torch", "device"), ("builtins", "set"),
        ("collections", "OrderedDict"), ("torch.serialization", "_get_layout"),
        ("negmerge.checkpoints.pickled_module", "Unknown"), ("os", "system"),
    ],
)  # fmt: skip
def test_a_pickle_cannot_change_what_it_names(module: str, name: str, tmp_path: Path):
    owner = getattr(importlib.import_module(module), name)
    before = {key: repr(value) for key, value in vars(owner).items()} if hasattr(
        owner, "__dict__"
    ) else {}  # fmt: skip
    for attribute in ("__call__", "__new__", "harm", "__setstate__", "__defaults__"):
        path = tmp_path / "in.pt"
        path.write_bytes(archive(setting(module, name, attribute)))
        with pytest.raises(FileError):
            convert(path, tmp_path / "out.safetensors", trust=True)
    after = {key: repr(value) for key, value in vars(owner).items()} if before else {}
    assert after == before
    assert not hasattr(owner, "harm")
    assert converted(split_state("model."), tmp_path).keys() == joined_state().keys()


def test_hostile_opcodes_run_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = [
        ("os", "system", "touch ran"), ("builtins", "eval", "open('ran', 'w')"),
        ("builtins", "exec", "open('ran', 'w')"), ("posix", "system", "touch ran"),
        ("torch.hub", "load", "ran"), ("builtins", "__import__", "os"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__", "os"),
        ("torch.serialization", "os.system", "touch ran"),
    ]  # fmt: skip
    for module, name, argument in calls:
        call = f"c{module}\n{name}\n(X".encode() + len(argument).to_bytes(4, "little")
        call += argument.encode() + b"tR"
        inside = b"\x80\x02ca\nModule\n)\x81}(X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00x"
        for opcodes in (b"\x80\x02" + call + b".", inside + call + b"ub."):
            Path("in.pt").write_bytes(archive(opcodes))
            with suppress(FileError):
                convert("in.pt", "out.safetensors", trust=True)
            Path("in.pt").write_bytes(opcodes)
            with suppress(FileError):
                convert("in.pt", "out.safetensors", trust=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"in.pt", "out.safetensors"}
