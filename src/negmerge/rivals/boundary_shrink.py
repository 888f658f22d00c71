"""Boundary shrinking: each sample to forget gets the label of the nearest other class."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from negmerge.errors import OptionError, ValueRangeError
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training.feeds import Batch, Indices, RelabelledFeed
from negmerge.training.hyperparameters import HyperParameters, Positive
from negmerge.training.loop import Trained
from negmerge.training.outputs import logits_of
from negmerge.training.samples import only_tensor


@rival(
    splits="forget",
    paper="Chen et al., CVPR 2023",
    settings=HyperParameters(epochs=10, lr=1e-5),
    search={"lr": Range(1e-6, 1e-4)},
)
def boundary_shrink(task: Task, *, bound: Positive = 0.1, pixels: bool = True) -> Trained:
    """Learn the forget set with the labels that the original gives to perturbed inputs.

    Args:
        bound: the size of the perturbation; if it crosses no boundary, the true label stays.
        pixels: whether inputs are pixels in [0, 1]; perturbed inputs then are pixels too.
    """
    original = copy.deepcopy(task.model).eval().requires_grad_(False)

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        return perturbed_labels(original, batch, bound, pixels)

    return task.train(RelabelledFeed(task.feeds["forget"], label))


def perturbed_labels(model: nn.Module, batch: Batch, bound: float, pixels: bool) -> Tensor:
    """Return the predictions for inputs that are moved by ±`bound` in the direction of the loss.

    >>> model = nn.Linear(1, 2)  # the decision boundary is at 0.5
    >>> model.weight.data = torch.tensor([[-1.0], [1.0]])
    >>> model.bias.data = torch.tensor([0.5, -0.5])
    >>> batch = torch.tensor([[0.2], [0.45]]), torch.tensor([0, 0])
    >>> perturbed_labels(model, batch, 0.1, True).tolist()
    [0, 1]
    """
    device = next(model.parameters()).device
    inputs, labels = only_tensor(batch[0], "boundary_shrink").to(device), batch[1].to(device)
    if not inputs.is_floating_point():
        raise OptionError(
            f"boundary_shrink: got inputs of {inputs.dtype}, wanted floating point numbers, which "
            "can be perturbed; use another rival"
        )
    if pixels and not 0 <= float(inputs.min()) <= float(inputs.max()) <= 1:
        raise ValueRangeError(
            f"boundary_shrink: got inputs from {inputs.min():.3g} to {inputs.max():.3g}, wanted "
            "pixels in [0, 1]; set the option pixels=False for other inputs"
        )
    inputs = inputs.detach().requires_grad_()
    loss = nn.functional.cross_entropy(logits_of(model, inputs).float(), labels)
    (slope,) = torch.autograd.grad(loss, inputs)
    with torch.no_grad():
        moved = inputs + bound * slope.sign()
        if pixels:
            moved = (moved.clamp(0, 1) * 255).round() / 255
        return logits_of(model, moved).argmax(1).cpu()
