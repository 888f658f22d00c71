"""KL-regularised ascent: the predictions for the retain set stay as they were."""

from __future__ import annotations

from torch import Tensor, nn

from negmerge.rivals.language import LEARNING_RATE, TOFU, divergence, frozen_copy, train_on_pairs
from negmerge.rivals.registry import Published, Task, by_pairs, rival
from negmerge.training.feeds import Batch
from negmerge.training.hyperparameters import Positive
from negmerge.training.loop import Trained


@rival(
    splits="all",
    paper="Maini et al., COLM 2024",
    settings=TOFU,
    search=LEARNING_RATE,
    texts=Published(TOFU, LEARNING_RATE),
    samples=by_pairs,
)
def kl_ascent(task: Task, *, alpha: Positive = 1.0) -> Trained:
    """Increase the loss on the forget set, keep the predictions for the retain set.

    Args:
        alpha: the factor of KL(original ‖ model) on the retain set.
    """
    loss, original = task.objective, frozen_copy(task.model)

    def ascent(model: nn.Module, forget: Batch, retain: Batch, epoch: int) -> Tensor:
        return alpha * divergence(task, model, original, retain) - loss(model, forget, epoch)

    return train_on_pairs(task, ascent)
