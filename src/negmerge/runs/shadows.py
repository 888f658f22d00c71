"""The shadows of `evidence: full`: small repetitions of the run, for attacks on single records.

Each shadow is one step of the executor. It trains its own original and retrained model, and
unlearns by the first method of the recipe, with the steps of an ordinary run in a folder of its
own. It records the margins of the three models and deletes them. A step that was interrupted
continues with what its folder holds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from negmerge.errors import OptionError
from negmerge.evaluation.attacks.shadow_game import Role, draw_roles
from negmerge.evidence.sets import SomeOf, observe, some_of
from negmerge.evidence.shadow_margins import (
    Columns,
    Kind,
    ShadowMargins,
    read_shadows,
    record,
    recorded_id,
)
from negmerge.merging.rules import rules
from negmerge.rivals import rivals
from negmerge.runs.context import Context, plugin_versions
from negmerge.runs.executors import InProcess
from negmerge.runs.merges import merge_pool
from negmerge.runs.methods import Subset
from negmerge.runs.pool import fine_tune_pool, plan_originals, train_originals
from negmerge.runs.recipe import Recipe
from negmerge.runs.records import Done
from negmerge.runs.reshape import reshape
from negmerge.runs.rival_trainings import plan_rivals
from negmerge.runs.rivals import train_rivals
from negmerge.runs.scales import find_scales
from negmerge.runs.scores import score_reference
from negmerge.runs.steps import Advance, FileStep
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import Scenario, ToTrain, identity
from negmerge.scenarios.data import DataScenario, require_sets
from negmerge.support.files import report_write_errors, write_file
from negmerge.support.progress import Progress, Quiet
from negmerge.training.feeds import Feed, Indices
from negmerge.training.loop import VERSION as LOOP
from negmerge.training.seeds import seed_of
from negmerge.vectors.task_vector import TaskVector

VERSION = 1
"""To be raised when a shadow of the same recipe records other numbers."""
SAMPLE = 500
"""The largest number of samples of the retain and of the test set that a shadow records."""
FEWEST = 30
"""The least number of targets: each shadow unlearns about a third of them."""


@dataclass(frozen=True)
class Shadow(FileStep):
    """One shadow.

    Args:
        recipe: of the shadow.
        targets: the positions of the targets in the forget set of the run.
        roles: the role of each target.
        folder: where the shadow keeps its models until it has recorded their margins.
    """

    key: str
    recipe: Recipe
    targets: tuple[int, ...]
    roles: tuple[int, ...]
    folder: Path
    out: Path

    def scenario(self, scenario: Scenario) -> DataScenario:
        """Return the scenario of the shadow, made from that of the run."""
        targets, roles = np.array(self.targets), np.array(self.roles)
        forget, left_out = (targets[roles == role] for role in (Role.UNLEARNED, Role.OUT))
        return require_sets(scenario, "shadows").shadow(forget, left_out)

    def size(self, scenario: Scenario) -> int:
        """Return the number of samples that trainings and the search for λ process."""
        return samples_of(self.recipe, self.scenario(scenario))

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun, progress = time.perf_counter(), Counted(self.size(scenario), advance)
        if recorded_id(self.out) != self.key:  # it was not killed after it had recorded all
            self.make(scenario, progress)
        if self.folder.exists():
            with report_write_errors(self.folder):
                shutil.rmtree(self.folder)
        progress.complete()
        return Done(0, time.perf_counter() - begun)

    def make(self, scenario: Scenario, progress: Progress) -> None:
        """Make the three models and record what the tests need of them."""
        own, store = self.scenario(scenario), Run(self.folder)
        feeds = feeds_of(require_sets(scenario, "shadows"), np.array(self.targets))
        with store.locked():
            context = Context(self.recipe, own, store, InProcess(own), progress, illustrated=False)
            models = make_models(context)
            observed: dict[Kind, Columns] = {}
            for kind, model in models.items():
                with model.network(own) as network:
                    observed[kind] = observe(own, network, feeds)
            with report_write_errors(self.out):
                self.out.parent.mkdir(exist_ok=True)
            write_file(self.out, record(observed, self.key, models["unlearned"].scale))


class Counted(Quiet):
    """Adds up the samples of all stages of a shadow, up to the expected number.

    The criterion may search for λ further than expected, and a shadow that continues has done some.
    """

    def __init__(self, expected: int, advance: Advance) -> None:
        self.left, self.pass_on, self.counts = expected, advance, True

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self.counts = unit != "bytes"

    def advance(self, count: int) -> None:
        if self.counts:
            count = min(count, self.left)
            self.left -= count
            self.pass_on(count)

    def note(self, text: str, **facts: Any) -> None:
        """Say nothing: the run has said the same of its own models."""

    def complete(self) -> None:
        """Count what is left as done."""
        self.pass_on(self.left)


@dataclass(frozen=True)
class ShadowModel:
    """A model of a shadow: a file of weights, minus λ times a patch."""

    model: Path
    patch: Path | None = None
    scale: float = 0.0

    @contextmanager
    def network(self, scenario: Scenario) -> Iterator[nn.Module]:
        """Make the network, with the patch applied in the block."""
        network = scenario.model(self.model)
        if self.patch is None:
            yield network
            return
        with scenario.subtracted(network, TaskVector.load(self.patch), self.scale):
            yield network


def make_models(context: Context) -> dict[Kind, ShadowModel]:
    """Train, unlearn by the only method of the recipe, and retrain, as `pipeline.unlearn` does."""
    original, reference = plan_originals(context)
    assert reference is not None, "the scenario of a shadow has a reference"
    start = train_originals(context, original, reference)
    scores = score_reference(context, reference)
    pool = fine_tune_pool(context, start)
    merged = reshape(context, start, merge_pool(context, pool), scores)
    merged, _ = find_scales(context, pool, merged, scores)
    trained = train_rivals(context, start, scores)
    title = context.recipe.methods[0].title
    if title in trained:
        unlearned = ShadowModel(trained[title].chosen.out)
    else:
        unlearned = ShadowModel(original.out, merged[title].patch, merged[title].scale)
    return {
        "original": ShadowModel(original.out),
        "unlearned": unlearned,
        "retrained": ShadowModel(reference.out),
    }


def feeds_of(scenario: DataScenario, targets: Indices) -> dict[str, Feed]:
    """Return the samples that every shadow observes: targets, and some of retain and test set."""
    report = scenario.eval_sets("report")
    return {
        "targets": SomeOf(scenario.train_set("forget"), targets),
        "retain": some_of(report["retain"], SAMPLE),
        "test": some_of(report["test"], SAMPLE),
    }


# --------------------------------------------------------------------------------------- the stage


def recipe_of_shadows(recipe: Recipe) -> Recipe:
    """Return the recipe of a shadow: the first method, and a few members of the pool."""
    pool, method = recipe.pool, recipe.methods[0]
    members = min(recipe.shadows.members, len(pool.trainings()))
    if members < len(pool.trainings()):
        seed = 0 if pool.subset is None else pool.subset.seed
        pool = pool.model_copy(update={"subset": Subset(count=members, seed=seed)})
    candidates = method.candidates(pool.members(), pool.per_training)
    if method.subset is not None and method.subset.count > len(candidates):
        method = method.model_copy(update={"subset": None})
    pool = pool.model_copy(update={"keep": True})  # the folder of a shadow is deleted
    return recipe.model_copy(update={"methods": (method,), "pool": pool})


def check_shadows(recipe: Recipe, scenario: Scenario) -> None:
    """Raise if `evidence: full` cannot be had: before any training, not after hours."""
    if recipe.evidence != "full":
        return
    where = "evidence full"
    if not isinstance(scenario.original(), ToTrain):
        raise OptionError(
            f"{where}: trains shadow models like the original, which is given; remove the weights "
            "of the original from the recipe, or set evidence to standard"
        )
    if recipe.methods[0].add is not None:
        raise OptionError(
            f"{where}: the first method adds task vectors, to learn; wanted one that forgets"
        )
    targets = len(targets_of(recipe, require_sets(scenario, "shadows")))
    if targets < FEWEST:
        raise OptionError(
            f"shadows.fraction: {targets} records of the forget set are targets; wanted at least "
            f"{FEWEST}; raise shadows.fraction, or forget more"
        )


def targets_of(recipe: Recipe, scenario: DataScenario) -> Indices:
    """Return the positions of the targets in the forget set."""
    size = len(scenario.train_set("forget"))
    count = round(recipe.shadows.fraction * size)
    rng = np.random.default_rng(seed_of("targets", recipe.seed))
    return np.sort(rng.choice(size, count, replace=False))


def roles_of(recipe: Recipe, targets: int) -> NDArray[np.int8]:
    """Return the role of each target in each shadow."""
    return draw_roles(recipe.shadows.count, targets, seed_of("roles", recipe.seed))


def plan_shadows(recipe: Recipe, scenario: DataScenario, store: Run) -> list[Shadow]:
    """Return the steps of all shadows."""
    own, targets = recipe_of_shadows(recipe), targets_of(recipe, scenario)
    (method,) = own.methods
    content = [
        VERSION, LOOP, SAMPLE, scenario.scored_on, scenario.training.content(),
        [one.content() for one in own.pool.trainings()], method.model_dump(mode="json"),
        own.search.model_dump(mode="json"), own.criterion, own.seed, own.terms.content(),
        plugin_versions(own, scenario), rules.versions(method.name), rivals.versions(method.name),
        targets.tolist(), *own.terms.after_subtraction,
        *([own.pool.checkpoints] if own.pool.checkpoints else []),
    ]  # fmt: skip
    steps: list[Shadow] = []
    for number, roles in enumerate(roles_of(recipe, len(targets)).tolist(), 1):
        key = identity("shadow", *content, roles)
        place = (store.states / f"shadow-{key}", store.shadow(number))
        steps.append(Shadow(key, own, tuple(targets.tolist()), tuple(roles), *place))
    return steps


@dataclass(frozen=True)
class TrainedShadows:
    """What all shadows recorded, their files, and the seconds they took."""

    margins: ShadowMargins
    files: list[Path]
    seconds: float


def train_shadows(context: Context) -> TrainedShadows:
    """Train all shadows that are not done yet."""
    recipe, scenario = context.recipe, require_sets(context.scenario, "shadows")
    steps = plan_shadows(recipe, scenario, context.store)
    done = context.run(f"training {len(steps)} shadows", steps)
    for left in context.store.states.glob("shadow-*"):  # of a recipe that was changed
        with report_write_errors(left):
            shutil.rmtree(left)
    files = [step.out for step in steps]
    roles = np.array([step.roles for step in steps], np.int8)
    margins = read_shadows(recipe.methods[0].title, roles, files)
    return TrainedShadows(margins, files, sum(one.seconds for one in done))


def samples_of(recipe: Recipe, scenario: DataScenario) -> int:
    """Return the number of samples that one shadow processes in trainings and measurements."""
    train = scenario.training
    plans = plan_rivals(scenario, recipe, Run(""), Start(Path(), ""))
    trained = scenario.work("train", train) + scenario.work("retain", train)
    trained += sum(step.samples(scenario) for steps in plans.values() for step in steps)
    if not plans:
        trained += sum(scenario.work("forget", one) for one in recipe.pool.trainings())
        if (retain := recipe.retain_training) is not None:
            trained += scenario.work("retain", retain)
        trained += recipe.search.passes() * scenario.size("choose")
    return trained + scenario.size("report")


def shadow_note(recipe: Recipe, scenario: Scenario) -> tuple[str, dict[str, Any]]:
    """Return a note about the cost of all shadows: a line of text, and the same facts by name."""
    data = require_sets(scenario, "shadows")
    steps = plan_shadows(recipe, data, Run(""))
    count, samples = len(steps), sum(step.size(scenario) for step in steps)
    members = len(recipe_of_shadows(recipe).pool.members())
    text = (
        f"evidence full: {count} shadows, each trains an original, a retrained model and "
        f"{recipe.methods[0].title} with a pool of {members}: {samples:,} samples in all; "
        "shadows.count and shadows.members change it"
    )
    return text, {"shadows": count, "members": members, "samples": samples}
