"""Retraining: the reference that all other methods approximate in less time."""

from __future__ import annotations

from torch import nn

from negmerge.errors import OptionError, quoted
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch


@rival(
    splits="retain",
    paper="the reference",
    settings=HyperParameters(epochs=182, lr=0.1, schedule="step", milestones=(0.5, 0.747252)),
    search={"lr": Range(1e-2, 1e-1)},
)
def retrain(task: Task) -> Trained:
    """Train on the retain set from random weights."""
    with fork_random_state():
        seed_torch(seed_of("weights", task.seed))
        reset(task.model)
    return task.train(task.feeds["retain"])


def reset(model: nn.Module) -> None:
    """Draw random weights for every trainable layer, by its own initialisation."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and not any(weight.requires_grad for weight in own.values()):
            continue  # frozen
        fresh = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if fresh is not None:
            fresh()
        elif own:
            where = quoted(".".join(filter(None, [name, next(iter(own))])))
            raise OptionError(
                f"retrain: {where} belongs to a {type(module).__name__}, which has no method "
                "reset_parameters; add one, or train a new model yourself"
            )
