"""The work of a run, piece by piece: each is done once, in the executor, and found again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from negmerge.criteria import Choice, criteria
from negmerge.errors import FileError, MismatchError
from negmerge.executors import Executor, Work
from negmerge.files import file_digest, take_over
from negmerge.measuring import (
    Evaluation,
    MeanLoss,
    Sweep,
    Walk,
    run_evaluation,
    run_mean_loss,
    run_sweep,
    run_walk,
)
from negmerge.merge.accumulator import Accumulator
from negmerge.merge.select import Greedy
from negmerge.pool import Job, run_job
from negmerge.progress import Progress
from negmerge.recipe import Recipe, Search
from negmerge.rivals import rivals
from negmerge.rundir import Run
from negmerge.scenario import Problem, Use, identity


class Workshop:
    """What every stage of a run needs: where it is, what it is about, who works.

    illustrated: whether what only the page shows is measured too.
    alone: every member's own sweep and λ, if they were swept.
    bins: how the attack sees original, reference and methods.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Run,
        problem: Problem,
        executor: Executor,
        progress: Progress,
        illustrated: bool = True,
    ) -> None:
        self.recipe, self.folder, self.progress = recipe, folder, progress
        self.problem, self.executor, self.illustrated = problem, executor, illustrated
        self.criterion = criteria.get(recipe.criterion)
        self.warnings: list[str] = []
        self.alone: list[tuple[Sweep, Choice]] = []
        self.bins: dict[str, list[dict[str, Any]]] = {}
        self.merging = [method for method in recipe.methods if method.name not in rivals]

    def train_all(
        self,
        title: str,
        jobs: Sequence[Job],
        then: Callable[[Job], None] = lambda job: None,
        work: Work = run_job,
        of: int | None = None,
    ) -> None:
        """Train what is not done, here or by another run; each is handed to `then` as it is done.

        of: how many the stage has in all, if some are not among `jobs` any more.
        """
        todo: list[Job] = []
        for job in (job for job in jobs if not job.done()):
            if self.borrowed(job):
                then(job)
            else:
                todo.append(job)
        if todo:
            total = sum(job.samples(self.problem) for job in todo if job.steps)
            self.progress.stage(title, total, "samples")
            for place, _ in self.executor.map(work, todo, self.progress.advance, of or len(jobs)):
                then(todo[place])

    def borrowed(self, job: Job) -> bool:
        """Whether another run has done the same training; its files are this run's then too."""
        place = job.out.relative_to(self.folder.folder)
        for lender in self.folder.lenders:
            theirs = replace(job, out=lender / place)
            # A link there could lead to any file.
            own = theirs.out.parent.resolve() == lender.resolve() / place.parent
            linked = theirs.out.is_symlink() or theirs.record.is_symlink()
            if job.steps and own and not linked and theirs.done():
                take_over(theirs.record, job.record)
                take_over(theirs.out, job.out)
                return True
        return False

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
        search: Search | None = None,
    ) -> Sweep:
        """A sweep with its id: whatever its rows depend on.

        search: the recipe's if not given.
        """
        search = search or self.recipe.search
        depends = [search.grid(), self.criterion.looks, search.samples, self.recipe.seed, member]
        if search.limit is not None:
            depends += [search.limit, self.criterion.name, reference, self.criterion.limits]
        if search.strategy != "grid":
            depends += [search.strategy, self.criterion.name]
        made_from = identity(file_digest(vector), depends, self.problem.scored_on)
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
            self._state(title, made_from).with_suffix(".csv"),  # two methods may have one vector
        )

    def sweep_all(self, sweeps: list[Sweep]) -> None:
        todo = [s for s in sweeps if not self.folder.has(f"sweeps/{s.title}", s.id, s.out)]
        if todo:
            size = sum(len(feed) for feed in self.problem.scoring_feeds("choose").values())
            total = size * sum(s.search.passes() for s in todo)
            self.progress.stage(f"searching λ in {len(todo)} sweeps", total, "samples")
            results = self.executor.map(run_sweep, todo, self.progress.advance, len(sweeps))
            for place, (seconds, evaluations) in results:
                one = todo[place]
                name = f"sweeps/{one.title}"
                self.folder.finished_unit(name, one.id, one.out, seconds, evaluations)

    def rank(
        self, title: str, members: list[Path], scale: float, name: str
    ) -> tuple[list[MeanLoss], list[float], float]:
        """The loss of θ − λτ of every member alone on one set, and the seconds it took."""
        base, buffers = self.folder.base, self.recipe.buffers
        content = [self.problem.scored_on, self.recipe.search.samples, self.recipe.seed]
        depends = [*content, buffers, name, scale, file_digest(base)]
        jobs = [
            MeanLoss(
                base, (one,), buffers, name, scale, self._state("rank", depends, file_digest(one))
            )
            for one in members
        ]
        total = len(self.problem.scoring_feeds("choose")[name]) * len(jobs)
        self.progress.stage(f"{title}: ranking {len(jobs)} members", total, "samples")
        results = dict(self.executor.map(run_mean_loss, jobs, self.progress.advance))
        losses = [results[place][0] for place in range(len(jobs))]
        return jobs, losses, sum(seconds for _, seconds in results.values())

    def walk(
        self, title: str, greedy: Greedy, ranked: list[MeanLoss], losses: list[float]
    ) -> tuple[list[int], float]:
        """Let the members join one by one: which are kept, and the seconds it took."""
        partial = self._state("walk", greedy.order, [job.out.name for job in ranked])
        job = Walk(greedy, tuple(ranked), tuple(losses), partial)
        total = len(self.problem.scoring_feeds("choose")[ranked[0].name]) * (len(ranked) - 1)
        self.progress.stage(f"{title}: joining members", total, "samples")
        ((_, found),) = self.executor.map(run_walk, [job], self.progress.advance)
        return found

    def _state(self, *what: object) -> Path:
        return self.folder.states / f"{identity(*what)}.json"

    def evaluation(
        self,
        model: Path,
        patch: Path | None = None,
        scale: float = 0.0,
        use: Use = "report",
        member: Literal["keep", "merge"] | None = None,
    ) -> Evaluation:
        """A model to score, with the place where its scores wait for the others."""
        content = [file_digest(model), patch and file_digest(patch), scale, self.criterion.looks]
        content += [use, self.recipe.search.samples, self.recipe.seed, member]
        made_from = identity(*content, self.problem.scored_on)
        return Evaluation(model, self.folder.states / f"{made_from}.json", patch, scale, member)

    def evaluate(
        self,
        what: str,
        wanted: list[Evaluation],
        use: Use = "report",
        work: Work = run_evaluation,
    ) -> list[Any]:
        """The scores of models, in their order, on the data that is reported or that chooses.

        Methods may come to the same model, as greedy and single best do with one member: it is
        scored once.
        """
        distinct = list({one.out: one for one in wanted}.values())
        size = sum(len(feed) for feed in self.problem.scoring_feeds(use).values())
        self.progress.stage(f"scoring {what}", size * len(distinct), "samples")
        results = dict(self.executor.map(work, distinct, self.progress.advance))
        scores = {one.out: results[place] for place, one in enumerate(distinct)}
        return [deepcopy(scores[one.out]) for one in wanted]

    def seconds_of(self, *units: str) -> float:
        """The seconds of finished pieces of work."""
        return sum(self.folder.journal[unit]["seconds"] for unit in units)

    def evaluations_of(self, unit: str) -> int:
        """How often the data that chooses ran through a model for a finished sweep."""
        return self.folder.journal[unit]["evaluations"]

    def need_room(self, models: int, what: str, remedy: str) -> None:
        """Refuse to begin what the disk cannot hold: models, their states, patches."""
        need = self.folder.base.stat().st_size * (models + 2 * len(self.recipe.methods) + 2)
        free = shutil.disk_usage(self.folder.folder).free
        if models and free < need:
            raise FileError(
                f"{self.folder.folder}: {free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed "
                f"for {models} {what}; free some, or {remedy}"
            )

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
