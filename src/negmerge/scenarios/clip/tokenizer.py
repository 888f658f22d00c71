"""The tokenizer of a CLIP folder, from `tokenizer.json` alone.

That file is data: a vocabulary and rules. Other files that `transformers` reads beside it can name
classes, files elsewhere and Python code to run; only the special tokens are taken from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from negmerge.checkpoints.checkpoint import read_within
from negmerge.errors import FileError, quoted
from negmerge.extras import missing_message
from negmerge.scenarios.clip.config import read_config
from negmerge.scenarios.clip.library import open_clip
from negmerge.support.reading import parse_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY = "vocab.json"
"""The vocabulary of a tokenizer that `transformers` saved without `tokenizer.json`."""
SPECIAL = tuple(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
MAX_VOCABULARY = 1 << 28
"""Bytes of a vocabulary."""


def folder_tokenizer(folder: Path, text: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a folder, as open_clip wraps it; `text` is its checked `text_cfg`."""
    vocabulary, path = read_within(folder, TOKENIZER, MAX_VOCABULARY), folder / TOKENIZER
    if vocabulary is None:
        raise FileError(
            f"{folder}: has no {TOKENIZER}, but its configuration names a tokenizer of its own; "
            "write the file with save_pretrained of a fast tokenizer of transformers"
        )
    config = tokenizer_config(folder)
    options = {k: v for k, v in (text.get("tokenizer_kwargs") or {}).items() if v is not None}
    # The library gets a folder with these two files only, so it can read no other.
    with TemporaryDirectory(prefix="negmerge-") as name:
        (Path(name) / TOKENIZER).write_bytes(vocabulary)
        (Path(name) / TOKENIZER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        try:
            return open_clip().tokenizer.HFTokenizer(
                name,
                context_length=text.get("context_length", 77),
                tokenizer_mode=text.get("tokenizer_mode"),
                trust_remote_code=False,
                local_files_only=True,
                **options,
            )
        except ImportError as error:
            raise FileError(
                f"{path}: {missing_message('transformers', 'text')} ({error})"
            ) from None
        except Exception as error:  # the parser of vocabularies raises plain exceptions
            why = " ".join(str(error).split())[:200].replace(name, str(folder))
            raise FileError(f"{path}: is not a tokenizer: {why}") from None


def has_own_vocabulary(folder: Path) -> bool:
    """Whether a folder has a vocabulary other than OpenAI's, which open_clip has built in."""
    if (raw := read_within(folder, TOKENIZER, MAX_VOCABULARY)) is not None:
        tree = parse_json(raw, folder / TOKENIZER, "content")
        model, added = tree.get("model"), tree.get("added_tokens") or []
        words = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(words, dict) or not all(isinstance(one, dict) for one in added):
            return True
        words = words | {str(one.get("content")): one.get("id") for one in added}
    elif (raw := read_within(folder, VOCABULARY, MAX_VOCABULARY)) is not None:
        words = parse_json(raw, folder / VOCABULARY, "content")
    else:
        return False
    return words != open_clip().SimpleTokenizer().encoder


def tokenizer_config(folder: Path) -> dict[str, str]:
    """Return the content of a `tokenizer_config.json`: the class and the special tokens."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for file in ("special_tokens_map.json", TOKENIZER_CONFIG):
        tree = read_config(folder, file)
        for name in SPECIAL:
            token = tree.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise FileError(f"{folder / file}: {name}: got {quoted(token, 60)}, wanted text")
            if token is not None:
                found[name] = token
    return found
