"""Model state arithmetic: subtract a task vector of the forget set, add one of the retain set."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from negmerge.rivals.language import TOFU
from negmerge.rivals.registry import Published, Range, Task, rival
from negmerge.training.hyperparameters import Positive
from negmerge.training.loop import Trained, check_finite

STRENGTH = {"alpha": Range(0.25, 4.0)}


@rival(
    splits="all",
    paper="model state arithmetic (MSA), 2025",
    settings=TOFU,
    search=STRENGTH,
    texts=Published(TOFU, STRENGTH),
)
def state_arithmetic(task: Task, *, alpha: Positive = 1.0, beta: Positive = 1.0) -> Trained:
    """Compute θ - α(θ₁ - θ) + β(θ₂ - θ), where θ₁ learned the forget set and θ₂ the retain set.

    Args:
        alpha: the factor of the task vector of the forget set.
        beta: the factor of the task vector of the retain set.
    """
    weights = dict(task.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    changes = {name: torch.zeros_like(own) for name, own in before.items()}
    # The state of the first training stays until the end: whoever resumes needs both vectors.
    first = task.state and task.state.with_name(f"{task.state.name}-forget")
    costs: list[Trained] = []
    for name, factor, state in (("forget", -alpha, first), ("retain", beta, task.state)):
        own = replace(task, model=copy.deepcopy(task.model), state=state)
        costs.append(own.train(task.feeds[name]))
        with torch.no_grad():
            for key, weight in own.model.named_parameters():
                changes[key] += factor * (weight - before[key])
    with torch.no_grad():
        for key, weight in weights.items():
            weight += changes[key]
    if first is not None:
        first.unlink(missing_ok=True)
    check_finite(task.model)
    return Trained(
        sum(cost.samples for cost in costs), sum(cost.seconds for cost in costs), costs[0].loss
    )
