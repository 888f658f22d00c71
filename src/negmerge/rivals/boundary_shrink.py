"""Boundary shrinking: each sample to forget is given to the class across the nearest boundary."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from negmerge.data.feeds import Batch, Indices, Relabelled
from negmerge.data.samples import only_tensor
from negmerge.errors import OptionError, ValueRangeError
from negmerge.hyperparameters import HyperParameters, Positive
from negmerge.models.outputs import logits_of
from negmerge.rivals.registry import Range, Task, rival
from negmerge.training import Trained


@rival(
    splits="forget",
    paper="Chen et al., CVPR 2023",
    settings=HyperParameters(epochs=10, lr=1e-5),
    search={"lr": Range(1e-6, 1e-4)},
)
def boundary_shrink(task: Task, *, bound: Positive = 0.1, pixels: bool = True) -> Trained:
    """Learn the forget set as the classes that the original sees across its boundary.

    bound: how far an input is moved to get across; where it does not, the true label stays.
    pixels: inputs are pixels in [0, 1], and so are the moved ones.
    """
    original = copy.deepcopy(task.model).eval().requires_grad_(False)

    def label(batch: Batch, picked: Indices, seed: int) -> Tensor:
        return across_boundary(original, batch, bound, pixels)

    return task.train(Relabelled(task.feeds["forget"], label))


def across_boundary(model: nn.Module, batch: Batch, bound: float, pixels: bool) -> Tensor:
    """What a model sees in inputs that are moved up its loss, by `bound` in every coordinate.

    >>> model = nn.Linear(1, 2)  # the boundary is at 0.5
    >>> model.weight.data = torch.tensor([[-1.0], [1.0]])
    >>> model.bias.data = torch.tensor([0.5, -0.5])
    >>> batch = torch.tensor([[0.2], [0.45]]), torch.tensor([0, 0])
    >>> across_boundary(model, batch, 0.1, True).tolist()
    [0, 1]
    """
    device = next(model.parameters()).device
    inputs, labels = only_tensor(batch[0], "boundary_shrink").to(device), batch[1].to(device)
    if not inputs.is_floating_point():
        raise OptionError(
            f"the inputs are {inputs.dtype}; wanted floating point, which can be "
            "moved by a little; use another rival"
        )
    if pixels and not 0 <= float(inputs.min()) <= float(inputs.max()) <= 1:
        raise ValueRangeError(
            f"inputs reach from {inputs.min():.3g} to {inputs.max():.3g}; "
            "wanted pixels in [0, 1], or the option pixels=False"
        )
    inputs = inputs.detach().requires_grad_()
    loss = nn.functional.cross_entropy(logits_of(model, inputs).float(), labels)
    (slope,) = torch.autograd.grad(loss, inputs)
    with torch.no_grad():
        moved = inputs + bound * slope.sign()
        if pixels:
            moved = (moved.clamp(0, 1) * 255).round() / 255
        return logits_of(model, moved).argmax(1).cpu()
