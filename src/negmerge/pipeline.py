"""`run(recipe)`: from data to the unlearned model. Read it from top to bottom: it is the paper."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, MismatchError, OptionError
from negmerge.evaluation.scores import avg_gap
from negmerge.executors import Executor, LocalProcesses, thread_split
from negmerge.files import file_digest, write_file
from negmerge.measuring import Evaluation, Sweep, run_evaluation, run_sweep
from negmerge.merge.accumulator import Accumulator
from negmerge.merge.engine import merge
from negmerge.merge.rules import make_rule, rules
from negmerge.models.weights import save_model
from negmerge.parallel import available_workers
from negmerge.patching import apply
from negmerge.pool import Job, make_job, run_job, samples_of
from negmerge.progress import Progress, Quiet
from negmerge.recipe import DEFAULT, Method, Recipe, load_recipe
from negmerge.rundir import Run, write_json
from negmerge.scenario import Problem, Scenario, identity
from negmerge.search import Choice, choose, criteria, read_rows
from negmerge.task_vector import TaskVector

SELECTORS = ("single_best",)


def run(
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Run:
    """Unlearn as a recipe says; run again on the same folder, it goes on where it stopped.

    recipe: a Recipe, a path or a shipped name; None: the embedded demo.
    out: the run directory; `runs/<name>` if not given. changes: `key=value` for the recipe.
    """
    if not isinstance(recipe, Recipe):
        out = Path("runs") / Path(recipe or DEFAULT).stem if out is None else out
        recipe = load_recipe(recipe, changes)
    folder = Run("runs/recipe" if out is None else out)
    check_methods(recipe)
    with folder.working():
        if folder.finished_with(recipe.dump()):
            return folder
        progress = progress or Quiet()
        scenario = Scenario(recipe, progress)
        members = len(recipe.pool.members())
        workers, threads = thread_split(recipe.workers, available_workers(None), members)
        with LocalProcesses(partial(Scenario, recipe), workers, threads) as executor:
            return Pipeline(recipe, folder, scenario, executor, progress).run()


def check_methods(recipe: Recipe) -> None:
    """Every method is a rule with options it takes, or a selector."""
    for method in recipe.methods:
        if method.name in SELECTORS:
            if method.options:
                raise OptionError(f"method {method.name!r} takes no options")
        elif method.name in rules:
            make_rule(method.name, method.options)
        else:
            known = ", ".join([*rules, *SELECTORS])
            raise OptionError(f"unknown method {method.name!r}; there are: {known}")


@dataclass
class Found:
    """What a method came to: the λ, the patch it belongs to, and what the search took."""

    choice: Choice
    patch: Path
    evaluations: int
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)


class Pipeline:
    """One run in progress."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Run,
        problem: Problem,
        executor: Executor,
        progress: Progress,
    ) -> None:
        self.recipe, self.folder, self.progress = recipe, folder, progress
        self.problem, self.executor = problem, executor
        self.criterion = criteria.get(recipe.criterion)
        self.scales = recipe.search.grid()
        self.warnings: list[str] = []

    def run(self) -> Run:
        """The paper's algorithm, stage by stage."""
        self.prepare()
        original, retrained = self.train_originals()
        pool = self.fine_tune()
        patches = self.merge_all(pool)
        reference = self.score_retrained(retrained)
        found = self.search_all(pool, patches, reference)
        scores = self.score_all(original, retrained, pool, found)
        self.write_unlearned(found)
        write_json(self.folder.folder / "scores.json", scores)
        self.folder.seal()
        return self.folder

    # --------------------------------------------------------------------------------------- stages

    def prepare(self) -> None:
        """Open and check the data before anything is written; then the seal is broken."""
        about = self.problem.describe()
        if about["forgotten_class"] is not None and self.criterion.name == "match_holdout":
            self.warnings.append(
                "match_holdout leaves a whole class as well known as held-out data of the others; "
                "keep_retain or oracle forget it"
            )
        self.folder.manifest.unlink(missing_ok=True)
        write_file(self.folder.recipe, self.recipe.dump().encode())

    def train_originals(self) -> tuple[Job, Job | None]:
        """θ_ori on retain ∪ forget, and the reference that never saw the forget set."""
        make = partial(
            make_job, self.problem, settings=self.recipe.train, states=self.folder.states
        )
        original = make("original model", "train", out=lambda _: self.folder.base)
        jobs, given = [original], [self.recipe.model.weights]
        if self.recipe.retrain is not None:
            jobs.append(make("retrained model", "retain", out=lambda _: self.folder.retrain))
            given.append(self.recipe.retrain.weights)
        for k, weights in enumerate(given):
            if weights is not None:
                jobs[k] = self.adopt(jobs[k], weights)
            elif jobs[k].out.exists() and not jobs[k].done():
                raise MismatchError(
                    f"{jobs[k].out}: was made by another recipe, and nothing is overwritten; "
                    "name another --out, or remove the folder"
                )
        self.train_all("training original and reference", jobs)
        return jobs[0], jobs[1] if len(jobs) > 1 else None

    def adopt(self, job: Job, weights: Path) -> Job:
        """Take a model from a file instead of training it."""
        network = self.problem.network(weights)
        job = job.renamed(identity("file", file_digest(weights)))
        if not job.done():
            write_json(job.record, {"id": job.id, "samples": 0, "seconds": 0.0})
            save_model(job.out, network, {"id": job.id})
        return job

    def fine_tune(self) -> list[Job]:
        """θ_ft,k: the pool, fine-tuned from the original on the forget set."""
        start = (self.folder.base, file_digest(self.folder.base))
        settings = self.recipe.pool.members()
        jobs = [
            make_job(
                self.problem,
                f"member {k} of {len(settings)}",
                "forget",
                member,
                out=self.folder.member,
                states=self.folder.states,
                start=start,
            )
            for k, member in enumerate(settings, 1)
        ]
        title = f"fine-tuning {len(jobs)} members on the forget set"
        if self.recipe.pool.keep:
            self.need_room(sum(not job.done() for job in jobs))
            self.train_all(title, jobs)
        else:
            self.train_and_fold(title, jobs)
        return jobs

    def train_and_fold(self, title: str, jobs: list[Job]) -> None:
        """Fold each member when it is trained, then delete it: disk does not grow with the pool."""
        path, base = self.folder.accumulator, self.folder.base
        wanted = {method.name: method.options for method in self.recipe.methods}
        if path.exists():
            accumulator = Accumulator.load(path, base)
        else:
            accumulator = Accumulator(base, wanted, self.recipe.buffers)
        folded = {member["name"] for member in accumulator.members}
        strangers = folded - {job.out.name for job in jobs}
        if strangers:
            raise MismatchError(
                f"{path}: holds {len(strangers)} members of another pool, which cannot be taken "
                "out again; name another --out"
            )

        def fold(job: Job) -> None:
            if job.out.name not in folded:
                accumulator.add(job.out)
                accumulator.save(path)
                folded.add(job.out.name)
            job.out.unlink()

        for job in jobs:
            if job.done():
                fold(job)
        self.train_all(title, [j for j in jobs if j.out.name not in folded], then=fold)

    def merge_all(self, pool: list[Job]) -> dict[str, Path]:
        """τ of every rule, as patches."""
        patches: dict[str, Path] = {}
        for method in self.recipe.methods:
            if method.name not in SELECTORS:
                made_from = identity(
                    [job.id for job in pool], method.name, method.options, self.recipe.buffers
                )
                merged = partial(self.merge_one, method, pool)
                patches[method.title] = self.make_patch(method.title, made_from, merged)
        return patches

    def merge_one(self, method: Method, pool: list[Job], out: Path) -> None:
        """Merge the pool by one rule, from its files or from the accumulator."""
        if self.recipe.pool.keep:
            members = [job.out for job in pool]
            buffers = self.recipe.buffers
            merge(self.folder.base, members, method.name, method.options, out=out, buffers=buffers)
        else:
            accumulator = Accumulator.load(self.folder.accumulator, self.folder.base)
            accumulator.finish(method.name, method.options).save(out)

    def score_retrained(self, retrained: Job | None) -> dict[str, Any] | None:
        """The reference's scores, which `oracle` needs before λ is chosen."""
        if retrained is None:
            return None
        return self.evaluate("the retrained model", [self.evaluation(retrained.out)])[0]

    def search_all(
        self,
        pool: list[Job],
        patches: dict[str, Path],
        reference: dict[str, Any] | None,
    ) -> dict[str, Found]:
        """λ of every method: sweep, then choose."""
        merged = {title: self.make_sweep(title, patch) for title, patch in patches.items()}
        single = any(method.name == "single_best" for method in self.recipe.methods)
        members = [self.make_sweep(f"member-{j.id}", j.out, True) for j in pool] if single else []
        self.sweep_all([*merged.values(), *members])
        found: dict[str, Found] = {}
        for method in self.recipe.methods:
            if method.name == "single_best":
                result = self.single_best(method.title, pool, members, reference)
            else:
                one = merged[method.title]
                choice = choose(read_rows(one.out), self.criterion, reference)
                seconds = self.seconds_of(f"patches/{method.title}", f"sweeps/{one.title}")
                result = Found(choice, one.vector, len(self.scales), seconds)
            found[method.title] = result
            if result.choice.edge:
                self.warnings.append(
                    f"{method.title}: the chosen λ = {result.choice.scale:g} is the largest that "
                    "was tried; a larger one may do better: raise search.stop"
                )
        return found

    def single_best(
        self, title: str, pool: list[Job], sweeps: list[Sweep], reference: dict[str, Any] | None
    ) -> Found:
        """The member that does best with its own λ: n × m evaluations."""
        choices = [choose(read_rows(s.out), self.criterion, reference) for s in sweeps]
        best = min(range(len(pool)), key=lambda k: choices[k].loss)
        base, member = self.folder.base, pool[best]
        patch = self.make_patch(
            title,
            identity("single best", member.id),
            lambda out: merge(base, [member.out], "uniform", out=out),
        )
        seconds = self.seconds_of(*(f"sweeps/{s.title}" for s in sweeps))
        detail = {"member": member.id, "settings": member.settings.model_dump(mode="json")}
        return Found(choices[best], patch, len(pool) * len(self.scales), seconds, detail)

    def score_all(
        self,
        original: Job,
        retrained: Job | None,
        pool: list[Job],
        found: dict[str, Found],
    ) -> dict[str, Any]:
        """Every number of the report, on data that did not choose λ unless the criterion looks."""
        wanted = [self.evaluation(job.out) for job in (original, retrained) if job is not None]
        wanted += [self.evaluation(original.out, f.patch, f.choice.scale) for f in found.values()]
        scores = self.evaluate("every method", wanted)
        first = scores.pop(0) | cost_of([original])
        second = None if retrained is None else scores.pop(0) | cost_of([retrained])
        if second is None:
            self.warnings.append("no retrain reference: efficacy not measured")
        else:
            first["avg_gap"], second["avg_gap"] = avg_gap(first, second), 0.0
        training = cost_of(pool)
        ratio = None
        if retrained is not None:
            # What retraining takes by the recipe, also when the reference came from a file.
            ratio = training["samples_processed"] / samples_of(self.problem, retrained)
            if ratio > 1:
                self.warnings.append(
                    f"the pool processed {ratio:.2f} × the samples of retraining from scratch"
                )
        methods = [
            {"method": title, "splits": "forget", "scale": result.choice.scale}
            | own
            | {
                "avg_gap": None if second is None else avg_gap(own, second),
                "sparsity": 100 * TaskVector.load(result.patch).sparsity(),
                "seconds": training["seconds"] + result.seconds,
                "seconds_search": result.seconds,
                "samples_processed": training["samples_processed"],
                "cost_ratio": ratio,
                "evaluations": result.evaluations,
                "criterion": self.criterion.name,
                "looked": self.criterion.looks,
                "edge": result.choice.edge,
            }
            | result.detail
            for (title, result), own in zip(found.items(), scores, strict=True)
        ]
        return {
            "title": self.recipe.title,
            "seed": self.recipe.seed,
            "original": first,
            "retrain": second,
            "methods": methods,
            "splits": self.problem.describe(),
            "pool": [job.cost() for job in pool],
            "warnings": self.warnings,
        }

    def write_unlearned(self, found: dict[str, Found]) -> None:
        """θ_ori − λτ of the first method, as a model file."""
        first = next(iter(found.values()))
        tau = TaskVector.load(first.patch)
        apply(self.folder.base, -first.choice.scale * tau, self.folder.unlearned)

    # -------------------------------------------------------------------------------------- helpers

    def train_all(
        self,
        title: str,
        jobs: list[Job],
        then: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """Train what is not done; each is handed to `then` as it is done."""
        todo = [job for job in jobs if not job.done()]
        if todo:
            self.progress.stage(title, sum(samples_of(self.problem, j) for j in todo), "samples")
            for place, _ in self.executor.map(run_job, todo, self.progress.advance):
                then(todo[place])

    def make_patch(self, title: str, made_from: str, make: Callable[[Path], object]) -> Path:
        """The patch of a method, made unless it is there."""
        path, name = self.folder.patch(title), f"patches/{title}"
        if not self.folder.has(name, made_from, path):
            begun = time.perf_counter()
            make(path)
            self.folder.finished_unit(name, made_from, time.perf_counter() - begun)
        return path

    def make_sweep(self, title: str, vector: Path, member: bool = False) -> Sweep:
        """A sweep with its id: whatever its rows depend on."""
        search = [self.scales, self.criterion.looks, self.recipe.search.samples, self.recipe.seed]
        made_from = identity(file_digest(vector), search, self.problem.identity)
        return Sweep(
            made_from,
            title,
            self.folder.base,
            vector,
            member,
            self.scales,
            self.folder.sweep(title),
            self.folder.states / f"{made_from}.csv",
        )

    def sweep_all(self, sweeps: list[Sweep]) -> None:
        todo = [s for s in sweeps if not self.folder.has(f"sweeps/{s.title}", s.id, s.out)]
        if todo:
            size = sum(len(feed) for feed in self.problem.scoring_feeds("choose").values())
            total = size * len(self.scales) * len(todo)
            self.progress.stage(f"searching λ in {len(todo)} sweeps", total, "samples")
            for place, seconds in self.executor.map(run_sweep, todo, self.progress.advance):
                self.folder.finished_unit(f"sweeps/{todo[place].title}", todo[place].id, seconds)

    def evaluation(self, model: Path, patch: Path | None = None, scale: float = 0.0) -> Evaluation:
        """A model to score, with the place where its scores wait for the others."""
        content = [file_digest(model), patch and file_digest(patch), scale, self.criterion.looks]
        made_from = identity(*content, self.recipe.search.samples, self.problem.identity)
        return Evaluation(model, self.folder.states / f"{made_from}.json", patch, scale)

    def evaluate(self, what: str, wanted: list[Evaluation]) -> list[dict[str, Any]]:
        """The scores of models, in their order."""
        size = sum(len(feed) for feed in self.problem.scoring_feeds("report").values())
        self.progress.stage(f"scoring {what}", size * len(wanted), "samples")
        results = dict(self.executor.map(run_evaluation, wanted, self.progress.advance))
        return [results[place] for place in range(len(wanted))]

    def seconds_of(self, *units: str) -> float:
        """The seconds of finished pieces of work."""
        return sum(self.folder.journal[unit]["seconds"] for unit in units)

    def need_room(self, members: int) -> None:
        """Refuse to begin what the disk cannot hold: members, their states, patches."""
        need = self.folder.base.stat().st_size * (members + 2 * len(self.recipe.methods) + 2)
        free = shutil.disk_usage(self.folder.folder).free
        if members and free < need:
            raise FileError(
                f"{self.folder.folder}: {free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed "
                f"for {members} members; free some, or set pool.keep to false"
            )


def cost_of(jobs: list[Job]) -> dict[str, Any]:
    """What trainings cost together."""
    costs = [job.cost() for job in jobs]
    return {
        "samples_processed": sum(cost["samples"] for cost in costs),
        "seconds": sum(cost["seconds"] for cost in costs),
    }
