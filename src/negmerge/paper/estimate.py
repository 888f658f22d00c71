"""An estimate of what the run of a recipe needs: disk, memory, GPU-hours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from negmerge.rivals import rivals
from negmerge.runs.recipe import Recipe
from negmerge.scenarios.settings import Setup
from negmerge.scenarios.workload import Probe, Workload
from negmerge.training.hyperparameters import HyperParameters

SUSTAINED = 1.0e13
"""Floating-point operations per second that a data-centre GPU is assumed to sustain."""


@dataclass(frozen=True)
class Processed:
    """The samples that one network processes.

    Args:
        probe: a network of the same architecture.
        settings: the settings of a training of it.
        trained: the samples of all trainings, counted once per epoch.
        scored: the samples of all measurements.
    """

    probe: Probe
    settings: HyperParameters
    trained: float
    scored: float

    def __add__(self, other: Processed) -> Processed:
        both = (self.trained + other.trained, self.scored + other.scored)
        return Processed(self.probe, self.settings, *both)


@dataclass(frozen=True)
class Estimate:
    """A rough estimate: bytes of disk without the data, bytes of GPU memory, GPU-hours.

    Args:
        disk, memory, hours: the estimate; the hours are those of a GPU that sustains `SUSTAINED`.
        networks: the samples that each network processes, by the name of its probe.
    """

    disk: float
    memory: float
    hours: float
    networks: Mapping[str, Processed] = field(default_factory=dict)

    def __add__(self, other: Estimate) -> Estimate:
        networks = dict(self.networks)
        for name, work in other.networks.items():
            networks[name] = networks[name] + work if name in networks else work
        memory = max(self.memory, other.memory)
        return Estimate(self.disk + other.disk, memory, self.hours + other.hours, networks)

    def __str__(self) -> str:
        return (
            f"about {self.disk / 1e9:,.1f} GB of disk without the data, {self.memory / 1e9:.1f} GB "
            f"of GPU memory, {self.hours:,.1f} GPU-hours at {SUSTAINED / 1e12:.0f} TFLOP/s"
        )


NOTHING = Estimate(0, 0, 0)


def workload_of(recipe: Recipe) -> Workload:
    """The part of the cost of a run that its scenario decides."""
    uses_reported_data = recipe.settings.criterion(recipe.criterion).uses_reported_data
    return recipe.settings.workload(Setup(recipe.seed, recipe.search.samples, uses_reported_data))


def estimate(recipe: Recipe, done: set[str] | None = None) -> Estimate:
    """Estimate what a run of a recipe needs, without loading data or weights.

    >>> from negmerge.runs.recipe import load_recipe
    >>> 1 < estimate(load_recipe("cifar10_resnet18")).hours < 20
    True

    Args:
        recipe: of the run.
        done: the members that earlier runs have trained; the members of this run are added.
    """
    search, work = recipe.search, workload_of(recipe)
    members = fresh = recipe.pool.members()
    if work.shared is not None and done is not None:
        fresh = [member for member in members if f"{work.shared} {member}" not in done]
        done.update(f"{work.shared} {member}" for member in members)
    trained = work.trained + sum(member.epochs for member in fresh) * work.sizes["forget"]
    models = len(fresh) + 2
    merged = [method for method in recipe.methods if method.name not in rivals]
    for method in (method for method in recipe.methods if method.name in rivals):
        rival, tries = rivals.get(method.name), search.tries if method.tune else 1
        used, options = rival.resolve(method.options)
        trained += tries * used.epochs * work.sizes[rival.used(options)]
        models += tries
    searched = [method for method in merged if method.add is None]
    single = any(method.name == "single_best" for method in searched)
    sweeps = len(searched) + len(members) * (1 if single else 0.25)
    seen = sweeps * (1 if work.tangent else search.passes()) * work.choosing
    seen += (len(recipe.methods) + 2 + len(members)) * work.reported
    tangent = 2 if work.tangent else 1
    operations = tangent * work.model.forward * (3 * trained + seen)
    batch = max(work.batch, recipe.pool.settings.batch)
    memory = 4 * work.model.weights + tangent * batch * work.model.outputs
    disk = work.model.weights * (models + len(merged) + 2)
    processed = Processed(work.probe, members[0], trained, seen)
    networks = {work.probe.name: processed}
    return Estimate(disk, memory, operations / SUSTAINED / 3600, networks)
