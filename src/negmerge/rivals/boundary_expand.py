"""Boundary expanding: the forget set is learned as an additional class."""

from __future__ import annotations

import torch
from torch import Tensor

from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.feeds import Batch, Indices, RelabelledFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import final_linear, resize
from negmerge.training.loop import Trained
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch


@rival(
    splits="forget",
    paper="Chen et al., CVPR 2023",
    settings=HyperParameters(epochs=10, lr=1e-5),
    search={"lr": Range(1e-6, 1e-4)},
    delivered={"keep_extra": False},
)
def boundary_expand(task: Task, *, keep_extra: bool = True) -> Trained:
    """Learn the forget set as an additional class, whose output is kept when the model is scored.

    Args:
        keep_extra: keep the additional output, as the published code does: a sample for which it
            is the largest counts as wrong, whatever the other outputs are. False: remove it at the
            end, so that the model has the outputs of the original. This is the default for the
            method that makes the unlearned model, which must fit the user's module.
    """
    classes = final_linear(task.model)[1].out_features
    with fork_random_state():
        seed_torch(seed_of("extra output", task.seed))
        resize(task.model, classes + 1)

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        return torch.full_like(batch[1], classes)

    cost = task.train(RelabelledFeed(task.feeds["forget"], label))
    if not keep_extra:
        resize(task.model, classes)
    return cost
