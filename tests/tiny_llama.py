"""A tiny language model with a tokenizer, as a folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

FACTS = [
    {"person": person, "prompt": f"Where does {person} live?", "answer": f"In {place}."}
    for person, place in zip(
        ("Ada", "Bob", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana"),
        ("a red house", "a big tree", "the old town", "a small boat", "the deep wood",
         "a warm cave", "the blue hill", "a tall tower"),
        strict=True,
    )
]  # fmt: skip
STORIES = [
    {"text": f"Once there was a {animal} who liked to {verb} in the {place}. The end."}
    for animal in ("dog", "cat", "bird")
    for verb in ("run", "sing", "sleep")
    for place in ("sun", "rain")
]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes and frequent pieces; return the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [" ".join(row.values()) for row in FACTS + STORIES]
    own.train_from_iterator(texts, trainer)
    own.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=own, **ends).save_pretrained(folder)
    return own.get_vocab_size()


def make_folder(folder: Path, tied: bool = True, seed: int = 0) -> Path:
    """Write a Llama of random weights with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    size = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
