"""NPO, negative preference optimisation: ascent that ends where an answer is unlikely enough."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from negmerge.rivals.language import (
    LEARNING_RATE,
    TOFU,
    answer_log_probability,
    frozen_copy,
    train_on_pairs,
)
from negmerge.rivals.registry import Published, Range, Task, by_pairs, rival
from negmerge.training.feeds import Batch
from negmerge.training.hyperparameters import Positive
from negmerge.training.loop import Trained


@rival(
    splits="all",
    paper="Zhang et al., COLM 2024",
    settings=TOFU,
    search=LEARNING_RATE,
    texts=Published(TOFU, LEARNING_RATE),
    samples=by_pairs,
    forget_only=Range(1e-6, 1e-4),
)
def npo(
    task: Task, *, beta: Positive = 0.1, alpha: Positive = 1.0, use_retain: bool = True
) -> Trained:
    """Make the answers to forget less likely than they were, by a bounded loss.

    The loss of an answer y is -2/β · log σ(-β · log(p(y) / p₀(y))), where p₀ is the probability of
    the original and p that of the model.

    Args:
        beta: the larger, the sooner the loss stops pushing an answer.
        alpha: the factor of the loss on the retain set.
        use_retain: whether to train on as many samples of the retain set, too.
    """
    loss, original = task.objective, frozen_copy(task.model)

    def preference(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        with torch.no_grad():
            before = answer_log_probability(task, original, batch)
        ratio = answer_log_probability(task, model, batch) - before
        return -2 / beta * nn.functional.logsigmoid(-beta * ratio).mean()

    def both(model: nn.Module, forget: Batch, retain: Batch, epoch: int) -> Tensor:
        return preference(model, forget, epoch) + alpha * loss(model, retain, epoch)

    if not use_retain:
        return task.train(task.feeds["forget"], preference)
    return train_on_pairs(task, both)
