"""How soon does a model relearn what it forgot?

Knowledge that was only suppressed comes back after a few steps of training on part of the forget
set; a model that never had it needs as many as the retrained model. The curve is measured on other
samples than those that are trained on. A single curve rises and falls by chance: what is compared
is the mean height of several, and steps are counted on their mean.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from math import hypot

import numpy as np
from scipy.stats import t
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evaluation.metrics import Measured
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
REPEATS = 5
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


class Finished(Exception):
    """The last step is done: raised to end a training."""


def metric_on(subject: Subject, network: nn.Module, held_out: Feed) -> Measured:
    """Return the forget metric of a model on held-out samples; its interval may have no width."""
    scenario, name = subject.scenario, subject.scenario.settings.forget_metric
    found = scenario.measure_on({"forget": held_out}, network, subject.advance)
    value = float(found.row()[name])
    return Measured(value, *found.intervals.get(name, (value, value)), len(held_out))


def curve(
    subject: Subject, feed: Feed, held_out: Feed, repeat: int
) -> list[tuple[float, Measured]]:
    """Train a copy of a model; return its forget metric on held-out samples at some steps."""
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
        if done >= STEPS[-1]:
            raise Finished

    with suppress(Finished):
        seed = seed_of("relearning", subject.seed, repeat)
        train(network, feed, settings, seed, objective=objective, advance=advance)
    return points


def find(subject: Subject) -> Findings:
    """Relearn with several orders of the samples."""
    feed, held_out = parts(subject.scenario, subject.seed)
    if not len(held_out):
        return {"height": Finding(value=None, why=ALONE)}
    original = subject.scenario.model(subject.original)
    target = SHARE * metric_on(subject, original, held_out).value
    found: Findings = {}
    for repeat in range(REPEATS):
        try:
            points = curve(subject, feed, held_out, repeat)
        except ValueRangeError as error:
            return {"height": Finding(value=None, why=str(error))}
        after = [one for steps, one in points if steps]
        found[f"repeat_{repeat}"] = Finding(
            value=target,
            low=float(np.mean([one.low for one in after])),
            high=float(np.mean([one.high for one in after])),
            curve=[(steps, one.value) for steps, one in points],
            n=len(held_out),
        )
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


def height(curves: Sequence[Finding]) -> Finding:
    """Return the mean of all points after the first step, with its interval.

    The interval joins, as squares, that of the held-out samples and the t interval over the curves,
    which alone would have no width if one batch holds all samples, and their order changes nothing.
    It ends at the lowest and at the highest point or end of an interval of the samples, as that of
    a share does at 100 %.

    >>> found = height([
    ...     Finding(value=None, low=60.0, high=78.0, curve=[(0, 0.0), (1, 50.0), (2, 90.0)]),
    ...     Finding(value=None, low=60.0, high=78.0, curve=[(0, 0.0), (1, 50.0), (2, 90.0)]),
    ... ])
    >>> found.value, found.low, found.high
    (70.0, 60.0, 78.0)

    Args:
        curves: the curves, each with the mean interval of its points after the first step.
    """
    values = [[y for x, y in one.curve if x] for one in curves]
    means = [float(np.mean(own)) for own in values]
    mean, half = float(np.mean(means)), 0.0
    if len(means) > 1:
        spread = float(np.std(means, ddof=1)) / len(means) ** 0.5
        half = float(t.ppf(0.975, len(means) - 1)) * spread
    ends = [(one.low, one.high) for one in curves if one.low is not None and one.high is not None]
    down, up = np.mean(ends, axis=0).tolist() if ends else (mean, mean)
    least, most = min(down, *map(min, values)), max(up, *map(max, values))
    low, high = mean - hypot(half, mean - down), mean + hypot(half, up - mean)
    return Finding(value=mean, low=min(mean, max(low, least)), high=max(mean, min(high, most)))


def finish(found: dict[str, Findings]) -> dict[str, Findings]:
    """Compute the height of the curves, the steps until 90 %, and their ratio to the null's."""
    results: dict[str, Findings] = {}
    for title, own in found.items():
        repeats = [one for name, one in own.items() if name.startswith("repeat_")]
        if not repeats:
            why = own["height"].why
            results[title] = own | {"steps": Finding(value=None, why=why)}
            continue
        first, mean = repeats[0], mean_curve([one.curve for one in repeats])
        steps, reached = crossing(mean, first.value or 0.0)  # 90 % of the original's metric
        results[title] = {
            "height": height(repeats).model_copy(update={"n": first.n, "curve": mean}),
            "steps": Finding(value=round(steps, 1), n=first.n, least=not reached),
        }
    null = results.get(RETRAINED, {}).get("steps")
    nothing = null is not None and null.value == 0
    for own in results.values():
        own["ratio"] = ratio_of(own["steps"], null)
        if nothing and own["steps"].value is not None:
            own["steps"] = Finding(value=None, why=NOTHING, n=own["steps"].n)
    return results


def ratio_of(steps: Finding, null: Finding | None) -> Finding:
    """Return the steps of a model divided by those of the retrained model, or why there is none."""
    if null is None:
        return Finding(value=None, why="no retrained model to compare with")
    if steps.value is None:
        return Finding(value=None, why=steps.why)
    if null.value is None:
        return Finding(value=None, why=f"the retrained model: {null.why}")
    if not null.value:
        return Finding(value=None, why=NOTHING)
    if null.least and steps.least:
        return Finding(value=None, why="neither model is there after the last step")
    return Finding(value=steps.value / null.value, least=steps.least, most=null.least)


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
            f"of them. There are {REPEATS} orders of the samples, and all have {STEPS[-1]} steps. "
            f"Compared is the metric in the mean over the orders and the steps "
            f"{', '.join(map(str, STEPS[1:]))}, whose interval is that of the held-out samples and "
            "of the orders. Steps are counted on the mean curve, until 90 % of the original's "
            "metric."
        ),
        place=40,
        tier="standard",
        quantities=(
            Quantity(
                name="height",
                label="mean of the relearning curve: {metric}",
                short="during relearning",
                of="forget",
                above="knows more while it relearns than a model that never knew it, a sign that "
                "knowledge was suppressed, not removed",
                below="knows less while it relearns than a model that never knew it",
            ),
            Quantity(
                name="steps",
                label="steps until 90 % of the original's metric on held-out samples",
                short="steps to relearn",
                unit="steps",
                better="higher",
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
        version=4,
    ),
)
