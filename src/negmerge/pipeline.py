"""`run(recipe)`: from data to the unlearned model. Read it from top to bottom: it is the paper."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from negmerge.checking import check_methods, unasked
from negmerge.clip_scenario import make_problem
from negmerge.criteria import Choice, choose
from negmerge.errors import MismatchError, OptionError
from negmerge.executors import LocalProcesses, processes_for
from negmerge.files import file_digest, sync, write_file
from negmerge.illustrating import add_members, illustrate, scored_alone
from negmerge.measuring import Sweep, run_measurement
from negmerge.merge.accumulator import Accumulator
from negmerge.merge.engine import merge
from negmerge.merge.select import SELECTORS, Greedy, single_best
from negmerge.outcome import Found, Outcome
from negmerge.parallel import available_workers
from negmerge.patching import apply
from negmerge.pool import Job, make_job
from negmerge.progress import Progress, Quiet
from negmerge.recipe import DEFAULT, Method, Recipe, load_recipe
from negmerge.rivalry import Contender, best_try, plan_rivals, run_rival
from negmerge.rivals import rivals
from negmerge.rundir import Run, write_json
from negmerge.scenario import Problem, identity
from negmerge.search import read_rows
from negmerge.task_vector import TaskVector
from negmerge.terminal import warn
from negmerge.workshop import Workshop

Reference = dict[str, Any] | None
"""The scores of the retrained model, if there is one."""


def run(
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
    lenders: Sequence[Path] = (),
) -> Run:
    """Unlearn as a recipe says; run again on the same folder, it goes on where it stopped.

    Work is done in processes, so a script must call it under `if __name__ == "__main__":`.

    recipe: a Recipe, a path or a shipped name; None: the embedded demo.
    out: the run directory; `runs/<name>` if not given. changes: `key=value` for the recipe.
    lenders: other run directories; where one has done the same training, it is taken from there.
    """
    if isinstance(recipe, Recipe):
        if changes:
            raise OptionError("changes go with the name or path of a recipe, not with a Recipe")
    else:
        out = Path("runs") / Path(recipe or DEFAULT).stem if out is None else out
        recipe = load_recipe(recipe, changes)
    folder = Run("runs/recipe" if out is None else out, lenders).check_own()
    check_methods(recipe)
    progress = progress or Quiet()
    problem = make_problem(recipe, progress)
    problem.check()  # before anything is written
    for note in problem.describe().get("notes", []):
        warn(note)  # not only after hours of work
    with folder.working():
        if folder.finished_with(recipe.dump(), problem_of(recipe, problem)):
            folder.clear()
            return folder
        cores, gpus = available_workers(None), torch.cuda.device_count()
        workers = processes_for(recipe.workers, cores, most_at_once(recipe), gpus)
        with LocalProcesses(partial(make_problem, recipe), workers, cores) as executor:
            return Pipeline(recipe, folder, problem, executor, progress).run()


def most_at_once(recipe: Recipe) -> int:
    """How many trainings the largest stage has: those of the pool, or those of all rivals."""
    tries = [recipe.search.tries if m.tune else 1 for m in recipe.methods if m.name in rivals]
    merging = len(tries) < len(recipe.methods)
    return max(len(recipe.pool.members()) if merging else 1, sum(tries))


def problem_of(recipe: Recipe, problem: Problem) -> str:
    """A hash of what a run depends on beside its recipe: data, splits, files of weights."""
    given = [recipe.model.weights, recipe.retrain and recipe.retrain.weights]
    return identity(problem.scored_on, [path and file_digest(path) for path in given])


class Pipeline(Workshop):
    """One run in progress."""

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
        outcome = Outcome(original, retrained, pool, found, contenders)
        scores = self.score_all(outcome)
        self.write_unlearned(found, contenders)
        write_json(self.folder.folder / "scores.json", scores)
        artefacts = outcome.artefacts(self.folder, self.recipe)
        artefacts += self.problem.complete(self.folder.unlearned)
        if self.illustrated:
            artefacts += illustrate(self, outcome)
        self.folder.seal(problem_of(self.recipe, self.problem), artefacts)
        return self.folder

    # ------------------------------------------------------------------------- original, reference

    def break_seal(self) -> None:
        """From here on the folder holds an unfinished run of this recipe."""
        about = self.problem.describe()
        self.warnings += about.get("notes", [])
        if about["forgotten_class"] is not None and self.criterion.name == "match_holdout":
            self.warnings.append(
                "match_holdout leaves a whole class as well known as held-out data of the others; "
                "keep_retain or oracle forget it"
            )
        if self.merging and len(self.recipe.pool.members()) == 1:
            self.warnings.append("a pool of one member: every rule gives its own task vector")
        if about["looked"] and not self.criterion.looks:
            self.warnings.append("a set has one sample: λ is chosen on what is reported")
        self.folder.break_seal()
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
        if self.recipe.clip is not None:
            original = original.given(None, self.problem.identity)
        elif self.recipe.model.weights is not None:
            original = original.given(self.recipe.model.weights)
        retrained = None
        if self.recipe.retrain is not None:
            retrained = make("retrained model", "retain", out=lambda _: self.folder.retrain)
            if self.recipe.retrain.weights is not None:
                retrained = retrained.given(self.recipe.retrain.weights)
        for job in (original, retrained):
            if job is not None and job.out.exists() and not job.done():
                raise MismatchError(
                    f"{job.out}: is damaged, or was made by another recipe or from other data, and "
                    "nothing is overwritten; name another --out, or remove the folder"
                )
        return original, retrained

    def train_originals(self, original: Job, retrained: Job | None) -> None:
        """θ_ori on retain ∪ forget, and the reference that never saw the forget set."""
        jobs = [job for job in (original, retrained) if job is not None]
        done = {job.out for job in jobs if job.done()}
        places = {"original": self.folder.base, "retrained": self.folder.retrain}
        for text, facts in unasked(self.recipe, self.problem):
            if places[facts["model"]] not in done:
                self.progress.note(text, **facts)
        self.train_all("training original and reference", jobs)

    def score_retrained(self, retrained: Job | None) -> Reference:
        """The reference's scores, which `oracle` needs before λ is chosen."""
        if retrained is None:
            return None
        found = self.evaluate("the retrained model", [self.evaluation(retrained.out)])[0]
        return {name: value for name, value in found.items() if name != "bins"}

    # -------------------------------------------------------------------------------- pool, patches

    def start(self) -> tuple[Path, str]:
        """Where members and rivals start: the original's file, and its id."""
        return self.folder.base, file_digest(self.folder.base)

    def fine_tune(self) -> list[Job]:
        """θ_ft,k: the pool, fine-tuned from the original on the forget set."""
        if not self.merging:
            return []
        start, settings = self.start(), self.recipe.pool.members()
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

    def merge_all(self, pool: list[Job]) -> dict[str, Path]:
        """τ of every rule, as patches."""
        patches: dict[str, Path] = {}
        for method in self.merging:
            if method.name not in SELECTORS:
                members = self.drawn(method, pool)
                made_from = identity(
                    [job.id for job in members], method.name, method.options, self.recipe.buffers
                )
                merged = partial(self.merge_one, method, members)
                patches[method.title] = self.make_patch(method.title, made_from, merged)
        return patches

    def drawn(self, method: Method, pool: list[Job]) -> list[Job]:
        """The members that a method merges."""
        return pool if method.subset is None else method.subset.of(pool)

    def merge_one(self, method: Method, pool: list[Job], out: Path) -> None:
        """Merge the pool by one rule, from its files or from the accumulator."""
        if self.recipe.pool.keep:
            members = [job.out for job in pool]
            buffers = self.recipe.buffers
            merge(self.folder.base, members, method.name, method.options, out=out, buffers=buffers)
        else:
            accumulator = Accumulator.load(self.folder.accumulator, self.folder.base)
            accumulator.finish(method.name, method.options).save(out)

    # -------------------------------------------------------------------------------------- search

    def search_all(
        self, pool: list[Job], patches: dict[str, Path], reference: Reference
    ) -> dict[str, Found]:
        """λ of every method: sweep, then choose."""
        make = partial(self.make_sweep, reference)
        found = {
            method.title: Found(
                Choice(method.add or 0.0, 0.0, edge=False),
                patches[method.title],
                0,
                self.seconds_of(f"patches/{method.title}"),
                self.drawn(method, pool),
                added=method.add is not None,
            )
            for method in self.merging
            if method.title in patches
        }
        for method in self.merging:
            if method.name == "greedy":
                found[method.title] = self.greedy(method, pool)
            elif method.name == "single_best" and method.add is not None:
                found[method.title] = self.single_added(method, method.add, pool)
        merged = {title: make(title, one.patch) for title, one in found.items() if not one.added}
        searched = [m for m in self.merging if m.name == "single_best" and m.add is None]
        alone: list[Sweep] = []
        if searched or (self.illustrated and self.recipe.pool.keep):
            search, buffers = self.recipe.search, self.recipe.buffers
            search = search if searched else search.coarse()  # for the page only
            alone = [make(f"member-{j.id}", j.out, buffers, search) for j in pool]
        self.sweep_all([*merged.values(), *alone])
        choices = [choose(read_rows(s.out), self.criterion, reference) for s in alone]
        self.alone = list(zip(alone, choices, strict=True))
        for title in merged:
            one = found[title]
            one.choice = choose(read_rows(merged[title].out), self.criterion, reference)
            one.evaluations += self.evaluations_of(f"sweeps/{title}")
            one.searching = self.seconds_of(f"sweeps/{title}")
            one.sweeps = [title]
        for method in searched:
            found[method.title] = self.single_best(method.title, pool)
        for title, one in found.items():
            self.warn_of(title, one)
        return {method.title: found[method.title] for method in self.merging}

    def warn_of(self, title: str, result: Found) -> None:
        """Say so if nothing is forgotten, or if the grid was too short."""
        if result.choice.scale == 0:
            self.warnings.append(
                f"{title}: λ = 0 did best by {self.criterion.name}: nothing is forgotten"
            )
        elif result.choice.edge:
            self.warnings.append(
                f"{title}: a λ larger than all that were tried may be better: raise search.stop "
                "or search.limit"
            )

    def single_best(self, title: str, pool: list[Job]) -> Found:
        """The member that does best with its own λ: n × m evaluations."""
        best = single_best([choice.loss for _, choice in self.alone])
        base, member, buffers = self.folder.base, pool[best], self.recipe.buffers
        patch = self.make_patch(
            title,
            identity("single best", member.id, buffers),
            lambda out: merge(base, [member.out], "uniform", out=out, buffers=buffers),
        )
        titles = [sweep.title for sweep, _ in self.alone]
        units = [f"sweeps/{one}" for one in titles]
        evaluations, seconds = sum(map(self.evaluations_of, units)), self.seconds_of(*units)
        detail = {"member": member.id, "settings": member.settings.model_dump(mode="json")}
        merging = self.seconds_of(f"patches/{title}")
        choice = self.alone[best][1]
        return Found(choice, patch, evaluations, merging, pool, seconds, titles, detail=detail)

    def greedy(self, method: Method, pool: list[Job]) -> Found:
        """Members join the mean while a loss falls; λ comes later.

        The loss is that of the retain set after forgetting, or of the forget set after learning.
        """
        greedy, title = Greedy(**method.options), method.title
        name, scale = ("retain", greedy.scale) if method.add is None else ("forget", -method.add)
        ranked, losses, first = self.rank(title, [job.out for job in pool], scale, name)
        places, second = self.walk(title, greedy, ranked, losses)
        kept = [pool[place] for place in places]
        detail = {"kept": [job.id for job in kept], "order": greedy.order}
        return self.chosen(method, pool, kept, 2 * len(pool) - 1, first + second, detail)

    def single_added(self, method: Method, scale: float, pool: list[Job]) -> Found:
        """The member that knows the forget set best when it is added."""
        members = [job.out for job in pool]
        _, losses, seconds = self.rank(method.title, members, -scale, "forget")
        best = pool[single_best(losses)]
        return self.chosen(method, pool, [best], len(pool), seconds, {"member": best.id})

    def chosen(
        self,
        method: Method,
        pool: list[Job],
        kept: list[Job],
        evaluations: int,
        seconds: float,
        detail: dict[str, Any],
    ) -> Found:
        """The mean of the members that a selector kept."""
        base, buffers = self.folder.base, self.recipe.buffers
        patch = self.make_patch(
            method.title,
            identity(method.name, [job.id for job in kept], buffers),
            lambda out: merge(base, [job.out for job in kept], "uniform", out=out, buffers=buffers),
        )
        seconds += self.seconds_of(f"patches/{method.title}")
        choice, added = Choice(method.add or 0.0, 0.0, edge=False), method.add is not None
        return Found(choice, patch, evaluations, seconds, pool, added=added, detail=detail)

    # --------------------------------------------------------------------------------------- rivals

    def train_rivals(self, reference: Reference) -> dict[str, Contender]:
        """The methods of others: each from the original, on its own data, tuned if so asked."""
        base, folder = self.folder.base, self.folder
        plans = plan_rivals(self.problem, self.recipe, folder.rival, folder.states, self.start())
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

    # --------------------------------------------------------------------------------------- scores

    def score_all(self, outcome: Outcome) -> dict[str, Any]:
        """Every number of the report, on data that did not choose λ unless the criterion looks."""
        base = outcome.original.out
        wanted = {"original": self.evaluation(base)}
        if outcome.retrained is not None:
            wanted["retrained"] = self.evaluation(outcome.retrained.out)
        for title, one in outcome.found.items():
            wanted[title] = self.evaluation(base, one.patch, one.scale)
        for title, one in outcome.contenders.items():
            wanted[title] = self.evaluation(one.job.out)
        members = scored_alone(self) if self.illustrated else []
        found = self.evaluate("every method", [*wanted.values(), *members])
        measured = dict(zip(wanted, found[: len(wanted)], strict=True))
        self.bins = {title: row.pop("bins") for title, row in measured.items()}
        scores = outcome.scores(self.recipe, self.problem, self.criterion, measured)
        scores["warnings"] = self.warnings + scores["warnings"]
        add_members(scores, [choice for _, choice in self.alone], found[len(wanted) :])
        return scores

    def write_unlearned(self, found: dict[str, Found], contenders: dict[str, Contender]) -> None:
        """θ_ori − λτ of the first method, or what a rival made of θ_ori, as a model file."""
        title = self.recipe.methods[0].title
        if title in contenders:
            write_file(self.folder.unlearned, contenders[title].job.out.read_bytes())
            return
        first = found[title]
        tau = TaskVector.load(first.patch)
        apply(self.folder.base, -first.scale * tau, self.folder.unlearned)
        sync(self.folder.unlearned)
