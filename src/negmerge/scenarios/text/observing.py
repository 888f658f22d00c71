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

LOGITS = 64 << 20
"""The largest number of logits that are computed at a time."""


def answers_of(model: nn.Module, samples: Sequence[Sample]) -> Columns:
    """Return the columns of `answer_columns` for samples, in their order."""
    feed, parts = TextFeed(samples), list[Columns]()
    device = next(model.parameters()).device
    width = int(getattr(model, "config", model).vocab_size)  # pyright: ignore
    batches = _parts(feed.lengths, width)
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


def _parts(lengths: NDArray[Any], width: int) -> list[NDArray[np.int64]]:
    """Cut samples into batches of similar length whose logits fit into memory."""
    order, parts = np.argsort(lengths, kind="stable"), list[NDArray[np.int64]]()
    start = 0
    while start < len(order):
        stop = start + 1
        while (
            stop < len(order) and (stop + 1 - start) * int(lengths[order[stop]]) * width <= LOGITS
        ):
            stop += 1
        parts.append(order[start:stop])
        start = stop
    return parts


def greedy(model: nn.Module, samples: Sequence[Sample], end: int) -> list[Ids]:
    """Continue the prompt of each sample by the most likely tokens, without the end token.

    Answers are cut off at the length of the right one plus half as many tokens.

    Args:
        end: the token that ends an answer.
    """
    from transformers import GenerationConfig

    found: dict[int, Ids] = {}
    device = next(model.parameters()).device
    order = np.argsort([sample.first for sample in samples], kind="stable")
    for start in range(0, len(order), 32):
        picked = order[start : start + 32]
        longest = max(samples[i].first for i in picked)
        ids = np.full((len(picked), longest), end, np.int64)
        seen = np.zeros_like(ids)
        for row, i in enumerate(picked):  # padded on the left: the answer follows the prompt
            ids[row, longest - samples[i].first :] = samples[i].ids[: samples[i].first]
            seen[row, longest - samples[i].first :] = 1
        most = max(len(samples[i].answer) for i in picked)
        config = GenerationConfig(
            max_new_tokens=most + most // 2,
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
            stops = np.flatnonzero(told == end)
            found[int(i)] = told[: stops[0]] if len(stops) else told
    return [found[i] for i in range(len(samples))]
