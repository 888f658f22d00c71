"""Is a method as near to the retrained model as a second retrained model is?"""

from __future__ import annotations

from math import hypot

from negmerge.evaluation.scores import TUG_OF_WAR, Scores, avg_gap, gap_metrics, tug_of_war
from negmerge.evidence.findings import RETRAINED, SECOND, Finding, Quantity
from negmerge.evidence.registry import Exhibits, Findings, ObservedTest, forgetting_tests


def halves(ours: Scores, theirs: Scores, names: list[str] | tuple[str, ...]) -> list[float] | None:
    """Return half the width of the 95 % interval of each difference; None if one has none.

    The errors of the two models are taken to be independent, which makes the widths rather too
    large: both are measured on the same samples.
    """
    if not all(name in one.intervals for one in (ours, theirs) for name in names):
        return None
    bounds = [(ours.intervals[name], theirs.intervals[name]) for name in names]
    return [hypot(*((high - low) / 2 for low, high in pair)) for pair in bounds]


def find(seen: Exhibits, title: str) -> Findings:
    """Compare the metrics of a model with those of the retrained model."""
    if title == RETRAINED:
        return {}
    ours, theirs = seen.models[title].scores, seen.models[RETRAINED].scores
    found: Findings = {}
    reference = theirs.row()
    names = gap_metrics(reference)
    if (gap := avg_gap(ours.row(), reference)) is not None:
        known = halves(ours, theirs, names)
        half = None if known is None else hypot(*known) / len(names)
        found["avg_gap"] = _bounded(gap, half, 0.0, None)
    if (tow := tug_of_war(ours.row(), reference)) is not None:
        known = halves(ours, theirs, TUG_OF_WAR)
        half = None
        if known is not None:  # the relative errors of factors add up as squares
            shares = [1 - abs(ours.row()[name] - reference[name]) / 100 for name in TUG_OF_WAR]
            if all(shares):
                half = tow * hypot(*(h / 100 / s for h, s in zip(known, shares, strict=True)))
        found["tow"] = _bounded(tow, half, 0.0, 1.0)
    return found or {"avg_gap": Finding(value=None, why="no metric is part of Avg. Gap")}


def _bounded(value: float, half: float | None, least: float, most: float | None) -> Finding:
    if half is None:
        return Finding(value=value)
    high = value + half if most is None else min(value + half, most)
    return Finding(value=value, low=max(value - half, least), high=high)


forgetting_tests.register(
    "distance",
    ObservedTest(
        name="distance",
        title="Is it as near to the retrained model as a second retrained model?",
        text=(
            "Two models retrained with different seeds differ, too: nearer to the retrained model "
            "than this no method can be shown to be. Avg. Gap is the mean distance of the "
            "metrics; ToW, the tug-of-war score, is the product of 1 − |gap| over the accuracies "
            "of forget, retain and test set, 1 for equal accuracies."
        ),
        place=70,
        tier="standard",
        quantities=(
            Quantity(
                name="avg_gap",
                label="Avg. Gap to the retrained model",
                short="Avg. Gap",
                unit="points",
                better="lower",
                above="further from the retrained model than a second retrained model is",
                below="nearer to the retrained model than a second retrained model is",
            ),
            Quantity(
                name="tow",
                label="tug-of-war score",
                short="ToW",
                unit="",
                better="higher",
                above="nearer to the retrained model than a second retrained model is",
                below="further from the retrained model than a second retrained model is",
            ),
        ),
        needs=frozenset(("retrained", "second")),
        null=SECOND,
        find=find,
    ),
)
