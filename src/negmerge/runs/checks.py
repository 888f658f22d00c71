"""The checks of a run before anything is trained: methods, memory, notes on expensive defaults."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import torch

from negmerge.errors import OptionError
from negmerge.evaluation.criteria import Criterion
from negmerge.evaluation.scales import Search
from negmerge.merging.rules import make_rule, rules
from negmerge.merging.select import SELECTORS, Greedy
from negmerge.merging.shared_statistics import accumulable_rules
from negmerge.registry import nearest, unknown_name
from negmerge.rivals import Rival, rivals
from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.runs.rival_trainings import RivalTraining, plan_rivals, suited_rival
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import Scenario, ToTrain, TrainingSet
from negmerge.scenarios.data import DataScenario, require_sets
from negmerge.scenarios.settings import scenarios
from negmerge.training.execution import checkpointed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.memory import check_step
from negmerge.training.recalibration import normalisations

SPARE = 0.05
"""The share of a GPU's free memory that is left to the CUDA context of a worker process and to
fragmentation; an assumption."""
TITLES = {
    "original": "training the original model",
    "retrained": "retraining without the forget set, to compare with",
}


def check_methods(recipe: Recipe) -> None:
    """Raise unless the criterion and every method of a recipe exist and have valid options."""
    criterion = recipe.settings.criterion(recipe.criterion)
    recipe.settings.check_criterion(criterion)
    check_search(recipe.search, criterion)
    if recipe.evidence == "full" and not recipe.settings.has_shadows:
        able = [kind for kind in scenarios if scenarios.get(kind).has_shadows]
        raise OptionError(
            f"evidence full: trains shadow models, which scenario {recipe.scenario} does not; "
            f"wanted evidence standard, or scenario {' or '.join(able)}"
        )
    if not recipe.pool.keep:
        names = [method.name for method in recipe.methods if method.name not in rivals]
        for name in names:
            allowed = accumulable_rules()
            if names.count(name) > 1 or (name in rules and name not in allowed):
                raise OptionError(
                    f"pool.keep false: allows each of these rules once: {', '.join(allowed)}; "
                    f"got {name!r}; set pool.keep to true, or leave the method out"
                )
    for method in recipe.methods:
        check_reshaped(recipe, method)
        if method.name in rivals:
            check_rival(method, suited_rival(recipe, method))
        elif method.tune:
            raise OptionError(
                f"method {method.name!r}: tune is for rivals, and its λ is searched in any case; "
                "leave tune out"
            )
        elif method.name in SELECTORS:
            check_selector(method)
        elif method.name in rules:
            check_merge(recipe, method)
        else:
            raise OptionError(unknown_name("method", method.name, [*rules, *SELECTORS, *rivals]))


def check_merge(recipe: Recipe, method: Method) -> None:
    """Raise unless a rule has valid options and as many members as it needs."""
    pool, subset = recipe.pool, method.subset
    if method.members != "all" and not pool.checkpoints:
        raise OptionError(
            f"method {method.title!r}: members {method.members} needs pool.checkpoints; add them, "
            "or leave members out"
        )
    count = len(method.candidates(pool.members(), pool.per_training))
    if subset is not None:
        subset.check(count)
        count = subset.count
        if subset.by == "retain" and method.add is not None:
            raise OptionError(
                f"method {method.title!r}: subset.by retain is for τ that is subtracted, and add "
                "adds it; leave one of them out"
            )
    make_rule(method.name, method.options).check_members(count)


def check_reshaped(recipe: Recipe, method: Method) -> None:
    """Raise if τ is to be changed, and the method, the scenario or the criterion has none to."""
    for name in method.reshaped_by:
        where = f"method {method.title!r}: {name}"
        if method.name in rivals or method.name in SELECTORS or method.add is not None:
            raise OptionError(
                f"{where} is for merge rules whose task vector is subtracted; leave it out"
            )
        if name not in recipe.settings.reshapes:
            able = [kind for kind in scenarios if name in scenarios.get(kind).reshapes]
            needs = "samples of its own" if name == "groups" else "a retain set to train on"
            raise OptionError(
                f"{where} needs {needs}, which scenario {recipe.scenario} does not have; leave it "
                f"out, or use scenario {' or '.join(able)}"
            )
        criterion = recipe.settings.criterion(recipe.criterion)
        if name == "groups" and criterion.uses_reported_data:
            raise OptionError(
                f"{where} needs samples that are not reported, and criterion {criterion.name} "
                "chooses on all reported data; leave groups out, or use another criterion"
            )


def check_search(search: Search, criterion: Criterion) -> None:
    """Raise if a search needs a criterion that limits λ, and this one does not."""
    if search.strategy in ("bracket", "doubling") and not criterion.limits:
        raise OptionError(
            f"search.strategy {search.strategy}: wanted keep_retain, got {criterion.name}"
        )
    if search.confidence is not None and criterion.limit is None:
        raise OptionError(
            f"search.confidence: is for a criterion that limits a metric, such as keep_retain; got "
            f"{criterion.name}; set search.confidence to null"
        )


def check_measured(recipe: Recipe, scenario: Scenario) -> None:
    """Raise if the criterion reads a metric that the scenario does not measure."""
    criterion = recipe.settings.criterion(recipe.criterion)
    measured = [metric.name for metric in scenario.metrics]
    missing = [name for name in criterion.reads if name not in measured]
    if measured and missing:
        raise OptionError(
            f"search.criterion: {criterion.name} reads {missing[0]}, which scenario "
            f"{recipe.scenario} does not measure; wanted a criterion such as "
            f"{recipe.settings.default_criterion}"
        )


def check_buffers(recipe: Recipe, scenario: Scenario) -> None:
    """Raise if statistics are to be recalibrated, and the model or the scenario has none."""
    if recipe.buffers != "recalibrate":
        return
    data = require_sets(scenario, "buffers: recalibrate")
    if not normalisations(data.model()):
        raise OptionError(
            "buffers: got recalibrate, and the model has no BatchNorm with running statistics; "
            "set buffers to keep"
        )
    data.recalibration_set()


def check_rival(method: Method, rival: Rival) -> None:
    """Raise unless a rival has valid options, and something to tune if it is tuned."""
    if method.subset is not None or method.add is not None:
        raise OptionError(
            f"method {method.title!r}: subset and add are for merged task vectors; leave them out"
        )
    check_no_merge(method)
    if method.name == "retrain":
        raise OptionError("method 'retrain': is the reference of every run; leave it out")
    rival.resolve(method.options)
    if method.tune and not rival.ranges(method.options):
        raise OptionError(
            f"method {method.title!r}: nothing is left to tune, its options fix "
            f"{' and '.join(rival.search)}; leave one of them out, or leave tune out"
        )


def check_selector(method: Method) -> None:
    """Raise unless a selector has valid options and chooses from the whole pool."""
    known = vars(Greedy()) if method.name == "greedy" else {}
    wrong = sorted(method.options.keys() - known.keys())
    if wrong:
        wanted = ", ".join(known) or "none"
        near = nearest(wrong[0], known)
        raise OptionError(f"{method.name}: no option {wrong[0]!r}; it takes {wanted}{near}")
    if method.name == "greedy":
        try:
            Greedy(**method.options)
        except TypeError:
            raise OptionError(
                f"greedy: scale {method.options['scale']!r}, wanted a number"
            ) from None
    if method.subset is not None:
        raise OptionError(f"method {method.title!r}: subset is for merge rules; leave it out")
    check_no_merge(method)


def check_no_merge(method: Method) -> None:
    """Raise if a rival or a selector has fields that are only for merge rules."""
    given = {"members": method.members != "all", "equalise": method.equalise}
    wrong = [name for name, used in given.items() if used]
    if wrong:
        raise OptionError(f"method {method.title!r}: {wrong[0]} is for merge rules; leave it out")


def check_trainings(recipe: Recipe, scenario: Scenario, limit: float | None) -> None:
    """Raise if a training of a run does not fit in memory, or its model has no checkpointing.

    Args:
        recipe, scenario: of the run.
        limit: the bytes of memory for one training; None: memory is not checked.
    """
    if not isinstance(scenario, DataScenario):
        return
    planned: dict[object, tuple[str, TrainingSet, HyperParameters]] = {}
    for where, on, own in _trainings(recipe, scenario):
        how = (own.precision, own.checkpointing, own.optimizer, own.momentum > 0)
        planned[on, own.batch, own.accumulate, *how] = where, on, own  # what memory depends on
    model = None
    for where, on, settings in planned.values():
        if limit is None and not settings.checkpointing:
            continue
        model = scenario.model() if model is None else model
        try:
            if settings.checkpointing:
                with checkpointed(model):
                    pass
        except OptionError as error:
            raise OptionError(f"{where}.{error}") from None
        if limit is not None:
            feed, objective = scenario.train_set(on), scenario.loss(settings)
            check_step(where, model, feed, settings, objective, limit)


def _trainings(
    recipe: Recipe, scenario: Scenario
) -> Iterator[tuple[str, TrainingSet, HyperParameters]]:
    """Yield every training of a run: where the recipe has its settings, the set, the settings."""
    for plan in (scenario.original(), scenario.reference()):
        if isinstance(plan, ToTrain):
            yield "train", plan.on, plan.settings
    for member in _members(recipe):
        yield "pool.settings", "forget", member
    if (retain := recipe.retain_training) is not None:
        yield "pool.settings", "retain", retain
    for step in _rivals(recipe, scenario):  # they take the batch and its parts from the original
        yield "train", step.on[0], step.settings


def _members(recipe: Recipe) -> list[HyperParameters]:
    """Return the trainings of the pool of a run: none if all methods are rivals."""
    merges = any(method.name not in rivals for method in recipe.methods)
    return recipe.pool.trainings() if merges else []


def _rivals(recipe: Recipe, scenario: Scenario) -> list[RivalTraining]:
    """Return the trainings of all rivals, only to look at them."""
    plans = plan_rivals(scenario, recipe, Run(""), Start(Path(), ""))
    return [step for steps in plans.values() for step in steps]


def memory_limit(workers: int, gpus: int) -> float | None:
    """Return the bytes of GPU memory for each worker process; None if there is no GPU."""
    if not gpus:
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return (1 - SPARE) * free / ceil(workers / gpus)  # the GPUs are taken to be alike


def default_trainings(recipe: Recipe, scenario: Scenario) -> list[tuple[str, dict[str, Any]]]:
    """Return a note for each long training that is a default and not asked for by the recipe.

    Returns:
        The notes; each is a line of text, and the same facts by name.
    """
    models = {"original": scenario.original(), "retrained": scenario.reference()}
    plans = {name: plan for name, plan in models.items() if isinstance(plan, ToTrain)}
    if not any(plan.remedy for plan in plans.values()):
        return []
    samples = {name: scenario.work(plan.on, plan.settings) for name, plan in plans.items()}
    total = sum(samples.values())
    total += sum(scenario.work("forget", member) for member in _members(recipe))
    if (retain := recipe.retain_training) is not None:
        total += scenario.work("retain", retain)
    total += sum(step.samples(scenario) for step in _rivals(recipe, scenario))
    notes: list[tuple[str, dict[str, Any]]] = []
    for name, plan in plans.items():
        if plan.remedy is None:
            continue
        epochs, share = plan.settings.epochs, samples[name] / total
        text = (
            f"{TITLES[name]}: {epochs} epochs × {samples[name] // epochs:,} records = "
            f"{samples[name]:,} samples, {100 * share:.0f} % of all training of this run; "
            f"{plan.remedy}"
        )
        facts = {"model": name, "epochs": epochs, "samples": samples[name], "share": share}
        notes.append((text, facts))
    return notes
