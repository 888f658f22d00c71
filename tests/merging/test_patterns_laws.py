"""`include` and `exclude`: the merge of the chosen tensors alone, the others as in the base."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import negmerge as nm
from negmerge.errors import OptionError
from negmerge.merging.estimate import estimate
from negmerge.runs.executors import InProcess
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from running import negmerge
from small_pools import VARIANTS

NAMES = ["embed.weight", "layers.0.q.weight", "layers.0.q.bias", "layers.1.q.weight", "head.weight"]
PATTERNS = ["*", "layers.*", "*.bias", "*embed*", "layers.?.q.weight", "[eh]*", "*.weight"]


def models(seed: int, n: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    base = {name: rng.standard_normal((5, 7)).astype(np.float32) for name in NAMES}
    change = {name: rng.standard_normal((5, 7)) for name in NAMES}
    return [base] + [
        {m: (v + change[m] + rng.standard_normal((5, 7))).astype("f4") for m, v in base.items()}
        for _ in range(n)
    ]


def fits(name: str, include: list[str], exclude: list[str]) -> bool:
    wanted = not include or any(fnmatchcase(name, p) for p in include)
    return wanted and not any(fnmatchcase(name, p) for p in exclude)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(PATTERNS), max_size=2),
    st.lists(st.sampled_from(PATTERNS[1:]), max_size=2),
    st.sampled_from(VARIANTS),
    st.integers(0, 9),
)
def test_the_merge_of_the_chosen_tensors_alone(include, exclude, variant, seed):
    rule, options = variant
    base, *pool = models(seed)
    chosen = [name for name in NAMES if fits(name, include, exclude)]
    if not chosen:
        with pytest.raises(nm.NegMergeError, match="nothing to merge"):
            nm.merge(base, pool, rule, options, include=include, exclude=exclude)
        return
    tau = nm.merge(base, pool, rule, options, include=include, exclude=exclude)
    alone = nm.merge(
        {n: base[n] for n in chosen}, [{n: m[n] for n in chosen} for m in pool], rule, options
    )
    assert {n: tau[n].tolist() for n in tau} == {n: alone[n].tolist() for n in alone}
    assert tau.sparsity() == alone.sparsity()
    assert (tau.origin.include, tau.origin.exclude) == (include, exclude)
    assert sorted(tau.origin.kept) == sorted(set(NAMES) - set(chosen))
    applied = nm.apply(base, -1.0 * tau)
    assert all(np.array_equal(applied[n], base[n]) for n in NAMES if n not in chosen)


def test_one_pattern_may_be_a_text():
    base, *pool = models(0)
    assert [*nm.merge(base, pool, include="layers.1.*")] == ["layers.1.q.weight"]


def test_an_accumulator_with_patterns(tmp_path):
    base, *pool = models(0)
    accumulator = nm.Accumulator(base, exclude=["*embed*"])
    for model in pool:
        accumulator.add(model)
    accumulator.save(tmp_path / "acc.safetensors")
    tau = nm.Accumulator.load(tmp_path / "acc.safetensors", base).finish()
    other = nm.merge(base, pool, exclude="*embed*")
    assert {n: tau[n].tolist() for n in tau} == {n: other[n].tolist() for n in other}
    assert tau.origin.exclude == ["*embed*"]


@pytest.fixture
def place(tmp_path):
    for k, model in enumerate(models(1)):
        save_file(model, tmp_path / f"m{k}.safetensors")
    return tmp_path


def test_every_way_of_merging(place):
    base, *pool = (place / f"m{k}.safetensors" for k in range(4))
    given = {"include": ["layers.*", "head*"], "exclude": ["*.bias"]}
    out = [place / f"out{k}.safetensors" for k in range(5)]
    tau = nm.merge(base, pool, "ties", out=out[0], **given)
    assert sorted(tau) == ["head.weight", "layers.0.q.weight", "layers.1.q.weight"]
    merge_on(InProcess(None), base, pool, "ties", out=out[1], ranges=2, **given)
    assert out[0].read_bytes() == out[1].read_bytes()
    nm.apply(base, -0.5 * tau, out[2])
    nm.merge_and_apply(base, pool, -0.5, out[3], "ties", **given)
    merge_and_apply_on(InProcess(None), base, pool, -0.5, out[4], "ties", ranges=2, **given)
    assert len({path.read_bytes() for path in out[2:]}) == 1
    assert estimate(base, pool, "ties", **given).elements == 3 * 35


def test_the_command(place):
    given = ["--include", "layers.*", "--include", "head*", "--exclude", "*.bias"]
    pool = [f"m{k}.safetensors" for k in range(4)]
    negmerge(place, "merge", *pool, *given, "-o", "p.safetensors")
    found = json.loads(negmerge(place, "inspect", "p.safetensors", "--json")[0])
    assert found["include"] == ["layers.*", "head*"]
    assert found["exclude"] == ["*.bias"]
    assert "excluded" in negmerge(place, "inspect", "p.safetensors")[0]
    negmerge(place, "apply", pool[0], "p.safetensors", "--negate", "1", "-o", "a.safetensors")
    negmerge(place, "merge", *pool, *given, "--negate", "1", "-o", "b")
    one, two = load_file(place / "a.safetensors"), load_file(place / "b" / "model.safetensors")
    assert all(np.array_equal(one[n], two[n]) for n in NAMES)
    card = (place / "b" / "README.md").read_text()
    assert "--include 'layers.*' --include 'head*' --exclude '*.bias' --negate 1.0" in card
    text, _ = negmerge(place, "merge", *pool, *given, "--dry-run", "--json", "-o", "c.safetensors")
    assert json.loads(text)["elements"] == 3 * 35


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize("more", ["", "--negate 1", "--dry-run"])
def test_a_pattern_that_fits_nothing(place, option, more):
    pool = [f"m{k}.safetensors" for k in range(3)]
    words = [*pool, option, "*embd*", *more.split(), "-o", "out"]
    _, said = negmerge(place, "merge", *words, code=2)
    (line,) = said.splitlines()
    assert f"{option[2:]} '*embd*': fits none of 5 tensors, such as 'embed.weight'" in line
    assert not (place / "out").exists()


def test_patterns_are_texts():
    base, *pool = models(0)
    with pytest.raises(OptionError, match="exclude '': wanted a pattern"):
        nm.merge(base, pool, exclude=[""])
