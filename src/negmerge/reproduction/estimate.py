"""What a recipe will need, before it is begun: disk, memory, GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from negmerge.criteria import criteria
from negmerge.data.datasets import resolve
from negmerge.errors import OptionError, shown
from negmerge.hyperparameters import HyperParameters
from negmerge.models.classifiers import create
from negmerge.models.pretrained import ClipSource
from negmerge.recipe import Recipe
from negmerge.rivals import rivals

SUSTAINED = 1.0e13
"""Floating-point operations a second that a GPU is taken to keep up; a data-centre one's share."""

SIZES = {
    "cifar10": (50_000, 10_000, 10),
    "cub200": (5_994, 5_794, 200),
    "tiny_imagenet": (100_000, 10_000, 200),
    "fashion_small": (8_000, 2_500, 10),
    "fashion_mnist": (60_000, 10_000, 10),
    "cars": (8_144, 8_041, 196),
    "dtd": (3_760, 1_880, 47),
    "eurosat": (21_600, 2_700, 10),
    "gtsrb": (26_640, 12_630, 43),
    "mnist": (60_000, 10_000, 10),
    "resisc45": (18_900, 6_300, 45),
    "sun397": (19_850, 19_850, 397),
    "svhn": (73_257, 26_032, 10),
    "imagenet": (1_281_167, 50_000, 1000),
}
"""Training and test images, and classes, of the data sets of the paper's recipes."""


@dataclass(frozen=True)
class Estimate:
    """What runs take, roughly: bytes of disk without the data, bytes of memory, GPU-hours."""

    disk: float
    memory: float
    hours: float

    def __add__(self, other: Estimate) -> Estimate:
        memory = max(self.memory, other.memory)
        return Estimate(self.disk + other.disk, memory, self.hours + other.hours)

    def __str__(self) -> str:
        return (
            f"about {self.disk / 1e9:,.1f} GB of disk beside the data, {self.memory / 1e9:.1f} GB "
            f"of GPU memory, {self.hours:,.1f} GPU-hours at {SUSTAINED / 1e12:.0f} TFLOP/s"
        )


def estimate(recipe: Recipe, done: set[str] | None = None) -> Estimate:
    """What a run of a recipe takes; nothing is loaded.

    done: trainings of a CLIP that runs before it have done; those of this run are added.

    >>> from negmerge.recipe import load_recipe
    >>> 1 < estimate(load_recipe("cifar10_resnet18")).hours < 20
    True
    """
    train, test, classes = size_of(recipe.data.name)
    train, test = recipe.data.limit.train or train, recipe.data.limit.test or test
    members = recipe.pool.members()
    merged = [method for method in recipe.methods if method.name not in rivals]
    single = any(method.name == "single_best" and method.add is None for method in merged)
    sweeps = len([m for m in merged if m.add is None]) + len(members) * (1 if single else 0.25)
    models = len(members) + 2
    if recipe.clip is not None:
        cost = _clip(recipe.model.name)
        fresh = _fresh(recipe, members, set() if done is None else done)
        trained = sum(member.epochs for member in fresh) * train
        models = len(fresh) + 2
        choosing = 2 * recipe.search.samples
        reported = test + size_of(recipe.clip.control.name)[1]
    else:
        source = resolve(recipe.data.name)
        size = recipe.data.size or source.size
        cost = _classifier(recipe.model.name, classes, source.channels, size)
        train = round(train * (1 - recipe.split.validation))
        forget = round(train * (recipe.split.forget.fraction or 1 / classes))
        parts = {"forget": forget, "retain": train - forget, "all": train}
        trained = recipe.train.epochs * train + sum(m.epochs for m in members) * forget
        if recipe.retrain is not None:
            trained += recipe.train.epochs * parts["retain"]
        for method in recipe.methods:
            if method.name in rivals:
                rival, tries = rivals.get(method.name), recipe.search.tries if method.tune else 1
                settings, options = rival.resolve(method.options)
                trained += tries * settings.epochs * parts[rival.used(options)]
                models += tries
        looks = criteria.get(recipe.criterion).looks
        choosing = train + test if looks else 3 * recipe.search.samples
        reported = train + test
    linear = recipe.clip is not None and recipe.clip.linear
    passes = 1 if linear else recipe.search.passes()
    seen = sweeps * passes * choosing
    seen += (len(recipe.methods) + 2 + len(members)) * reported
    tangent = 2 if linear else 1
    operations = tangent * cost.forward * (3 * trained + seen)
    batch = max(recipe.train.batch, recipe.pool.settings.batch)
    memory = 4 * cost.weights + tangent * batch * cost.outputs
    return Estimate(
        cost.weights * (models + len(merged) + 2), memory, operations / SUSTAINED / 3600
    )


def _fresh(recipe: Recipe, members: list[HyperParameters], done: set[str]) -> list[HyperParameters]:
    """The members that no run before has trained."""
    clip, data = recipe.clip, recipe.data
    assert clip is not None
    problem = [data, recipe.model, clip.pretrained, clip.freeze, clip.linear, recipe.seed]
    keys = {f"{problem} {member}": member for member in members}
    fresh = [member for key, member in keys.items() if key not in done]
    done.update(keys)
    return fresh


def size_of(name: str) -> tuple[int, int, int]:
    """Training and test images, and classes, of a data set.

    >>> size_of("/mirrors/cars")
    Traceback (most recent call last):
    negmerge.errors.OptionError: data set '/mirrors/cars': its size is not known
    """
    if name not in SIZES:
        raise OptionError(f"data set {shown(name)}: its size is not known")
    return SIZES[name]


@dataclass
class _Cost:
    """Bytes of weights, and of one image: operations of a forward pass, bytes of all outputs."""

    weights: float = 0.0
    forward: float = 0.0
    outputs: float = 0.0

    def note(self, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            self.outputs += 4.0 * output.numel() / 2


def _count(network: nn.Module, channels: int, size: int) -> _Cost:
    """Two images that hold nothing go through a network that holds nothing."""
    cost = _Cost(weights=4.0 * sum(p.numel() for p in network.parameters()))
    for module in network.modules():
        if not list(module.children()):
            module.register_forward_hook(cost.note)
    with FlopCounterMode(display=False) as counter:
        network.eval()(torch.zeros(2, channels, size, size, device="meta"))
    cost.forward = counter.get_total_flops() / 2
    return cost


@cache
def _classifier(name: str, classes: int, channels: int, size: int) -> _Cost:
    with torch.device("meta"):
        mean = [0.5] * channels
        network = create(name, classes, channels, mean, mean)
    return _count(network, channels, size)


@cache
def _clip(name: str) -> _Cost:
    source = ClipSource(name)
    with torch.device("meta"):
        clip = source.build()
    cost = _count(clip.get_submodule("visual"), 3, source.size)
    rest = ("visual.", "transformer.", "text.")  # of the text side all but its transformer is kept
    left = sum(p.numel() for n, p in clip.named_parameters() if not n.startswith(rest))
    cost.weights += 4.0 * left
    return cost
