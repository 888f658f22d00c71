"""How the attack of membership inference sees a model: histograms of what it looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from negmerge.evaluation.mia import fit
from negmerge.evaluation.predictions import Predictions

BINS = 40


def attack_bins(found: Mapping[str, Predictions]) -> list[dict[str, Any]]:
    """Histograms of the true class's probability, and which bins the attack takes for members.

    Nothing if retain, forget and test are not all there: then there is no attack.
    """
    if not {"retain", "forget", "test"} <= found.keys():
        return []
    test = found["test"].confidence
    attack = fit(found["retain"].confidence[: len(test)], test)
    edges = np.linspace(0, 1, BINS + 1)
    member = attack.predict_member((edges[:-1] + edges[1:]) / 2)
    rows: list[dict[str, Any]] = []
    for name in ("forget", "retain", "test"):
        counts = np.histogram(found[name].confidence, edges)[0]
        for low, high, count, inside in zip(edges, edges[1:], counts, member, strict=False):
            row = {"set": name, "low": round(float(low), 6), "high": round(float(high), 6)}
            rows.append(row | {"count": int(count), "member": int(inside)})
    return rows
