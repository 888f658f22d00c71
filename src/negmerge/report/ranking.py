"""Which method did better, and whether the number of samples is enough to say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from negmerge.criteria import Criterion

Scores = Mapping[str, Any]


def losses(scores: Scores, criterion: Criterion) -> dict[str, float | None]:
    """How every method does by the criterion, on the reported data; smaller is better.

    None: the criterion does not allow it. The test set stands for the held-out data, which is not
    reported. Empty if what the criterion needs was not measured; a method that was added, to
    learn instead of to forget, is left out.
    """
    original, retrain = scores["original"], scores["retrain"]
    there = {"test": original["acc_test"], "retain": original["acc_retain"], "retrain": retrain}
    if there[criterion.needs] is None:
        return {}
    zero = {**original, "acc_holdout": original["acc_test"]}
    rows = [row for row in scores["methods"] if row.get("direction") != "add"]
    return {row["method"]: criterion.loss(row, zero, retrain) for row in rows}


def ranked(scores: Scores, criterion: Criterion) -> list[Mapping[str, Any]]:
    """The methods in the order of the criterion; what it does not allow comes after the others,
    by retain accuracy, and last what was added."""
    found = losses(scores, criterion)

    def order(row: Mapping[str, Any]) -> tuple[int, float]:
        loss = found.get(row["method"])
        if loss is not None:
            return 0, loss
        return (1, -row["acc_retain"]) if row["method"] in found else (2, 0.0)

    return sorted(scores["methods"], key=order)


def gap_interval(row: Mapping[str, Any], retrain: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval of a method's Avg. Gap, from the numbers of samples.

    The gap is a mean of distances; the errors of both ends of each are taken for independent.

    >>> ours = {"avg_gap": 0.5, "intervals": {"mia": (10.0, 14.0)}}
    >>> gap_interval(ours, {"intervals": {"mia": (9.0, 12.0)}})
    (0.0, 3.0)
    """
    halves = [(high - low) / 2 for one in (row, retrain) for low, high in one["intervals"].values()]
    half = sqrt(sum(half * half for half in halves)) / len(row["intervals"])
    return max(row["avg_gap"] - half, 0.0), min(row["avg_gap"] + half, 100.0)


def nearest(scores: Scores) -> tuple[str, list[str]] | None:
    """The method with the smallest Avg. Gap, and those whose intervals overlap with its own.

    None if there is nothing to compare.
    """
    rows = [row for row in scores["methods"] if row["avg_gap"] is not None]
    if scores["retrain"] is None or len(rows) < 2:
        return None
    rows = sorted(rows, key=lambda row: row["avg_gap"])
    bounds = [gap_interval(row, scores["retrain"]) for row in rows]
    names = [row["method"] for row in rows]
    return names[0], [
        name for name, (low, _) in zip(names[1:], bounds[1:], strict=True) if low <= bounds[0][1]
    ]


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    shown, more = list(names[:most]), len(names) - most
    last = f"{more} more" if more > 0 else shown.pop()
    return f"{', '.join(shown)} and {last}" if shown else last


def bracketed(bounds: Sequence[float]) -> str:
    """A 95 % interval by its ends, which stay within 0 and 100 where ± would not.

    >>> bracketed((99.12, 99.99)), bracketed((42.4, 57.6))
    ('[99.12–99.99]', '[42.4–57.6]')
    """
    low, high = bounds
    places = 2 if high - low < 1 else 1
    return f"[{low:.{places}f}–{high:.{places}f}]"
