"""What the methods for language models have in common: published settings, and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from negmerge.rivals.registry import Range, Task
from negmerge.training.feeds import Batch, PairedFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained
from negmerge.training.outputs import IGNORED

TOFU = HyperParameters(
    optimizer="adamw", epochs=5, batch=32, lr=1e-5, weight_decay=0.01, schedule="linear"
)
"""The settings of the TOFU benchmark for all its methods (Maini et al., COLM 2024)."""
LEARNING_RATE = {"lr": Range(1e-6, 1e-3)}
"""Large models need small rates, the models of a desk large ones."""
PairLoss = Callable[[nn.Module, Batch, Batch, int], Tensor]
"""Returns the loss for a model, samples to forget, samples to retain and an epoch."""


def train_on_pairs(task: Task, loss: PairLoss) -> Trained:
    """Train on the forget set, with as many samples of the retain set in each batch."""

    def objective(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        (inputs, retain), targets = batch  # pyright: ignore (the inputs of the feed are a pair)
        return loss(model, (inputs, targets), retain, epoch)  # pyright: ignore

    return task.train(PairedFeed(task.feeds["forget"], task.feeds["retain"]), objective)


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model that does not change."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def answer_log_probability(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of the whole answer of each sample."""
    logits, targets = task.predict(model, batch)
    losses = nn.functional.cross_entropy(
        logits.float().transpose(1, 2), targets, reduction="none", ignore_index=IGNORED
    )
    return -losses.sum(1)


def divergence(task: Task, model: nn.Module, original: nn.Module, batch: Batch) -> Tensor:
    """Return KL(original ‖ model) of the predictions of a batch.

    It is the mean over samples of the mean over their predictions, as the loss is.
    """
    logits, targets = task.predict(model, batch)
    with torch.no_grad():
        wanted = task.predict(original, batch)[0].float().log_softmax(-1)
    found = nn.functional.kl_div(
        logits.float().log_softmax(-1), wanted, reduction="none", log_target=True
    )
    own = targets != IGNORED
    return ((found.sum(-1) * own).sum(1) / own.sum(1)).mean()
