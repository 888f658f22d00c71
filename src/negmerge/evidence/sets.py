"""The samples that tests of forgetting use, and what is observed of each of them.

None of them chose λ, unless the criterion of the run uses the reported data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from negmerge.evaluation.attacks.margins import margin
from negmerge.evaluation.passes import observe_set
from negmerge.evidence.registry import Need
from negmerge.scenarios.base import Scenario
from negmerge.scenarios.data import DataScenario
from negmerge.support.progress import Advance
from negmerge.training.feeds import Batch, Feed, Indices
from negmerge.training.hyperparameters import Augmentation

LARGEST = 5000
"""The largest number of samples of a set that are observed; more would hardly narrow intervals."""
MOST_SURE = 1e-12
"""The smallest distance from 0 and 1 of a probability that is turned into a margin."""
REASONS: dict[Need, str] = {
    "chances": "the scenario observes no probability of the true answer to a sample",
    "features": "the scenario has no features of samples",
    "relearning": "the scenario has no forget and retain set to train on together, or its forget "
    "metric does not rise with what a model knows",
    "retrained": "no retrain reference: efficacy not measured",
    "second": "no second retrained model: the retrained model is given or missing, so that what "
    "the test finds on a model that never saw the forget set is not known",
    "sets": "the scenario has no sets of samples",
    "shadows": "the scenario trains no shadow models",
    "unseen": "there are no unseen samples of the kind of the forget set, or no reported ones that "
    "were trained on",
    "weights": "the weights of a linearised model alone are not the model",
}
"""Why a test cannot be done, by what it lacks."""


class SomeOf:
    """Some samples of a feed.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> SomeOf(feed, np.array([1, 3])).test_batch(np.array([1]))[1].tolist()
    [3]
    """

    def __init__(self, feed: Feed, where: Indices) -> None:
        self.feed, self.where = feed, where
        lengths = getattr(feed, "lengths", None)
        self.lengths = None if lengths is None else lengths[where]

    def __len__(self) -> int:
        return len(self.where)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.feed.train_batch(self.where[picked], seed, augment)

    def test_batch(self, picked: Indices) -> Batch:
        return self.feed.test_batch(self.where[picked])


def some_of(feed: Feed, count: int = LARGEST) -> Feed:
    """Return a feed with at most `count` evenly spaced samples of another one."""
    if len(feed) <= count:
        return feed
    return SomeOf(feed, np.linspace(0, len(feed) - 1, count).astype(np.int64))


def sets_of(scenario: DataScenario, names: Sequence[str]) -> dict[str, Feed]:
    """Return the sets of these names that a scenario has; each has at most `LARGEST` samples.

    Args:
        names: of reported sets, or `unseen`: samples like those to forget that no model has seen.
    """
    found = dict(scenario.eval_sets("report"))
    if "unseen" in names and (unseen := scenario.unseen_set()) is not None:
        found["unseen"] = unseen
    return {name: some_of(found[name]) for name in names if name in found}


def lacks(scenario: Scenario, need: Need) -> bool:
    """Return whether a scenario cannot provide what a test needs of it."""
    if not isinstance(scenario, DataScenario):
        return True
    if need == "chances":
        return not _has(scenario, "logits", "label") and not _has(scenario, "loss", "probability")
    if need == "features":
        return not scenario.has_features
    if need == "relearning":
        settings = scenario.settings
        trainable = settings.rivals is not None and scenario.stands_alone
        trainable = trainable and settings.metric(settings.forget_metric).better != "higher"
        return not trainable or not {"forget", "retain"} <= {*scenario.eval_sets("report")}
    if need == "weights":
        return not scenario.stands_alone
    if need == "shadows":
        return not scenario.settings.has_shadows
    return need == "unseen" and scenario.unseen_set() is None


def _has(scenario: DataScenario, *columns: str) -> bool:
    return {*columns} <= {*scenario.columns}


def columns_of(scenario: DataScenario) -> list[str]:
    """Return the columns of the forget metric; none if they take long to observe."""
    columns = scenario.settings.metric(scenario.settings.forget_metric).columns
    slow = {*columns} & {*scenario.reported_columns} or not {*columns} <= {*scenario.columns}
    return [] if slow else list(columns)


def observe(
    scenario: DataScenario,
    model: nn.Module,
    feeds: Mapping[str, Feed],
    advance: Advance = lambda count: None,
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the columns of the forget metric and, if it is known, the margin of each sample.

    The margin is the logit of the probability of the true answer; of a text, of the geometric mean
    of the probabilities of its tokens.
    """
    wanted = {*columns_of(scenario)}
    by_logits = _has(scenario, "logits", "label")
    by_loss = not by_logits and _has(scenario, "loss", "probability")
    read = wanted | ({"logits", "label"} if by_logits else {"loss"} if by_loss else set[str]())
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for name, feed in feeds.items():
        # CLIP has a head for each set; unseen samples are classified as those of the forget set.
        called = "forget" if name == "unseen" else name
        see = partial(scenario.observe, columns=sorted(read))
        own = observe_set(see, model, called, feed, advance)
        found[name] = {column: own[column] for column in wanted - {"logits"}}
        if by_logits:
            found[name]["margin"] = margin(own["logits"], own["label"])
        elif by_loss:
            chance = np.exp(-own["loss"].astype(np.float64)).clip(MOST_SURE, 1 - MOST_SURE)
            found[name]["margin"] = np.log(chance) - np.log1p(-chance)
    return found
