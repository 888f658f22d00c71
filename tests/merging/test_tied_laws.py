"""Tied heads: stored once or twice, in the base or in members, with one result."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.errors import MismatchError
from negmerge.runs.executors import InProcess
from negmerge.runs.ranges import merge_and_apply_on

EMBED, HEAD, BODY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.q.weight"
FORMS = ("once", "twice")


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {EMBED: torch.randn(9, 4, generator=draw), BODY: torch.randn(4, 4, generator=draw)}


def write(folder: Path, model: dict, form: str, tied: bool | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "twice":
        model = model | {HEAD: model[EMBED].clone()}
    if form == "head":
        model = {HEAD: model[EMBED], BODY: model[BODY]}
    save_file(model, folder / "model.safetensors")
    if tied is not None:
        config = {"model_type": "llama", "tie_word_embeddings": tied}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def pool(place: Path, forms: list[str], tied: bool | None = None) -> tuple[Path, list[Path]]:
    """A base and members, each stored in a form."""
    base = weights(0)
    models = [base, *({n: v + 0.1 * weights(k)[n] for n, v in base.items()} for k in (1, 2, 3))]
    paths = [
        write(place / f"{k}-{form}", model, form, tied)
        for k, (model, form) in enumerate(zip(models, forms, strict=True))
    ]
    return paths[0], paths[1:]


@pytest.mark.parametrize("rule", ["consensus", "ties", "uniform"])
def test_one_result_however_the_head_is_stored(tmp_path, rule):
    found = set()
    for k, forms in enumerate(product(FORMS, repeat=4)):
        base, members = pool(tmp_path / str(k), list(forms), tied=True)
        tau = nm.merge(base, members, rule, out=tmp_path / f"{k}.safetensors")
        assert sorted(tau) == [EMBED, BODY]
        assert tau.origin.tied == ({HEAD: EMBED} if forms[0] == "twice" else {})
        found.add((tau.sparsity(), tau.elements, str([tau[n].tolist() for n in tau])))
        nm.apply(base, -1.0 * tau, tmp_path / f"out{k}")
        nm.merge_and_apply(base, members, -1.0, tmp_path / f"pass{k}", rule)
        merge_and_apply_on(
            InProcess(None), base, members, -1.0, tmp_path / f"ranges{k}", rule, ranges=2
        )
        raw = [
            (tmp_path / f"{o}{k}/model.safetensors").read_bytes() for o in ("out", "pass", "ranges")
        ]
        assert raw[0] == raw[1] == raw[2]
        written = load_file(tmp_path / f"out{k}/model.safetensors")
        assert written.keys() == load_file(base / "model.safetensors").keys()
        if forms[0] == "twice":
            assert torch.equal(written[HEAD], written[EMBED])
    assert len(found) == 1


def test_bytes_say_that_a_head_is_tied_without_a_configuration(tmp_path):
    base, members = pool(tmp_path, ["twice", "once", "twice", "once"])
    assert nm.merge(base, members).origin.tied == {HEAD: EMBED}


def test_a_member_that_has_only_the_head(tmp_path):
    base, members = pool(tmp_path / "a", ["once", "head", "once", "twice"], tied=True)
    other = pool(tmp_path / "b", ["once"] * 4, tied=True)
    one, two = nm.merge(base, members), nm.merge(*other)
    assert {n: one[n].tolist() for n in one} == {n: two[n].tolist() for n in two}


def test_in_memory(tmp_path):
    states = []
    for k in range(3):
        body, embedding = torch.nn.Linear(4, 4, bias=False), torch.nn.Embedding(9, 4)
        torch.manual_seed(k)
        torch.nn.init.normal_(embedding.weight)
        torch.nn.init.normal_(body.weight)
        states.append(
            {EMBED: embedding.weight.data, HEAD: embedding.weight.data, BODY: body.weight.data}
        )
    tau = nm.merge(states[0], states[1:], "uniform")
    assert sorted(tau) == [EMBED, BODY]
    result = nm.apply(states[0], -1.0 * tau)
    assert torch.equal(result[HEAD], result[EMBED])
    assert not torch.equal(result[HEAD], states[0][HEAD])
    copies = {name: v.clone() for name, v in states[0].items()}
    with tau.applied(copies, -1.0) as changed:
        assert all(torch.equal(changed[n], result[n]) for n in result)
    shared = {name: v.clone() for name, v in states[0].items()}
    shared[HEAD] = shared[EMBED]
    with tau.applied(shared, -1.0) as changed:
        assert all(torch.equal(changed[n], result[n]) for n in result)
    accumulator = nm.Accumulator(states[0], ["uniform"])
    for state in states[1:]:
        accumulator.add(state)
    other = accumulator.finish("uniform")
    assert {n: tau[n].tolist() for n in tau} == {n: other[n].tolist() for n in other}
    assert other.origin.tied == {HEAD: EMBED}


def test_heads_that_differ_are_tensors_of_their_own(tmp_path):
    models = [weights(k) | {HEAD: torch.full((9, 4), float(k))} for k in range(3)]
    tau = nm.merge(models[0], models[1:])
    assert sorted(tau) == [HEAD, EMBED, BODY]
    assert tau.origin.tied == {}


def test_a_head_that_is_missing_and_not_tied(tmp_path):
    whole = weights(0) | {HEAD: torch.ones(9, 4)}
    save_file(whole, tmp_path / "base.safetensors")
    save_file(weights(1), tmp_path / "member.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "member.safetensors"
    with pytest.raises(MismatchError, match=r"'lm_head.weight': is missing, and is not tied: in "):
        nm.merge(paths[0], [paths[1]])
    with pytest.raises(MismatchError, match=r"'lm_head.weight': is not in the base, and is not "):
        nm.merge(paths[1], [paths[0]])


def test_a_pattern_for_one_name_is_for_both(tmp_path):
    base, members = pool(tmp_path, ["twice"] * 4)
    for pattern in ("*embed*", "lm_head*"):
        assert [*nm.merge(base, members, exclude=pattern)] == [BODY]
        assert [*nm.merge(base, members, include=pattern)] == [EMBED]
