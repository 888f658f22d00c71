"""Compiled code is known by what it computes, and proves it before it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from numba import config
from numba.core.dispatcher import Dispatcher

from negmerge import NegMergeError
from negmerge.checkpoints import checksum
from negmerge.merging import dissent, magnitudes, rows
from negmerge.merging.computation import loop_for
from negmerge.merging.rules import make_rule, rules
from negmerge.support import jit
from negmerge.support.jit import (
    CacheFile,
    CheckedCache,
    CheckedCompiler,
    equals_reference,
    identity,
)
from negmerge.vectors import compiled_addition

KEYS = [("float32", "min"), ("float32", "max"), ("float64", "max")]


def process(folder: Path) -> CacheFile:
    return CacheFile(str(folder), "loop.kernel-1.py311", ("stamp", 1))


@pytest.mark.parametrize("order", list(permutations(range(len(KEYS)))))
def test_what_is_loaded_is_what_was_saved(order: tuple[int, ...], tmp_path: Path):
    processes = [process(tmp_path) for _ in KEYS]
    for k in order:
        processes[k].save(KEYS[k], f"code of {KEYS[k]}")
    assert [process(tmp_path).load(key) for key in KEYS] == [f"code of {key}" for key in KEYS]


def test_code_of_an_older_source_is_not_loaded(tmp_path: Path):
    CacheFile(str(tmp_path), "loop.kernel-1.py311", ("stamp", 0)).save(KEYS[0], "old")
    assert process(tmp_path).load(KEYS[0]) is None


def dispatchers() -> list[Dispatcher]:
    """All compiled code of the package."""
    found = [
        value
        for module in (checksum, compiled_addition, dissent, magnitudes, rows)
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    ]
    return found + [loop_for(make_rule(name), packs) for name in rules for packs in (True, False)]


def test_all_compiled_code_proves_itself():
    assert len(dispatchers()) > 8
    for dispatcher in dispatchers():
        assert type(dispatcher._compiler) is CheckedCompiler, dispatcher
        assert type(dispatcher._cache) is CheckedCache, dispatcher
        assert type(dispatcher._cache._cache_file) is CacheFile, dispatcher


def test_no_two_pieces_of_code_have_one_name():
    names = [dispatcher.py_func.__qualname__ for dispatcher in dispatchers()]
    assert len(set(names)) == len(names)


NEXT_SYMBOL = """
import os
import negmerge.support.jit as jit
if {forks}:
    if os.fork():
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(next(jit.FunctionIdentity._unique_ids), flush=True)
os._exit(0)
"""


def test_symbols_of_two_processes_differ():
    code = NEXT_SYMBOL.format(forks=False)
    run = partial(subprocess.check_output, [sys.executable, "-c", code])
    assert abs(int(run()) - int(run())) > 1 << 32


def test_symbols_of_a_forked_process_differ():
    code = NEXT_SYMBOL.format(forks=True).replace(
        "if True:", "print(next(jit.FunctionIdentity._unique_ids), flush=True)\nif True:"
    )
    parent, child = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert abs(int(parent) - int(child)) > 1 << 32


# ---------------------------------------------------------------------------------------- identity


def scaled(k: float) -> Callable[[float], float]:
    return lambda x: k * x


def made(source: str) -> Callable[..., float]:
    """A function as a prompt makes it: a name that may stand for another function later."""
    space: dict = {"np": np, "scaled": scaled(2.0)}
    exec(source, space)  # noqa: S102
    return space["finish"]


SOURCES = [
    "def finish(x): return x",
    "def finish(x): return x + 1",
    "def finish(x): return x + 2",
    "def finish(x, y): return x + 1",
    "def finish(x, k=1): return x + k",
    "def finish(x, k=2): return x + k",
    "K = 1\ndef finish(x): return x + K",
    "K = 2\ndef finish(x): return x + K",
    "K = np.array([1.0])\ndef finish(x): return x + K[0]",
    "K = np.array([2.0])\ndef finish(x): return x + K[0]",
    "def helper(x): return x\ndef finish(x): return helper(x)",
    "def helper(x): return -x\ndef finish(x): return helper(x)",
    "def finish(x): return scaled(x)",
    "def finish(x): return (lambda y: y + 1)(x)",
    "def finish(x): return (lambda y: y + 2)(x)",
    "def finish(x): return np.sin(x)",
    "def finish(x): return np.cos(x)",
]


def test_another_source_is_another_identity():
    found = [identity(made(source)) for source in SOURCES]
    found += [identity(scaled(2.0)), identity(scaled(3.0)), identity(made(SOURCES[0]), "fast")]
    assert len(set(found)) == len(found)


def test_the_same_source_is_the_same_identity_in_every_process():
    code = "import sys; sys.path[:0] = [{!r}, {!r}]; from test_jit_laws import *; print({})"
    names = (
        "*(identity(made(s)) for s in SOURCES), *(d.py_func.__qualname__ for d in dispatchers())"
    )
    here = Path(__file__)
    text = code.format(str(here.parent), str(here.parents[1]), names)
    found = [
        subprocess.check_output([sys.executable, "-c", text], text=True).split() for _ in range(2)
    ]
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------- proof


def doubled(values: np.ndarray) -> float:
    for i in range(len(values)):
        values[i] *= 2
    return values[0]


def examples(dtypes: list) -> list[tuple[np.ndarray]]:
    return [(np.arange(1, 5, dtype=dtypes[0]),)]


def wrong_return(values: np.ndarray) -> float:
    values *= 2
    return -1.0


def wrong_array(values: np.ndarray) -> float:
    values *= 2
    values[-1] = 7
    return values[0]


@pytest.mark.parametrize("plain", [wrong_return, wrong_array])
def test_code_that_fails_its_proof_is_never_called(plain: Callable[..., float]):
    quick = jit.compiled(equals_reference(plain, examples))(copied(doubled))
    values = np.ones(3)
    with pytest.raises(NegMergeError, match=r"doubled.*different results"):
        quick(values)
    assert values.tolist() == [1, 1, 1]


def copied(function: Callable[..., float]) -> Callable[..., float]:
    return FunctionType(function.__code__, function.__globals__, function.__name__)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "flipped"])
def test_a_damaged_file_of_the_cache_is_replaced(damage: str, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    proof = equals_reference(copied(doubled), examples)
    jit.compiled(proof)(copied(doubled))(np.ones(3))
    (path,) = tmp_path.rglob("*.nbc")
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 255]) + whole[-8:]
    damaged = {"cut": whole[:40], "empty": b"", "other": b"negmerge", "flipped": flipped}
    path.write_bytes(damaged[damage])
    with pytest.warns(UserWarning, match="compiled again and replaced"):
        assert jit.compiled(proof)(copied(doubled))(np.full(3, 4.0)) == 8
    quick = jit.compiled(proof)(copied(doubled))
    assert quick(np.ones(3)) == 2
    assert sum(quick.stats.cache_hits.values()) == 1


def test_code_of_another_file_is_not_run_even_to_prove_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    tried: list[Callable[..., float]] = []

    def proof(code: Callable[..., float], dtypes: Sequence[Any]) -> bool:
        tried.append(code)
        return True

    for function in (doubled, wrong_return):
        jit.compiled(proof)(copied(function))(np.ones(3))
    (mine,), (other,) = tmp_path.rglob("*doubled*.nbc"), tmp_path.rglob("*wrong_return*.nbc")
    mine.write_bytes(other.read_bytes())
    tried.clear()
    with pytest.warns(UserWarning, match="compiled again and replaced"):
        assert jit.compiled(proof)(copied(doubled))(np.ones(3)) == 2
    assert len(tried) == 1, "what was compiled, not what was loaded"


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    quick = jit.compiled(equals_reference(copied(doubled), examples))(copied(doubled))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quick._cache._cache_file, "_open_for_write", full)
    assert quick(np.ones(3)) == 2
