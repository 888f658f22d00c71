"""The tokenizer of a CLIP folder, from `tokenizer.json` alone.

That file is data: a vocabulary and rules. What `transformers` would look for beside it can name
classes, files elsewhere and Python to run; of that only the special tokens are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from negmerge.checkpoint import read_inside
from negmerge.errors import FileError, shown
from negmerge.models.clip_config import refuse_code
from negmerge.models.prompts import open_clip
from negmerge.reading import parse_json

TOKENIZER, ABOUT = "tokenizer.json", "tokenizer_config.json"
VOCABULARY = "vocab.json"
"""The vocabulary of a tokenizer that `transformers` saved without `tokenizer.json`."""
SPECIAL = tuple(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
LARGEST = 1 << 28
"""Bytes of a vocabulary."""


def folder_tokenizer(folder: Path, text: Mapping[str, Any]) -> Any:
    """What turns sentences into tokens, as open_clip wraps it.

    folder: with `tokenizer.json`, and perhaps `tokenizer_config.json`.
    text: the checked `text_cfg` of its configuration.
    """
    vocabulary = read_inside(folder, TOKENIZER, LARGEST)
    if vocabulary is None:
        raise FileError(
            f"{folder}: has no {TOKENIZER}, and its configuration says that it has a tokenizer of "
            "its own; save_pretrained of a fast tokenizer of transformers writes one"
        )
    about = about_tokenizer(folder)
    options = {k: v for k, v in (text.get("tokenizer_kwargs") or {}).items() if v is not None}
    # A folder with these two files and no others: the library finds nothing else to read.
    with TemporaryDirectory(prefix="negmerge-") as name:
        (Path(name) / TOKENIZER).write_bytes(vocabulary)
        (Path(name) / ABOUT).write_text(json.dumps(about), encoding="utf-8")
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
            raise FileError(f"{folder / TOKENIZER}: needs transformers: {error}") from None
        except Exception as error:  # the parser of vocabularies raises plain exceptions
            why = " ".join(str(error).split())[:200].replace(name, str(folder))
            raise FileError(f"{folder / TOKENIZER}: is not a tokenizer: {why}") from None


def has_own_words(folder: Path) -> bool:
    """Whether a folder has a vocabulary that is not OpenAI's, which open_clip has built in."""
    if (raw := read_inside(folder, TOKENIZER, LARGEST)) is not None:
        tree = parse_json(raw, folder / TOKENIZER, "content")
        model, added = tree.get("model"), tree.get("added_tokens") or []
        words = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(words, dict) or not all(isinstance(one, dict) for one in added):
            return True
        words = words | {str(one.get("content")): one.get("id") for one in added}
    elif (raw := read_inside(folder, VOCABULARY, LARGEST)) is not None:
        words = parse_json(raw, folder / VOCABULARY, "content")
    else:
        return False
    return words != open_clip().SimpleTokenizer().encoder


def about_tokenizer(folder: Path) -> dict[str, str]:
    """What stands in the `tokenizer_config.json` of a tokenizer that is read from its vocabulary.

    folder: where the tokenizer is.
    """
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens(folder)


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that have a meaning of their own, by what they are for."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", ABOUT):
        path = folder / file
        said = parse_json(read_inside(folder, file) or b"{}", path, "content")
        refuse_code(path, said)
        for name in SPECIAL:
            token = said.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise FileError(f"{path}: {name}: wanted text; got {shown(token, 60)}")
            if token is not None:
                found[name] = token
    return found
