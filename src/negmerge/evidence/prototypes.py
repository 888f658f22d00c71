"""Do the features still separate what was forgotten? A classifier from five samples of each class.

A method may change only the last layer, and leave features from which anybody recovers the class
with a few labelled samples.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from negmerge.errors import MismatchError
from negmerge.evaluation.metrics.accuracy import share
from negmerge.evaluation.passes import batches, evaluating
from negmerge.evidence.findings import Finding, Quantity
from negmerge.evidence.membership import finding_of
from negmerge.evidence.registry import Findings, ModelTest, Subject, forgetting_tests
from negmerge.evidence.sets import some_of
from negmerge.scenarios.data import DataScenario
from negmerge.support.progress import Advance
from negmerge.training.feeds import Feed
from negmerge.training.samples import to_device
from negmerge.training.seeds import seed_of

SHOTS, DRAWS = 5, 10
"""The samples of each class of a prototype, and how often they are drawn."""
SAMPLES = 2000
"""The largest number of samples of each set."""
Rows = NDArray[np.float64]


def prototypes(features: Rows, labels: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
    """Return the mean direction of the samples of each class, and the classes.

    >>> prototypes(np.array([[2.0, 0.0], [0.0, 3.0]]), np.array([4, 7]))[1].tolist()
    [4, 7]
    """
    classes = np.unique(labels)
    unit = normalised(features)
    return normalised(np.stack([unit[labels == c].mean(0) for c in classes])), classes


def normalised(rows: Rows) -> Rows:
    """Return rows of length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1.0)


def features_of(
    scenario: DataScenario, model: nn.Module, name: str, feed: Feed, advance: Advance
) -> tuple[Rows, NDArray[np.int64]]:
    """Return the features and the labels of the samples of a set."""
    device = next(p.device for p in model.parameters())
    rows: list[Rows] = []
    labels: list[NDArray[np.int64]] = []
    with evaluating(model), torch.inference_mode():
        for picked in batches(len(feed)):
            inputs, targets = feed.test_batch(picked)
            found = scenario.features(model, name, to_device(inputs, device))
            rows.append(found.flatten(1).double().cpu().numpy())
            labels.append(targets.numpy())
            advance(len(picked))
    return np.concatenate(rows), np.concatenate(labels)


def sets_of(scenario: DataScenario) -> dict[str, Feed]:
    """Return the forget set; if the model has one head, the retain set; of a class, unseen ones."""
    reported = scenario.eval_sets("report")
    found = {"forget": some_of(reported["forget"], SAMPLES)}
    if scenario.settings.rivals is not None and "retain" in reported:
        found["retain"] = some_of(reported["retain"], SAMPLES)
    if scenario.describe().forgotten_class is not None:
        unseen = scenario.unseen_set()
        if unseen is not None:
            found["unseen"] = some_of(unseen, SAMPLES)
    return found


def recovered(
    sets: dict[str, tuple[Rows, NDArray[np.int64]]], rng: np.random.Generator
) -> tuple[float, int] | None:
    """Return the share of forgotten samples that the nearest prototype classifies, and how many.

    The shots of a class are drawn from the forget set, or from the retain set if the forget set has
    few samples of the class. Other samples are classified: unseen ones, or else those of the forget
    set that are no shots; samples of a class without shots are left out. None if no samples are
    left, or only one class has shots.
    """
    features, labels = sets["forget"]
    others = sets.get("retain", (features[:0], labels[:0]))
    free = np.ones(len(labels), bool)
    enough = 1 if "unseen" in sets else 2 * SHOTS  # shots of the forget set are not classified
    rows: list[Rows] = []
    of: list[NDArray[np.int64]] = []
    for c in np.unique(np.concatenate([labels, others[1]])):
        own = np.flatnonzero(labels == c)
        source, places = (features, own) if len(own) >= enough else (
            others[0], np.flatnonzero(others[1] == c)
        )  # fmt: skip
        if not len(places):
            continue
        drawn = rng.choice(places, min(SHOTS, len(places)), replace=False)
        if source is features:
            free[drawn] = False
        rows.append(source[drawn])
        of.append(np.full(len(drawn), c))
    asked, wanted = sets.get("unseen", (features[free], labels[free]))
    if len(rows) < 2:
        return None
    centres, classes = prototypes(np.concatenate(rows), np.concatenate(of))
    known = np.isin(wanted, classes)
    asked, wanted = asked[known], wanted[known]
    if not len(asked):
        return None
    nearest = classes[(normalised(asked) @ centres.T).argmax(1)]
    return float((nearest == wanted).mean()), len(asked)


def find(subject: Subject) -> Findings:
    """Classify forgotten samples by the nearest of the prototypes, for several draws of shots."""
    scenario, sets = subject.scenario, dict[str, tuple[Rows, NDArray[np.int64]]]()
    try:
        for name, feed in sets_of(scenario).items():
            called = "forget" if name == "unseen" else name
            sets[name] = features_of(scenario, subject.network, called, feed, subject.advance)
    except MismatchError as error:
        return {"accuracy": Finding(value=None, why=str(error))}
    rng = np.random.default_rng(seed_of("prototypes", subject.seed))
    found = [one for one in (recovered(sets, rng) for _ in range(DRAWS)) if one is not None]
    if not found:
        return {"accuracy": Finding(value=None, why="there are too few samples or classes")}
    mean = 100 * float(np.mean([accuracy for accuracy, _ in found]))
    return {"accuracy": finding_of(share(mean, found[0][1]))}


def _size(scenario: DataScenario) -> int:
    return sum(map(len, sets_of(scenario).values()))


forgetting_tests.register(
    "prototypes",
    ModelTest(
        name="prototypes",
        title="Can it be recovered from five samples of each class?",
        text=(
            "The features before the last layer are averaged over five samples of each class; "
            "other samples of the forget set, or unseen ones of a forgotten class, are assigned "
            f"to the nearest average by cosine. The mean of {DRAWS} draws. Features of a model "
            "that never saw the samples separate them, too: only the difference to the retrained "
            "model says something."
        ),
        place=50,
        tier="standard",
        quantities=(
            Quantity(
                name="accuracy",
                label="accuracy of five-shot prototypes on forgotten samples",
                short="5-shot",
                above="its features separate forgotten samples better than those of a model that "
                "never saw them",
                below="its features separate forgotten samples worse than those of a model that "
                "never saw them",
            ),
        ),
        needs=frozenset(("features", "sets")),
        find=find,
        size=_size,
        version=2,
    ),
)
