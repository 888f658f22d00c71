"""Influence unlearning: one second-order step that removes the influence of the forget set."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from negmerge.rivals.gradients import loss_gradient, total_gradient, trainable
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.hyperparameters import HyperParameters, Positive
from negmerge.training.loop import Trained, check_finite, deterministic
from negmerge.training.seeds import seed_of

CURVATURE = 1000
"""The number of retain samples that estimate the curvature."""


@rival(
    splits="all",
    paper="Izzo et al., AISTATS 2021; Jia et al., NeurIPS 2023",
    settings=HyperParameters(epochs=1),
    search={"alpha": Range(1.0, 20.0)},
    accepts=("batch",),
    samples=lambda sizes, settings: (
        sizes["forget"] + sizes["retain"] + min(CURVATURE, sizes["retain"])
    ),
)
def influence(task: Task, *, alpha: Positive = 0.2) -> Trained:
    """Subtract the forget set's influence by a second-order step.

    Args:
        alpha: the length of the step.
    """
    begun = time.monotonic()
    model, batch = task.model, task.settings.batch
    forget, retain = task.feeds["forget"], task.feeds["retain"]
    n_f, n_r = len(forget), len(retain)
    # At a minimum of the training loss of the original, the sum of both terms is the gradient of
    # the forget set divided by n_r.
    v = total_gradient(model, forget, batch, task.advance) / (n_f + n_r)
    v -= total_gradient(model, retain, batch, task.advance) * n_f / ((n_f + n_r) * n_r)
    step = alpha * inverse_fisher(task, v)
    weights = list(trainable(model).values())
    with torch.no_grad():
        for weight, own in zip(weights, step.split([w.numel() for w in weights]), strict=True):
            weight += own.view(weight.shape)
    check_finite(model)
    samples = n_f + n_r + min(CURVATURE, n_r)
    return Trained(samples, time.monotonic() - begun, 0.0)


def inverse_fisher(task: Task, v: Tensor) -> Tensor:
    """Multiply v by the inverse Fisher matrix, by the published recursion over retain samples.

    The recursion has one vector o, which starts as the gradient of the first sample and only
    shrinks, so that it removes the curvature of v along one direction only.
    """
    retain, size = task.feeds["retain"], len(task.feeds["retain"])
    order = np.random.default_rng(seed_of("curvature", task.seed)).permutation(size)[:CURVATURE]
    k, o = v.clone(), None
    with deterministic():
        for sample in order:
            g = loss_gradient(task.model, retain, np.array([sample]))
            if o is None:
                o = g
            else:
                scale = CURVATURE + o @ g
                k -= (k @ g) / scale * o
                o = o - (o @ g) / scale * o
            task.advance(1)
    return k
