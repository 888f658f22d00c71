"""The ranking of the methods, and whether the samples are enough to tell two methods apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot

from negmerge.evaluation.criteria import Criterion
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.evaluation.scores import gap_metrics
from negmerge.runs.result import MethodRow, MetricRow, RunResult, Scored

AVG_GAP = replace(
    metric_of("avg_gap", forgotten=True),
    label="Avg. Gap to retraining",
    short="Avg. Gap",
    unit="points",
)
TOW = replace(metric_of("tow"), label="tug-of-war score", short="ToW")

SHOWN = 6
"""The largest number of metrics in short tables and of λ curves; large tables have all."""


def measured_metrics(result: RunResult) -> list[str]:
    """The names of the metrics that at least one model has, in the order of the result."""
    rows = [result.original, result.retrain, *result.methods]
    return list(dict.fromkeys(name for row in rows if row is not None for name in row.measured()))


def criterion_losses(result: RunResult, criterion: Criterion) -> dict[str, float | None]:
    """The criterion's loss of each method on the reported data; smaller is better.

    The loss is None if the criterion does not allow the method. `reported_as` of the criterion
    names the reported metric that replaces one that is not reported. Methods that lack a metric and
    methods whose task vector was added are left out; all are if the original or the retrained
    model lacks a metric.
    """
    needed = {name: criterion.reported_as.get(name, name) for name in criterion.reads}

    def read(row: MetricRow | None) -> dict[str, float] | None:
        found = {} if row is None else row.measured()
        if not {*needed.values()} <= found.keys():
            return None
        return found | {name: found[other] for name, other in needed.items()}

    zero, reference = read(result.original), read(result.retrain)
    if zero is None or (criterion.needs == "retrain" and reference is None):
        return {}
    rows = {row.method: read(row) for row in result.methods if not row.added}
    return {
        title: criterion.loss(row, zero, reference)
        for title, row in rows.items()
        if row is not None
    }


def ranked(result: RunResult, criterion: Criterion, retain: Metric) -> list[MethodRow]:
    """The methods, ordered by the loss of the criterion.

    Methods that the criterion does not allow follow, ordered by the retain metric; methods without
    a loss come last.
    """
    found = criterion_losses(result, criterion)

    def order(row: MethodRow) -> tuple[int, float]:
        if row.method not in found:
            return 2, 0.0
        loss, kept = found[row.method], row.value(retain.name) or 0.0
        return (1, kept if retain.better == "lower" else -kept) if loss is None else (0, loss)

    return sorted(result.methods, key=order)


def gap_metric(result: RunResult) -> Metric:
    """Avg. Gap as a metric; in points if all metrics that it averages are percentages."""
    names = [] if result.retrain is None else gap_metrics(result.retrain.metrics)
    percent = all(metric_of(name).unit == "%" for name in names)
    return AVG_GAP if percent else replace(AVG_GAP, unit="")


def gap_interval(row: Scored, result: RunResult) -> tuple[float, float] | None:
    """The 95 % interval of a model's Avg. Gap, from the intervals of its metrics.

    The errors of the model and of the retrained model are assumed to be independent. None if the
    model has no gap, or if one of the metrics has no interval.
    """
    if result.retrain is None or row.avg_gap is None:
        return None
    names, both = gap_metrics(result.retrain.metrics), (row, result.retrain)
    if not names or not all(name in one.intervals for one in both for name in names):
        return None
    bounds = [one.intervals[name] for one in both for name in names]
    half = hypot(*((high - low) / 2 for low, high in bounds)) / len(names)
    most = 100.0 if gap_metric(result).unit else float("inf")
    return max(row.avg_gap - half, 0.0), min(row.avg_gap + half, most)


def nearest_to_retrained(result: RunResult) -> tuple[str, list[str]] | None:
    """The method with the smallest Avg. Gap, and the methods whose intervals overlap its interval.

    None if fewer than two methods have a gap, or if an interval is not known.
    """
    rows = [row for row in result.methods if row.avg_gap is not None]
    rows = sorted(rows, key=lambda row: row.avg_gap or 0.0)
    known = [pair for row in rows if (pair := gap_interval(row, result)) is not None]
    if len(rows) < 2 or len(known) < len(rows):
        return None
    alike = [row.method for row, (low, _) in zip(rows, known, strict=True) if low <= known[0][1]]
    return rows[0].method, alike[1:]


def join_names(names: Sequence[str], most: int = 6) -> str:
    """Join names for a sentence.

    >>> join_names(["a", "b", "c"]), join_names(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    shown, more = list(names[:most]), len(names) - most
    last = f"{more} more" if more > 0 else shown.pop()
    return f"{', '.join(shown)} and {last}" if shown else last


def interval_text(bounds: Sequence[float], metric: Metric) -> str:
    """A 95 % interval in brackets.

    >>> interval_text((42.4, 57.6), metric_of("mia"))
    '[42.4–57.6]'
    >>> interval_text((-2.4, 7.6), metric_of("mia"))
    '[-2.4 to 7.6]'
    >>> interval_text((-0.5, 2e-5), metric_of("error"))
    '[-0.5 to 2e-05]'
    """
    low, high = bounds
    texts = [metric.number(end) for end in bounds]
    if metric.unit in ("%", "points"):
        places = 2 if high - low < 1 else 1
        texts = [f"{end:.{places}f}" for end in bounds]
    return f"[{(' to ' if low < 0 else '–').join(texts)}]"
