"""Metrics by name. ◄ ADD A METRIC: one file here, or in `attacks`, with one `metrics.register`.

A metric is computed from the observations of single samples and never runs a model. Tables, the
page, exports, sweeps and `negmerge list metrics` show every metric whose columns a scenario
observes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from negmerge.errors import OptionError, quoted
from negmerge.evaluation.observations import Observations
from negmerge.registry import Registry

Observed = Mapping[str, Observations]
"""The observations of each set, by the name of the set."""


@dataclass(frozen=True)
class Measured:
    """A number, its 95 % interval, and the number of samples it was computed from.

    >>> Measured(75.0, 50.0, 90.0, 20).value
    75.0
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Histogram:
    """The histograms of the values that an attack uses, for the page.

    Args:
        file: the name of the CSV file in `report/data` of a run.
        title: the title of the section of the page.
        text: the description of the figure.
        bins: computes rows of `set`, `low`, `high`, `count`, `member` from the observations.
        axis: the label of the axis of the values.
    """

    file: str
    title: str
    text: str
    bins: Callable[[Observed], list[dict[str, Any]]]
    axis: str = "observed value"


@dataclass(frozen=True)
class Comparison:
    """A number from the same column of two models, without the samples that are NaN.

    Args:
        set: the name of the set.
        value: takes the column of the model and that of the retrained one; None if it needs more.
    """

    set: str
    column: str
    value: Callable[[NDArray[Any], NDArray[Any]], float | None]


@dataclass(frozen=True)
class Metric:
    """A number of one model.

    Args:
        name: the name in `scores.json`, in sweeps and in exports.
        label: a description of a few words.
        short: the heading of its column.
        better: `lower` or `higher` if such values are better; `reference` if values nearer to the
            retrained model are better.
        sets: the names of the sets that the metric needs.
        columns: the columns that must be observed of each sample.
        value: computes the number from the observations of the sets; None if no sample has what it
            needs, and then the metric is missing, as if a set were.
        unit: the unit of the number.
        in_gap: whether Avg. Gap includes the metric.
        reported: False for a metric that only chooses λ.
        histogram: the histograms that the page shows beside the number.
        compares: for a metric that compares a model with the retrained one: the set, the column,
            and a function of the two columns; `value` then returns None.
        interval: the 95 % interval of a value, from the value and the number of samples of the
            first set; None if an interval needs more.
    """

    name: str
    label: str
    short: str
    better: Literal["lower", "higher", "reference"]
    sets: tuple[str, ...]
    columns: tuple[str, ...]
    value: Callable[[Observed], Measured | None]
    unit: str = "%"
    in_gap: bool = False
    reported: bool = True
    histogram: Histogram | None = None
    compares: Comparison | None = None
    interval: Callable[[float, int], tuple[float, float]] | None = None

    @property
    def heading(self) -> str:
        """The heading of the column, with the unit."""
        return f"{self.short} {self.unit}".rstrip()

    @property
    def axis(self) -> str:
        """The label of an axis: the description, with the unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def number(self, value: float) -> str:
        """Format a value without its unit: percentages with two decimals, others with four digits.

        >>> metric_of("mia").number(12.345), metric_of("error").number(0.00012345)
        ('12.35', '0.0001234')
        """
        if self.unit in ("%", "points"):
            return f"{value:.2f}"
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"

    def text(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()


RESERVED = frozenset((
    "agreement", "anatomy", "avg_gap", "cost_ratio", "criterion", "direction", "edge", "elements",
    "evaluations", "failure", "id", "intervals", "kept", "looked", "loss", "matched", "matched_gap",
    "member", "members", "method", "options", "order", "samples", "samples_processed", "scale",
    "seconds", "seconds_merge", "seconds_search", "settings", "sparsity", "sparsity_parts",
    "splits", "title", "tow", "tried", "unmatched", "unused", "validation",
))  # fmt: skip
"""Other fields of the rows of `scores.json`, which no metric may be named like."""

TABLES = frozenset((
    "component", "depth", "dissent", "geometry", "matched", "members", "prefixes", "scores",
    "sweeps", "tries",
))  # fmt: skip
"""The names of the tables of every page, which no histogram may have."""
OF_EVIDENCE = "evidence-"
"""The beginning of the names of the tables of tests of forgetting."""
FILE = re.compile(r"([A-Za-z0-9_-]+)\.csv")


class MetricRegistry(Registry[Metric]):
    """The registry of metrics; every histogram has a file of its own."""

    def _check(self, name: str, entry: Metric) -> None:
        if entry.histogram is None:
            return
        file, others = entry.histogram.file, [one.histogram for one in self._entries.values()]
        match = FILE.fullmatch(file)
        taken = match is not None and match[1].lower().startswith(OF_EVIDENCE)
        if match is None or taken or match[1].lower() in TABLES:
            raise ValueError(
                f"metric {name!r}: the file of its histogram is {file!r}; wanted letters, digits, "
                f"- and _, then .csv, and none of {', '.join(sorted(TABLES))} and {OF_EVIDENCE}…"
            )
        if any(one is not None and one.file.lower() == file.lower() for one in others):
            raise ValueError(
                f"metric {name!r}: the file of its histogram is {file!r}, which another metric "
                "writes; choose another name"
            )


metrics = MetricRegistry(
    "metric", "negmerge.evaluation.metrics", "negmerge.evaluation.attacks", reserved=RESERVED
)


def observable(columns: Sequence[str], first: Sequence[str] = ()) -> list[Metric]:
    """Return the metrics that can be computed from some columns: `first` ones, then by name.

    >>> [metric.name for metric in observable(["error"])]
    []
    """
    found = [metrics.get(name) for name in metrics]
    found = [metric for metric in found if {*metric.columns} <= {*columns}]
    places = {name: place for place, name in enumerate(first)}
    return sorted(found, key=lambda metric: places.get(metric.name, len(places)))


def metric_of(name: str, forgotten: bool = False) -> Metric:
    """Return a metric by name, to format its values.

    A name that is not registered gives a metric without a unit, with the name as its label.

    >>> metric_of("acc_forget").axis, metric_of("squared_error").axis
    ('accuracy on the forget set, %', 'squared error')

    Args:
        forgotten: for a name that is not registered, whether lower values are better.
    """
    if name in metrics:
        return metrics.get(name)

    def value(found: Observed) -> Measured:
        raise OptionError(
            f"metric {quoted(name)}: is not registered; import the module that registers it"
        )

    words = name.replace("_", " ")
    better = "lower" if forgotten else "higher"
    return Metric(name, words, words, better, (), (), value, unit="")
