"""Checks of losses that a run makes by itself, if its scenario asks for them.

A member that knows the forget set worse than the original would be subtracted in the wrong
direction. An original that was trained too hard on records has lost its language.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import ClassVar

from negmerge.runs.context import Context
from negmerge.runs.members import plan_losses
from negmerge.runs.records import Done
from negmerge.runs.steps import Advance, ValueStep
from negmerge.runs.trainings import Member, Training
from negmerge.scenarios.base import Scenario, identity
from negmerge.scenarios.data import DataScenario, require_sets

LOST = 2.0
"""The growth of the perplexity of general texts, by the training of the original, above which a
run warns."""


@dataclass(frozen=True)
class StartLoss(ValueStep[float]):
    """The loss on a set of the model that the original was trained from."""

    key: str
    on: str
    out: Path

    value_type: ClassVar = float

    def size(self, scenario: Scenario) -> int:
        return len(require_sets(scenario, "checks").eval_sets("choose")[self.on])

    def run(self, scenario: Scenario, advance: Advance) -> Done[float]:
        begun, data = time.perf_counter(), require_sets(scenario, "checks")
        feed = data.eval_sets("choose")[self.on]
        loss = data.mean_loss(scenario.model(), self.on, feed, advance)
        return Done(loss, time.perf_counter() - begun)


def check_losses(context: Context, original: Training, pool: Sequence[Member]) -> list[str]:
    """Return warnings about members that unlearned the forget set, and about a lost language."""
    scenario = context.scenario
    if not isinstance(scenario, DataScenario) or not scenario.settings.checks_losses:
        return []
    if not pool or not context.recipe.pool.keep:
        return []
    general = original.trains and "general" in scenario.eval_sets("choose")
    learned = plan_losses(context, pool, -1.0, "forget")
    steps = [*plan_losses(context, pool[:1], 0.0, "forget"), *learned]
    if general:
        key = identity("start", scenario.scored_on, context.recipe.search.samples, scenario.seed)
        out = context.store.states / f"{key}.json"
        steps += [*plan_losses(context, pool[:1], 0.0, "general"), StartLoss(key, "general", out)]
    known, *found = (done.value for done in context.run("checking losses", steps))
    warnings = [
        f"{member.title}: its loss on the forget set is {loss:.4g}, above the original's "
        f"{known:.4g}: it did not learn the forget set, and its task vector points the wrong way"
        for member, loss in zip(pool, found, strict=False)
        if loss > known
    ]
    if general and (growth := exp(min(found[-2] - found[-1], 100.0))) > LOST:
        warnings.append(
            f"training the original raised the perplexity of general texts {growth:.3g} times: it "
            "has lost language, which no unlearning brings back; train it with a smaller lr, or "
            "with more general texts (split.general)"
        )
    return warnings
