"""What a finding means beside that of the retrained model; needs no torch."""

from __future__ import annotations

from math import hypot
from typing import Literal

from negmerge.evidence.findings import ORIGINAL, RETRAINED, Evidence, Finding

Verdict = Literal["above", "below", "alike", "unknown"]
"""Whether a number is above or below that of the retrained model by more than chance explains, or
not told apart from it, or whether one of the two was not measured."""


def verdict(found: Finding | None, null: Finding | None) -> Verdict:
    """Compare a finding with that of the retrained model.

    The difference must be larger than its own 95 % interval, with independent errors of the two.

    >>> null = Finding(value=50.0, low=47.0, high=53.0)
    >>> verdict(Finding(value=61.0, low=58.0, high=64.0), null)
    'above'
    >>> verdict(Finding(value=53.0, low=50.0, high=56.0), null), verdict(null, None)
    ('alike', 'unknown')
    """
    if found is None or null is None or found.value is None or null.value is None:
        return "unknown"
    difference = found.value - null.value
    if abs(difference) <= hypot(_reach(found, difference > 0), _reach(null, difference < 0)):
        return "alike"
    return "above" if difference > 0 else "below"


OVERDONE = 45.0
"""The AUC of an attack, in percent, below which a model is called over-unlearned."""


def overdone(evidence: Evidence) -> list[str]:
    """Return a warning for each method whose forgotten records stand out as less known than unseen.

    The whole interval of the attack's AUC must be below `OVERDONE`, and the retrained model's not.
    A method whose AUC is not below the original's did not lower it by unlearning.
    """
    found: list[str] = []
    for name, test in evidence.tests.items():
        null, original = test.finding(RETRAINED, "auc"), test.finding(ORIGINAL, "auc")
        for model in test.models:
            own = test.finding(model, "auc")
            if model in (ORIGINAL, RETRAINED) or own is None or own.value is None:
                continue
            if original is not None and original.value is not None and own.value >= original.value:
                continue
            high = own.value if own.high is None else own.high
            if high < OVERDONE and verdict(own, null) in ("below", "unknown"):
                found.append(
                    f"{model}: over-unlearned: the attack {name} has AUC {own.value:.1f} %, well "
                    "below 50 %: forgotten records stand out as less known than unseen ones"
                )
    return found


def _reach(found: Finding, down: bool) -> float:
    """Return how far the interval of a finding reaches down or up; 0 if it has none."""
    assert found.value is not None
    end = found.low if down else found.high
    return 0.0 if end is None else abs(found.value - end)
