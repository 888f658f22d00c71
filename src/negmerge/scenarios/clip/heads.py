"""The frozen head of a data set: computed by the text encoder of a CLIP model, or ready-made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from negmerge.errors import FileError, MismatchError, OptionError, quoted
from negmerge.scenarios.base import identity
from negmerge.scenarios.clip.pretrained import EMBEDDINGS, ClipSource
from negmerge.scenarios.clip.prompts import Prompts, prompts_of
from negmerge.support.progress import Progress, Quiet
from negmerge.support.reading import parse_json
from negmerge.training.weights import load_tensors, save_tensors
from negmerge.vision.cache import cache_folder, open_or_make


def zero_shot_head(
    source: ClipSource,
    data: str,
    names: Sequence[str],
    prompts: Prompts,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Return the frozen head of a data set, [classes, features].

    The row of a class is the mean of the normalised features of its sentences, normalised again,
    times exp(logit_scale). A ready-made head of the source is preferred. `advance` is called with 1
    after each class.
    """
    ready = ready_head(source, data, names)
    if ready is not None:
        return ready
    if not source.has_text:
        raise FileError(
            f"{source.weights}: has no text encoder to compute the head of {quoted(data)}, and "
            f"{EMBEDDINGS} has no such head; use a CLIP model with a text encoder"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, clip = source.tokenizer(), source.load().eval().to(device)
    rows: list[Tensor] = []
    with torch.inference_mode():
        for sentences in prompts.words(names):
            try:
                tokens = tokenizer(sentences).to(device)
            except Exception as error:  # a small vocabulary does not have every word
                raise OptionError(
                    f"{source.name}: the tokenizer cannot read {quoted(sentences[0])}: {error}"
                ) from None
            try:
                each = clip.encode_text(tokens, normalize=True)  # pyright: ignore[reportCallIssue]
            except IndexError:
                raise FileError(
                    f"{source.weights}: the text encoder has fewer tokens than the tokenizer"
                ) from None
            rows.append(functional.normalize(each.mean(0), dim=-1))
            advance(1)
        scale: Tensor = clip.logit_scale  # pyright: ignore[reportAssignmentType]
        return (torch.stack(rows) * scale.exp()).cpu()


def ready_head(source: ClipSource, data: str, names: Sequence[str]) -> Tensor | None:
    """Return the ready-made head with the name or the classes of a data set, if there is one."""
    if (path := source.embeddings) is None:
        return None
    ready, metadata = load_tensors(path)
    classes = parse_json(metadata.get("classes", "{}"), path, "metadata `classes`")
    alike = [name for name in classes if classes[name] == list(names) and name in ready]
    found = data if data in ready else next(iter(alike), None)
    if found is None:
        return None
    shape, width = tuple(ready[found].shape), source.config["model_cfg"]["embed_dim"]
    if len(shape) != 2 or shape[1] != width:
        raise FileError(
            f"{path} {quoted(found)}: got shape {shape}, wanted one row of {width} numbers for "
            "each class"
        )
    if len(ready[found]) != len(names) or classes.get(found, list(names)) != list(names):
        raise MismatchError(
            f"{path} {quoted(found)}: has other classes than the data set {quoted(data)}"
        )
    if "logit_scale" not in ready or ready["logit_scale"].numel() != 1:
        raise FileError(f"{path}: has no tensor logit_scale of one number")
    head = functional.normalize(ready[found].float(), dim=-1)
    return head * ready["logit_scale"].float().exp()


def cached_head(
    source: ClipSource,
    data: str,
    names: Sequence[str],
    words: str | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Return the frozen head of a data set, built once and kept in the cache.

    Args:
        words: the known data set whose prompts are used; that of `data` if not given.
        progress: shows how many classes are done.
    """
    sentences = sentences_of(source, data, names, words)
    content = identity(source.fingerprint, data, identity(names, sentences))
    path = cache_folder() / "heads" / f"{content}.safetensors"

    def make() -> None:
        shown = progress or Quiet()
        shown.stage(f"building the zero-shot head of {data}", len(names), "classes")
        head = zero_shot_head(source, data, names, prompts_of(words or data), shown.advance)
        save_tensors(path, {"head": head}, {"data": data})

    return open_or_make(path, lambda: _read_head(path), make)


def _read_head(path: Path) -> Tensor | None:
    """The head in a file of the cache; None if there is none or the file is damaged."""
    try:
        return load_tensors(path)[0]["head"] if path.is_file() else None
    except (FileError, KeyError):
        return None


def sentences_of(
    source: ClipSource, data: str, names: Sequence[str], words: str | None = None
) -> list[list[str]]:
    """Return the sentences of each class; none if a ready-made head has classes without words."""
    try:
        return prompts_of(words or data).words(names)
    except OptionError:
        if ready_head(source, data, names) is None:
            raise
        return []
