"""The tests of `evidence: full`, from one set of shadow models: U-LiRA, KLoM, the score of 2023."""

from __future__ import annotations

import numpy as np

from negmerge.evaluation.attacks.klom import KLoM, klom
from negmerge.evaluation.attacks.shadow_game import Role, play
from negmerge.evaluation.attacks.unlearning_score import epsilons, final_score, forget_score
from negmerge.evaluation.metrics import Measured
from negmerge.evidence.findings import ORIGINAL, RETRAINED, Finding, Quantity
from negmerge.evidence.registry import Findings, ShadowTest, forgetting_tests
from negmerge.evidence.shadow_margins import Kind, ShadowMargins

FPR = 0.01
OUT_ONLY = (Role.UNLEARNED, Role.OUT)
"""The roles of a target in whose shadows the retrained model never saw it."""


def titles(shadows: ShadowMargins) -> dict[str, Kind]:
    """Return the models of shadows by the title that findings have."""
    return {ORIGINAL: "original", RETRAINED: "retrained", shadows.method: "unlearned"}


def _finding(found: Measured | None, why: str = "") -> Finding:
    if found is None:
        return Finding(value=None, why=why)
    return Finding(value=found.value, low=found.low, high=found.high, n=found.n)


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
    """Measure KLoM on targets, retain and test set; of the retrained models, the floor."""
    found: dict[str, Findings] = {}
    for title, kind in titles(shadows).items():
        own = "unlearned" if kind == "retrained" else kind
        kloms = {
            "targets": klom(
                shadows.of_role(own, Role.UNLEARNED), shadows.of_role("retrained", *OUT_ONLY)
            )
        } | {
            name: klom(shadows.margins[own, name], shadows.margins["retrained", name])
            for name in ("retain", "test")
        }
        found[title] = {
            name: _klom_finding(one, high, kind == "retrained")
            for name, one, high in (
                ("klom", kloms["targets"], False),
                ("klom_high", kloms["targets"], True),
                ("klom_retain", kloms["retain"], False),
                ("klom_test", kloms["test"], False),
            )
        }
    return found


def _klom_finding(found: KLoM, high: bool, floor: bool) -> Finding:
    medians, ends = (found.median, found.floor_median), (found.high, found.floor_high)
    return Finding(value=(ends if high else medians)[floor], n=len(found.values))


def score_privacy(shadows: ShadowMargins) -> dict[str, Findings]:
    """Compute the score of 2023; of the retrained models, with two independent sets of them."""
    never, models = shadows.of_role("retrained", Role.OUT), len(shadows.roles) // 3
    found: dict[str, Findings] = {}
    for title, kind in titles(shadows).items():
        own = epsilons(shadows.of_role(kind, Role.UNLEARNED), never)
        forget = forget_score(own, models)
        sets = [
            (shadows.accuracy(kind, name), shadows.accuracy("retrained", name))
            for name in ("retain", "test")
        ]
        found[title] = {
            "score": Finding(value=final_score(forget, *sets), n=len(own)),
            "forget_score": Finding(value=forget, n=len(own)),
            "epsilon": Finding(value=float(np.median(own)), n=len(own)),
        }
    return found


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
        "number of the retrained models is the floor: the first half of them against the second. "
        "With fewer than 50 models of each kind, p and q are taken for normal distributions.",
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
        "compare with the number of the retrained models, which compares two sets of them.",
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
