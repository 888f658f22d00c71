"""Influence unlearning: one step to where the model would be had it not seen the forget set."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from negmerge.data.draws import seed_of
from negmerge.hyperparameters import HyperParameters, Positive
from negmerge.rivals.gradients import loss_gradient, total_gradient, trainable
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training import Trained, check_finite, deterministic

CURVATURE = 1000


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

    alpha: the length of the step.
    """
    begun = time.monotonic()
    model, batch = task.model, task.settings.batch
    forget, retain = task.feeds["forget"], task.feeds["retain"]
    n_f, n_r = len(forget), len(retain)
    # Where the original's training loss is flat, both terms together are the gradient of the
    # forget set over n_r: what pulled the model away from where the retain set alone would have it.
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
    """v times the inverse Fisher matrix, by the published recursion over single retain samples.

    The recursion keeps one vector o, which begins as the first sample's gradient and only shrinks;
    so the curvature it takes out of v is that along one direction.
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
