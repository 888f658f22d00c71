"""The cost of a run, for estimates; no data is loaded and no weights are allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model.

    Args:
        weights: bytes of the weights.
        forward: floating-point operations of the forward pass of one sample.
        outputs: bytes of the outputs of all layers in the forward pass of one sample.
    """

    weights: float
    forward: float
    outputs: float


@dataclass(frozen=True)
class Probe:
    """A network of the architecture of a run, to measure the speed of a machine.

    Args:
        name: identifies the architecture, and what of it is trained.
        build: returns the network with random weights, ready for training.
        shape: the shape of one sample.
        classes: the number of classes.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


@dataclass(frozen=True)
class Workload:
    """The part of the cost of a run that its scenario decides; sizes are numbers of samples.

    Args:
        model: the cost of the model.
        probe: a network of the same architecture.
        sizes: the sizes of the sets: `forget`, and `retain` and `all` if there are rivals.
        trained: samples processed by the trainings of the original and of the retrained model.
        choosing: samples of one measurement that chooses λ.
        reported: samples of one measurement that is reported.
        batch: the batch size of the training of the original.
        tangent: whether models are linearised: a pass costs twice as much, and one pass over the
            samples that choose λ serves every λ.
        shared: a text that is equal in all runs that can share their members; None if runs cannot.
    """

    model: ModelCost
    probe: Probe
    sizes: Mapping[str, int]
    trained: int
    choosing: int
    reported: int
    batch: int = 1
    tangent: bool = False
    shared: str | None = None


def model_cost(network: nn.Module, inputs: Tensor) -> ModelCost:
    """Return the cost of a network, by a forward pass on the device `meta`, which computes nothing.

    Args:
        network: the network, on the device `meta`.
        inputs: a batch, on the device `meta`.
    """
    outputs: list[int] = []

    def count(module: nn.Module, given: object, output: object) -> None:
        outputs.append(output.numel() if isinstance(output, Tensor) else 0)

    for module in network.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        network.eval()(inputs)
    return ModelCost(
        weights=4.0 * sum(p.numel() for p in network.parameters()),
        forward=counter.get_total_flops() / len(inputs),
        outputs=4.0 * sum(outputs) / len(inputs),
    )
