"""The step that trains a model by a rival method, once or for each try of a tuned rival."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.errors import FileError, OptionError, ValueRangeError
from negmerge.rivals import Rival, Task, rivals
from negmerge.rivals.registry import SETS, VERSION
from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.runs.records import Cost, Done
from negmerge.runs.steps import Advance
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start, Training
from negmerge.scenarios.base import Scenario, identity
from negmerge.scenarios.data import require_sets
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import final_linear
from negmerge.training.loop import VERSION as LOOP
from negmerge.training.loop import Trained
from negmerge.training.seeds import seed_of

INHERITED = ("batch", "augment", "precision", "accumulate", "compile", "checkpointing")
"""The settings that rivals take from the original's training: the batch and the augmentation, as in
the published protocol, and how a step is computed."""


@dataclass(frozen=True)
class RivalTraining(Training):
    """A training by a rival method.

    `tried` has the values of the tuned options; it is None if the rival is not tuned.
    """

    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, float] | None = None

    def find_cost(self) -> Cost | None:
        """Return the cost of a training that is done; a try that diverged has no model."""
        try:
            cost = self.read_cost()
        except FileError:
            return None
        failed = cost.failure is not None and cost.id == self.key
        return cost if failed else super().find_cost()

    def samples(self, scenario: Scenario) -> int:
        data = require_sets(scenario, self.method)
        sizes = {name: len(data.train_set(name)) for name in self.on}
        return rivals.get(self.method).samples(sizes, self.settings)

    def train(self, scenario: Scenario, network: nn.Module, advance: Advance) -> Trained:
        data = require_sets(scenario, self.method)
        task = Task(
            network,
            {name: data.train_set(name) for name in self.on},
            self.settings,
            self.seed,
            self.state,
            self.save_every,
            advance,
            data.loss(self.settings),
            data.predictions,
        )
        return rivals.get(self.method).run(task, self.options)

    def metadata(self, network: nn.Module) -> dict[str, Any]:
        outputs = final_linear(network)[1].out_features
        own = {"method": self.method, "options": self.options, "outputs": outputs}
        return super().metadata(network) | own

    def run(self, scenario: Scenario, advance: Advance) -> Done[Cost]:
        """Train; of a tuned rival, record a try that diverges instead of raising."""
        begun = time.monotonic()
        try:
            return super().run(scenario, advance)
        except ValueRangeError as error:
            if self.tried is None:
                raise
            spent = time.monotonic() - begun
            failed = {"id": self.key, "title": self.title, "failure": str(error)}
            self.write_cost(failed | {"samples": 0, "seconds": spent})
            self.state.unlink(missing_ok=True)
            return Done(self.read_cost(), spent)


def suited_rival(recipe: Recipe, method: Method) -> Rival:
    """Return the rival of a method with what is published for the models of a recipe."""
    if recipe.settings.rivals is None:
        raise OptionError(
            f"method {method.title!r}: scenario {recipe.scenario} has no rivals, which need a "
            "classifier or texts, and a retain set; leave it out"
        )
    return rivals.get(method.name).suited_to(recipe.settings.rivals)


def make_rival_training(
    scenario: Scenario,
    title: str,
    rival: Rival,
    given: Mapping[str, Any],
    settings: HyperParameters | None,
    out: Callable[[str], Path],
    states: Path,
    start: Start,
    tried: dict[str, float] | None = None,
    save_every: float = 15.0,
) -> RivalTraining:
    """Return a rival's training with its key and seed.

    Args:
        scenario, title, out, states, start, save_every: as in `make_training`.
        rival: the rival method.
        given: settings and options by name.
        settings: the other settings; the published ones if None.
        tried: as in `RivalTraining`.
    """
    settings, options = rival.resolve(given, settings)
    version = rivals.versions(rival.name)
    content = [rival.name, options, settings.content(), start.key, *version]
    drawn = [rival.name, options, settings.random_content(), start.key, *version]
    seed = seed_of("rival", scenario.seed, identity(scenario.identity, drawn))
    key = identity(scenario.identity, content, seed, LOOP, VERSION)
    return RivalTraining(
        key,
        title,
        SETS[rival.used(options)],
        settings,
        seed,
        start.weights,
        out(key),
        states / identity(key, title),  # two methods may have the same training
        save_every=save_every,
        method=rival.name,
        options=options,
        tried=tried,
    )


def tuning_grid(rival: Rival, options: Mapping[str, Any], count: int) -> list[dict[str, float]]:
    """Return the values of the tuned options for each try of a rival.

    With one tuned option the tries run through its range in order. With two, each value of either
    is used once, and tries that are neighbours in one option are far apart in the other. The number
    of tries is the same for all rivals.

    >>> tuning_grid(rivals.get("finetune"), {}, 3)
    [{'lr': 0.001}, {'lr': 0.01}, {'lr': 0.1}]
    >>> [values["keep"] for values in tuning_grid(rivals.get("salun"), {}, 5)]
    [0.1, 0.5, 0.9, 0.3, 0.7]
    """
    tries: list[dict[str, float]] = [{} for _ in range(count)]
    for place, (name, value_range) in enumerate(rival.ranges(options).items()):
        points = value_range.points(count)
        order = sorted(range(count), key=lambda k, step=place + 1: (k % step > 0, k))
        for values, k in zip(tries, order, strict=True):
            values[name] = points[k]
    return tries


def plan_rivals(
    scenario: Scenario, recipe: Recipe, store: Run, start: Start
) -> dict[str, list[RivalTraining]]:
    """Return the trainings of every rival of a recipe, by title: one, or one for each try."""
    plans: dict[str, list[RivalTraining]] = {}
    for position, method in enumerate(recipe.methods):
        if method.name not in rivals:
            continue
        rival = suited_rival(recipe, method)
        given = method.options if position else {**rival.delivered, **method.options}
        inherited = {name: getattr(scenario.training, name) for name in INHERITED}
        settings = rival.settings.model_copy(update=inherited)
        tries: Sequence[dict[str, float] | None] = [None]
        if method.tune:
            tries = tuning_grid(rival, given, recipe.search.tries)
        plans[method.title] = [
            make_rival_training(
                scenario,
                method.title if tried is None else f"{method.title}, try {k} of {len(tries)}",
                rival,
                given | (tried or {}),
                settings,
                partial(store.rival, method.title),
                store.states,
                start,
                tried,
                recipe.save_every,
            )
            for k, tried in enumerate(tries, 1)
        ]
    return plans
