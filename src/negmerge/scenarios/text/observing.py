"""What is observed of each sample of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evaluation.observations import Columns
from negmerge.scenarios.text.models import logits
from negmerge.text.encoding import Ids, Sample
from negmerge.text.feed import IGNORED, TextFeed

LOGITS = 64 << 20
"""The largest number of logits that are computed at a time."""


def answer_tokens(model: nn.Module, samples: Sequence[Sample]) -> list[tuple[Any, Any]]:
    """Return for each sample the log-probability of each answer token, and which are predicted.

    A token is predicted if it is the most likely one after the tokens before it.
    """
    feed, found = TextFeed(samples), dict[int, tuple[Any, Any]]()
    device = next(model.parameters()).device
    width = int(getattr(model, "config", model).vocab_size)  # pyright: ignore
    for picked in _parts(feed.lengths, width):
        inputs, targets = feed.test_batch(picked)
        assert isinstance(inputs, dict)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        first = min(samples[i].first for i in picked) - 1
        scores = logits(model, inputs, first)[:, :-1].float().log_softmax(-1).cpu()
        wanted = targets[:, first + 1 :]
        _check(scores, wanted)
        own = scores.gather(2, wanted.clamp(min=0)[..., None])[..., 0].double().numpy()
        hits = (scores.argmax(-1) == wanted).numpy()
        for row, i in enumerate(picked):
            kept = (wanted[row] != IGNORED).numpy()
            found[int(i)] = own[row, kept], hits[row, kept]
    return [found[i] for i in range(len(samples))]


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


def _check(scores: Tensor, wanted: Tensor) -> None:
    broken = (~scores.isfinite().all(-1) & (wanted != IGNORED)).any(1)
    # −∞ is a probability of zero, which a mask may give to some tokens; NaN is a broken model.
    if bool(broken.any()) and bool(scores[broken].isnan().any()):
        raise ValueRangeError(
            f"the outputs of the model are NaN for {int(broken.sum())} of {len(wanted)} samples: "
            "the model is broken, not unlearned; use a smaller λ or learning rate"
        )


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


def token_columns(answers: Sequence[tuple[Any, Any]], columns: Collection[str]) -> Columns:
    """Return the columns that follow from the answer tokens.

    >>> found = token_columns([(np.log([0.5, 0.5]), np.array([False, True]))], ["loss", "right"])
    >>> found["loss"].round(4).tolist(), found["right"].tolist()
    ([0.6931], [1])

    Args:
        columns: some of `loss`, `tokens`, `right`, `matched_from`, `mink` and `probability`.
    """
    computed = {
        "loss": lambda scores, hits: -scores.mean(),
        "probability": lambda scores, hits: np.exp(scores.mean()),
        "tokens": lambda scores, hits: len(scores),
        "right": lambda scores, hits: int(hits.sum()),
        "matched_from": lambda scores, hits: matched_from(hits),
        "mink": lambda scores, hits: lowest(scores),
    }
    kept = {name: function for name, function in computed.items() if name in columns}
    return {
        name: np.array([function(scores, hits) for scores, hits in answers])
        for name, function in kept.items()
    }


def matched_from(hits: NDArray[np.bool_]) -> int:
    """Return the earliest position from which all answer tokens are predicted.

    >>> matched_from(np.array([True, False, True, True])), matched_from(np.array([True, False]))
    (2, 2)
    """
    wrong = np.flatnonzero(~hits)
    return int(wrong[-1]) + 1 if len(wrong) else 0


def lowest(scores: NDArray[np.float64], share: float = 0.2) -> float:
    """Return the mean log-probability of the least likely tokens, at least one (Min-K %).

    >>> lowest(np.array([-1.0, -5.0, -2.0]))
    -5.0
    """
    count = max(1, int(len(scores) * share))
    return float(np.sort(scores)[:count].mean())
