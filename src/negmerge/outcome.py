"""What a run comes to: the rows of `scores.json`, and the files it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from negmerge.criteria import Choice, Criterion
from negmerge.evaluation.scores import avg_gap
from negmerge.names import layer_of
from negmerge.pool import Job
from negmerge.recipe import Recipe
from negmerge.rivalry import Contender
from negmerge.rundir import Run
from negmerge.scenario import Problem
from negmerge.task_vector import TaskVector

NO_REFERENCE = "no retrain reference: efficacy not measured"


@dataclass
class Found:
    """What a method came to: the λ, the patch it belongs to, and what the search took.

    merging: seconds until there was a vector, all tries of a selector with it. searching: seconds
    of the search for λ. pool: the members it needed. sweeps: the titles of its sweeps. added:
    θ + λτ, not θ − λτ.
    """

    choice: Choice
    patch: Path
    evaluations: int
    merging: float
    pool: list[Job]
    searching: float = 0.0
    sweeps: list[str] = field(default_factory=list)
    added: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """What τ is multiplied by before it is subtracted."""
        return -self.choice.scale if self.added else self.choice.scale

    @property
    def seconds(self) -> float:
        """All that came after the members."""
        return self.merging + self.searching


@dataclass
class Outcome:
    """The models of a run, and what every method came to, by its title."""

    original: Job
    retrained: Job | None
    pool: list[Job]
    found: dict[str, Found]
    contenders: dict[str, Contender]

    def scores(
        self,
        recipe: Recipe,
        problem: Problem,
        criterion: Criterion,
        measured: Mapping[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """`scores.json`.

        measured: on the reported data: `original`, `retrained`, and every method by its title.
        """
        about = problem.describe()
        original, reference = measured["original"] | cost_of([self.original]), None
        if self.retrained is not None:
            reference = measured["retrained"] | cost_of([self.retrained]) | {"avg_gap": 0.0}
            original["avg_gap"] = avg_gap(original, reference)
        rows = {
            title: self._merged(title, criterion, about["looked"], recipe.clip is not None)
            for title in self.found
        }
        rows |= {
            title: {"method": title} | contender.row(criterion, about["looked"])
            for title, contender in self.contenders.items()
        }
        # What retraining takes by the recipe, also when the reference came from a file.
        retraining = None if self.retrained is None else self.retrained.samples(problem)
        for title, row in rows.items():
            row |= measured[title]
            row["avg_gap"] = None if reference is None else avg_gap(row, reference)
            row["cost_ratio"] = retraining and row["samples_processed"] / retraining
        return {
            "title": recipe.title,
            "seed": recipe.seed,
            "original": original,
            "retrain": reference,
            "methods": [rows[method.title] for method in recipe.methods],
            "splits": about,
            "pool": [job.cost() for job in self.pool],
            "warnings": self._warnings(rows, retraining, recipe.clip is None),
        }

    def _merged(self, title: str, criterion: Criterion, looked: bool, clip: bool) -> dict[str, Any]:
        """The row of a merged vector, but for what was measured and what compares it."""
        result = self.found[title]
        tau, training = TaskVector.load(result.patch), cost_of(result.pool)
        row: dict[str, Any] = {
            "method": title,
            "splits": "forget",
            "scale": result.choice.scale,
            "sparsity": 100 * tau.sparsity(),
            "seconds": training["seconds"] + result.seconds,
            "seconds_merge": result.merging,
            "seconds_search": result.searching,
            "samples_processed": training["samples_processed"],
            "evaluations": result.evaluations,
            "criterion": None if result.added else criterion.name,
            "looked": looked,
            "edge": result.choice.edge,
        }
        if clip:
            row |= {"members": tau.origin.n, "elements": tau.elements, "anatomy": anatomy(tau)}
        if result.added:
            row["direction"] = "add"
        return row | result.detail

    def _warnings(
        self, rows: Mapping[str, dict[str, Any]], retraining: int | None, expected: bool
    ) -> list[str]:
        """What cost more than retraining; or that there is none to compare with.

        retraining: samples it processes. expected: whether the scenario has a retrained model.
        """
        if retraining is None:
            return [NO_REFERENCE] if expected else []
        found: list[str] = []
        ratio = cost_of(self.pool)["samples_processed"] / retraining
        if ratio > 1:
            found.append(f"the pool processed {ratio:.2f} × the samples of retraining from scratch")
        for title, contender in self.contenders.items():
            if rows[title]["cost_ratio"] > 1:
                found.append(
                    f"{title}: its {len(contender.jobs)} trainings processed "
                    f"{rows[title]['cost_ratio']:.2f} × the samples of retraining from scratch"
                )
        return found

    def artefacts(self, run: Run, recipe: Recipe) -> list[Path]:
        """All files of the run."""
        files = [run.recipe, run.base, run.base.with_suffix(".json"), run.unlearned]
        files.append(run.folder / "scores.json")
        if self.found:
            files.append(run.folder / "journal.json")
        if self.retrained is not None:
            files += [run.retrain, run.retrain.with_suffix(".json")]
        files += [job.record for job in self.pool]
        if recipe.pool.keep:
            files += [job.out for job in self.pool]
        for result in self.found.values():
            files += [result.patch, *map(run.sweep, result.sweeps)]
        for job in (job for contender in self.contenders.values() for job in contender.jobs):
            files += [job.record] if job.failure() else [job.record, job.out]
        return files


def cost_of(jobs: list[Job]) -> dict[str, Any]:
    """What trainings cost together."""
    costs = [job.cost() for job in jobs]
    return {
        "samples_processed": sum(cost["samples"] for cost in costs),
        "seconds": sum(cost["seconds"] for cost in costs),
    }


def anatomy(tau: TaskVector) -> dict[str, dict[str, float]]:
    """Where a task vector of an image encoder is zero, in percent: thirds of its depth, stem, MLPs.

    Both as a share of elements and as the mean over tensors, which is what the paper's tables are.
    """
    seen = {name: layer_of(name) for name in tau.entries if name.startswith("visual.")}
    depth = 1 + max((layer[1] for layer in seen.values() if layer is not None), default=0)

    def place(name: str) -> str:
        layer = seen.get(name)
        return "" if layer is None else ("early", "middle", "late")[3 * layer[1] // depth]

    def component(name: str) -> str:
        stem = name.startswith(("visual.conv1.", "visual.trunk.patch_embed."))
        return "stem" if stem else "mlp" if ".mlp." in name else ""

    groups = tau.sparsity(by=place) | tau.sparsity(by=component)
    return {
        name: {
            "elements": 100 * found.element_weighted,
            "tensors": 100 * found.tensor_mean,
        }
        for name, found in sorted(groups.items())
        if name
    }
