"""The checks of a recipe before anything is trained, and the notes about expensive defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from negmerge.errors import OptionError
from negmerge.merging.rules import make_rule, rules
from negmerge.merging.select import SELECTORS, Greedy
from negmerge.merging.shared_statistics import accumulable_rules
from negmerge.registry import unknown_name
from negmerge.rivals import rivals
from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.runs.rival_trainings import plan_rivals
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import Scenario, ToTrain


def check_methods(recipe: Recipe) -> None:
    """Raise unless the criterion and every method of a recipe exist and have valid options."""
    criterion = recipe.settings.criterion(recipe.criterion)
    recipe.settings.check_criterion(criterion)
    if recipe.search.strategy == "bracket" and not criterion.limits:
        raise OptionError(f"search.strategy bracket: wanted keep_retain, got {criterion.name}")
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
        if method.name in rivals:
            if not recipe.settings.rivals:
                raise OptionError(
                    f"method {method.title!r}: scenario {recipe.scenario} has no rivals, which "
                    "need a classifier and a retain set; leave it out"
                )
            check_rival(method)
        elif method.tune:
            raise OptionError(
                f"method {method.name!r}: tune is for rivals, and its λ is searched in any case; "
                "leave tune out"
            )
        elif method.name in SELECTORS:
            check_selector(method)
        elif method.name in rules:
            make_rule(method.name, method.options)
            if method.subset is not None:
                method.subset.of(recipe.pool.members())
        else:
            raise OptionError(unknown_name("method", method.name, [*rules, *SELECTORS, *rivals]))


def check_rival(method: Method) -> None:
    """Raise unless a rival has valid options, and something to tune if it is tuned."""
    rival = rivals.get(method.name)
    if method.subset is not None or method.add is not None:
        raise OptionError(
            f"method {method.title!r}: subset and add are for merged task vectors; leave them out"
        )
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
        raise OptionError(f"{method.name}: no option {wrong[0]!r}; it takes {wanted}")
    if method.name == "greedy":
        try:
            Greedy(**method.options)
        except TypeError:
            raise OptionError(
                f"greedy: scale {method.options['scale']!r}, wanted a number"
            ) from None
    if method.subset is not None:
        raise OptionError(f"method {method.title!r}: subset is for merge rules; leave it out")


TITLES = {
    "original": "training the original model",
    "retrained": "retraining without the forget set, to compare with",
}


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
    total = sum(samples.values()) + _samples_of_methods(recipe, scenario)
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


def _samples_of_methods(recipe: Recipe, scenario: Scenario) -> int:
    """Return the number of samples that the pool and the rivals will process."""
    total = 0
    if any(method.name not in rivals for method in recipe.methods):
        total += sum(scenario.work("forget", member) for member in recipe.pool.members())
    plans = plan_rivals(scenario, recipe, Run(""), Start(Path(), ""))  # only to count
    return total + sum(step.samples(scenario) for steps in plans.values() for step in steps)
