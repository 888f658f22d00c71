"""Retraining: the answer that every other method tries to reach in less time."""

from __future__ import annotations

from torch import nn

from negmerge.data.draws import seed_of
from negmerge.data.transforms import own_random_state, seed_torch
from negmerge.errors import OptionError, shown
from negmerge.hyperparameters import HyperParameters
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training import Trained


@rival(
    splits="retain",
    paper="the reference",
    settings=HyperParameters(epochs=182, lr=0.1, schedule="step", milestones=(0.5, 0.747252)),
    search={"lr": Range(1e-2, 1e-1)},
)
def retrain(task: Task) -> Trained:
    """Train on the retain set from fresh weights."""
    with own_random_state():
        seed_torch(seed_of("weights", task.seed))
        reset(task.model)
    return task.train(task.feeds["retain"])


def reset(model: nn.Module) -> None:
    """Fresh weights for every layer that is trained, as the layers themselves draw them."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and not any(weight.requires_grad for weight in own.values()):
            continue  # frozen: part of the architecture
        fresh = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if fresh is not None:
            fresh()
        elif own:
            where = shown(".".join(filter(None, [name, next(iter(own))])))
            raise OptionError(
                f"retrain: {where} belongs to a {type(module).__name__}, which has no "
                "reset_parameters to draw it anew; add one, or train a new model yourself"
            )
