"""Results of runs made by hand, for studies: some metrics of some methods in some seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from negmerge.runs.recipe import Recipe
from negmerge.runs.result import RunResult

Values = Mapping[str, Mapping[str, Sequence[float | None]]]
"""By metric and model, one value for each seed; None where a seed does not have it."""


def recipe_of(*methods: str, **fields: Any) -> Recipe:
    """A recipe of the scenario `classify`, whose metrics are registered."""
    return Recipe.model_validate({"methods": list(methods), "title": "A study"} | fields)


def results_of(values: Values, retrained: bool = True) -> dict[int, RunResult]:
    """The results of seeds 0, 1 and so on; a method without any value in a seed is not there."""
    models = dict.fromkeys(name for found in values.values() for name in found)
    count = max(len(one) for found in values.values() for one in found.values())
    results: dict[int, RunResult] = {}
    for seed in range(count):
        rows: dict[str, dict[str, float]] = {}
        for model in models:
            own = {m: found[model][seed] for m, found in values.items() if model in found}
            known = {metric: value for metric, value in own.items() if value is not None}
            rows |= {model: known} if known else {}
        nothing: dict[str, Any] = {"intervals": {}, "samples": {}, "seconds": 1.0 + seed}
        about = {"scale": 0.5, "sparsity": None, "cost_ratio": None, "evaluations": 3}
        about |= {"criterion": None, "looked": False, "edge": False, "splits": "forget"}
        reference = nothing | rows.pop("retrained", {})
        results[seed] = RunResult.model_validate({
            "title": "A study", "seed": seed,
            "original": nothing | rows.pop("original", {}),
            "retrain": reference if retrained else None,
            "methods": [nothing | about | {"method": k} | row for k, row in rows.items()],
            "splits": {"data": "none", "sizes": {}, "chosen_on": {}}, "pool": [], "warnings": [],
        })  # fmt: skip
    return results
