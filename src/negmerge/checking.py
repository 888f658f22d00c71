"""What a recipe asks for is there, and fits together, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from negmerge.criteria import criteria
from negmerge.errors import OptionError
from negmerge.merge.accumulator import foldable
from negmerge.merge.rules import make_rule, rules
from negmerge.merge.select import SELECTORS, Greedy
from negmerge.recipe import Method, Recipe
from negmerge.registry import unknown
from negmerge.rivalry import check_rival, plan_rivals
from negmerge.rivals import rivals
from negmerge.scenario import Part, Problem


def check_methods(recipe: Recipe) -> None:
    """Every method is a rule, a selector or a rival with options it takes; the criterion exists."""
    criterion = criteria.get(recipe.criterion)
    if recipe.clip is not None and criterion.needs != "retain":
        raise OptionError(
            f"search.criterion {criterion.name}: a CLIP has a forget and a control set; wanted "
            "keep_retain"
        )
    if recipe.search.strategy == "bracket" and not criterion.limits:
        raise OptionError(f"search.strategy bracket: wanted keep_retain, got {criterion.name}")
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
            if recipe.clip is not None or method.subset is not None or method.add is not None:
                raise OptionError(
                    f"method {method.title!r}: rivals are for classifiers, and merge nothing"
                )
            check_rival(method)
            continue
        if method.tune:
            raise OptionError(
                f"method {method.name!r}: tune is for rivals; its λ is searched anyway"
            )
        if method.name in SELECTORS:
            check_selector(method)
        elif method.name in rules:
            make_rule(method.name, method.options)
            if method.subset is not None:
                method.subset.of(recipe.pool.members())
        else:
            known = [*rules, *SELECTORS, *rivals]
            raise OptionError(unknown("method", method.name, known))


def check_selector(method: Method) -> None:
    """A selector has options it takes, and chooses from the whole pool."""
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
        raise OptionError(f"method {method.title!r}: subset is for merge rules")


def unasked(recipe: Recipe, problem: Problem) -> list[tuple[str, dict[str, Any]]]:
    """The long trainings that come from a default and not from the recipe, and what each costs.

    Each is a line for people, and the same for machines.
    """
    if recipe.clip is not None:
        return []
    epochs = recipe.train.epochs
    default = "epochs" not in recipe.train.model_fields_set
    needed = criteria.get(recipe.criterion).needs == "retrain"
    own = ["original"] if recipe.model.weights is None else []
    if recipe.retrain is not None and recipe.retrain.weights is None:
        own.append("retrained")
    told = {
        "original": default,
        "retrained": "retrain" not in recipe.model_fields_set and not needed,
    }
    parts: dict[str, Part] = {"original": "train", "retrained": "retain"}
    sizes = {name: len(problem.training_feed(parts[name])) for name in own}
    whole = epochs * sum(sizes.values()) + _later(recipe, problem)
    found: list[tuple[str, dict[str, Any]]] = []
    for name in (name for name in own if told[name]):
        samples = epochs * sizes[name]
        text = (
            f"{WORDS[name][0]}: {epochs} epochs × {sizes[name]:,} records = {samples:,} samples, "
            f"{100 * samples / whole:.0f} % of all training of this run; "
            f"{WORDS[name][1].format(epochs=epochs)}"
        )
        facts = {"model": name, "epochs": epochs, "samples": samples, "share": samples / whole}
        found.append((text, facts))
    return found


WORDS = {
    "original": (
        "training the original model",
        "{epochs} epochs are the default: set train.epochs, or give a trained model as "
        "model.weights",
    ),
    "retrained": (
        "retraining without the forget set, to compare with",
        "the recipe does not ask for it: `retrain: null` leaves it out, and Avg. Gap with it",
    ),
}


def _later(recipe: Recipe, problem: Problem) -> int:
    """The samples that the pool and the rivals will process."""
    found = 0
    if any(method.name not in rivals for method in recipe.methods):
        epochs = sum(member.epochs for member in recipe.pool.members())
        found += epochs * len(problem.training_feed("forget"))
    nowhere = Path()
    plans = plan_rivals(problem, recipe, lambda *_: nowhere, nowhere, (nowhere, ""))
    return found + sum(job.samples(problem) for jobs in plans.values() for job in jobs)
