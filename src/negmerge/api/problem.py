"""The recipe and the scenario that `unlearn` makes from its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from negmerge.errors import MismatchError, OptionError, quoted
from negmerge.evaluation.criteria import criteria, keep_share
from negmerge.evaluation.functions import DEFAULT_SEARCH as FUNCTION_SEARCH
from negmerge.evaluation.functions import Evaluate, check_confidence
from negmerge.evaluation.scales import Search
from negmerge.registry import unknown_name
from negmerge.rivals import Rival, rivals
from negmerge.rivals.registry import SETS
from negmerge.runs.checks import check_measured, check_methods
from negmerge.runs.methods import Pool
from negmerge.runs.recipe import Recipe, check_recipe
from negmerge.runs.rival_trainings import INHERITED
from negmerge.scenarios.base import Scenario
from negmerge.scenarios.module.functions import FineTune, FunctionScenario
from negmerge.scenarios.module.scenario import ModuleScenario
from negmerge.scenarios.module.settings import FunctionSettings, Module, ModuleSettings, Sets
from negmerge.scenarios.settings import ScenarioSettings
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import final_linear

KNOWN_SETS = ("forget", "retain", "test")
DEFAULT_GRID = {"epochs": [5, 10, 15], "label_smoothing": [0.0, 0.05, 0.1]}
"""The grid of the default pool: nine members."""
FUNCTION_GRID = {"epochs": [5, 10, 15], "lr": [0.05, 0.02, 0.01]}
"""The same for training code of the user, which always has epochs and a learning rate."""

Problem = tuple[Recipe, Scenario]


@dataclass(frozen=True)
class Request:
    """The arguments of `unlearn` that datasets and functions have in common."""

    model: nn.Module
    method: str
    pool: Pool | None
    search: Search | None
    seed: int
    options: dict[str, Any]

    def module(self, weights: Path) -> Module:
        """Return the settings that name the module and its weights."""
        return Module(name=type(self.model).__name__, weights=weights)

    def recipe(self, settings: ScenarioSettings, search: Search, grid: Mapping[str, Any]) -> Recipe:
        """Return the recipe of the run; `grid` is for a pool that is not given."""
        return Recipe.model_validate(
            {
                "title": f"{type(self.model).__name__}: {self.method}",
                "seed": self.seed,
                "scenario": settings.kind,
                "settings": settings,
                "pool": self.pool or Pool.model_validate({"grid": grid}),
                "methods": [{"name": self.method, "options": self.options}],
                "search": search,
            }
        )


def check_request(
    model: Any, method: Any, pool: Any, search: Any, seed: Any, options: dict[str, Any]
) -> Request:
    """Raise unless the arguments have the right types; return them."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model: is a {type(model).__name__}; wanted a torch.nn.Module")
    if not isinstance(method, str):
        raise OptionError(
            f"method: is a {type(method).__name__}; wanted the name of a merge rule, a selector or "
            "a rival"
        )
    given = {"pool": pool, "search": search}
    given = {name: value for name, value in given.items() if value is not None}
    checked = check_recipe({"seed": seed, "methods": [method], **given}, "nm.unlearn")
    found = {name: getattr(checked, name) if name in given else None for name in ("pool", "search")}
    return Request(model, method, seed=seed, options=options, **found)


def _got(argument: object) -> str:
    return "is missing" if argument is None else f"is a {type(argument).__name__}"


def classifier_problem(
    request: Request, splits: Mapping[str, Dataset[Any]] | None, digest: str, weights: Path
) -> Problem:
    """Return the problem of a classifier and its datasets.

    Args:
        digest: a hash of the weights of the model.
        weights: the file of the weights in the run.
    """
    if not isinstance(splits, Mapping):
        raise OptionError(
            f"splits: {_got(splits)}; wanted a mapping of datasets by name: forget, and retain or "
            "test or both (or fine_tune and evaluate)"
        )
    for name in splits:
        if name not in KNOWN_SETS:
            raise OptionError(f"splits: {unknown_name('set', str(name), KNOWN_SETS)}")
    rival = rivals.get(request.method) if request.method in rivals else None
    if rival is None:
        search = _check_search(request.search, splits)
        trained, depends, samples = ("forget",), tuple(splits), search.samples
        inherited: dict[str, Any] = {}
    else:
        search = Search()
        trained = depends = _check_rival(request, rival, splits)
        samples = None
        inherited = {name: getattr(rival.settings, name) for name in INHERITED}
    settings = ModuleSettings(
        data=Sets(name=""), model=request.module(weights), train=HyperParameters(**inherited)
    )
    sets = (trained, depends, samples)
    scenario = ModuleScenario(settings, request.model, splits, digest, request.seed, *sets)
    settings = settings.model_copy(update={"data": Sets(name=scenario.name)})
    recipe = request.recipe(settings, search, DEFAULT_GRID)
    if rival is None:
        check_methods(recipe)
        check_measured(recipe, scenario)
    else:
        _check_last_layer(scenario, request.method)
    return recipe, scenario


