"""SalUn: random labels, changing only the weights with large gradients on the forget set."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.rivals.gradients import total_gradient, trainable
from negmerge.rivals.random_label import mislabelled
from negmerge.rivals.registry import Range, Task, by_epochs, rival
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained


@rival(
    splits="all",
    paper="Fan et al., ICLR 2024",
    settings=HyperParameters(epochs=10, lr=0.013),
    search={"lr": Range(5e-4, 5e-2), "keep": Range(0.1, 0.9, "steps")},
    samples=lambda sizes, settings: by_epochs(sizes, settings) + sizes["forget"],
)
def salun(
    task: Task,
    *,
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5,
    use_retain: bool = True,
    mixed: bool = False,
) -> Trained:
    """Learn random labels, changing only the weights with the largest gradient on the forget set.

    Args:
        keep: the share of weights that may change; the others keep their bits.
        use_retain: as in `random_label`.
        mixed: as in `random_label`.
    """
    begun = time.monotonic()
    forget = task.feeds["forget"]
    gradient = total_gradient(task.model, forget, task.settings.batch, task.advance)
    mask = largest(task.model, gradient.abs(), keep)
    spent = time.monotonic() - begun
    cost = task.train(mislabelled(task, use_retain, mixed), mask=mask)
    return replace(cost, samples=cost.samples + len(forget), seconds=cost.seconds + spent)


def largest(model: nn.Module, saliency: Tensor, keep: float) -> dict[str, Tensor]:
    """Return masks of the elements with the largest saliency, by name of the weight.

    Args:
        saliency: one value for each trainable element.
        keep: the share of all elements that the masks contain.
    """
    if not bool(saliency.isfinite().all()):
        raise ValueRangeError(
            "salun: the gradient on the forget set is NaN or infinite; check weights and inputs"
        )
    order = saliency.argsort(descending=True, stable=True)
    top = torch.zeros(len(saliency), dtype=torch.bool, device=saliency.device)
    top[order[: int(keep * len(saliency))]] = True
    weights = trainable(model)
    parts = top.split([weight.numel() for weight in weights.values()])
    return {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
