"""What a recipe asks for is there, and fits together, before anything is trained."""

from __future__ import annotations

from negmerge.criteria import criteria
from negmerge.errors import OptionError
from negmerge.merge.accumulator import foldable
from negmerge.merge.rules import make_rule, rules
from negmerge.merge.select import SELECTORS, Greedy
from negmerge.recipe import Method, Recipe
from negmerge.rivalry import check_rival
from negmerge.rivals import rivals


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
            known = ", ".join([*rules, *SELECTORS, *rivals])
            raise OptionError(f"unknown method {method.name!r}; there are: {known}")


def check_selector(method: Method) -> None:
    """A selector has options it takes, and chooses from the whole pool."""
    known = vars(Greedy()) if method.name == "greedy" else {}
    unknown = sorted(method.options.keys() - known.keys())
    if unknown:
        wanted = ", ".join(known) or "none"
        raise OptionError(f"{method.name}: no option {unknown[0]!r}; it takes {wanted}")
    if method.name == "greedy":
        try:
            Greedy(**method.options)
        except TypeError:
            raise OptionError(
                f"greedy: scale {method.options['scale']!r}, wanted a number"
            ) from None
    if method.subset is not None:
        raise OptionError(f"method {method.title!r}: subset is for merge rules")
