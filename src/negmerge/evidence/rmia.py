"""RMIA: a membership attack that knows how hard each record is, from a second retrained model.

The second retrained model is the reference of the attack; the first one is attacked like every
method, and shows what the attack finds on a model that never saw the forget set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from negmerge.evaluation.attacks.margins import Floats, probability_of
from negmerge.evaluation.attacks.operating_points import tpr_interval
from negmerge.evaluation.attacks.ranks import auc
from negmerge.evaluation.attacks.rmia import membership_ratios, rmia_scores
from negmerge.evidence.findings import ORIGINAL, SECOND, Finding, Quantity
from negmerge.evidence.membership import AUC, finding_of
from negmerge.evidence.registry import Exhibits, Findings, ObservedTest, forgetting_tests
from negmerge.training.seeds import seed_of

POPULATION = 1 / 3
"""The share of the unseen samples that are the population of the attack; the others are the
non-members."""
FPR = 0.01
DRAWS = 4000
"""The number of draws of the interval of the rate."""


def divide(unseen: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the population and of the non-members among unseen samples.

    >>> [len(part) for part in divide(9, seed=0)]
    [3, 6]
    """
    order = np.random.default_rng(seed_of("population", seed)).permutation(unseen)
    count = max(round(POPULATION * unseen), 1)
    return np.sort(order[:count]), np.sort(order[count:])


def chances_of(seen: Exhibits, title: str) -> dict[tuple[str, str], Floats]:
    """Return the probabilities of the true answers, by model and set."""
    return {
        (model, name): probability_of(seen.models[model].sets[name]["margin"])
        for model in (title, SECOND)
        for name in ("forget", "unseen")
    }


def ratios_of(seen: Exhibits, title: str) -> tuple[Floats, Floats]:
    """Return the likelihood ratios of forgotten records and of non-members.

    They rank the samples as the scores do, but without ties, of which a rate of 1 % has many.
    """
    chances = chances_of(seen, title)
    found = {
        name: membership_ratios(chances[title, name], chances[SECOND, name][None])
        for name in ("forget", "unseen")
    }
    _, others = divide(len(found["unseen"]), seen.seed)
    return found["forget"], found["unseen"][others]


def scores_of(seen: Exhibits, title: str) -> tuple[Floats, Floats]:
    """Return the scores of the attack on a model, for forgotten records and for non-members."""
    chances = chances_of(seen, title)
    population, others = divide(len(chances[title, "unseen"]), seen.seed)

    def attack(name: str, where: NDArray[np.int64] | slice) -> Floats:
        return rmia_scores(
            chances[title, name][where],
            chances[SECOND, name][None, where],
            chances[title, "unseen"][population],
            chances[SECOND, "unseen"][None, population],
        )

    return attack("forget", slice(None)), attack("unseen", others)


def find(seen: Exhibits, title: str) -> Findings:
    """Attack a model: all forgotten records, and those that the original exposes most."""
    members, others = scores_of(seen, title)
    if not len(others):
        return {"auc": Finding(value=None, why="there are too few unseen samples")}
    # Both sides are chosen alike: chance alone then favours neither in any model.
    exposed = [
        own[np.argsort(-chosen_by, kind="stable")[: max(len(own) // 10, 1)]]
        for own, chosen_by in zip((members, others), scores_of(seen, ORIGINAL), strict=True)
    ]
    found = {
        "auc": finding_of(auc(members, others)),
        "worst": finding_of(auc(*exposed)),
        "tpr": Finding(value=None, why=f"not resolvable with {len(others)} negatives"),
    }
    ratios = ratios_of(seen, title)
    if (rate := tpr_interval(*ratios, FPR, seed_of("tpr", seen.seed), DRAWS)) is not None:
        found["tpr"] = finding_of(rate)
    own = seen.models[title].sets
    if "retain" in own:
        kept = own.get("test", own["unseen"])["margin"]
        found["retain"] = finding_of(auc(own["retain"]["margin"], kept))
    return found


forgetting_tests.register(
    "rmia",
    ObservedTest(
        name="rmia",
        title="Does a strong attack find the forgotten records?",
        text=(
            "RMIA asks how much likelier a record is under the model than under a second retrained "
            "model, which never saw it, compared with unseen records. AUC: 50 % is chance. The "
            "worst tenth are the forgotten records that the attack finds most easily in the "
            "original, beside the tenth of the unseen ones that it most easily takes for them. "
            "TPR is the share of forgotten records that are found when 1 % of unseen "
            "ones are taken for them. The attack on the retain set has no reference model that "
            "never saw it, and ranks by probability alone; its line is the retrained model, which "
            "was trained on that set."
        ),
        place=20,
        tier="standard",
        quantities=(
            AUC,
            Quantity(
                name="worst",
                label="AUC on the tenth of the forget set that the original exposes most",
                short="AUC, worst tenth",
                above="still exposes the most exposed tenth",
                below="over-unlearned: the most exposed tenth stands out as less known",
            ),
            Quantity(
                name="tpr",
                label="forgotten records found at a false-positive rate of 1 %",
                short="TPR at 1 % FPR",
                above="some records are found with few false alarms",
            ),
            Quantity(
                name="retain",
                label="AUC of a plain attack on the retain set",
                short="AUC, retain set",
                above="exposes records of the retain set more",
                below="exposes records of the retain set less",
            ),
        ),
        needs=frozenset(("chances", "retrained", "second", "unseen")),
        sets=("forget", "unseen", "retain", "test"),
        find=find,
    ),
)
