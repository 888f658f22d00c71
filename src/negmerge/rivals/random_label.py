"""Random labels: training on the forget set with random labels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.feeds import Batch, Feed, Indices, JoinedFeed, RelabelledFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import final_linear
from negmerge.training.loop import Trained
from negmerge.training.seeds import draws, seed_of


@rival(
    splits="all",
    paper="Golatkar et al., CVPR 2020",
    settings=HyperParameters(epochs=10, lr=0.01),
    search={"lr": Range(1e-3, 1e-1)},
)
def random_label(task: Task, *, use_retain: bool = True, mixed: bool = False) -> Trained:
    """Each epoch, learn the forget set with random labels, then the retain set.

    Args:
        use_retain: whether to train on the retain set too.
        mixed: shuffle both sets together instead of one after the other, as the published code does
            for CIFAR-100 and Tiny ImageNet.
    """
    return task.train(mislabelled(task, use_retain, mixed))


def mislabelled(task: Task, use_retain: bool, mixed: bool) -> Feed:
    """Return the forget set with labels drawn from all classes in each epoch, and the retain set.

    The true label may be drawn too.
    """
    classes = final_linear(task.model)[1].out_features

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        drawn = draws(seed_of("labels", seed), picked, 1)[:, 0] % np.uint64(classes)
        return torch.from_numpy(drawn.astype(np.int64))

    forget = RelabelledFeed(task.feeds["forget"], label)
    return JoinedFeed([forget, task.feeds["retain"]], mixed) if use_retain else forget
