"""The types of `scores.json`, the result of a run.

In the file every metric is a field of its row, so a row may have any number of metrics.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from negmerge.evidence.findings import Evidence
from negmerge.runs.geometry_record import Geometry
from negmerge.runs.records import Number, Pair, Record
from negmerge.scenarios.settings import Description

Count = Annotated[int, Field(ge=0)]


class MetricRow(Record):
    """The metrics of one model by name; None for a metric that was not measured.

    >>> row = MetricRow(acc_forget=12.5, mia=None)
    >>> row.metrics, row.value("acc_forget"), row.value("mia")
    ({'acc_forget': 12.5, 'mia': None}, 12.5, None)
    """

    __pydantic_extra__: dict[str, Number | None]  # pyright: ignore

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics of the row, in order."""
        return dict(self.model_extra or {})

    def value(self, metric: str) -> float | None:
        """Return a metric; None if it was not measured."""
        return (self.model_extra or {}).get(metric)

    def measured(self) -> dict[str, float]:
        """Return the metrics that were measured."""
        return {name: value for name, value in self.metrics.items() if value is not None}


class Scored(MetricRow):
    """The scores of one model, and its cost.

    Args:
        intervals: the 95 % interval of each metric that has one.
        samples: the number of samples of each reported set.
        samples_processed: the number of samples processed in training.
        seconds: the seconds of training, merging and searching.
        tow: the tug-of-war score, if there is a retrained model.
        validation: the metrics on the samples that choose λ, in runs that add task vectors.
    """

    intervals: dict[str, Pair]
    samples: dict[str, Count]
    seconds: Number
    samples_processed: Count = 0
    avg_gap: Number | None = None
    tow: Number | None = None
    validation: dict[str, Number] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_intervals(self) -> Scored:
        for name in self.intervals:
            if self.value(name) is None:
                raise ValueError(f"intervals: {name} has an interval and no value")
        return self


class Tried(MetricRow):
    """One try of a tuned rival, measured on the samples that choose.

    Args:
        options: the values of the tuned options.
        loss: the loss by the criterion; None if the criterion does not allow the try.
        failure: why there is no usable model.
    """

    options: dict[str, Number]
    loss: Number | None = None
    samples: Count = 0
    seconds: Number = 0.0
    failure: str | None = None


class Zeros(Record):
    """The zeros of a part of a task vector, in percent.

    Args:
        elements: the share among all elements.
        tensors: the mean of the shares of the tensors.
        tensors_std: the standard deviation of the shares of the tensors, if there are several.
        layers_std: the standard deviation of the means of the layers, if there are several.
    """

    elements: Number
    tensors: Number
    tensors_std: Number | None = None
    layers_std: Number | None = None


