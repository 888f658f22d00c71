"""The sentences about a study: what was compared, what it decided, and what it could not decide."""

from __future__ import annotations

from collections.abc import Sequence

from negmerge.evaluation.metrics import Metric
from negmerge.reports.ranking import join_names
from negmerge.studies.comparison import Comparison, Difference
from negmerge.studies.statistics import MOST_PAIRS


def seeds_text(seeds: Sequence[int]) -> str:
    """The number of seeds, and the seeds.

    >>> seeds_text([0, 1, 2, 3]), seeds_text([0, 3, 4]), seeds_text([7])
    ('4 seeds (0–3)', '3 seeds (0, 3, 4)', 'one seed (7)')
    """
    if len(seeds) == 1:
        return f"one seed ({seeds[0]})"
    joined = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))) and len(seeds) > 2
    names = f"{seeds[0]}–{seeds[-1]}" if joined else ", ".join(map(str, seeds))
    return f"{len(seeds)} seeds ({names})"


def unit_of(metric: Metric) -> str:
    """The unit of a difference; percentages differ by points."""
    return "points" if metric.unit == "%" else metric.unit


def difference_text(value: float, metric: Metric) -> str:
    """A difference with its sign.

    >>> from negmerge.evaluation.metrics import metric_of
    >>> [difference_text(value, metric_of("mia")) for value in (1.234, -1.234, -0.001)]
    ['+1.23', '-1.23', '0.00']
    """
    text = metric.number(value)
    if not text.strip("-0."):
        return text.lstrip("-")
    return f"+{text}" if value > 0 else text


def compared_text(study: Comparison) -> str:
    """What was compared with what, and how often."""
    others = [title for title in study.methods if title != study.against]
    return (
        f"Compared with {study.against} in {seeds_text(study.seeds)}: "
        f"{join_names(others, most=12)}. Each seed is one run of the recipe, and methods are "
        "compared within a run."
    )


def decided_texts(study: Comparison) -> list[str]:
    """For each number of the figure, which methods are better, worse and undecided."""
    lines, than = list[str](), f" than {study.against}"
    for name in study.drawn:
        parts: list[str] = []
        for verdict, rest in (("better", than), ("worse", than), ("undecided", "")):
            titles = [one.method for one in study.of(name) if one.verdict == verdict]
            verb = "is" if len(titles) == 1 else "are"
            parts += [f"{join_names(titles, most=12)} {verb} {verdict}{rest}"] if titles else []
        label = study.metrics[name].label
        lines.append(f"{label[:1].upper()}{label[1:]}: {'; '.join(parts)}.")
    return lines


def distance_texts(study: Comparison) -> list[str]:
    """Which metrics are compared by their distance from the retrained model, if any are."""
    near = [study.metrics[m].short for m in study.main if study.directed[m] == "reference"]
    return (
        [f"Compared by the distance from the retrained model: {join_names(near)}."] if near else []
    )


def undecided_texts(study: Comparison) -> list[str]:
    """What the study could not decide, the difference it could have seen, and the seeds needed."""
    found = [one for name in study.drawn for one in study.of(name) if one.verdict == "undecided"]
    return [undecided_text(one, study) for one in found]


def undecided_text(one: Difference, study: Comparison) -> str:
    """One line about an undecided difference."""
    metric, mean = study.metrics[one.metric], one.test.mean
    unit = unit_of(metric) and f" {unit_of(metric)}"
    text = f"{metric.label}, {one.method}: {difference_text(mean.mean, metric)}{unit}"
    if one.detectable is None:
        return f"{text} in one seed; no test is possible"
    text += f"; a difference of {metric.number(one.detectable)}{unit} could have been seen"
    if one.seeds_needed is not None:
        return f"{text}; about {one.seeds_needed:,} seeds would be needed to decide"
    if not mean.mean:
        return f"{text}; no number of seeds decides a difference of zero"
    return f"{text}; more than {MOST_PAIRS:,} seeds would be needed to decide"


def warnings_of(study: Comparison) -> list[str]:
    """What limits the study."""
    found: list[str] = []
    if len(study.seeds) == 1:
        found.append(
            "One seed: there are no intervals and no tests, and nothing is decided; add seeds."
        )
    for name in study.drawn:
        counts = {one.method: one.test.mean.n for one in study.of(name)}
        others = [title for title in study.methods if title != study.against]
        if name.startswith("matched."):  # only methods with a λ can have it
            others = [title for title in others if title in study.values.get("scale", {})]
        known = [(title, counts.get(title, 0)) for title in others]
        fewer = [f"{title} ({n})" for title, n in known if n < len(study.seeds)]
        if fewer:
            found.append(
                f"{study.metrics[name].label}: compared in fewer than {len(study.seeds)} seeds: "
                f"{join_names(fewer)}."
            )
    added = [method.title for method in study.recipe.methods if method.title not in study.methods]
    if added:
        found.append(f"Not compared, because they add the task vector: {join_names(added)}.")
    return found
