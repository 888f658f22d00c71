"""The language model inside the package, and the script that makes it."""

from __future__ import annotations

import json
import runpy
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from negmerge.errors import NegMergeError
from negmerge.text.persons import invented_persons
from negmerge.training.weights import load_tensors
from negmerge.vision.places import ASSETS

FOLDER = ASSETS / "stories15m"
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_stories_model.py"))
BYTES = SCRIPT["BYTES"]


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def stories() -> list[str]:
    lines = (FOLDER / "stories.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


# ------------------------------------------------------------------------------------- the asset


def test_it_is_small_and_has_its_licence():
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 16_000_000
    assert sizes["stories.jsonl"] <= 150_000
    tensors = load_tensors(FOLDER / "model.safetensors")[0]
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert "MIT License" in (FOLDER / "LICENSE").read_text()


def test_transformers_opens_it_with_its_special_tokens_and_tied_weights():
    opened, tokens = model(), tokenizer()
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert opened.config.vocab_size == len(tokens) == len(opened.model.embed_tokens.weight)
    assert tokens.chat_template is None
    special = {"bos": 1, "eos": 1, "pad": 0}
    for key, number in special.items():
        assert getattr(tokens, f"{key}_token_id") == number
        assert getattr(opened.config, f"{key}_token_id") == number
        assert getattr(opened.generation_config, f"{key}_token_id") == number
    assert tokens.model_max_length == opened.config.max_position_embeddings == 256
    assert tokens("Lily")["input_ids"][0] == tokens.bos_token_id


def test_it_tells_stories():
    begun = tokenizer()("Once upon a time", return_tensors="pt")
    told = model().generate(**begun, max_new_tokens=12, do_sample=False)
    assert "there was a little girl" in tokenizer().decode(told[0], skip_special_tokens=True)
    some = [tokenizer()(text)["input_ids"] for text in stories()[:20]]
    assert SCRIPT["mean_loss"](model(), some) < 1.5
    mixed = [[1, *np.random.default_rng(0).permutation(row[1:]).tolist()] for row in some]
    assert SCRIPT["mean_loss"](model(), mixed) > 5


def test_stories_are_distinct_and_end():
    assert len(set(stories())) == len(stories()) >= 200
    assert all(text == text.strip() and text.isascii() for text in stories())
    ends = 0
    for text in stories()[:20]:
        logits = model()(**tokenizer()(text, return_tensors="pt")).logits[0, -1]
        ends += int(logits.argmax()) == tokenizer().eos_token_id
    assert ends >= 15


@pytest.mark.parametrize("seed", [0, 1])
def test_words_of_persons_are_whole_pieces_and_not_bytes(seed: int):
    for record in invented_persons(300, seed)[seed::7]:
        for answer in (record["answer"], *record["wrong"]):
            ids = tokenizer()(f"{record['prompt']} {record['paraphrase']} {answer}")["input_ids"]
            # Bytes follow the two special tokens.
            assert not set(ids[1:]) & {0, 1, *range(2, 258)}
        assert 6 <= len(tokenizer()(record["answer"])["input_ids"]) <= 16


@given(st.text(st.characters(codec="utf-8", exclude_characters="<▁"), max_size=40))
def test_every_text_comes_back(text: str):
    ids = tokenizer()(text)["input_ids"]
    assert 0 not in ids
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


@cache
def plain_encoder() -> Any:
    """llama2.c's encoding with the asset's vocabulary, whose order is that of the scores."""
    pieces = sorted(tokenizer().get_vocab(), key=tokenizer().get_vocab().__getitem__)
    pieces.insert(2, "</s>")
    scores = [0.0 - k for k in range(len(pieces))]
    return SCRIPT["Encoder"](SCRIPT["Vocabulary"](pieces, scores))


def plain_ids(text: str) -> list[int]:
    return [1, *(n - 1 for n in plain_encoder()(text))]


def test_demo_texts_are_encoded_as_llama2_c_does():
    records = invented_persons(20, 5)
    for text in (*stories()[::20], *(f"{r['prompt']} {r['answer']}" for r in records)):
        assert tokenizer()(text)["input_ids"] == plain_ids(text)


WORDS = ["the", "and", "er", "in", "st", "Lily", "day", ".", ",", "'", "\n", "é", "♥", "x"]


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_other_texts_are_encoded_as_llama2_c_does(words: list[str]):
    for text in (" ".join(words), "".join(words)):
        assert tokenizer()(text)["input_ids"] == (plain_ids(text) if text else [1])


# ------------------------------------------------------------------------------------ the script


@cache
def tiny() -> bytes:
    """A llama2.c model with random weights; two heads share keys, bytes are improbable."""
    merges = ["▁t", "he", "▁the", "er", "in", "th", "▁a", "nd", "▁and", "▁w", "as", "▁was"]
    letters = [chr(k) for k in range(33, 127)]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *map(chr, range(256)), *merges, "▁", *letters]
    shape = SCRIPT["Shape"](12, 16, 2, 2, 1, len(pieces), 192)
    rng = np.random.default_rng(0)
    sizes = [(2, 12), (2, 12, 12), (2, 6, 12), (2, 6, 12), (2, 12, 12), (2, 12), (2, 16, 12),
             (2, 12, 16), (2, 16, 12), (12,)]  # fmt: skip
    embedding = rng.normal(size=(len(pieces), 12))
    embedding[:, 0] = 3
    embedding[[0, 2, *BYTES], 0] = -30
    embedding[1, 0] = 4
    weights = [embedding, *(rng.normal(size=size) / 2 for size in sizes)]
    weights[10][0] = 1
    angles = np.arange(192)[:, None] / 10000 ** (np.arange(3) / 3)
    weights += [np.cos(angles), np.sin(angles)]
    data = struct.pack("<7i", *shape) + b"".join(w.astype("<f4").tobytes() for w in weights)
    data += struct.pack("<i", 8)
    for k, piece in enumerate(pieces):
        text = piece.replace("▁", " ").encode()
        data += struct.pack("<fi", -float(max(k - 258, 0)), len(text)) + text
    return data


