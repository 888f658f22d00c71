"""Gradient difference: ascent on the forget set, descent on the retain set."""

from __future__ import annotations

from torch import Tensor, nn

from negmerge.rivals.language import LEARNING_RATE, TOFU, train_on_pairs
from negmerge.rivals.registry import Published, Task, by_pairs, rival
from negmerge.training.feeds import Batch
from negmerge.training.hyperparameters import Positive
from negmerge.training.loop import Trained


@rival(
    splits="all",
    paper="Liu et al., CoLLAs 2022; Maini et al., COLM 2024",
    settings=TOFU,
    search=LEARNING_RATE,
    texts=Published(TOFU, LEARNING_RATE),
    samples=by_pairs,
)
def gradient_difference(task: Task, *, alpha: Positive = 1.0) -> Trained:
    """Increase the loss on the forget set, decrease it on as many samples of the retain set.

    Args:
        alpha: the factor of the loss on the retain set.
    """
    loss = task.objective

    def difference(model: nn.Module, forget: Batch, retain: Batch, epoch: int) -> Tensor:
        return alpha * loss(model, retain, epoch) - loss(model, forget, epoch)

    return train_on_pairs(task, difference)
