"""Processes that fill the cache of compiled code together never get each other's code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from negmerge import compiled
from negmerge.jit import CacheFile
from negmerge.merge import kernels, loop, trim
from negmerge.merge.rules import make_rule, rules

KEYS = [("float32", "min"), ("float32", "max"), ("float64", "max")]


def process(folder: Path) -> CacheFile:
    return CacheFile(str(folder), "loop.kernel-1.py311", ("stamp", 1))


@pytest.mark.parametrize("late", range(len(KEYS)))
@pytest.mark.parametrize("order", list(permutations(range(len(KEYS)))))
def test_what_is_loaded_is_what_was_saved(
    order: tuple[int, ...], late: int, tmp_path: Path, monkeypatch
):
    processes = [process(tmp_path) for _ in KEYS]
    for one in processes:  # each read the index before the others wrote theirs
        monkeypatch.setattr(one, "_load_index", dict)
    waiting: list[Callable[[], None]] = []
    write = processes[late]._save_data
    monkeypatch.setattr(
        processes[late], "_save_data", lambda *what: waiting.append(lambda: write(*what))
    )
    for k in order:
        processes[k].save(KEYS[k], f"code of {KEYS[k]}")
    waiting[0]()  # one writes its code after all others are done
    found = [process(tmp_path).load(key) for key in KEYS]
    assert all(code in (None, f"code of {key}") for code, key in zip(found, KEYS, strict=True))
    assert any(found), "the last one is kept"


def test_one_after_the_other_all_are_kept(tmp_path: Path):
    for key in KEYS:
        process(tmp_path).save(key, f"code of {key}")
    assert [process(tmp_path).load(key) for key in KEYS] == [f"code of {key}" for key in KEYS]


def test_code_of_an_older_source_is_not_loaded(tmp_path: Path):
    CacheFile(str(tmp_path), "loop.kernel-1.py311", ("stamp", 0)).save(KEYS[0], "old")
    assert process(tmp_path).load(KEYS[0]) is None


def test_all_compiled_code_is_kept_so():
    found = [
        value
        for module in (compiled, kernels, loop, trim)
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    ]
    found += [loop.segment_kernel(*make_rule(name).streamed(), True) for name in rules]
    assert len(found) > 8
    for dispatcher in found:
        assert type(dispatcher._cache._cache_file) is CacheFile, dispatcher
