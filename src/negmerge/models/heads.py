"""The frozen head of a data set: from the text side of a CLIP, or ready-made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from negmerge.errors import FileError, MismatchError, OptionError, shown
from negmerge.models.pretrained import EMBEDDINGS, ClipSource
from negmerge.models.prompts import Prompts
from negmerge.models.weights import load_tensors
from negmerge.reading import parse_json


def zero_shot_head(
    source: ClipSource,
    data: str,
    names: Sequence[str],
    prompts: Prompts,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """The frozen head of a data set, [classes, features]: ready-made, or from the text side.

    Each class is the mean of its sentences' normalised features, normalised again, times
    exp(logit_scale).

    data: the set's registered name. names: its classes, as it spells them.
    advance: told of each class.
    """
    ready = ready_head(source, data, names)
    if ready is not None:
        return ready
    if not source.speaks:
        raise FileError(
            f"{source.weights}: has no text side to build the head of {shown(data)} with, and "
            f"there is none in {EMBEDDINGS}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, clip = source.tokenizer(), source.load().eval().to(device)
    rows: list[Tensor] = []
    with torch.inference_mode():
        for sentences in prompts.words(names):
            try:
                tokens = tokenizer(sentences).to(device)
            except Exception as error:  # a small tokenizer does not know every word
                raise OptionError(
                    f"{source.name}: cannot read {shown(sentences[0])}: {error}"
                ) from None
            try:
                each = clip.encode_text(tokens, normalize=True)  # pyright: ignore[reportCallIssue]
            except IndexError:
                raise FileError(
                    f"{source.weights}: its text side does not know all tokens of its tokenizer"
                ) from None
            rows.append(functional.normalize(each.mean(0), dim=-1))
            advance(1)
        scale: Tensor = clip.logit_scale  # pyright: ignore[reportAssignmentType]
        return (torch.stack(rows) * scale.exp()).cpu()


def ready_head(source: ClipSource, data: str, names: Sequence[str]) -> Tensor | None:
    """The head of a set among the ready-made ones, found by its name or by its classes."""
    if source.embeddings is None:
        return None
    where = source.embeddings
    ready, metadata = load_tensors(where)
    known = parse_json(metadata.get("classes", "{}"), where, "metadata `classes`")
    alike = [name for name in known if known[name] == list(names) and name in ready]
    found = data if data in ready else next(iter(alike), None)
    if found is None:
        return None
    if len(ready[found]) != len(names) or known.get(found, list(names)) != list(names):
        raise MismatchError(
            f"{where} {shown(found)}: is of other classes than the data set {shown(data)}"
        )
    if "logit_scale" not in ready:
        raise FileError(f"{where}: has no logit_scale")
    head = functional.normalize(ready[found].float(), dim=-1)
    return head * ready["logit_scale"].float().exp()
