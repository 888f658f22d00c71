"""Tied heads: an output layer that is the same tensor as the input embedding, under another name.

Libraries store such a tensor once or twice, and a base may be stored in one way and its members in
the other. Here all models get the names of the base, and a tensor that the base stores twice is
merged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, cast

from negmerge.checkpoints.adapted import Adapted
from negmerge.checkpoints.checkpoint import Checkpoint, read_within
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_embedding
from negmerge.errors import MismatchError, quoted
from negmerge.support.reading import parse_json

HEAD = "lm_head.weight"
STEP = 1 << 20
"""The bytes that are compared at a time."""


def tie_heads(base: Checkpoint, members: Sequence[tuple[Checkpoint, str]]) -> dict[str, str]:
    """Give all members the names of the base, where names differ because of a tied head.

    Args:
        base: the base.
        members: the members, each with its name in errors; `tensors` of a member may be replaced.

    Returns:
        The names of tensors that the base stores a second time, each with the name of the first.
    """
    models = [base, *(model for model, _ in members)]
    heads = {name for model in models for name in model.tensors if _ends(name, HEAD)}
    tied: dict[str, str] = {}
    for head in sorted(heads):
        embedding = _embedding_of(head, models)
        if embedding is not None and _is_tied(head, embedding, base, members):
            if head in base.tensors and embedding in base.tensors:
                tied[head] = embedding
            for model, _ in members:
                model.tensors = _named_like(base, model, head, embedding)
    return tied


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _embedding_of(head: str, models: Sequence[Checkpoint]) -> str | None:
    """Find the embedding that belongs to a head: of the same shape, with the most similar name."""
    shape = next(m.tensors[head].shape for m in models if head in m.tensors)
    found = {
        name
        for model in models
        for name, info in model.tensors.items()
        if info.shape == shape and is_embedding(name)
    }
    return max(sorted(found), key=lambda name: _shared_parts(name, head), default=None)


def _shared_parts(one: str, two: str) -> int:
    """Return how many parts two names have in common at the beginning.

    >>> _shared_parts("language_model.model.wte.weight", "language_model.lm_head.weight")
    1
    """
    pairs = zip(one.split("."), two.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_tied(
    head: str, embedding: str, base: Checkpoint, members: Sequence[tuple[Checkpoint, str]]
) -> bool:
    """Return whether a head is tied in all models; raise if names differ and it is not."""
    named = [(base, str(base.path)), *members]
    whole = [(model, place) for model, place in named if not isinstance(model, Adapted)]
    both = [(m, p) for m, p in whole if head in m.tensors and embedding in m.tensors]
    differing = [(m, p) for m, p in both if not _same(m, m.tensors[head], m.tensors[embedding])]
    if not differing and (both or any(_says_tied(model) for model, _ in whole)):
        for model, place in members:
            if isinstance(model, Adapted) and head in model.changed:
                raise MismatchError(
                    f"{place} {quoted(head)}: the adapter changes a head that is tied to "
                    f"{quoted(embedding)} in the base; train an adapter for other modules"
                )
        return True
    for model, place in members:
        missing = (base.tensors.keys() ^ model.tensors.keys()) & {head, embedding}
        if missing:
            name = min(missing)
            lacks = "is missing" if name in base.tensors else "is not in the base"
            why = (
                f"is not tied: in {differing[0][0].path} it differs from {quoted(embedding)}"
                if differing
                else "nothing says that it is tied (tie_word_embeddings in config.json)"
            )
            raise MismatchError(
                f"{place} {quoted(name)}: {lacks}, and {why}; save base and models with their heads"
            )
    return False


def _same(model: Checkpoint, one: TensorInfo, two: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    for start in range(0, one.nbytes, STEP):
        stop = min(start + STEP, one.nbytes)
        if (model.read(one, start, stop) != model.read(two, start, stop)).any():
            return False
    return True


def _says_tied(model: Checkpoint) -> bool:
    """Return whether the configuration beside a model says that its head is tied."""
    raw = None if model.folder is None else read_within(model.folder, "config.json")
    if raw is None:
        return False
    config = parse_json(raw, model.path / "config.json", "content")
    inner = config.get("text_config")
    parts: list[Any] = [config, inner] if isinstance(inner, dict) else [config]
    return any(cast("dict[str, Any]", p).get("tie_word_embeddings") is True for p in parts)


def _named_like(
    base: Checkpoint, model: Checkpoint, head: str, embedding: str
) -> dict[str, TensorInfo]:
    """Return the tensors of a model in which both names are one tensor, with the base's names."""
    tensors = dict(model.tensors)
    own = [tensors.pop(name) for name in (embedding, head) if name in tensors]
    for name in (embedding, head):
        if name in base.tensors and own:
            tensors[name] = own[0]
    return tensors
