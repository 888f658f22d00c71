"""What tests of forgetting found: the part `evidence` of `scores.json`; needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Tier = Literal["basic", "standard", "full"]
TIERS: tuple[Tier, ...] = ("basic", "standard", "full")
"""How much evidence a run collects; each tier includes those before it."""
Better = Literal["lower", "higher", "reference"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^\w[\w-]*$")]
"""The name of a test, which files are named after."""

ORIGINAL, RETRAINED = "original", "retrained"
SECOND = "second retrained"
"""The titles of models that are not methods; no method can have a title with a space."""
NO_REFERENCE = "no retrain reference: efficacy not measured"


class _Frozen(BaseModel):
    """A part of `scores.json`; a later version may write further fields."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Finding(_Frozen):
    """A number that a test found for one model.

    >>> Finding(value=61.0, low=58.0, high=64.0, n=500).value
    61.0

    Args:
        value: the number; None if it was not measured, and then `why` has the reason.
        low, high: the ends of the 95 % interval, if the number has one.
        n: the number of samples it was computed from.
        least, most: whether the number is only a lower, an upper bound.
        curve: points (x, y), for a figure.
    """

    value: Number | None
    low: Number | None = None
    high: Number | None = None
    n: Count | None = None
    why: str | None = None
    least: bool = False
    most: bool = False
    curve: list[tuple[Number, Number]] = Field(default_factory=list)


class Quantity(_Frozen):
    """A number that a test finds for every model.

    Args:
        name: its key in the findings of a model.
        label: a description of a few words.
        short: the heading of its column.
        better: as in `evaluation.metrics.Metric`.
        of: for a metric of the scenario, whether it is that of the forget or of the retain set; its
            unit is then that of the metric (or `points`, for a change of a percentage), and
            `{metric}` in the label is replaced by its label.
        above, below: what it means if the number of a model is larger, smaller than that of the
            retrained model; "" if it means nothing.
    """

    name: str
    label: str
    short: str
    unit: str = "%"
    better: Better = "reference"
    of: Literal["forget", "retain"] | None = None
    above: str = ""
    below: str = ""


class TestResult(_Frozen):
    """What one test found.

    Args:
        title: the title of its figure.
        text: what is measured, and how.
        tier: the tier that the test belongs to.
        axis, y_axis: the labels of the axes of the curves, if findings have curves.
        null: the title of the model whose finding is the line to reach.
        quantities: the numbers; the first one decides what is said about a model.
        models: by title of a model, its findings by name of the quantity.
        missing: why the test was not run, if it was not.
    """

    __test__ = False  # no test of pytest

    title: str
    text: str
    tier: Tier
    quantities: list[Quantity]
    axis: str = ""
    y_axis: str = ""
    null: str = RETRAINED
    models: dict[str, dict[str, Finding]] = Field(default_factory=dict)
    missing: str | None = None

    def finding(self, model: str, quantity: str) -> Finding | None:
        """Return what was found for a model; None if nothing was."""
        return self.models.get(model, {}).get(quantity)


class Evidence(_Frozen):
    """Everything that the tests of a run found.

    Args:
        tier: the tier that the recipe asked for.
        tests: by name, in the order of the page.
        seconds: the time that the tests took, with the trainings that only they need.
    """

    tier: Tier
    tests: dict[Name, TestResult]
    seconds: Number = 0.0
