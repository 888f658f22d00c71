"""What runs need by an estimate: disk, memory, GPU-hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from negmerge.rivals import rivals
from negmerge.runs.recipe import Recipe
from negmerge.runs.rival_trainings import suited_rival
from negmerge.runs.shadows import recipe_of_shadows
from negmerge.scenarios.workload import Probe
from negmerge.training.hyperparameters import HyperParameters

SUSTAINED = 1.0e13
"""Floating-point operations per second that a data-centre GPU is assumed to sustain."""


@dataclass(frozen=True)
class Processed:
    """The samples that one network processes in trainings (once per epoch) and in measurements."""

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

    The hours are those of a GPU that sustains `SUSTAINED`. `weights` are the bytes of one model (of
    the largest, if there are several), `networks` has the samples that each
    network processes, by the name of its probe.
    """

    disk: float
    memory: float
    hours: float
    weights: float = 0
    networks: Mapping[str, Processed] = field(default_factory=dict)

    def __add__(self, other: Estimate) -> Estimate:
        networks = dict(self.networks)
        for name, work in other.networks.items():
            networks[name] = networks[name] + work if name in networks else work
        memory, weights = max(self.memory, other.memory), max(self.weights, other.weights)
        disk, hours = self.disk + other.disk, self.hours + other.hours
        return Estimate(disk, memory, hours, weights, networks)

    def __str__(self) -> str:
        return (
            f"about {self.disk / 1e9:,.1f} GB of disk without the data, {self.memory / 1e9:.1f} GB "
            f"of GPU memory, {self.hours:,.1f} GPU-hours at {SUSTAINED / 1e12:.0f} TFLOP/s"
        )


NOTHING = Estimate(0, 0, 0)


def estimate(recipe: Recipe, done: set[str] | None = None) -> Estimate:
    """Estimate what a run of a recipe needs, without loading data or weights.

    >>> from negmerge.runs.recipe import load_recipe
    >>> 1 < estimate(load_recipe("cifar10_resnet18")).hours < 20
    True

    `done` has the members that earlier runs have trained; the members of this run are added.
    """
    search, work = recipe.search, recipe.settings.workload(recipe.setup())
    pool = recipe.pool
    members, fresh = pool.members(), pool.trainings()
    if work.shared is not None and done is not None:
        fresh = [one for one in pool.trainings() if f"{work.shared} {one}" not in done]
        done.update(f"{work.shared} {one}" for one in pool.trainings())
    trained = work.trained + sum(member.epochs for member in fresh) * work.sizes["forget"]
    models = len(fresh) * pool.per_training + 2
    if recipe.retain_training is not None:
        trained, models = trained + work.sizes["retain"], models + 1
    if recipe.evidence != "basic":  # a second retrained model
        trained += recipe.settings.retraining(work.sizes) or 0
        models += 1
    merged = [method for method in recipe.methods if method.name not in rivals]
    for method in (method for method in recipe.methods if method.name in rivals):
        rival, tries = suited_rival(recipe, method), search.tries if method.tune else 1
        used, options = rival.resolve(method.options)
        trained += tries * used.epochs * work.sizes[rival.used(options)]
        models += tries
    searched = [method for method in merged if method.add is None]
    single = any(method.name == "single_best" for method in searched)
    sweeps = len(searched) + len(members) * (1 if single else 0.25)
    seen = sweeps * (1 if work.tangent else search.passes()) * work.choosing
    seen += (len(recipe.methods) + 2 + len(members)) * work.reported
    if recipe.evidence == "full":
        shadows = recipe.shadows
        unlearned = shadows.fraction * work.sizes["forget"] / 3
        few = recipe_of_shadows(recipe).pool.trainings()
        own = work.trained + sum(member.epochs for member in few) * unlearned
        trained += shadows.count * own
        seen += shadows.count * search.passes() * work.choosing
    tangent = 2 if work.tangent else 1
    operations = tangent * work.model.forward * (3 * trained + seen)
    batch = max(work.batch, recipe.pool.settings.batch)
    memory = 4 * work.model.weights + tangent * batch * work.model.outputs
    disk = work.model.weights * (models + len(merged) + 2)
    networks = {work.probe.name: Processed(work.probe, members[0], trained, seen)}
    return Estimate(disk, memory, operations / SUSTAINED / 3600, work.model.weights, networks)


def total_of(recipes: Sequence[Recipe]) -> Estimate:
    """The estimate of several runs, which train equal members once."""
    done: set[str] = set()
    return sum((estimate(recipe, done) for recipe in recipes), NOTHING)
