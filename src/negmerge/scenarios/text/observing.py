"""What is observed of each sample of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from negmerge.evaluation.observations import Columns
from negmerge.evaluation.text_columns import answer_columns
from negmerge.scenarios.text.models import logits
from negmerge.text.encoding import Ids, Sample
from negmerge.text.feed import TextFeed
from negmerge.training.outputs import IGNORED

LOGITS = {"cpu": 4 << 20, "cuda": 128 << 20}
"""The largest number of logits that are computed at a time, by the kind of device."""


def answers_of(model: nn.Module, samples: Sequence[Sample]) -> Columns:
    """Return the columns of `answer_columns` for samples, in their order."""
    feed, parts = TextFeed(samples), list[Columns]()
    device = next(model.parameters()).device
    width = int(getattr(model, "config", model).vocab_size)  # pyright: ignore
    batches = _parts(feed.lengths, width, LOGITS.get(device.type, LOGITS["cuda"]))
    for picked in batches:
        inputs, targets = feed.test_batch(picked)
        assert isinstance(inputs, dict)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        first = min(samples[i].first for i in picked) - 1
        scores = logits(model, inputs, first)[:, :-1].float().log_softmax(-1).cpu()
        wanted = targets[:, first + 1 :]
        answer = (wanted != IGNORED).numpy()
        own = scores.gather(2, wanted.clamp(min=0)[..., None])[..., 0].numpy()
        parts.append(answer_columns(own, (scores.argmax(-1) == wanted).numpy(), answer))
    order = np.argsort(np.concatenate(batches))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _parts(lengths: NDArray[Any], width: int, most: int) -> list[NDArray[np.int64]]:
    """Cut samples into batches of similar length with at most this number of logits."""
    order, parts = np.argsort(lengths, kind="stable"), list[NDArray[np.int64]]()
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * int(lengths[order[stop]]) * width <= most:
            stop += 1
        parts.append(order[start:stop])
        start = stop
    return parts


def greedy(model: nn.Module, samples: Sequence[Sample], end: int) -> list[Ids]:
    """Continue the prompt of each sample by the most likely tokens, without the end token.

    Answers are cut off at the length of the right one plus half as many tokens, and where the
    model takes no more tokens.

    Args:
        end: the token that ends an answer.
    """
    from transformers import GenerationConfig

    found: dict[int, Ids] = {}
    device = next(model.parameters()).device
    most_tokens = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    limit = int(most_tokens) if most_tokens else None
    for picked in _prompts(samples, limit):
        longest = max(samples[i].first for i in picked)
        ids = np.full((len(picked), longest), end, np.int64)
        seen = np.zeros_like(ids)
        for row, i in enumerate(picked):  # padded on the left: the answer follows the prompt
            ids[row, longest - samples[i].first :] = samples[i].ids[: samples[i].first]
            seen[row, longest - samples[i].first :] = 1
        most = max(_allowed(samples[i]) for i in picked)
        config = GenerationConfig(
            max_new_tokens=most if limit is None else min(most, limit - longest),
            do_sample=False,
            num_beams=1,
            eos_token_id=end,
            pad_token_id=end,
        )
        generate: Any = model.generate
        out = generate(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(seen).to(device),
            generation_config=config,
        )
        for row, i in enumerate(picked):
            told = out[row, longest:].cpu().numpy()
            found[int(i)] = before(told[: _allowed(samples[i])], end)
    return [found[i] for i in range(len(samples))]


def before(ids: Ids, end: int) -> Ids:
    """Return the tokens before the first end token.

    >>> before(np.array([5, 6, 2, 7]), 2)
    array([5, 6])
    """
    stops = np.flatnonzero(ids == end)
    return ids[: stops[0]] if len(stops) else ids


def _allowed(sample: Sample) -> int:
    """Return the largest number of tokens of a generated answer."""
    return len(sample.answer) + len(sample.answer) // 2


def _prompts(samples: Sequence[Sample], limit: int | None) -> list[list[int]]:
    """Cut samples into batches of prompts of similar length.

    The longest prompt of a batch and the longest right answer have at most `limit` tokens.
    """
    parts: list[list[int]] = []
    answer = 0
    for i in sorted(range(len(samples)), key=lambda i: samples[i].first):
        answer = max(answer, len(samples[i].answer))
        fits = limit is None or samples[i].first + answer <= limit
        if not parts or len(parts[-1]) == 32 or not fits:
            parts.append([])
            answer = len(samples[i].answer)
        parts[-1].append(i)
    return parts
