"""What a recipe will need, before it is begun: disk, memory, GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from negmerge.criteria import criteria
from negmerge.data.datasets import resolve
from negmerge.models.classifiers import create
from negmerge.recipe import Recipe
from negmerge.rivals import rivals

SUSTAINED = 1.0e13
"""Floating-point operations a second that a GPU is taken to keep up; a data-centre one's share."""

SIZES = {
    "cifar10": (50_000, 10_000, 10),
    "cub200": (5_994, 5_794, 200),
    "tiny_imagenet": (100_000, 10_000, 200),
    "fashion_small": (4_000, 1_000, 10),
}
"""Training and test images, and classes, of the data sets of the paper's recipes."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes, roughly: bytes of disk without the data, bytes of memory, GPU-hours."""

    disk: float
    memory: float
    hours: float

    def __add__(self, other: Estimate) -> Estimate:
        memory = max(self.memory, other.memory)
        return Estimate(self.disk + other.disk, memory, self.hours + other.hours)

    def __str__(self) -> str:
        return (
            f"about {self.disk / 1e9:.1f} GB of disk beside the data, {self.memory / 1e9:.1f} GB "
            f"of GPU memory, {self.hours:.1f} GPU-hours at {SUSTAINED / 1e12:.0f} TFLOP/s"
        )


def estimate(recipe: Recipe) -> Estimate:
    """What a run of a recipe takes; nothing is loaded."""
    source = resolve(recipe.data.name)
    size = recipe.data.size or source.size
    train, test, classes = SIZES[recipe.data.name]
    train, test = recipe.data.limit.train or train, recipe.data.limit.test or test
    train = round(train * (1 - recipe.split.validation))
    share = recipe.split.forget.fraction or 1 / classes
    forget = round(train * share)
    parts = {"forget": forget, "retain": train - forget, "all": train}
    cost = _Cost(recipe, classes, source.channels, size)

    members = recipe.pool.members()
    trained = recipe.train.epochs * train
    if recipe.retrain is not None:
        trained += recipe.train.epochs * parts["retain"]
    trained += sum(member.epochs for member in members) * forget
    models = len(members) + 2
    for method in recipe.methods:
        if method.name in rivals:
            rival, tries = rivals.get(method.name), recipe.search.tries if method.tune else 1
            settings, options = rival.resolve(method.options)
            trained += tries * settings.epochs * parts[rival.used(options)]
            models += tries
    looks = criteria.get(recipe.criterion).looks
    choosing = train + test if looks else 3 * recipe.search.samples
    merged = [method for method in recipe.methods if method.name not in rivals]
    single = any(method.name == "single_best" for method in merged)
    sweeps = len(merged) + len(members) * (1 if single else 0.25)
    seen = sweeps * len(recipe.search.grid()) * choosing
    seen += (len(recipe.methods) + 2 + len(members)) * (train + test)
    operations = cost.forward * (3 * trained + seen)
    disk = cost.weights * (models + len(merged) + 2)
    batch = max(recipe.train.batch, recipe.pool.settings.batch)
    return Estimate(disk, 4 * cost.weights + batch * cost.outputs, operations / SUSTAINED / 3600)


class _Cost:
    """Bytes of weights, and of one image: operations of a forward pass, bytes of all outputs."""

    def __init__(self, recipe: Recipe, classes: int, channels: int, size: int) -> None:
        self.outputs = 0.0
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            mean = [0.5] * channels
            network = create(recipe.model.name, classes, channels, mean, mean).eval()
            for module in network.modules():
                if not list(module.children()):
                    module.register_forward_hook(self._note)
            network(torch.zeros(2, channels, size, size))
        self.forward = counter.get_total_flops() / 2
        self.weights = 4.0 * sum(p.numel() for p in network.parameters())

    def _note(self, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            self.outputs += 4.0 * output.numel() / 2