class MethodRow(Scored):
    """A method: its scores, its λ and its cost.

    Args:
        method: the title.
        splits: the data that the method used: `all`, `retain` or `forget`.
        scale: λ; None for a rival.
        sparsity: the sparsity of the task vector in percent; None for a rival.
        sparsity_parts: the same for parts of the model that differ, such as embeddings.
        cost_ratio: the samples processed, divided by those of retraining.
        evaluations: how often the data that chooses ran through a model.
        criterion: the criterion that chose λ or the best try; None if nothing was chosen.
        looked: whether the criterion used the reported data.
        edge: whether a λ larger than the largest measured one may be better.
        unused: the percentage of what the limited metric may lose that is not lost at λ, for a
            criterion such as `keep_retain`.
        agreement: the percentage of pairs of members whose changes of an element, if both are not
            zero, have the same sign.
        direction: `add` if the task vector was added.
        member, kept, order: the selected member or members of a selector, and its order; also of a
            rule whose members were chosen by the loss on retain samples.
        members, elements, anatomy: the number of merged models and of elements of a task vector,
            and its zeros by group of layers.
        settings, options, tried: the settings, options and tries of a rival.
        matched: λ and every metric at the level of `RunResult.matching`, and `matched_gap`, the
            mean distance of the metrics but the forget metric to the retrained model.
        unmatched: why there is no λ with that level.
        reshaped: what changed the merged task vector before λ was searched, by the field of the
            method, with its numbers.
    """

    method: str
    splits: str
    scale: Number | None
    sparsity: Number | None
    cost_ratio: Number | None
    evaluations: Count
    criterion: str | None
    looked: bool
    edge: bool
    seconds_merge: Number | None = None
    seconds_search: Number = 0.0
    unused: Number | None = None
    agreement: Number | None = None
    sparsity_parts: dict[str, Number] = Field(default_factory=dict)
    direction: Literal["add"] | None = None
    member: str | None = None
    kept: list[str] | None = None
    order: str | None = None
    members: Count | None = None
    elements: Count | None = None
    anatomy: dict[str, Zeros] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    tried: list[Tried] = Field(default_factory=list)
    matched: dict[str, Number] = Field(default_factory=dict)
    unmatched: str | None = None
    reshaped: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_tries(self) -> MethodRow:
        values = self.chosen
        for name in self.tried[0].options if self.tried else ():
            if not isinstance(values.get(name), int | float):
                raise ValueError(f"{name} was tried, and neither settings nor options has it")
        return self

    @property
    def merged(self) -> bool:
        """Whether the method merges task vectors; otherwise it is a rival."""
        return self.scale is not None

    @property
    def searched(self) -> bool:
        """Whether λ was searched."""
        return self.merged and self.criterion is not None

    @property
    def added(self) -> bool:
        """Whether the task vector was added, to learn instead of to forget."""
        return self.direction == "add"

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings and options of a rival."""
        return self.settings | self.options


class MemberRow(MetricRow):
    """A pool member: its training, and its scores with its own λ if they were measured.

    Args:
        epoch, training: of a checkpoint, the epoch after which it was written, and the id of the
            member at the end of its training; `samples` and `seconds` are those until this epoch.
    """

    id: str
    samples: Count
    seconds: Number
    title: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    loss: Number | None = None
    epoch: Count | None = None
    training: str | None = None
    scale: Number | None = None
    intervals: dict[str, Pair] = Field(default_factory=dict)
    avg_gap: Number | None = None
    matched: dict[str, Number] = Field(default_factory=dict)


class Matching(Record):
    """The level of forgetting at which methods are compared, on the samples that choose λ.

    Args:
        metric: the forget metric.
        stated: whether the recipe states the level; otherwise it is that of the retrained model.
        retrained: the metrics of the retrained model on these samples.
        samples: the number of samples of each set, if the scenario has sets.
    """

    metric: str
    level: Number
    stated: bool
    retrained: dict[str, Number] = Field(default_factory=dict)
    samples: dict[str, Count] = Field(default_factory=dict)


class RunResult(Record):
    """Everything that a run measured.

    Args:
        format: the version of the file; files of negmerge 0.1 do not have this field.
        methods: in the order of the recipe; the first made the unlearned model.
        splits: the description of the data.
        matching: the level of the fields `matched` of the rows.
        geometry: lengths, distances and losses along paths, which only the page shows.
        evidence: what tests of forgetting found; None in runs without a page, and of version 0.3
            and older.
    """

    format: Literal["negmerge-scores/1"] = "negmerge-scores/1"
    title: str
    seed: int
    original: Scored
    retrain: Scored | None
    methods: Annotated[list[MethodRow], Field(min_length=1)]
    splits: Description
    pool: list[MemberRow]
    warnings: list[str]
    matching: Matching | None = None
    geometry: Geometry | None = None
    evidence: Evidence | None = None

    @model_validator(mode="after")
    def _check_chosen_on(self) -> RunResult:
        if isinstance(self.splits.chosen_on, str) and not all(
            method.looked for method in self.methods if method.criterion is not None
        ):
            raise ValueError("splits.chosen_on: wanted the number of samples of each set")
        return self

    @property
    def first(self) -> MethodRow:
        """The method that made the unlearned model."""
        return self.methods[0]

    def method(self, title: str) -> MethodRow:
        """Return a method by its title."""
        return next(row for row in self.methods if row.method == title)

    def tree(self) -> dict[str, Any]:
        """Return the result as JSON values for the file."""
        return self.model_dump(mode="json", exclude_unset=True)
