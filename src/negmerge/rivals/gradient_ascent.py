"""Gradient ascent: training with the opposite sign of the loss."""

from __future__ import annotations

from torch import Tensor, nn

from negmerge.rivals.language import LEARNING_RATE, TOFU
from negmerge.rivals.registry import Published, Range, Task, rival
from negmerge.training.feeds import Batch
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained


@rival(
    splits="forget",
    paper="Thudi et al., EuroS&P 2022",
    settings=HyperParameters(epochs=5, lr=5e-4),
    search={"lr": Range(1e-5, 1e-3)},
    texts=Published(TOFU, LEARNING_RATE),
)
def gradient_ascent(task: Task) -> Trained:
    """Increase the loss on the forget set."""
    loss = task.objective

    def ascent(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        return -loss(model, batch, epoch)

    return task.train(task.feeds["forget"], ascent)
