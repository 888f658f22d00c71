"""Metrics of answers that a language model gives, for each set: exact match, loss and others.

All are computed from one pass over the true answers, except ROUGE, which needs what the model
writes (`text_columns.py`). Definitions are those of open-unlearning, with one difference: where
the last token of an answer is wrong, extraction strength is 0 here and 1/T there.

Avg. Gap includes the exact match on the forget and on the retain set, beside the attack `auc_loss`:
the same three questions as the accuracies and the MIA of the paper. The holdout set is not in it:
no model answers questions about records that it never saw, so its gap is 0 and would only make
Avg. Gap smaller. Token accuracy and extraction strength are not in it, because a retrained model
also gets many tokens of a forgotten answer right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.evaluation.metrics import Measured, Metric, Observed, metrics
from negmerge.evaluation.metrics.accuracy import Z, share
from negmerge.evaluation.observations import Observations
from negmerge.evaluation.text_columns import LARGEST_EXPONENT

SETS = ("forget", "retain", "holdout", "general")
ANSWER = "tokens"
"""The column that only answers have: every metric of texts needs it, because images also have a
`loss`."""


def exact_match(found: Observations) -> Measured:
    """Return the percentage of answers of which every token is predicted right.

    Exactly these answers are what greedy decoding writes: as long as it has written the answer so
    far, it chooses the next token from the same text as the pass over the true answer.

    >>> exact_match(Observations({"right": np.array([3, 2]), "tokens": np.array([3, 3])})).value
    50.0
    """
    right = int((found["right"] == found["tokens"]).sum())
    return share(100 * right / len(found), len(found))


def mean_loss(found: Observations) -> Measured:
    """Return the mean over samples of the loss, with a normal interval."""
    losses = found["loss"].astype(np.float64)
    mean = float(losses.mean())
    half = _half(losses - mean, len(losses))
    return Measured(mean, mean - half, mean + half, len(losses))


def perplexity(found: Observations) -> Measured:
    """Return exp of the mean loss of a token; samples count by their number of tokens.

    The interval is that of the ratio Σ loss·tokens / Σ tokens over samples, to first order.

    >>> found = Observations({"loss": np.log([2.0, 8.0]), "tokens": np.array([2, 1])})
    >>> round(perplexity(found).value, 4)
    3.1748
    """
    losses, tokens = found["loss"].astype(np.float64), found["tokens"].astype(np.float64)
    mean = float((losses * tokens).sum() / tokens.sum())
    half = _half((losses - mean) * tokens, float(tokens.sum()))
    value, low, high = (exp(min(own, LARGEST_EXPONENT)) for own in (mean, mean - half, mean + half))
    return Measured(value, low, high, len(found))


def _half(distances: NDArray[np.float64], weight: float) -> float:
    """Return half the width of the normal 95 % interval of Σ distances / weight, of mean 0."""
    count = len(distances)
    return Z * sqrt(float((distances**2).sum()) * count / max(count - 1, 1)) / weight


def mean_share(shares: NDArray[Any]) -> Measured | None:
    """Return the mean of shares from 0 to 1 as a percentage; samples with NaN are left out.

    The interval is that of as many yes or no: a share with the same mean varies at most as much.
    None if every share is NaN.

    >>> mean_share(np.array([1.0, 0.5, np.nan])).value, mean_share(np.array([np.nan]))
    (75.0, None)
    """
    known = shares[~np.isnan(shares)].astype(np.float64)
    if not len(known):
        return None
    return share(min(100 * float(known.mean()), 100.0), len(known))


def extraction_strength(found: Observations) -> Measured | None:
    """Return the mean of 1 - k/T: the share of the answer that follows from its first k tokens.

    k is the earliest place from which the prediction is right to the end of the T tokens.

    >>> extraction_strength(
    ...     Observations({"matched_from": np.array([1, 4]), "tokens": np.array([4, 4])})
    ... ).value
    37.5
    """
    return mean_share(1 - found["matched_from"] / found["tokens"])


def memorised(found: Observations) -> Measured | None:
    """Return the mean share of answer tokens that are predicted right."""
    return mean_share(found["right"] / found["tokens"])


@dataclass(frozen=True)
class Kind:
    """A metric that every set has.

    Args:
        name: the name of the metric before that of the set.
        knows_more: `higher` or `lower`, the values of a model that knows the set better.
        value: computes it from the observations of a set.
    """

    name: str
    label: str
    columns: tuple[str, ...]
    value: Callable[[Observations], Measured | None]
    knows_more: str = "higher"
    unit: str = "%"


KINDS = (
    Kind("exact", "answers that are exactly right", ("right",), exact_match),
    Kind("rouge", "ROUGE-L recall", ("rouge",), lambda found: mean_share(found["rouge"])),
    Kind(
        "probability",
        "probability of the answer, per token",
        ("probability",),
        lambda found: mean_share(found["probability"]),
    ),
    Kind("extraction", "extraction strength", ("matched_from",), extraction_strength),
    Kind("memorised", "tokens predicted right", ("right",), memorised),
    Kind("loss", "mean loss of answers", ("loss",), mean_loss, "lower", "nats"),
    Kind("perplexity", "perplexity of answer tokens", ("loss",), perplexity, "lower", ""),
)


def _value(name: str, kind: Kind, found: Observed) -> Measured | None:
    if not len(found[name]):
        raise ValueRangeError(f"{kind.name}: the {name} set is empty; wanted at least one sample")
    return kind.value(found[name])


for _set in SETS:
    for _kind in KINDS:
        metrics.register(
            f"{_kind.name}_{_set}",
            Metric(
                name=f"{_kind.name}_{_set}",
                label=f"{_kind.label}, {_set} set",
                short=f"{_set} {_kind.name}",
                better="higher"
                if (_kind.knows_more == "higher") != (_set == "forget")
                else "lower",
                sets=(_set,),
                columns=(ANSWER, *_kind.columns),
                value=partial(_value, _set, _kind),
                unit=_kind.unit,
                in_gap=_kind.name == "exact" and _set in ("forget", "retain"),
            ),
        )
