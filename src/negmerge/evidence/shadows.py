"""The tests of `evidence: full`, from one set of shadow models: U-LiRA, KLoM, the score of 2023."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from negmerge.evaluation.attacks.klom import klom
from negmerge.evaluation.attacks.margins import Floats
from negmerge.evaluation.attacks.shadow_game import Role, play
from negmerge.evaluation.attacks.unlearning_score import (
    epsilons,
    final_score,
    forget_points,
)
from negmerge.evaluation.metrics import Measured
from negmerge.evidence.findings import ORIGINAL, RETRAINED, Finding, Quantity
from negmerge.evidence.membership import finding_of
from negmerge.evidence.registry import Findings, ShadowTest, forgetting_tests
from negmerge.evidence.shadow_margins import Kind, ShadowMargins

FPR = 0.01


def titles(shadows: ShadowMargins) -> dict[str, Kind]:
    """Return the models of shadows by the title that findings have."""
    return {ORIGINAL: "original", RETRAINED: "retrained", shadows.method: "unlearned"}


def _finding(found: Measured | None, why: str = "") -> Finding:
    return Finding(value=None, why=why) if found is None else finding_of(found)


def attack_samples(shadows: ShadowMargins) -> dict[str, Findings]:
    """Play the game of U-LiRA: unlearned against never seen, and kept against never seen."""
    found: dict[str, Findings] = {}
    others = int((shadows.roles == Role.OUT).sum())
    for title, kind in titles(shadows).items():
        margins = shadows.margins[kind, "targets"]
        game = play(margins, shadows.roles, fprs=(FPR,))
        kept = play(margins, shadows.roles, Role.IN, fprs=())
        found[title] = {
            "auc": _finding(game.auc),
            "tpr": _finding(game.tpr[FPR], f"not resolvable with {others:,} non-members"),
            "worst": Finding(value=game.worst_decile, n=len(game.success)),
            "retain_auc": _finding(kept.auc),
        }
    return found


def compare_distributions(shadows: ShadowMargins) -> dict[str, Findings]:
    """Measure KLoM on targets, retain and test set.

    Every kind of models in some shadows is compared with the retrained models of as many others, so
    that the number of the retrained models is the floor of the same comparison.
    """
    half = len(shadows.roles) // 2
    found: dict[str, Findings] = {}
    for title, kind in titles(shadows).items():
        never = shadows.of_role("retrained", Role.OUT)
        targets = klom(shadows.of_role(kind, Role.UNLEARNED), never).values
        retain, test = (
            klom(shadows.margins[kind, name][:half], shadows.margins["retrained", name][half:])
            for name in ("retain", "test")
        )
        found[title] = {
            "klom": over_samples(targets, np.median),
            "klom_high": over_samples(targets, partial(np.quantile, q=0.95)),
            "klom_retain": over_samples(retain.values, np.median),
            "klom_test": over_samples(test.values, np.median),
        }
    return found


def over_samples(values: Floats, statistic: Callable[..., Any], draws: int = 1000) -> Finding:
    """Return a statistic of samples with its interval, for which samples are drawn again."""
    rng = np.random.default_rng(0)
    drawn = values[rng.integers(len(values), size=(draws, len(values)))]
    low, high = np.quantile(statistic(drawn, axis=1), [0.025, 0.975])
    value = float(statistic(values))
    low, high = min(float(low), value), max(float(high), value)
    return Finding(value=value, low=low, high=high, n=len(values))


def score_privacy(shadows: ShadowMargins) -> dict[str, Findings]:
    """Compute the score of 2023; of the retrained models, with two independent sets of them."""
    never, models = shadows.of_role("retrained", Role.OUT), len(shadows.roles) // 3
    found: dict[str, Findings] = {}
    for title, kind in titles(shadows).items():
        own = epsilons(shadows.of_role(kind, Role.UNLEARNED), never)
        points = forget_points(own, models)
        kept = final_score(1.0, *accuracies(shadows, kind))
        found[title] = {
            "score": over_samples(points * kept, np.mean),
            "forget_score": over_samples(points, np.mean),
            "epsilon": over_samples(own, np.median),
        }
    return found


def accuracies(shadows: ShadowMargins, kind: Kind) -> list[tuple[float, float]]:
    """Return the accuracies of a kind of models and of retrained ones, on retain and test set."""
    return [
        (shadows.accuracy(kind, name), shadows.accuracy("retrained", name))
        for name in ("retain", "test")
    ]


SHADOWS = (
    "Every shadow is a run on its own: by chance it keeps a third of the forget set, unlearns a "
    "third by the first method, and never sees a third. "
)

forgetting_tests.register(
    "shadow_attack",
    ShadowTest(
        name="shadow_attack",
        title="Can a single forgotten record be told from one never seen?",
        text=SHADOWS + "For each record, an attacker who knows its margins under all other "
        "shadows tells by a likelihood ratio whether a model unlearned it or never saw it "
        "(U-LiRA). AUC 50 % is chance; the retrained models, which never saw either, are a little "
        "below, because each margin is left out of its own side. Intervals are over shadows and "
        "records. The same attack on kept records is the leakage of the retain set.",
        tier="full",
        quantities=(
            Quantity(
                name="auc",
                label="AUC of unlearned against never seen records",
                short="AUC",
                above="still tells unlearned records from records that were never seen",
                below="over-unlearned: unlearned records stand out from those never seen",
            ),
            Quantity(
                name="tpr", label="unlearned records found at 1 % false positives", short="TPR"
            ),
            Quantity(
                name="worst",
                label="right decisions about the tenth of the records that leak most",
                short="worst tenth",
            ),
            Quantity(
                name="retain_auc",
                label="AUC of kept against never seen records",
                short="retain AUC",
            ),
        ),
        needs=frozenset(("shadows",)),
        find=attack_samples,
    ),
)
forgetting_tests.register(
    "klom",
    ShadowTest(
        name="klom",
        title="Are the answers distributed as those of retrained models?",
        text=SHADOWS + "KLoM is the divergence KL(p‖q) of a record: p is the distribution of its "
        "margin under models that unlearned it, q that under models retrained without it. The "
        "number of the retrained models is the floor: one half of them against the other. "
        "With fewer than 50 models of each kind, p and q are taken for normal distributions. "
        "Intervals are over records, which share the models: they are rather too narrow.",
        tier="full",
        quantities=(
            Quantity(
                name="klom",
                label="median KLoM of forgotten records",
                short="KLoM",
                unit="nats",
                above="answers to forgotten records are distributed unlike those of retrained "
                "models",
            ),
            Quantity(
                name="klom_high",
                label="KLoM of forgotten records, 95th percentile",
                short="KLoM, p95",
                unit="nats",
            ),
            Quantity(
                name="klom_retain",
                label="median KLoM of the retain set",
                short="KLoM, retain",
                unit="nats",
            ),
            Quantity(
                name="klom_test",
                label="median KLoM of the test set",
                short="KLoM, test",
                unit="nats",
            ),
        ),
        needs=frozenset(("shadows",)),
        find=compare_distributions,
    ),
)
forgetting_tests.register(
    "unlearning_score",
    ShadowTest(
        name="unlearning_score",
        title="How would the unlearning competition of NeurIPS 2023 score it?",
        text=SHADOWS + "ε of a record bounds how well models that unlearned it can be told from "
        "models retrained without it, by its margin. The forget score F is 1 if every ε is below "
        "0.5 and halves with each further 0.5; the score multiplies it by the accuracies on "
        "retain and test set, relative to those of retrained models. ε of a few models is coarse: "
        "compare with the number of the retrained models, which compares two sets of them. "
        "Intervals are over records, which share the models: they are rather too narrow.",
        tier="full",
        quantities=(
            Quantity(
                name="score",
                label="score of the competition",
                short="score",
                unit="",
                below="further from retrained models than retrained models are from each other",
            ),
            Quantity(name="forget_score", label="forget score F", short="F", unit=""),
            Quantity(name="epsilon", label="median ε of a record", short="ε", unit=""),
        ),
        needs=frozenset(("shadows",)),
        find=score_privacy,
    ),
)
