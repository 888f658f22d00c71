"""ℓ1-sparse: fine-tuning with a penalty that drives weights to zero."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from negmerge.errors import OptionError
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.feeds import Batch
from negmerge.training.hyperparameters import HyperParameters, Positive
from negmerge.training.loop import Trained, cross_entropy


@rival(
    splits="retain",
    paper="Jia et al., NeurIPS 2023",
    settings=HyperParameters(epochs=10, lr=0.01),
    search={"alpha": Range(1e-6, 1e-4)},
)
def l1_sparse(
    task: Task, *, alpha: Positive = 1e-5, no_l1_epochs: Annotated[int, Field(ge=0)] = 0
) -> Trained:
    """Train on the retain set with an ℓ1 penalty on all weights, which decreases to zero.

    Args:
        alpha: the factor of ‖θ‖₁ in the first epoch.
        no_l1_epochs: the number of epochs without penalty at the end.
    """
    fading = task.settings.epochs - no_l1_epochs
    if fading < 1:
        raise OptionError(
            f"l1_sparse: no_l1_epochs: got {no_l1_epochs} of {task.settings.epochs} epochs, wanted "
            "fewer; to train without penalty, use finetune"
        )
    loss = cross_entropy(task.settings)

    def penalised(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        strength = alpha * max(1 - epoch / fading, 0.0)
        norm = sum(weight.abs().sum() for weight in model.parameters())
        return loss(model, batch, epoch) + strength * norm

    return task.train(task.feeds["retain"], penalised)