def _check_search(search: Search | None, splits: Mapping[str, Any]) -> Search:
    """Return the search with its criterion; raise unless `splits` has the sets it needs."""
    if "forget" not in splits or len(splits) < 2:
        raise OptionError(
            f"splits: got {', '.join(splits) or 'nothing'}; wanted forget, and test (samples that "
            "the model never saw) or retain (samples that it keeps) or both"
        )
    search = search or Search()
    criterion = search.criterion
    if criterion is None:
        criterion = "match_holdout" if "test" in splits else "keep_retain"
    needs = criteria.get(criterion).needs
    if needs not in splits:
        raise OptionError(f"search.criterion {criterion!r} needs the {needs} set; add it to splits")
    return search.model_copy(update={"criterion": criterion})


def _check_rival(request: Request, rival: Rival, splits: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sets that a rival is trained on; raise unless `splits` has them."""
    if request.pool or request.search:
        raise OptionError(
            f"{rival.name}: pool and search are for merged task vectors; leave them out"
        )
    needed = SETS[rival.used(rival.resolve(request.options)[1])]
    missing = [name for name in needed if name not in splits]
    if missing:
        hint = ", or set use_retain=False" if "use_retain" in rival.defaults else ""
        raise OptionError(
            f"{rival.name}: splits has no {missing[0]} set; wanted {' and '.join(needed)}; add "
            f"it{hint}"
        )
    return needed


def _check_last_layer(scenario: ModuleScenario, method: str) -> None:
    """Raise unless the last linear layer gives the logits; rivals change its classes."""
    name, layer = final_linear(scenario.module)
    if layer.out_features != scenario.classes:
        raise MismatchError(
            f"{method}: the model's last linear layer, {quoted(name)}, has {layer.out_features} "
            f"outputs, and the model {scenario.classes} classes; wanted the layer that gives the "
            "logits to be defined last"
        )


def function_problem(
    request: Request,
    fine_tune: FineTune | None,
    evaluate: Evaluate | None,
    keep: float,
    lower: Collection[str],
    digest: str,
    weights: Path,
) -> Problem:
    """Return the problem of a module, with functions that train and measure it.

    `digest` and `weights` are those of `classifier_problem`.
    """
    if not callable(fine_tune) or not callable(evaluate):
        name, got = ("evaluate", evaluate) if callable(fine_tune) else ("fine_tune", fine_tune)
        raise OptionError(
            f"{name}: {_got(got)}; wanted functions: fine_tune(model, settings) and evaluate(model)"
        )
    if request.method in rivals or request.method == "greedy":
        raise OptionError(
            f"method {request.method!r}: needs sets of samples and a loss; with fine_tune and "
            "evaluate, wanted a merge rule or single_best"
        )
    keep_share(keep, lower)  # raises if they are not valid
    module = request.module(weights)
    settings = FunctionSettings.model_validate(
        {"data": {"name": ""}, "model": module, "keep": keep, "lower": tuple(lower)}
    )
    scenario = FunctionScenario(settings, request.model, digest, fine_tune, evaluate, request.seed)
    settings = settings.model_copy(update={"data": Sets(name=scenario.name)})
    search = request.search or FUNCTION_SEARCH
    if search.criterion is not None:
        raise OptionError(
            f"search.criterion: got {search.criterion!r}; with evaluate, λ keeps a share of "
            "retain; remove this field, and set the share with keep"
        )
    check_confidence(search)
    recipe = request.recipe(settings, search, FUNCTION_GRID)
    if recipe.pool.checkpoints:
        raise OptionError(
            "pool.checkpoints: fine_tune returns when its training is over, and gives no weights "
            "after an epoch; leave them out, or let the epochs vary in pool.grid"
        )
    check_methods(recipe)
    return recipe, scenario
