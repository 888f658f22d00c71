"""The cost of a run, for estimates; no data is loaded and no weights are allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from negmerge.errors import OptionError, quoted
from negmerge.vision.datasets import DataSize, datasets
from negmerge.vision.settings import Data


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
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


@dataclass(frozen=True)
class Workload:
    """The part of the cost of a run that its scenario decides; sizes are numbers of samples.

    Args:
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


def size_of(data: Data) -> DataSize:
    """Return how many images of a registered data set a recipe uses, and the number of classes.

    >>> size_of(Data(name="cifar10", limit={"train": 1000}))
    DataSize(train=1000, test=10000, classes=10)
    >>> size_of(Data(name="/mirrors/cars"))
    Traceback (most recent call last):
    negmerge.errors.OptionError: data set '/mirrors/cars': the number of images is not known...
    """
    counts = datasets.get(data.name).counts if data.name in datasets else None
    if counts is None:
        raise OptionError(
            f"data set {quoted(data.name)}: the number of images is not known; register the data "
            "set with `counts`"
        )
    return counts._replace(**{k: v for k, v in data.limit if v is not None})


def model_cost(network: nn.Module, inputs: Tensor) -> ModelCost:
    """Return the cost of a network on the device `meta`, where a forward pass computes nothing."""
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
