"""`convert`: what the unpickler may meet is converted exactly, or refused in one line."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from negmerge.checkpoints.convert import convert
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.training.weights import load_tensors

NEW = "new.safetensors"


def refused(content: object, place: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line that the command line says of a pickle; nothing is written."""
    torch.save(content, place / "m.pt")
    return refused_file(place / "m.pt", capsys, *more)


def refused_file(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    out = path.with_name(NEW)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), "--trust", "-o", str(out), *more])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]
    return told


class Kind(torch.Tensor):
    """A subclass that torch's unpickler is told to allow."""


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.empty(3, device="meta"), "without data"),
        (lambda: torch.ones(3, dtype=torch.complex64), "of complex64"),
        (lambda: torch.ones(1).expand(2**30, 2**20), "expanded"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "m.pt"),
        (lambda: torch.ones(1, 1).expand(2**31, 2**31), "expanded"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_safetensors_cannot_hold(tensor, told, tmp_path, capsys):
    assert told in refused({"w": tensor(), "b": torch.ones(2)}, tmp_path, capsys)


def test_a_subclass(tmp_path, capsys):
    with torch.serialization.safe_globals([Kind]):
        told = refused({"w": torch.ones(2).as_subclass(Kind)}, tmp_path, capsys)
    assert "a Kind" in told


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "\ud800", "x" * 513, "__metadata__"])
def test_names_that_our_own_reader_refuses(name, tmp_path, capsys):
    told = refused({name: torch.ones(2)}, tmp_path, capsys)
    assert "printable and 1 to 512 characters" in told
    convert_named = {f"p.{name}": torch.ones(2)}
    told = refused(convert_named, tmp_path, capsys, "--strip-prefix", "p.")
    assert "printable" in told or "does not start" in told


@pytest.mark.parametrize("keys", [(1, 2), ("a", 2), ("a\n", "b")])
def test_weights_in_several_places(keys, tmp_path, capsys):
    told = refused({key: {"w": torch.ones(2)} for key in keys}, tmp_path, capsys)
    assert "--key" in told


@pytest.mark.parametrize("content", [None, 3, [], {}, {"w": 1}, {1: torch.ones(2)}, torch.ones(2)])
def test_what_is_no_dictionary_of_tensors(content, tmp_path, capsys):
    assert "no dictionary" in refused(content, tmp_path, capsys)


def pickled(make: str) -> bytes:
    """A zip as torch writes it, whose pickle is these opcodes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", make.encode("latin-1"))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\x80", b"\x80\x02", b"\x80\x02.", b"\x80\x02N.", b"PK\x03\x04", b"\x80\x02(((((.",
        b"\x80\x02c__builtin__\neval\n.", b"\x80\x02X\xff\xff\xff\x7fx.", b"\x80\x02h\x05.",
        pickle.dumps(OrderedDict(a=1)), pickle.dumps(OSError("x")), pickled("\x80\x02}q\x00."),
        pickled("\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNNNtR."), pickled("."), pickled(""),
        pickled("\x80\x02ctorch\nSize\nK\x05\x85R."), pickled("\x80\x02K\x01K\x02s."),
    ],
)  # fmt: skip
def test_damaged_pickles(raw, tmp_path, capsys):
    (tmp_path / "m.pt").write_bytes(raw)
    refused_file(tmp_path / "m.pt", capsys)


def test_pickles_with_flipped_bytes(tmp_path):
    """Whatever the unpickler raises, it is told; what it takes, our reader reads."""
    torch.save({"w": torch.ones(2, 3), "b": torch.arange(3)}, tmp_path / "good.pt")
    good, draw = (tmp_path / "good.pt").read_bytes(), random.Random(0)
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        (tmp_path / "m.pt").write_bytes(raw)
        try:
            convert(tmp_path / "m.pt", tmp_path / NEW, trust=True)
        except NegMergeError:
            continue
        load_tensors(tmp_path / NEW)


def test_every_layout_keeps_its_bits(tmp_path):
    tensors = {
        "transposed": torch.randn(3, 4).T,
        "expanded": torch.randn(3, 1).expand(3, 4),
        "strided": torch.randn(9)[::2],
        "negative": torch._neg_view(torch.randn(3)),
        "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(3).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    tensors["tied"] = tensors["transposed"]
    torch.save(tensors, tmp_path / "m.pt")
    assert convert(tmp_path / "m.pt", tmp_path / NEW, trust=True) == len(tensors)
    found, metadata = load_tensors(tmp_path / NEW)
    assert metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["fifo", "folder", "missing", "device"])
def test_what_is_no_file(kind, tmp_path, capsys):
    import os

    path = tmp_path / "m.pt"
    make = {"fifo": os.mkfifo, "folder": Path.mkdir, "missing": lambda _: None}
    make.get(kind, lambda p: p.symlink_to("/dev/zero"))(path)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), "--trust", "-o", str(tmp_path / NEW)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "no such file" in told or "not a regular file" in told
