"""How λ is chosen from the rows of a sweep: pure functions, by name. ◄ ADD A CRITERION."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from negmerge.errors import OptionError, ValueRangeError
from negmerge.evaluation.scores import avg_gap
from negmerge.registry import Registry

Row = dict[str, float]
"""`scale` and what was measured there: `acc_<set>` for every set, `mia` if λ may look."""

Reference = Mapping[str, Any] | None
"""The retrained model's scores, if there is one."""


@dataclass(frozen=True)
class Criterion:
    """How λ is chosen.

    loss: from a row, the row of λ = 0 and the reference to a number ≥ 0; the smallest wins, and of
        equals the smallest λ. None: the row may not be chosen.
    aim: from a set, the row of λ = 0 and the reference to the accuracy there that is aimed at or
        must be kept, and its words for a figure; None: none.
    needs: what must be there beside the forget set: a set, or the retrained model.
    looks: whether it chooses on the data that is reported.
    limits: whether it forbids λ that lose too much. As long as none is forbidden, a larger one may
        forget more, whatever a few samples say.
    """

    name: str
    summary: str
    loss: Callable[[Row, Row, Reference], float | None]
    aim: Callable[[str, Row, Reference], tuple[float, str] | None]
    needs: str
    looks: bool = False
    limits: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen λ, how good it was, and whether one beyond the grid's edge may be better."""

    scale: float
    loss: float
    edge: bool


def choose(rows: Iterable[Row], criterion: Criterion, reference: Reference = None) -> Choice:
    """The best row by a criterion.

    >>> rows = [dict(scale=s, acc_forget=f, acc_retain=99.0, acc_holdout=90.0)
    ...         for s, f in ((0.0, 100.0), (0.5, 91.0), (1.0, 60.0))]
    >>> choose(rows, criteria.get("match_holdout")).scale
    0.5
    """
    ordered = sorted(rows, key=lambda row: row["scale"])
    if not ordered or ordered[0]["scale"] != 0:
        raise OptionError(
            "a sweep must begin at λ = 0: the original model is what others differ from"
        )
    losses = [(criterion.loss(row, ordered[0], reference), row["scale"]) for row in ordered]
    allowed = [(loss, scale) for loss, scale in losses if loss is not None]
    if not allowed:
        raise ValueRangeError(f"no λ satisfies {criterion.name}; try other scales")
    loss, scale = min(allowed)
    last = losses[-1][0]
    edge = last is not None if criterion.limits else last == loss
    return Choice(scale, loss, edge and loss > 0)


def _match_holdout(row: Row, zero: Row, reference: Reference) -> float:
    # The original's accuracy on what it never saw is what it would have had on the forget set. The
    # unlearned model's own would do as well, but a destroyed model has both at chance, and matches.
    return abs(row["acc_forget"] - zero["acc_holdout"])


def _holdout_aim(name: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    value = zero["acc_holdout"]
    return (value, f"aim: held-out {value:.2f} %") if name == "forget" else None


KEPT = 0.95
"""The share of the original's retain accuracy that `keep_retain` keeps."""


def _keep_retain(row: Row, zero: Row, reference: Reference) -> float | None:
    least = KEPT * zero["acc_retain"] - 1e-9  # exactly 95 % is enough, also in binary fractions
    return row["acc_forget"] if row["acc_retain"] >= least else None


def _retain_limit(name: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    least = KEPT * zero["acc_retain"]
    told = f"at least {100 * KEPT:.0f} % of the original: {least:.2f} %"
    return (least, told) if name == "retain" else None


def _oracle(row: Row, zero: Row, reference: Reference) -> float:
    if reference is None:
        raise OptionError("criterion oracle needs the retrained model's scores")
    return avg_gap(row, reference)


def _retrained_aim(name: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
    if reference is None:
        return None
    value = reference[f"acc_{name}"]
    return value, f"retrained: {value:.2f} %"


criteria: Registry[Criterion] = Registry("criterion")
for _criterion in (
    Criterion(
        "match_holdout",
        "forget accuracy nearest to the original's accuracy on held-out data; needs no retraining",
        _match_holdout,
        _holdout_aim,
        "test",
    ),
    Criterion(
        "keep_retain",
        "lowest forget accuracy with at least 95 % of the original's retain accuracy",
        _keep_retain,
        _retain_limit,
        "retain",
        limits=True,
    ),
    Criterion(
        "oracle",
        "smallest Avg. Gap to the retrained model, on the reported data, as in the paper",
        _oracle,
        _retrained_aim,
        "retrain",
        looks=True,
    ),
):
    criteria.register(_criterion.name, _criterion)
