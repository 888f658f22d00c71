"""How soon does a model relearn what it forgot?

Knowledge that was only suppressed comes back after a few steps of training on part of the forget
set; a model that never had it needs as many as the retrained model. The curve is measured on other
samples than those that are trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evidence.findings import RETRAINED, Finding, Quantity
from negmerge.evidence.registry import Findings, ModelTest, Subject, forgetting_tests
from negmerge.evidence.sets import SomeOf, some_of
from negmerge.scenarios.data import DataScenario
from negmerge.training.feeds import Batch, CachedFeed, Feed, JoinedFeed, steps_of
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective, train
from negmerge.training.seeds import seed_of

STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
"""The numbers of steps after which the model is measured."""
SAMPLES = 500
"""The largest number of samples of the forget set to train on, and of held-out ones to measure."""
REPEATS = 3
"""The number of orders of the samples."""
SHARE = 0.9
"""The share of the original's metric that counts as relearned."""
ALONE = "the forget set has one sample, and no other one to measure"
NOTHING = "the retrained model is there without a step: relearning shows nothing here"
RATE = 0.1
"""The learning rate, as a share of that of the original's training, at whose end it is small."""


def parts(scenario: DataScenario, seed: int) -> tuple[Feed, Feed]:
    """Return samples to relearn from, with as many of the retain set, and held-out ones to measure.

    If a class is forgotten, the held-out samples are unseen ones of it; otherwise they are the
    other part of the reported forget set, of which a single sample leaves none.
    """
    sets = scenario.eval_sets("report")
    forget, retain = sets["forget"], sets["retain"]
    rng = np.random.default_rng(seed_of("relearning", seed))
    order = rng.permutation(len(forget))
    unseen = None
    if scenario.describe().forgotten_class is not None:
        unseen = scenario.unseen_set()
    count = min(SAMPLES, len(forget) if unseen is not None else max(len(forget) // 2, 1))
    if unseen is None:
        unseen = SomeOf(forget, np.sort(order[count:]))
    kept = rng.permutation(len(retain))[:count]
    both = [SomeOf(forget, np.sort(order[:count])), SomeOf(retain, np.sort(kept))]
    return JoinedFeed(both, mixed=True), CachedFeed(some_of(unseen, SAMPLES))


def settings_of(scenario: DataScenario, size: int) -> HyperParameters:
    """Return the settings of relearning: those of the original's training, with a constant rate."""
    own = scenario.training
    epochs = -(-STEPS[-1] // steps_of(size, own.batch))
    changes = {"epochs": epochs, "lr": RATE * own.lr, "schedule": "constant", "warmup": 0}
    return own.model_copy(update=changes | {"compile": False})


def with_fixed_statistics(objective: Objective) -> Objective:
    """Return an objective that leaves the statistics of BatchNorm as they are."""

    def fixed(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore
                module.eval()
        return objective(model, batch, epoch)

    return fixed


class Reached(Exception):
    """The model knows enough: raised to end a training."""


def metric_on(subject: Subject, network: nn.Module, held_out: Feed) -> float:
    """Return the forget metric of a model on held-out samples."""
    scenario = subject.scenario
    found = scenario.measure_on({"forget": held_out}, network, subject.advance)
    return float(found.row()[scenario.settings.forget_metric])


def curve(
    subject: Subject, feed: Feed, held_out: Feed, target: float, repeat: int
) -> list[tuple[float, float]]:
    """Train a copy of a model until its forget metric on held-out samples reaches a target.

    Returns:
        The metric at some steps, at the last one if the target is not reached.
    """
    scenario, network = subject.scenario, copy.deepcopy(subject.network)
    settings = settings_of(scenario, len(feed))
    objective = with_fixed_statistics(scenario.loss(settings))
    points, done = [(0.0, metric_on(subject, network, held_out))], 0

    def advance(count: int) -> None:
        nonlocal done
        done += 1
        subject.advance(count)
        if done in STEPS:
            points.append((float(done), metric_on(subject, network, held_out)))
        if points[-1][1] >= target or done >= STEPS[-1]:
            raise Reached

    if points[0][1] < target:
        seed = seed_of("relearning", subject.seed, repeat)
        with suppress(Reached):
            train(network, feed, settings, seed, objective=objective, advance=advance)
    return points


def find(subject: Subject) -> Findings:
    """Relearn with several orders of the samples."""
    feed, held_out = parts(subject.scenario, subject.seed)
    if not len(held_out):
        return {"steps": Finding(value=None, why=ALONE)}
    original = subject.scenario.model(subject.original)
    target = SHARE * metric_on(subject, original, held_out)
    found: Findings = {}
    for repeat in range(REPEATS):
        try:
            points = curve(subject, feed, held_out, target, repeat)
        except ValueRangeError as error:
            return {"steps": Finding(value=None, why=str(error))}
        found[f"repeat_{repeat}"] = Finding(value=target, curve=points, n=len(held_out))
    return found


def crossing(points: Sequence[tuple[float, float]], target: float) -> tuple[float, bool]:
    """Return after how many steps a curve reaches a target, and whether it does at all.

    Between two points the curve is taken to be a line.

    >>> crossing([(0, 10.0), (1, 20.0), (2, 60.0)], 40.0), crossing([(0, 10.0), (1, 20.0)], 40.0)
    ((1.5, True), (1, False))
    """
    before: tuple[float, float] | None = None
    for steps, value in points:
        if value >= target:
            if before is None:
                return steps, True
            share = (target - before[1]) / (value - before[1])
            return before[0] + share * (steps - before[0]), True
        before = steps, value
    return points[-1][0], False


def finish(found: dict[str, Findings]) -> dict[str, Findings]:
    """Compute the steps until 90 % of the original's metric, and their ratio to the retrained's."""
    curves = {
        title: [one.curve for name, one in own.items() if name.startswith("repeat_")]
        for title, own in found.items()
    }
    failed = {title: own for title, own in found.items() if not curves[title]}
    results: dict[str, Findings] = {}
    for title, own in curves.items():
        if title in failed:
            results[title] = failed[title]
            continue
        target = found[title]["repeat_0"].value or 0.0  # 90 % of the original's metric
        crossings = [crossing(points, target) for points in own]
        steps = [round(count, 1) for count, _ in crossings]
        results[title] = {
            "steps": Finding(
                value=float(np.median(steps)),
                low=min(steps),
                high=max(steps),
                n=found[title]["repeat_0"].n,
                least=not all(reached for _, reached in crossings),
                curve=mean_curve(own),
            )
        }
    null = results.get(RETRAINED, {}).get("steps")
    for own in results.values():
        steps = own["steps"]
        if null is None:
            own["ratio"] = Finding(value=None, why="no retrained model to compare with")
        elif steps.value is None:
            own["ratio"] = Finding(value=None, why=steps.why)
        elif null.value is None:
            own["ratio"] = Finding(value=None, why=f"the retrained model: {null.why}")
        elif not null.value:
            own["steps"] = Finding(value=None, why=NOTHING, n=steps.n, curve=steps.curve)
            own["ratio"] = Finding(value=None, why=NOTHING)
        elif null.least and steps.least:
            own["ratio"] = Finding(value=None, why="neither model is there after the last step")
        else:
            ratio = steps.value / null.value
            own["ratio"] = Finding(value=ratio, least=steps.least, most=null.least)
    return results


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean of curves, at the steps at which all of them were measured.

    >>> mean_curve([[(0, 1.0), (1, 3.0)], [(0, 3.0), (1, 3.0), (2, 5.0)]])
    [(0, 2.0), (1, 3.0)]
    """
    steps = zip(*curves, strict=False)
    return [(points[0][0], float(np.mean([y for _, y in points]))) for points in steps]


def _size(scenario: DataScenario) -> int:
    feed, held_out = parts(scenario, 0)
    trained = settings_of(scenario, len(feed)).epochs * len(feed)
    return REPEATS * (trained + len(STEPS) * len(held_out))  # at most


forgetting_tests.register(
    "relearning",
    ModelTest(
        name="relearning",
        title="How soon is it relearned?",
        text=(
            f"Each model is trained on at most {SAMPLES} samples of the forget set, mixed with as "
            "many of the retain set, with the settings of the original's training, a constant "
            f"{RATE:g} of its learning rate and fixed BatchNorm statistics. The curve is measured "
            "on held-out samples: of a forgotten class, unseen ones; of forgotten records, others "
            "of them. Steps are counted until 90 % of the original's metric; the ends of "
            f"the interval are the fewest and the most of {REPEATS} orders of the samples."
        ),
        place=40,
        tier="standard",
        quantities=(
            Quantity(
                name="steps",
                label="steps until 90 % of the original's metric on held-out samples",
                short="steps to relearn",
                unit="steps",
                better="higher",
                above="relearns more slowly than a model that never knew it",
                below="relearns faster than a model that never knew it, a sign that knowledge was "
                "suppressed, not removed",
            ),
            Quantity(
                name="ratio",
                label="steps to relearn, divided by those of the retrained model",
                short="× retrained",
                unit="",
            ),
        ),
        needs=frozenset(("relearning", "sets")),
        axis="training steps",
        y_axis="held-out samples: {metric}",
        finish=finish,
        find=find,
        size=_size,
        version=2,
    ),
)
