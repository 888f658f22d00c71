"""Attacks on language models: LOSS and Min-K %, with the forget set against unseen samples.

The members are the forget set, the non-members the holdout set, which is of the same distribution
and was never trained on. LOSS takes an answer with a small loss for a member, Min-K % (Shi et al.
2024) one whose least likely tokens are likely. A model that forgot has the AUC of the retrained
model, not the smallest one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.evaluation.attacks.ranks import auc, best_threshold, tpr
from negmerge.evaluation.metrics import Histogram, Measured, Metric, Observed, metrics
from negmerge.evaluation.metrics.answers import ANSWER

SETS = ("forget", "holdout")
BINS = 40
SIGNS = {"loss": -1, "mink": 1}
"""The columns that attacks use, and whether a member has high or low values."""


def _scores(column: str, found: Observed) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    forget, holdout = (SIGNS[column] * found[name][column].astype(np.float64) for name in SETS)
    return forget, holdout


def _auc(column: str, found: Observed) -> Measured:
    return auc(*_scores(column, found))


def _tpr(column: str, found: Observed) -> Measured | None:
    return tpr(*_scores(column, found))


def bins(column: str, found: Observed) -> list[dict[str, Any]]:
    """Return histograms of the numbers of an attack, and the bins of members."""
    forget, holdout = _scores(column, found)
    threshold = best_threshold(forget, holdout)
    values = {name: found[name][column].astype(np.float64) for name in SETS}
    low, high = (float(end(np.concatenate([*values.values()]))) for end in (np.min, np.max))
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    member = SIGNS[column] * (edges[:-1] + edges[1:]) / 2 > threshold
    rows: list[dict[str, Any]] = []
    for name, own in values.items():
        counts = np.histogram(own, edges)[0]
        for start, end, count, inside in zip(edges, edges[1:], counts, member, strict=False):
            row = {"set": name, "low": round(float(start), 6), "high": round(float(end), 6)}
            rows.append(row | {"count": int(count), "member": int(inside)})
    return rows


TEXT = (
    "The attack uses one number per sample, {what}; it takes the samples in the shaded range for "
    "trained on, where it errs least. For a model that forgot, the curve of the forget set lies to "
    "that of the holdout set as under the retrained model."
)
for _column, _title, _what in (
    ("loss", "LOSS", "the mean loss of its answer"),
    ("mink", "Min-K %", "the mean log-probability of the least likely fifth of its answer tokens"),
):
    metrics.register(
        f"auc_{_column}",
        Metric(
            name=f"auc_{_column}",
            label=f"AUC of the attack {_title}, forget against holdout set",
            short=f"AUC {_title}".removesuffix(" %"),
            better="reference",
            sets=SETS,
            columns=(ANSWER, _column),
            value=partial(_auc, _column),
            in_gap=_column == "loss",
            histogram=Histogram(
                file=f"attack_{_column}.csv",
                title=f"Membership inference: {_title}",
                text=TEXT.format(what=_what),
                bins=partial(bins, _column),
                axis=_what.replace("its answer", "the answer"),
            ),
        ),
    )
    metrics.register(
        f"tpr_{_column}",
        Metric(
            name=f"tpr_{_column}",
            label=f"forget set found by {_title} at 1 % false positives",
            short=f"TPR {_title}".removesuffix(" %"),
            better="reference",
            sets=SETS,
            columns=(ANSWER, _column),
            value=partial(_tpr, _column),
        ),
    )
