"""`run(recipe)`: from data to the unlearned model. Read it from top to bottom: it is the paper."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from negmerge.criteria import Choice, choose, criteria
from negmerge.errors import FileError, MismatchError, OptionError
from negmerge.evaluation.scores import avg_gap
from negmerge.executors import Executor, LocalProcesses, Work, thread_split
from negmerge.files import file_digest, sync, write_file
from negmerge.measuring import Evaluation, Sweep, run_evaluation, run_measurement, run_sweep
from negmerge.merge.accumulator import Accumulator, foldable
from negmerge.merge.engine import merge
from negmerge.merge.rules import make_rule, rules
from negmerge.parallel import available_workers
from negmerge.patching import apply
from negmerge.pool import Job, make_job, run_job
from negmerge.progress import Progress, Quiet
from negmerge.recipe import DEFAULT, Method, Recipe, load_recipe
from negmerge.rivalry import Contender, best_try, check_rival, plan_rivals, run_rival
from negmerge.rivals import rivals
from negmerge.rundir import Run, write_json
from negmerge.scenario import Problem, Scenario, Use, identity
from negmerge.search import read_rows
from negmerge.task_vector import TaskVector

SELECTORS = ("single_best",)
NO_REFERENCE = "no retrain reference: efficacy not measured"


def run(
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Run:
    """Unlearn as a recipe says; run again on the same folder, it goes on where it stopped.

    Work is done in processes, so a script must call it under `if __name__ == "__main__":`.

    recipe: a Recipe, a path or a shipped name; None: the embedded demo.
    out: the run directory; `runs/<name>` if not given. changes: `key=value` for the recipe.
    """
    if isinstance(recipe, Recipe):
        if changes:
            raise OptionError("changes go with the name or path of a recipe, not with a Recipe")
    else:
        out = Path("runs") / Path(recipe or DEFAULT).stem if out is None else out
        recipe = load_recipe(recipe, changes)
    folder = Run("runs/recipe" if out is None else out)
    check_methods(recipe)
    progress = progress or Quiet()
    scenario = Scenario(recipe, progress)
    scenario.check()  # before anything is written
    with folder.working():
        if folder.finished_with(recipe.dump(), problem_of(recipe, scenario)):
            folder.clear()
            return folder
        members = len(recipe.pool.members())
        cores, gpus = available_workers(None), torch.cuda.device_count()
        workers, threads = thread_split(recipe.workers, cores, members, gpus)
        with LocalProcesses(partial(Scenario, recipe), workers, threads) as executor:
            return Pipeline(recipe, folder, scenario, executor, progress).run()


def problem_of(recipe: Recipe, problem: Problem) -> str:
    """A hash of what a run depends on beside its recipe: data, splits, files of weights."""
    given = [recipe.model.weights, recipe.retrain and recipe.retrain.weights]
    return identity(problem.identity, [path and file_digest(path) for path in given])


def check_methods(recipe: Recipe) -> None:
    """Every method is a rule, a selector or a rival with options it takes; the criterion exists."""
    criteria.get(recipe.criterion)
    if not recipe.pool.keep:
        names = [method.name for method in recipe.methods if method.name not in rivals]
        for name in names:
            if names.count(name) > 1 or (name in rules and name not in foldable()):
                raise OptionError(
                    f"pool.keep false serves each rule once, and only: {', '.join(foldable())}; "
                    f"got {name!r}. Keep the pool, or leave it out"
                )
    for method in recipe.methods:
        if method.name in rivals:
            check_rival(method)
            continue
        if method.tune:
            raise OptionError(
                f"method {method.name!r}: tune is for rivals; its λ is searched anyway"
            )
        if method.name in SELECTORS:
            if method.options:
                raise OptionError(f"method {method.name!r} takes no options")
        elif method.name in rules:
            make_rule(method.name, method.options)
        else:
            known = ", ".join([*rules, *SELECTORS, *rivals])
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
        self.warnings: list[str] = []
        self.merging = [method for method in recipe.methods if method.name not in rivals]

    def run(self) -> Run:
        """The paper's algorithm, stage by stage."""
        original, retrained = self.plan_originals()
        self.break_seal()
        self.train_originals(original, retrained)
        pool = self.fine_tune()
        patches = self.merge_all(pool)
        reference = self.score_retrained(retrained)
        found = self.search_all(pool, patches, reference)
        contenders = self.train_rivals(reference)
        scores = self.score_all(original, retrained, pool, found, contenders)
        self.write_unlearned(found, contenders)
        write_json(self.folder.folder / "scores.json", scores)
        artefacts = self.artefacts(pool, found, contenders)
        self.folder.seal(problem_of(self.recipe, self.problem), artefacts)
        return self.folder

    # --------------------------------------------------------------------------------------- stages

    def break_seal(self) -> None:
        """From here on the folder holds an unfinished run of this recipe."""
        about = self.problem.describe()
        if about["forgotten_class"] is not None and self.criterion.name == "match_holdout":
            self.warnings.append(
                "match_holdout leaves a whole class as well known as held-out data of the others; "
                "keep_retain or oracle forget it"
            )
        if len(self.recipe.pool.members()) == 1:
            self.warnings.append("a pool of one member: every rule gives its own task vector")
        if about["looked"] and not self.criterion.looks:
            self.warnings.append("a set has one sample: λ is chosen on what is reported")
        self.folder.manifest.unlink(missing_ok=True)
        write_file(self.folder.recipe, self.recipe.dump().encode())

    def plan_originals(self) -> tuple[Job, Job | None]:
        """The jobs of original and reference; a folder that holds others is left as it is."""
        make = partial(
            make_job,
            self.problem,
            settings=self.recipe.train,
            states=self.folder.states,
            save_every=self.recipe.save_every,
        )
        original = make("original model", "train", out=lambda _: self.folder.base)
        if self.recipe.model.weights is not None:
            original = original.given(self.recipe.model.weights)
        retrained = None
        if self.recipe.retrain is not None:
            retrained = make("retrained model", "retain", out=lambda _: self.folder.retrain)
            if self.recipe.retrain.weights is not None:
                retrained = retrained.given(self.recipe.retrain.weights)
        for job in (original, retrained):
            if job is not None and job.out.exists() and not job.done():
                raise MismatchError(
                    f"{job.out}: is damaged or was made by another recipe, and nothing is "
                    "overwritten; name another --out, or remove the folder"
                )
        return original, retrained

    def train_originals(self, original: Job, retrained: Job | None) -> None:
        """θ_ori on retain ∪ forget, and the reference that never saw the forget set."""
        jobs = [job for job in (original, retrained) if job is not None]
        self.train_all("training original and reference", jobs)

    def fine_tune(self) -> list[Job]:
        """θ_ft,k: the pool, fine-tuned from the original on the forget set."""
        if not self.merging:
            return []
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
                save_every=self.recipe.save_every,
                start=start,
            )
            for k, member in enumerate(settings, 1)
        ]
        title = f"fine-tuning {len(jobs)} members on the forget set"
        if self.recipe.pool.keep:
            self.need_room(sum(not job.done() for job in jobs), "members", "set pool.keep to false")
            self.train_all(title, jobs)
        else:
            self.train_and_fold(title, jobs)
        return jobs

    def train_and_fold(self, title: str, jobs: list[Job]) -> None:
        """Fold each member when it is trained, then delete it: disk does not grow with the pool."""
        path, base = self.folder.accumulator, self.folder.base
        wanted = {method.name: method.options for method in self.merging}
        if path.exists():
            accumulator = Accumulator.load(path, base)
            if not accumulator.made_for(wanted, self.recipe.buffers):
                raise MismatchError(
                    f"{path}: was made for other methods or buffers, and its members are gone; "
                    "name another --out"
                )
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
        todo = [job for job in jobs if job.out.name not in folded]
        self.train_all(title, todo, then=fold, of=len(jobs))

    def merge_all(self, pool: list[Job]) -> dict[str, Path]:
        """τ of every rule, as patches."""
        patches: dict[str, Path] = {}
        for method in self.merging:
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
        make = partial(self.make_sweep, reference)
        merged = {title: make(title, patch) for title, patch in patches.items()}
        single = any(method.name == "single_best" for method in self.recipe.methods)
        buffers = self.recipe.buffers
        members = [make(f"member-{j.id}", j.out, buffers) for j in pool] if single else []
        self.sweep_all([*merged.values(), *members])
        found: dict[str, Found] = {}
        for method in self.merging:
            if method.name == "single_best":
                result = self.single_best(method.title, pool, members, reference)
            else:
                one = merged[method.title]
                rows = read_rows(one.out)
                choice = choose(rows, self.criterion, reference)
                seconds = self.seconds_of(f"patches/{method.title}", f"sweeps/{one.title}")
                result = Found(choice, one.vector, len(rows), seconds)
            found[method.title] = result
            if result.choice.scale == 0:
                self.warnings.append(
                    f"{method.title}: λ = 0 did best by {self.criterion.name}: nothing is forgotten"
                )
            elif result.choice.edge:
                self.warnings.append(
                    f"{method.title}: no λ was better than the largest that was tried; a larger "
                    "one may be: raise search.stop or search.limit"
                )
        return found

    def single_best(
        self, title: str, pool: list[Job], sweeps: list[Sweep], reference: dict[str, Any] | None
    ) -> Found:
        """The member that does best with its own λ: n × m evaluations."""
        rows = [read_rows(s.out) for s in sweeps]
        choices = [choose(r, self.criterion, reference) for r in rows]
        best = min(range(len(pool)), key=lambda k: choices[k].loss)
        base, member, buffers = self.folder.base, pool[best], self.recipe.buffers
        patch = self.make_patch(
            title,
            identity("single best", member.id, buffers),
            lambda out: merge(base, [member.out], "uniform", out=out, buffers=buffers),
        )
        seconds = self.seconds_of(*(f"sweeps/{s.title}" for s in sweeps))
        detail = {"member": member.id, "settings": member.settings.model_dump(mode="json")}
        return Found(choices[best], patch, sum(map(len, rows)), seconds, detail)

    def train_rivals(self, reference: dict[str, Any] | None) -> dict[str, Contender]:
        """The methods of others: each from the original, on its own data, tuned if so asked."""
        base = self.folder.base
        start = (base, file_digest(base))
        folder = self.folder
        plans = plan_rivals(self.problem, self.recipe, folder.rival, folder.states, start)
        jobs = [job for tries in plans.values() for job in tries]
        self.need_room(sum(not job.done() for job in jobs), "rivals", "lower search.tries")
        self.train_all(f"training {len(plans)} rivals", jobs, work=run_rival)
        tuned = [job for job in jobs if job.tried is not None and job.failure() is None]
        rows: dict[str, Any] = {}
        if tuned:
            models = [base, *(job.out for job in tuned)]
            wanted = [self.evaluation(model, use="choose") for model in models]
            found = self.evaluate("the tries of rivals", wanted, "choose", run_measurement)
            rows = dict(zip(["original", *(job.id for job in tuned)], found, strict=True))
        contenders: dict[str, Contender] = {}
        for title, tries in plans.items():
            if tries[0].tried is None:
                contenders[title] = Contender(tries, tries[0])
                continue
            own = [rows.get(job.id) for job in tries]
            best = best_try(tries, own, rows["original"], self.criterion, reference)
            contenders[title] = best
            if not best.allowed:
                self.warnings.append(
                    f"{title}: {self.criterion.name} allows none of {len(tries)} tries; the one "
                    "with the highest retain accuracy is shown"
                )
        return contenders

    def score_all(
        self,
        original: Job,
        retrained: Job | None,
        pool: list[Job],
        found: dict[str, Found],
        contenders: dict[str, Contender],
    ) -> dict[str, Any]:
        """Every number of the report, on data that did not choose λ unless the criterion looks."""
        wanted = [self.evaluation(job.out) for job in (original, retrained) if job is not None]
        wanted += [self.evaluation(original.out, f.patch, f.choice.scale) for f in found.values()]
        wanted += [self.evaluation(contender.job.out) for contender in contenders.values()]
        scores = self.evaluate("every method", wanted)
        first = scores.pop(0) | cost_of([original])
        second = None if retrained is None else scores.pop(0) | cost_of([retrained])
        if second is None:
            self.warnings.append(NO_REFERENCE)
        else:
            first["avg_gap"], second["avg_gap"] = avg_gap(first, second), 0.0
        training = cost_of(pool)
        ratio = retraining = None
        if retrained is not None:
            # What retraining takes by the recipe, also when the reference came from a file.
            retraining = retrained.samples(self.problem)
            ratio = training["samples_processed"] / retraining
            if ratio > 1:
                self.warnings.append(
                    f"the pool processed {ratio:.2f} × the samples of retraining from scratch"
                )
        about = self.problem.describe()
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
                "looked": about["looked"],
                "edge": result.choice.edge,
            }
            | result.detail
            for (title, result), own in zip(found.items(), scores, strict=False)
        ]
        for (title, contender), own in zip(contenders.items(), scores[len(found) :], strict=True):
            row = {"method": title} | contender.row(self.criterion, about["looked"]) | own
            row["avg_gap"] = None if second is None else avg_gap(own, second)
            own_ratio = retraining and contender.samples() / retraining
            row["cost_ratio"] = own_ratio
            methods.append(row)
            if own_ratio and own_ratio > 1:
                self.warnings.append(
                    f"{title}: its {len(contender.jobs)} trainings processed {own_ratio:.2f} × the "
                    "samples of retraining from scratch"
                )
        order = [method.title for method in self.recipe.methods]
        methods.sort(key=lambda row: order.index(row["method"]))
        return {
            "title": self.recipe.title,
            "seed": self.recipe.seed,
            "original": first,
            "retrain": second,
            "methods": methods,
            "splits": about,
            "pool": [job.cost() for job in pool],
            "warnings": self.warnings,
        }

    def artefacts(
        self, pool: list[Job], found: dict[str, Found], contenders: dict[str, Contender]
    ) -> list[Path]:
        """All files of this run."""
        run = self.folder
        files = [run.recipe, run.base, run.base.with_suffix(".json"), run.unlearned]
        files.append(run.folder / "scores.json")
        if self.merging:
            files.append(run.folder / "journal.json")
        if self.recipe.retrain is not None:
            files += [run.retrain, run.retrain.with_suffix(".json")]
        files += [job.record for job in pool]
        if self.recipe.pool.keep:
            files += [job.out for job in pool]
        files += [result.patch for result in found.values()]
        for method in self.merging:
            if method.name == "single_best":
                files += [run.sweep(f"member-{job.id}") for job in pool]
            else:
                files.append(run.sweep(method.title))
        for job in (job for contender in contenders.values() for job in contender.jobs):
            files += [job.record] if job.failure() else [job.record, job.out]
        return files

    def write_unlearned(self, found: dict[str, Found], contenders: dict[str, Contender]) -> None:
        """θ_ori − λτ of the first method, or what a rival made of θ_ori, as a model file."""
        title = self.recipe.methods[0].title
        if title in contenders:
            write_file(self.folder.unlearned, contenders[title].job.out.read_bytes())
            return
        first = found[title]
        tau = TaskVector.load(first.patch)
        apply(self.folder.base, -first.choice.scale * tau, self.folder.unlearned)
        sync(self.folder.unlearned)

    # -------------------------------------------------------------------------------------- helpers

    def train_all(
        self,
        title: str,
        jobs: Sequence[Job],
        then: Callable[[Job], None] = lambda job: None,
        work: Work = run_job,
        of: int | None = None,
    ) -> None:
        """Train what is not done; each is handed to `then` as it is done.

        of: how many the stage has in all, if some are not among `jobs` any more.
        """
        todo = [job for job in jobs if not job.done()]
        if todo:
            total = sum(job.samples(self.problem) for job in todo if job.steps)
            self.progress.stage(title, total, "samples")
            for place, _ in self.executor.map(work, todo, self.progress.advance, of or len(jobs)):
                then(todo[place])

    def make_patch(self, title: str, made_from: str, make: Callable[[Path], object]) -> Path:
        """The patch of a method, made unless it is there."""
        path, name = self.folder.patch(title), f"patches/{title}"
        if not self.folder.has(name, made_from, path):
            begun = time.perf_counter()
            make(path)
            self.folder.finished_unit(name, made_from, path, time.perf_counter() - begun)
        return path

    def make_sweep(
        self,
        reference: dict[str, Any] | None,
        title: str,
        vector: Path,
        member: Literal["keep", "merge"] | None = None,
    ) -> Sweep:
        """A sweep with its id: whatever its rows depend on."""
        search = self.recipe.search
        depends = [search.grid(), self.criterion.looks, search.samples, self.recipe.seed, member]
        if search.limit is not None:
            depends += [search.limit, self.criterion.name, reference]
        made_from = identity(file_digest(vector), depends, self.problem.identity)
        return Sweep(
            made_from,
            title,
            self.folder.base,
            vector,
            member,
            search,
            self.criterion.name,
            reference,
            self.folder.sweep(title),
            self.folder.states / f"{made_from}.csv",
        )

    def sweep_all(self, sweeps: list[Sweep]) -> None:
        todo = [s for s in sweeps if not self.folder.has(f"sweeps/{s.title}", s.id, s.out)]
        if todo:
            size = sum(len(feed) for feed in self.problem.scoring_feeds("choose").values())
            total = size * len(self.recipe.search.grid()) * len(todo)
            self.progress.stage(f"searching λ in {len(todo)} sweeps", total, "samples")
            results = self.executor.map(run_sweep, todo, self.progress.advance, len(sweeps))
            for place, seconds in results:
                one = todo[place]
                self.folder.finished_unit(f"sweeps/{one.title}", one.id, one.out, seconds)

    def evaluation(
        self, model: Path, patch: Path | None = None, scale: float = 0.0, use: Use = "report"
    ) -> Evaluation:
        """A model to score, with the place where its scores wait for the others."""
        content = [file_digest(model), patch and file_digest(patch), scale, self.criterion.looks]
        content += [use, self.recipe.search.samples, self.recipe.seed]
        made_from = identity(*content, self.problem.identity)
        return Evaluation(model, self.folder.states / f"{made_from}.json", patch, scale)

    def evaluate(
        self,
        what: str,
        wanted: list[Evaluation],
        use: Use = "report",
        work: Work = run_evaluation,
    ) -> list[Any]:
        """The scores of models, in their order, on the data that is reported or that chooses."""
        size = sum(len(feed) for feed in self.problem.scoring_feeds(use).values())
        self.progress.stage(f"scoring {what}", size * len(wanted), "samples")
        results = dict(self.executor.map(work, wanted, self.progress.advance))
        return [results[place] for place in range(len(wanted))]

    def seconds_of(self, *units: str) -> float:
        """The seconds of finished pieces of work."""
        return sum(self.folder.journal[unit]["seconds"] for unit in units)

    def need_room(self, models: int, what: str, remedy: str) -> None:
        """Refuse to begin what the disk cannot hold: models, their states, patches."""
        need = self.folder.base.stat().st_size * (models + 2 * len(self.recipe.methods) + 2)
        free = shutil.disk_usage(self.folder.folder).free
        if models and free < need:
            raise FileError(
                f"{self.folder.folder}: {free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed "
                f"for {models} {what}; free some, or {remedy}"
            )


def cost_of(jobs: list[Job]) -> dict[str, Any]:
    """What trainings cost together."""
    costs = [job.cost() for job in jobs]
    return {
        "samples_processed": sum(cost["samples"] for cost in costs),
        "seconds": sum(cost["seconds"] for cost in costs),
    }
