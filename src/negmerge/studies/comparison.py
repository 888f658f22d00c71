"""The methods of a study, paired by seed: every number that the runs measured, and differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from negmerge.errors import OptionError
from negmerge.evaluation.metrics import Metric, metric_of, metrics
from negmerge.registry import unknown_name
from negmerge.reports.ranking import AVG_GAP, SHOWN, gap_metric, measured_metrics
from negmerge.runs.recipe import Recipe
from negmerge.runs.result import RunResult, Scored
from negmerge.studies.statistics import (
    LEVEL,
    Mean,
    PairedTest,
    detectable,
    differences,
    holm,
    mean_of,
    paired_test,
    pairs_needed,
)

Verdict = Literal["better", "worse", "undecided", ""]
"""`""` for a number of which neither lower nor higher values are better."""
BySeed = Mapping[int, float]
NOT_RESULTS = frozenset((
    "elements", "members", "options", "samples", "seconds", "seconds_merge", "seconds_search",
    "settings",
))  # fmt: skip
"""Fields of a row that describe the recipe or the machine."""


MATCHED_GAP = "matched.matched_gap"
"""The mean gap of the other metrics where all methods forgot as much as the retrained model."""


def numbers_of(row: Scored) -> dict[str, float]:
    """Every number of a row: its metrics, then λ, sparsity, Avg. Gap and so on.

    An entry of a field that is a mapping is called `FIELD.KEY`.

    >>> row = Scored(intervals={}, samples={}, seconds=1.0, mia=2.0, validation={"mia": 3.0})
    >>> numbers_of(row)
    {'mia': 2.0, 'samples_processed': 0.0, 'validation.mia': 3.0}
    """
    found: dict[str, Any] = {**row.measured()}
    for field in (field for field in type(row).model_fields if field not in NOT_RESULTS):
        value: Any = getattr(row, field)
        mapping = value if isinstance(value, dict) else {}
        found |= {f"{field}.{key}": one for key, one in mapping.items()} or {field: value}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@dataclass(frozen=True)
class Difference:
    """How a method differs from the method that it is compared with, in one number.

    Args:
        metric, method: the names.
        by_seed: the value of the method less that of the other, for each seed that has both. Of a
            metric of which values near the retrained model are better, the distances from it are
            subtracted.
        better: whether a `lower` or a `higher` difference is better; None if neither is.
        test: the tests of the differences against zero.
        t_holm, wilcoxon_holm: the p-values after Holm's correction for the methods of the study.
        comparisons: the number of methods that are compared.
    """

    metric: str
    method: str
    by_seed: BySeed
    better: Literal["lower", "higher"] | None
    test: PairedTest
    t_holm: float | None = None
    wilcoxon_holm: float | None = None
    comparisons: int = 1

    @property
    def verdict(self) -> Verdict:
        """What the t test decides at 5 %, after the correction."""
        if self.better is None:
            return ""
        if self.t_holm is None or self.t_holm >= LEVEL:
            return "undecided"
        return "better" if (self.test.mean.mean < 0) == (self.better == "lower") else "worse"

    @property
    def better_seeds(self) -> int | None:
        """The number of seeds in which the method is better; None if neither can be."""
        if self.better is None:
            return None
        sign = -1 if self.better == "lower" else 1
        return sum(sign * value > 0 for value in self.by_seed.values())

    @property
    def detectable(self) -> float | None:
        """The difference that the corrected test would have found with a probability of 80 %.

        The level of the test is divided by the number of comparisons, as in the first step of
        Holm's correction. None for one seed.
        """
        mean = self.test.mean
        if mean.std is None:
            return None
        return detectable(mean.std, mean.n, LEVEL / self.comparisons)

    @property
    def seeds_needed(self) -> int | None:
        """The number of seeds that would decide, if the true difference is the measured one.

        The level of the test is that of `detectable`. None if the study decided, or if no
        reasonable number decides.
        """
        mean = self.test.mean
        if self.verdict != "undecided" or mean.std is None:
            return None
        return pairs_needed(mean.mean, mean.std, LEVEL / self.comparisons)

    def tree(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        test, mean = self.test, asdict(self.test.mean)
        return {
            "metric": self.metric,
            "method": self.method,
            "n": mean.pop("n"),
            "difference": mean.pop("mean"),
            **mean,
            "better_seeds": self.better_seeds,
            "t_p": test.t_p,
            "t_holm": self.t_holm,
            "wilcoxon_p": test.wilcoxon_p,
            "wilcoxon_holm": self.wilcoxon_holm,
            "detectable": self.detectable,
            "seeds_needed": self.seeds_needed,
            "verdict": self.verdict,
        }


class Comparison:
    """The results of the runs of a study, by seed, with the method that others are compared with.

    Args:
        against: the title of this method; None: the first method of the recipe.
    """

    def __init__(
        self, recipe: Recipe, results: Mapping[int, RunResult], against: str | None = None
    ):
        self.recipe, self.results = recipe, dict(sorted(results.items()))
        self.against = compared_with(recipe, against)
        self.methods = forgetting(recipe)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the study."""
        return list(self.results)

    @cached_property
    def values(self) -> dict[str, dict[str, dict[int, float]]]:
        """Every number by its name, then by model, then by seed.

        The models are `original`, `retrained` and the titles of the methods.
        """
        found: dict[str, dict[str, dict[int, float]]] = {}
        for seed, result in self.results.items():
            rows = {"original": result.original, "retrained": result.retrain}
            rows |= {row.method: row for row in result.methods}
            for model, row in rows.items():
                for name, value in ({} if row is None else numbers_of(row)).items():
                    found.setdefault(name, {}).setdefault(model, {})[seed] = value
        return {name: found[name] for name in sorted(found, key=self._place)}

    def _place(self, name: str) -> tuple[int, str]:
        """The sort key of a number: metrics in the order of reports, the gaps, then the others."""
        settings = self.recipe.settings
        first = [settings.forget_metric, settings.retain_metric]
        for result in self.results.values():
            first += measured_metrics(result)
        order = [*dict.fromkeys(first), "avg_gap", MATCHED_GAP]
        return (order.index(name), "") if name in order else (len(order), name)

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The label, the unit and the format of every number."""
        return {name: self._metric(name) for name in self.values}

    def _metric(self, name: str) -> Metric:
        if name in ("avg_gap", MATCHED_GAP):
            gap = gap_metric(next(iter(self.results.values())))
            label, short = "mean gap to retraining at equal forgetting", "gap, matched"
            return gap if name == "avg_gap" else replace(gap, name=name, label=label, short=short)
        if name in self._measured:
            return self.recipe.settings.metric(name)
        field, dot, key = name.partition(".")
        if not dot:
            return metric_of(name)
        own = AVG_GAP if key == "avg_gap" else self.recipe.settings.metric(key)
        words = field.replace("_", " ")
        return replace(own, name=name, label=f"{own.label}, {words}", short=f"{own.short}, {words}")

    @cached_property
    def _measured(self) -> set[str]:
        """The names of metrics; other numbers are fields of a row."""
        return {name for result in self.results.values() for name in measured_metrics(result)}

    @cached_property
    def directed(self) -> dict[str, Literal["lower", "higher", "reference"]]:
        """The numbers of which some values are better than others, and which these are.

        Where there is a retrained model, it is better to know of the forget set as much as it does:
        a ruined model knows less.
        """
        forget = self.recipe.settings.forget_metric
        found: dict[str, Literal["lower", "higher", "reference"]] = {}
        for name, metric in self.metrics.items():
            key = self._key(name)
            known = key in self._measured or key in ("avg_gap", "matched_gap")
            known = known or (key != name and key in metrics)
            better = "reference" if name == forget and self._reference(name) else metric.better
            if known and (better != "reference" or self._reference(name)):
                found[name] = better
        return found

    def _key(self, name: str) -> str:
        """The metric that a number is a value of: `mia` for `mia` and for `matched.mia`."""
        return name if name in self._measured else name.rpartition(".")[2]

    def _reference(self, name: str) -> BySeed:
        """The values of the retrained models on the samples of a number, by seed.

        Values at equal forgetting are measured on the samples that choose λ. On the samples of
        other derived numbers, retrained models are not measured.
        """
        key = self._key(name)
        if key == name or key == "avg_gap":
            return self.values.get(key, {}).get("retrained", {})
        if not name.startswith("matched."):
            return {}
        found = {seed: result.matching for seed, result in self.results.items()}
        return {
            seed: matching.retrained[key]
            for seed, matching in found.items()
            if matching is not None and key in matching.retrained
        }

    @property
    def _derived(self) -> list[str]:
        """Avg. Gap and other numbers that have a direction and are no metrics themselves.

        All methods have the same forget metric where they are matched: it is not compared.
        """
        same = f"matched.{self.recipe.settings.forget_metric}"
        found = [name for name in self.directed if name not in (*self._measured, same)]
        return [name for name in found if self.against in self.values[name]]

    @property
    def main(self) -> list[str]:
        """The numbers of short tables: the first metrics in the order of reports, then Avg. Gap."""
        own = [name for name in self.directed if name in self._measured][:SHOWN]
        return [*own, *self._derived]

    @property
    def drawn(self) -> list[str]:
        """The numbers of the figure: forget, retain, what the criterion reads, Avg. Gap."""
        settings, criterion = self.recipe.settings, self.recipe.criterion
        read = settings.criterion(criterion)
        names = [settings.forget_metric, settings.retain_metric]
        names += [read.reported_as.get(name, name) for name in read.reads]
        names += self._derived
        return [name for name in dict.fromkeys(names) if self.of(name)][:SHOWN]

    def means(self, name: str) -> dict[str, Mean]:
        """The mean of a number over the seeds, by model."""
        return {model: mean_of(list(found.values())) for model, found in self.values[name].items()}

    def compared(self, name: str) -> dict[str, BySeed]:
        """What is compared, by model: the values, or their distances from the retrained model."""
        found = self.values[name]
        if self.directed.get(name) != "reference":
            return dict(found)
        aim = self._reference(name)
        return {
            model: {seed: abs(value - aim[seed]) for seed, value in own.items() if seed in aim}
            for model, own in found.items()
        }

    @cached_property
    def differences(self) -> list[Difference]:
        """The paired differences of every number and every method that has it in some seed."""
        return [one for name in self.values for one in self._differences(name)]

    def _differences(self, name: str) -> list[Difference]:
        found, direction = self.compared(name), self.directed.get(name)
        better = "lower" if direction == "reference" else direction
        other, rows = found.get(self.against, {}), list[Difference]()
        for method in (title for title in self.methods if title != self.against):
            own = found.get(method, {})
            seeds = [seed for seed in self.seeds if seed in own and seed in other]
            if not seeds:
                continue
            values = differences([own[s] for s in seeds], [other[s] for s in seeds])
            by_seed = dict(zip(seeds, values.tolist(), strict=True))
            rows.append(Difference(name, method, by_seed, better, paired_test(values)))
        t_holm = holm([row.test.t_p for row in rows])
        wilcoxon_holm = holm([row.test.wilcoxon_p for row in rows])
        return [
            replace(row, t_holm=p, wilcoxon_holm=q, comparisons=len(rows))
            for row, p, q in zip(rows, t_holm, wilcoxon_holm, strict=True)
        ]

    def of(self, name: str) -> list[Difference]:
        """The differences of one number, in the order of the recipe."""
        return [one for one in self.differences if one.metric == name]


def forgetting(recipe: Recipe) -> list[str]:
    """The titles of the methods that forget; those that add τ learn, and are not compared."""
    return [method.title for method in recipe.methods if method.add is None]


def compared_with(recipe: Recipe, against: str | None) -> str:
    """Return the title of the method that others are compared with; raise if there are no others.

    >>> compared_with(Recipe(methods=["consensus", "uniform"]), "uniforme")
    Traceback (most recent call last):
    negmerge.errors.OptionError: --against: unknown method 'uniforme'; did you mean 'uniform'? ...
    """
    titles = forgetting(recipe)
    if len(titles) < 2:
        got = titles[0] if titles else "none that forgets"
        raise OptionError(
            f"methods: got {got}, wanted at least two to compare; add one, as in "
            "--set 'methods=[consensus, uniform]'"
        )
    if against is not None and against not in titles:
        raise OptionError(f"--against: {unknown_name('method', against, titles)}")
    return against or titles[0]