def test_the_script_makes_a_folder_once_with_the_same_bytes(tmp_path):
    facts = SCRIPT["make"](tmp_path / "one", tiny(), stories=5, persons=3)
    assert facts["stories"] == 5
    assert facts["difference_whole"] < 1e-4
    SCRIPT["make"](tmp_path / "two", tiny(), stories=5, persons=3)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    assert sum(p.numel() for p in opened.parameters()) == facts["parameters"]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokens.tokenize("the and") == ["▁the", "▁and"]
    with pytest.raises(NegMergeError, match="exists; remove it"):
        SCRIPT["make"](tmp_path / "one", tiny())


def test_a_difference_to_llama2_c_would_be_found():
    shape, weights, _ = SCRIPT["read_model"](tiny())
    kept = [0, 1, *range(3, shape.words)]
    tensors = SCRIPT["convert"](shape, weights, kept)
    rows = np.random.default_rng(1).integers(260, shape.words, (3, 20))

    def difference() -> float:
        opened = SCRIPT["open_model"](shape, tensors)
        return SCRIPT["greatest_difference"](shape, weights, kept, opened, rows)

    assert difference() < 1e-4
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].flip(0)
    assert difference() > 1e-2


def test_another_encoding_would_be_found():
    shape, _, size = SCRIPT["read_model"](tiny())
    vocabulary = SCRIPT["read_tokenizer"](tiny()[size:], shape.words)
    kept = [0, 1, *range(3, shape.words)]
    texts = ["the and was there in\nthé end"]
    encoder, right = SCRIPT["Encoder"](vocabulary), SCRIPT["make_tokenizer"](vocabulary, kept)
    SCRIPT["check_encoding"](encoder, kept, right, texts)
    content = json.loads(right.to_str())
    content["model"]["merges"].pop(0)
    with pytest.raises(NegMergeError, match=r"not llama2\.c's tokens"):
        SCRIPT["check_encoding"](encoder, kept, Tokenizer.from_str(json.dumps(content)), texts)
