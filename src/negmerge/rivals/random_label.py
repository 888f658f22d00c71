"""Random labels: unlearn by learning nonsense about the forget set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from negmerge.data.draws import draws, seed_of
from negmerge.data.feeds import Batch, Feed, Indices, Joined, Relabelled
from negmerge.hyperparameters import HyperParameters
from negmerge.models.classifiers import final_linear
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training import Trained


@rival(
    splits="all",
    paper="Golatkar et al., CVPR 2020",
    settings=HyperParameters(epochs=10, lr=0.01),
    search={"lr": Range(1e-3, 1e-1)},
)
def random_label(task: Task, *, use_retain: bool = True, mixed: bool = False) -> Trained:
    """Each epoch, learn random labels for the forget set, then the retain set as it is.

    use_retain: False: no retain pass. mixed: shuffle both together instead of in turn (the
        published code does so for CIFAR-100 and Tiny ImageNet).
    """
    return task.train(mislabelled(task, use_retain, mixed))


def mislabelled(task: Task, use_retain: bool, mixed: bool) -> Feed:
    """The forget set with labels drawn from all classes, anew in every epoch; then the retain set.

    The true label may be drawn too.
    """
    classes = final_linear(task.model)[1].out_features

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        drawn = draws(seed_of("labels", seed), picked, 1)[:, 0] % np.uint64(classes)
        return torch.from_numpy(drawn.astype(np.int64))

    forget = Relabelled(task.feeds["forget"], label)
    return Joined([forget, task.feeds["retain"]], mixed) if use_retain else forget
