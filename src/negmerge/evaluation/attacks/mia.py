"""MIA-efficacy, the attack of the paper: an SVM on the probability of the true class (SalUn)."""

from __future__ import annotations

from typing import Any

import numpy as np

from negmerge.evaluation.attacks.svm import fit, mia_efficacy
from negmerge.evaluation.metrics import Histogram, Measured, Metric, Observed, metrics
from negmerge.evaluation.metrics.accuracy import share

SETS = ("retain", "forget", "test")
BINS = 40


def mia(found: Observed) -> Measured:
    """Return the percentage of the forget set that the attack classifies as unseen."""
    retain, forget, test = (found[name]["confidence"] for name in SETS)
    return share(mia_efficacy(retain, test, forget), len(forget))


def bins(found: Observed) -> list[dict[str, Any]]:
    """Return histograms of the probability of the true class, and the bins of members."""
    test = found["test"]["confidence"]
    attack = fit(found["retain"]["confidence"][: len(test)], test)
    edges = np.linspace(0, 1, BINS + 1)
    member = attack.predict_member((edges[:-1] + edges[1:]) / 2)
    rows: list[dict[str, Any]] = []
    for name in ("forget", "retain", "test"):
        counts = np.histogram(found[name]["confidence"], edges)[0]
        for low, high, count, inside in zip(edges, edges[1:], counts, member, strict=False):
            row = {"set": name, "low": round(float(low), 6), "high": round(float(high), 6)}
            rows.append(row | {"count": int(count), "member": int(inside)})
    return rows


metrics.register(
    "mia",
    Metric(
        name="mia",
        label="forget set taken for unseen by membership inference",
        short="MIA",
        better="reference",
        sets=SETS,
        columns=("confidence",),
        value=mia,
        in_gap=True,
        histogram=Histogram(
            file="attack.csv",
            title="Membership inference",
            text=(
                "The attack uses one number per image, the probability of its true class; it "
                "classifies the images in the shaded range as trained on. For a model that forgot, "
                "the curve of the forget set is that of the test set, not of the retain set."
            ),
            bins=bins,
            axis="probability of the true class",
        ),
    ),
)
