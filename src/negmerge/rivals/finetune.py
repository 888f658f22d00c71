"""Fine-tuning on the retain set."""

from __future__ import annotations

from negmerge.rivals.language import LEARNING_RATE, TOFU
from negmerge.rivals.registry import Published, Range, Task, rival
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained


@rival(
    splits="retain",
    paper="Warnecke et al., NDSS 2023; Golatkar et al., CVPR 2020",
    settings=HyperParameters(epochs=10, lr=0.01),
    search={"lr": Range(1e-3, 1e-1)},
    texts=Published(TOFU, LEARNING_RATE),
)
def finetune(task: Task) -> Trained:
    """Continue training on the retain set only."""
    return task.train(task.feeds["retain"])
