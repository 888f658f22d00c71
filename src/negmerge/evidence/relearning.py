"""How soon does a model relearn what it forgot?

Knowledge that was only suppressed comes back after a few steps of training on part of the forget
set; a model that never had it needs as many as the retrained model. The curve is measured on other
samples than those that are trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evidence.findings import ORIGINAL, RETRAINED, Finding, Quantity
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
RATE = 0.1
"""The learning rate, as a share of that of the original's training, at whose end it is small."""


def parts(scenario: DataScenario, seed: int) -> tuple[Feed, Feed]:
    """Return samples to relearn from, with as many of the retain set, and held-out ones to measure.

    If a class is forgotten, the held-out samples are unseen ones of it; otherwise they are the
    other part of the reported forget set.
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
        unseen = SomeOf(forget, np.sort(order[count:] if len(forget) > 1 else order))
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


def curve(subject: Subject, feed: Feed, held_out: Feed, repeat: int) -> list[tuple[float, float]]:
    """Train a copy of a model; return its forget metric on held-out samples at some steps."""
    scenario, network = subject.scenario, copy.deepcopy(subject.network)
    settings = settings_of(scenario, len(feed))
    objective = with_fixed_statistics(scenario.loss(settings))
    name, points, done = scenario.settings.forget_metric, list[tuple[float, float]](), 0

    def measure() -> None:
        found = scenario.measure_on({"forget": held_out}, network, subject.advance)
        points.append((float(done), float(found.row()[name])))

    def advance(count: int) -> None:
        nonlocal done
        done += 1
        subject.advance(count)
        if done in STEPS:
            measure()

    measure()
    seed = seed_of("relearning", subject.seed, repeat)
    train(network, feed, settings, seed, objective=objective, advance=advance)
    return points


def find(subject: Subject) -> Findings:
    """Relearn with several orders of the samples."""
    feed, held_out = parts(subject.scenario, subject.seed)
    found: Findings = {}
    for repeat in range(REPEATS):
        try:
            points = curve(subject, feed, held_out, repeat)
        except ValueRangeError as error:
            return {"steps": Finding(value=None, why=str(error))}
        found[f"repeat_{repeat}"] = Finding(value=points[-1][1], curve=points, n=len(held_out))
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
    if not curves[ORIGINAL]:
        return failed
    target = SHARE * curves[ORIGINAL][0][0][1]
    results: dict[str, Findings] = {}
    for title, own in curves.items():
        if title in failed:
            results[title] = failed[title]
            continue
        crossings = [crossing(points, target) for points in own]
        steps = [count for count, _ in crossings]
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
        if null is None or not null.value or steps.value is None:
            why = "the retrained model needs no step" if null is not None else "no retrained model"
            own["ratio"] = Finding(value=None, why=why)
        elif null.least and steps.least:
            own["ratio"] = Finding(value=None, why="neither model is there after the last step")
        else:
            ratio = steps.value / null.value
            own["ratio"] = Finding(value=ratio, least=steps.least, most=null.least)
    return results


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean of curves that were measured at the same steps.

    >>> mean_curve([[(0, 1.0), (1, 3.0)], [(0, 3.0), (1, 3.0)]])
    [(0, 2.0), (1, 3.0)]
    """
    steps = zip(*curves, strict=True)
    return [(points[0][0], float(np.mean([y for _, y in points]))) for points in steps]


def _size(scenario: DataScenario) -> int:
    feed, held_out = parts(scenario, 0)
    trained = settings_of(scenario, len(feed)).epochs * len(feed)
    return REPEATS * (trained + len(STEPS) * len(held_out))


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
        tier="standard",
        quantities=(
            Quantity(
                name="steps",
                label="steps until 90 % of the original's metric on held-out samples",
                short="steps to relearn",
                unit="steps",
                better="higher",
                above="relearns more slowly than a model that never knew it",
                below="relearns faster than a model that never knew it: suppressed, not forgotten",
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
        finish=finish,
        find=find,
        size=_size,
    ),
)
