"""How well are records forgotten that have to be memorised to be known?

A random forget set hides the hard records: most of them are known without being trained on (Zhao
et al. 2024).
"""

from __future__ import annotations

import numpy as np

from negmerge.evaluation.attacks.margins import probability_of
from negmerge.evaluation.metrics import metric_of
from negmerge.evaluation.observations import Observations
from negmerge.evidence.findings import SECOND, Finding, Quantity
from negmerge.evidence.membership import finding_of
from negmerge.evidence.registry import Exhibits, Findings, ObservedTest, forgetting_tests

STRATA = ("low", "medium", "high")


def memorised(seen: Exhibits) -> list[np.ndarray]:
    """Return the positions of the forgotten records in thirds, those with least to memorise first.

    The measure is the probability of a wrong answer under the second retrained model. The original
    has no part in it: among records chosen by its probability, its chance errors would make every
    model near to it look better than the retrained one, also on records that none of them saw.
    """
    second = probability_of(seen.models[SECOND].sets["forget"]["margin"])
    return np.array_split(np.argsort(-second, kind="stable"), len(STRATA))


def find(seen: Exhibits, title: str) -> Findings:
    """Compute the forget metric of each third."""
    metric, columns = metric_of(seen.forget_metric), seen.models[title].sets["forget"]
    found: Findings = {}
    for name, where in zip(STRATA, memorised(seen), strict=True):
        if not {*metric.columns} <= columns.keys() or not len(where):
            found[name] = Finding(value=None, why=f"{metric.label}: not observed, or no records")
            continue
        rows = Observations({column: columns[column][where] for column in metric.columns})
        measured = metric.value({"forget": rows})
        found[name] = Finding(value=None) if measured is None else finding_of(measured)
    return found


def _quantity(name: str) -> Quantity:
    return Quantity(
        name=name,
        label=f"{{metric}}, records of {name} memorisation",
        short=f"{name} memorisation",
        of="forget",
        above=f"still knows the records of {name} memorisation",
        below=f"knows the records of {name} memorisation less than a model that never saw them",
    )


forgetting_tests.register(
    "strata",
    ObservedTest(
        name="strata",
        title="Are the memorised records forgotten?",
        text=(
            "The forgotten records in thirds by how much of each must be memorised to know it: the "
            "probability of a wrong answer under a second retrained model, which never saw them. "
            "Records that are known without being trained on say little about forgetting; those "
            "of high memorisation say most. The original does not choose the records: models near "
            "to it would look better on them by chance alone."
        ),
        place=30,
        tier="standard",
        quantities=tuple(_quantity(name) for name in reversed(STRATA)),
        needs=frozenset(("chances", "retrained", "second")),
        sets=("forget",),
        find=find,
    ),
)
