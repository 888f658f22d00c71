"""Whatever other processes left in the cache of compiled code, a rule computes itself."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import oracle
from negmerge.merging.computation import loop_for
from negmerge.merging.rules import make_rule, options_of, rules
from negmerge.support.jit import CHECKSUM_SIZE, cache_checksum
from running import negmerge, python

OTHER = {"quorum": 0.7, "density": 0.5, "factor": 1.5, "agree": 3, "errors": 1.5, "power": 3}
N = 6

# Merges by every variant in turn, in one process; prints the numbers of those that are wrong.
IN_TURN = """
import json, sys
from pathlib import Path
import numpy as np
import negmerge as nm
folder = Path(sys.argv[1])
members = sorted(folder.glob("member*.safetensors"))
wrong = []
for number, (rule, options) in json.loads(sys.argv[2]):
    tau = nm.merge(folder / "base.safetensors", members, rule, options, workers=1)
    found = np.concatenate([tau.entries[name].dense() for name in sorted(tau.entries)])
    if not np.array_equal(found, np.load(folder / f"wanted{number}.npy")):
        wrong.append(number)
print(json.dumps(wrong))
"""


def variants() -> list[tuple[str, dict]]:
    """Every rule with every choice of its options; of numbers the default and one other."""
    found = []
    for name in rules:
        values = {}
        for option, (takes, default) in options_of(rules.get(name)).items():
            words = takes.split("|") if "|" in takes else [default, OTHER[option]]
            values[option] = words
        for chosen in product(*values.values()):
            found.append((name, dict(zip(values, chosen, strict=True))))
    return found


VARIANTS = variants()


def loops() -> list[int]:
    """One variant for each piece of compiled code."""
    first: dict[object, int] = {}
    for number, (name, options) in enumerate(VARIANTS):
        rule = make_rule(name, options)
        first.setdefault(rule.direct_fold() or rule.parts(), number)
    return list(first.values())


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Path:
    """A base, its members, and what each variant must give."""
    folder = tmp_path_factory.mktemp("pool")
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (30, 80), "b.weight": (70,)}
    base = {k: (rng.integers(-8, 9, s) / 8).astype(np.float32) for k, s in shapes.items()}
    shared = {k: rng.integers(-3, 4, s) for k, s in shapes.items()}
    save_file(base, folder / "base.safetensors")
    deltas = []
    for k in range(N):
        change = {n: (shared[n] + rng.integers(-2, 3, s)) / 8 for n, s in shapes.items()}
        deltas.append(change)
        model = {n: (base[n] + change[n]).astype(np.float32) for n in shapes}
        save_file(model, folder / f"member{k}.safetensors")
    for number, (rule, options) in enumerate(VARIANTS):
        typed = make_rule(rule, options).options
        wanted = oracle.merge(deltas, rule, **typed)
        flat = np.concatenate([wanted[n].reshape(-1) for n in sorted(wanted)])
        np.save(folder / f"wanted{number}.npy", flat.astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def cache(pool: Path, tmp_path_factory) -> Path:
    """A cache that began empty and was filled by one process for each loop, two at a time."""
    folder = tmp_path_factory.mktemp("cache")
    members = [str(path) for path in sorted(pool.glob("member*.safetensors"))]

    def fill(number: int) -> None:
        rule, options = VARIANTS[number]
        told = [word for k, v in options.items() for word in ("--option", f"{k}={v}")]
        out = str(folder.parent / f"patch{number}.safetensors")
        arguments = ("merge", str(pool / "base.safetensors"), *members, "-o", out, "--rule", rule)
        negmerge(pool, *arguments, *told, NUMBA_CACHE_DIR=str(folder))

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(fill, loops()))
    return folder


def in_turn(pool: Path, cache: Path, order: list[int]) -> tuple[list[int], str]:
    """Merge by variants in one process; which came out wrong, and what it said."""
    work = [(number, VARIANTS[number]) for number in order]
    words = ["-c", IN_TURN, str(pool), json.dumps(work)]
    out, err = python(pool, *words, NUMBA_CACHE_DIR=str(cache))
    return json.loads(out), err


def orders() -> dict[str, list[int]]:
    forward = list(range(len(VARIANTS)))
    shuffled = np.random.default_rng(1).permutation(len(VARIANTS)).tolist()
    return {"forward": forward, "backward": forward[::-1], "shuffled": shuffled}


@pytest.mark.slow
@pytest.mark.parametrize("order", list(orders().values()), ids=list(orders()))
def test_loops_of_many_processes_serve_one(pool: Path, cache: Path, order: list[int]):
    wrong, told = in_turn(pool, cache, order)
    assert [VARIANTS[number] for number in wrong] == []
    assert "compiled" not in told, told


SPREAD = [
    {"reduce": "min"},
    {"reduce": "max"},
    {"reduce": "min", "signed": True},
    {"reduce": "max", "signed": True},
]
"""Options of consensus whose loops have the same arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
def test_a_poisoned_cache_is_noticed_mended_and_never_used(
    pool: Path, cache: Path, tmp_path: Path, sealed: bool
):
    poisoned = tmp_path / "poisoned"
    shutil.copytree(cache, poisoned)
    loops = [loop_for(make_rule("consensus", options), True).py_func for options in SPREAD]
    names = [loop.__qualname__.rpartition(".")[2] for loop in loops]
    files = [path for name in names for path in poisoned.rglob(f"*{name}*.nbc")]
    assert len(files) == 4
    contents = [path.read_bytes()[CHECKSUM_SIZE:] for path in files]
    for path, own, other in zip(files, contents, contents[1:] + contents[:1], strict=True):
        # With a checksum of its own nothing but the proof tells that it is another's code.
        seal = cache_checksum(path.name, other if sealed else own)
        path.write_bytes(seal + other)
    order = [k for k, (rule, options) in enumerate(VARIANTS) if rule in ("consensus", "uniform")]
    wrong, told = in_turn(pool, poisoned, order)
    assert wrong == []
    assert told.count("compiled again and replaced") == 4, told
    assert ("gives wrong results" if sealed else "wrong checksum") in told
    wrong, told = in_turn(pool, poisoned, order)
    assert (wrong, "compiled" in told) == ([], False), "the cache was mended"
