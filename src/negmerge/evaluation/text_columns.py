"""The columns of answers of a language model, which the metrics of texts are computed from.

A language model predicts an answer token by token. `answer_columns` takes two numbers of each
token from one pass over the true text: the log-probability of the token, and whether it is the
most probable one, which greedy decoding would choose. The other functions compute the columns
`truth_ratio` and `rouge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.evaluation.observations import Columns

Floats = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]

MINK = 5
"""Min-K % looks at one of this number of answer tokens, the least likely ones: K is 20 %."""
LARGEST_EXPONENT = 700.0
"""Above it `exp` is infinite in float64, and reports need finite numbers."""


def answer_columns(log_probability: Floats, hit: Flags, answer: Flags) -> Columns:
    """Return the columns of a batch that one pass over the true text determines.

    `loss` is the mean negative log-probability of the answer tokens and `probability` is
    exp(-loss). `tokens` is their number, `right` the number of hits among them, and `matched_from`
    the number of tokens to the last one that is no hit: all answer tokens after it are hits. `mink`
    is the mean log-probability of the least likely fifth of the tokens, rounded down but at least
    one.

    >>> found = answer_columns(
    ...     np.log([[0.5, 0.5, 0.125, 0.5]]),
    ...     np.array([[True, False, True, True]]),
    ...     np.array([[False, True, True, True]]),
    ... )
    >>> {name: round(float(column[0]), 3) for name, column in found.items()}
    {'loss': 1.155, 'tokens': 3.0, 'right': 2.0, 'matched_from': 1.0, 'mink': -2.079, ...}

    Args:
        log_probability: of the true token, samples × positions.
        hit: whether the true token is the most probable one.
        answer: whether the position belongs to the answer; the others are not read.
    """
    tokens = answer.sum(1)
    if not tokens.all():
        raise ValueRangeError(
            f"answers: sample {int(tokens.argmin())} of a batch has no answer token; wanted at "
            "least one; leave out records with empty answers"
        )
    logs = log_probability.astype(np.float64)
    if not np.isfinite(logs[answer]).all():
        raise ValueRangeError(
            "the log-probabilities of answer tokens are NaN or infinite: the model is broken, not "
            "unlearned; use a smaller λ or learning rate"
        )
    loss = 0.0 - np.where(answer, logs, 0.0).sum(1) / tokens
    place = answer.cumsum(1)
    return {
        "loss": loss,
        "tokens": tokens,
        "right": (answer & hit).sum(1),
        "matched_from": np.where(answer & ~hit, place, 0).max(1),
        "mink": _least_likely(np.where(answer, logs, np.inf), np.maximum(tokens // MINK, 1)),
        "probability": np.exp(-loss),
    }


def _least_likely(logs: Floats, counts: NDArray[np.int64]) -> Floats:
    """Return the mean of the smallest numbers of each row, as many as `counts` says."""
    counted = np.arange(logs.shape[1]) < counts[:, None]
    return np.where(counted, np.sort(logs, axis=1), 0.0).sum(1) / counts


def truth_ratio(loss: Floats, wrong: Floats) -> Floats:
    """Return p(wrong answers) / p(right answer) of each sample, NaN without wrong answers.

    Each p is exp(-loss), the geometric mean over the tokens of an answer; that of several wrong
    answers is their geometric mean, as in open-unlearning (which adds 1e-10 to the denominator).

    >>> wrong = np.array([[3.0, 5.0], [2.0, np.nan], [np.nan, np.nan]])
    >>> truth_ratio(np.array([4.0, 1.0, 1.0]), wrong).round(3)
    array([1.   , 0.368,   nan])

    Args:
        loss: of the right answer of each sample.
        wrong: the losses of the wrong answers, samples × answers; NaN where there are fewer.
    """
    known = ~np.isnan(wrong)
    counts = known.sum(1)
    sums = np.where(known, wrong, 0.0).sum(1)
    mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.exp(np.minimum(loss - mean, LARGEST_EXPONENT))


def rouge_recall(answers: Sequence[str], continuations: Sequence[str]) -> Floats:
    """Return the ROUGE-L recall of each continuation: the share of the answer's words in it.

    Words count in the order of the answer: the longest common subsequence. They are compared by
    their stems, in lower case, with the package rouge_score, as in TOFU, MUSE and open-unlearning:
    its stemmer decides the numbers, so a second implementation would only differ from the published
    ones. It knows the letters a to z and digits; an answer without any has no ROUGE and gets NaN.

    >>> rouge_recall(["Born in Oslo", "1999", "東京"], ["She was born near Oslo.", "", "東京"])
    array([0.66666667, 0.        ,        nan])

    Args:
        answers: the true answers.
        continuations: what the model writes, each for the answer at the same place.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    words = DefaultTokenizer(use_stemmer=True)
    scorer = RougeScorer(["rougeL"], tokenizer=words)
    found = [
        scorer.score(answer, written)["rougeL"].recall if words.tokenize(answer) else np.nan
        for answer, written in zip(answers, continuations, strict=True)
    ]
    return np.array(found, np.float64)
