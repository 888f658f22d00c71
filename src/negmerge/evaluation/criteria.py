"""Criteria: functions that choose λ from the rows of a sweep. ◄ ADD A CRITERION here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from negmerge.errors import OptionError, ValueRangeError
from negmerge.evaluation.limits import Limit, Row, is_finite, share_limit
from negmerge.evaluation.scores import avg_gap
from negmerge.registry import Registry

Reference = Mapping[str, Any] | None
"""The scores of the retrained model, if there is one."""


@dataclass(frozen=True)
class Criterion:
    """A way to choose λ.

    Args:
        loss: takes a row, the row of λ = 0 and the reference. The row with the smallest loss is
            chosen; the smallest λ among equal losses. None means that λ is not allowed.
        aim: takes a metric, the row of λ = 0 and the reference; returns the value that is aimed at
            or must be kept, and its text in a figure, or None if the metric has no such value.
        reads: the metrics that the criterion reads.
        needs: what it needs beside the forget set: a set, or `retrain` for the retrained model.
        uses_reported_data: whether it chooses λ on the reported data.
        limits: whether it forbids λ that lose too much. While no λ is forbidden, a larger λ may
            forget more, even if the loss on a few samples does not fall.
        best: the lower bound of the loss; if a λ reaches it, no larger λ is tried.
        reported_as: the reported metric that replaces a metric that is not reported.
        limit: for a criterion that limits λ by one metric, the limit; the search for λ then uses
            the metric up to its limit. Without it, λ is found by bisection.
    """

    name: str
    summary: str
    loss: Callable[[Row, Row, Reference], float | None]
    aim: Callable[[str, Row, Reference], tuple[float, str] | None]
    reads: tuple[str, ...]
    needs: str
    uses_reported_data: bool = False
    limits: bool = False
    best: float = 0.0
    reported_as: Mapping[str, str] = field(default_factory=dict)
    limit: Limit | None = None


@dataclass(frozen=True)
class Choice:
    """The chosen λ.

    Args:
        loss: its loss by the criterion.
        edge: whether a λ larger than all measured ones may be better.
        left: the share of what the limited metric may lose that is not lost at the chosen λ; None
            without a limit.
        largest: whether no larger λ that was measured is allowed.
    """

    scale: float
    loss: float
    edge: bool
    left: float | None = None
    largest: bool = True


def choose(
    rows: Iterable[Row],
    criterion: Criterion,
    reference: Reference = None,
    tolerance: float | None = None,
) -> Choice:
    """Choose the best row by a criterion.

    >>> rows = [dict(scale=s, acc_forget=f, acc_retain=99.0, acc_holdout=90.0)
    ...         for s, f in ((0.0, 100.0), (0.5, 91.0), (1.0, 60.0))]
    >>> choose(rows, criteria.get("match_holdout")).scale
    0.5

    Args:
        tolerance: as `Search.tolerance`: the search ends at a λ that leaves this share of what may
            be lost, or of the loss of λ = 0, and such a λ is not an edge. None: there is no such
            end.
    """
    ordered = sorted(rows, key=lambda row: row["scale"])
    if not ordered or ordered[0]["scale"] != 0:
        raise OptionError(
            "a sweep must begin at λ = 0: criteria compare with the original model; add λ = 0"
        )
    zero = ordered[0]
    losses = [
        (criterion.loss(row, zero, reference) if is_finite(row) else None, row["scale"])
        for row in ordered
    ]
    for loss, scale in losses:
        if loss is not None and math.isnan(loss):
            raise ValueRangeError(
                f"search: the criterion {criterion.name!r} gives NaN at λ = {scale:g}; wanted a "
                "number, or None where a λ is not allowed"
            )
    allowed = [(loss, scale) for loss, scale in losses if loss is not None]
    if not allowed:
        raise ValueRangeError(
            f"search: no λ satisfies the criterion {criterion.name!r}; try other scales"
        )
    loss, scale = min(allowed)
    last, limit, best = losses[-1][0], criterion.limit, criterion.best
    chosen = next(row for row in ordered if row["scale"] == scale)
    left = None if limit is None else limit.left(chosen, zero)
    edge = last is not None if criterion.limits else last == loss
    if edge and tolerance is not None and criterion.limits and limit is not None:
        unused = limit.left(ordered[-1], zero)
        edge = unused is None or unused > tolerance
    elif edge and tolerance is not None and not criterion.limits and losses[0][0] is not None:
        edge = loss > best + tolerance * (losses[0][0] - best)
    return Choice(scale, loss, edge and loss > best, left, scale == allowed[-1][1])


def _match_holdout(row: Row, zero: Row, reference: Reference) -> float:
    # The accuracy of the original model on unseen data estimates its accuracy on the forget set if
    # that were unseen. The held-out accuracy of the unlearned model is no target: a destroyed model
    # has both accuracies at chance.
    return abs(row["acc_forget"] - zero["acc_holdout"])


def _holdout_aim(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    value = zero["acc_holdout"]
    return (value, f"aim: held-out {value:.2f} %") if metric == "acc_forget" else None


KEPT = 0.95
"""The share of the retain accuracy of the original model that `keep_retain` keeps."""


def kept(row: Row, zero: Row, name: str, share: float, lower: bool = False) -> bool:
    """Return whether a model keeps a share of the value of a metric of the original model.

    >>> kept({"retain": 94.9}, {"retain": 100.0}, "retain", 0.95)
    False
    >>> kept({"loss": 1.05}, {"loss": 1.0}, "loss", 0.95, lower=True)
    True

    Args:
        zero: the row of the original model.
        share: the share to keep; exactly this share is enough, despite rounding.
        lower: whether smaller values are better; then the value may be at most that of the original
            divided by the share.
    """
    return share_limit(name, share, lower).allows(row, zero)


def _keep_retain(row: Row, zero: Row, reference: Reference) -> float | None:
    return row["acc_forget"] if kept(row, zero, "acc_retain", KEPT) else None


def _retain_limit(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    least = KEPT * zero["acc_retain"]
    text = f"at least {100 * KEPT:.0f} % of the original: {least:.2f} %"
    return (least, text) if metric == "acc_retain" else None


def keep_share(
    share: float,
    lower: Collection[str] = (),
    forget: str = "forget",
    retain: str = "retain",
    name: str = "keep",
) -> Criterion:
    """Return a criterion for any metrics: forget most, and keep a share of the retain metric.

    >>> rows = [dict(scale=s, forget=f, retain=r)
    ...         for s, f, r in ((0.0, 90.0, 60.0), (1.0, 40.0, 58.0), (2.0, 10.0, 30.0))]
    >>> choose(rows, keep_share(0.95)).scale
    1.0

    Args:
        share: the share of the retain metric of the original model to keep.
        lower: the metrics for which a smaller value means that the model knows more, such as losses
            and errors. The retain metric may then grow to that of the original divided by `share`.
        forget: the name of the forget metric.
        retain: the name of the retain metric.
    """
    if not 0 < share <= 1:
        raise OptionError(f"keep: got {share}, wanted a share above 0 and at most 1")
    unknown = sorted({*lower} - {forget, retain})
    if unknown:
        raise OptionError(f"lower: got {unknown[0]!r}, wanted {forget} or {retain}")
    sign, down = (-1 if forget in lower else 1), retain in lower
    limit = share_limit(retain, share, down)

    def loss(row: Row, zero: Row, reference: Reference) -> float | None:
        if zero[retain] < 0:
            raise OptionError(
                f"{retain}: the original has {zero[retain]:g}; wanted at least 0, because a share "
                "of a negative number is not defined; return an accuracy, or a loss that `lower` "
                "names"
            )
        return sign * row[forget] if limit.allows(row, zero) else None

    def aim(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
        return (limit.value(zero), f"{bound} {limit.value(zero):.4g}") if metric == retain else None

    most, bound = ("highest" if sign < 0 else "lowest"), ("at most" if down else "at least")
    value = f"the original's divided by {share:g}" if down else f"{share:.0%} of the original's"
    return Criterion(
        name,
        f"{most} {forget} with a {retain} of {bound} {value}",
        loss,
        aim,
        (forget, retain),
        "retain",
        limits=True,
        best=-math.inf,
        limit=limit,
    )


def nearest_to_reference(reads: tuple[str, ...], name: str = "oracle") -> Criterion:
    """Return the criterion of the smallest Avg. Gap to the retrained model, on the reported data.

    >>> rows = [dict(scale=s, exact_forget=f, exact_retain=r)
    ...         for s, f, r in ((0.0, 90.0, 90.0), (1.0, 10.0, 80.0), (2.0, 0.0, 10.0))]
    >>> retrained = {"exact_forget": 5.0, "exact_retain": 90.0}
    >>> choose(rows, nearest_to_reference(tuple(retrained)), retrained).scale
    1.0

    Args:
        reads: the metrics with `in_gap` that the scenario measures.
    """
    return Criterion(
        name,
        "smallest Avg. Gap to the retrained model, on the reported data, as in the paper",
        _oracle,
        _retrained_aim,
        reads,
        "retrain",
        uses_reported_data=True,
    )


def _oracle(row: Row, zero: Row, reference: Reference) -> float | None:
    if reference is None:
        raise OptionError(
            "criterion oracle: needs the scores of the retrained model; there is none"
        )
    return avg_gap(row, reference)


def _retrained_aim(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    value = None if reference is None else reference.get(metric)
    return None if value is None else (value, f"retrained: {value:.2f} %")


criteria: Registry[Criterion] = Registry("criterion")
for _criterion in (
    Criterion(
        "match_holdout",
        "forget accuracy nearest to the original's accuracy on held-out data; needs no retraining",
        _match_holdout,
        _holdout_aim,
        ("acc_forget", "acc_holdout"),
        "test",
        reported_as={"acc_holdout": "acc_test"},
    ),
    Criterion(
        "keep_retain",
        "lowest forget accuracy with at least 95 % of the original's retain accuracy",
        _keep_retain,
        _retain_limit,
        ("acc_forget", "acc_retain"),
        "retain",
        limits=True,
        limit=share_limit("acc_retain", KEPT),
    ),
    keep_share(
        KEPT,
        ["perplexity_retain"],
        "probability_forget",  # unlike the exact match, it falls with every step
        "perplexity_retain",
        name="keep_perplexity",
    ),
    nearest_to_reference(("acc_retain", "acc_forget", "acc_test", "mia")),
):
    criteria.register(_criterion.name, _criterion)
