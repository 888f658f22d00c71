"""Boundary expanding: samples to forget move to a class of their own, which is then taken away."""

from __future__ import annotations

import torch
from torch import Tensor

from negmerge.data.draws import seed_of
from negmerge.data.feeds import Batch, Indices, Relabelled
from negmerge.data.transforms import own_random_state, seed_torch
from negmerge.hyperparameters import HyperParameters
from negmerge.models.classifiers import final_linear, resize
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training import Trained


@rival(
    splits="forget",
    paper="Chen et al., CVPR 2023",
    settings=HyperParameters(epochs=10, lr=1e-5),
    search={"lr": Range(1e-6, 1e-4)},
)
def boundary_expand(task: Task, *, keep_extra: bool = False) -> Trained:
    """Learn the forget set as one more class, an output that is removed at the end.

    keep_extra: leave that output in the model, as the published code does: a sample that it wins
        counts as forgotten, whatever the other outputs still know.
    """
    classes = final_linear(task.model)[1].out_features
    with own_random_state():
        seed_torch(seed_of("extra output", task.seed))
        resize(task.model, classes + 1)

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        return torch.full_like(batch[1], classes)

    cost = task.train(Relabelled(task.feeds["forget"], label))
    if not keep_extra:
        resize(task.model, classes)
    return cost
