"""A plain membership attack: is a forgotten record better known than an unseen one?"""

from __future__ import annotations

from negmerge.evaluation.attacks.ranks import auc
from negmerge.evaluation.metrics import Measured
from negmerge.evidence.findings import Finding, Quantity
from negmerge.evidence.registry import Exhibits, Findings, ObservedTest, forgetting_tests

AUC = Quantity(
    name="auc",
    label="AUC of the attack on the forget set",
    short="AUC",
    above="still tells forgotten from unseen records",
    below="over-unlearned: forgotten records stand out as less known than unseen ones",
)


def finding_of(measured: Measured) -> Finding:
    """Return a measured number as a finding.

    >>> finding_of(Measured(50.0, 45.0, 55.0, 100)).high
    55.0
    """
    return Finding(value=measured.value, low=measured.low, high=measured.high, n=measured.n)


def find(seen: Exhibits, title: str) -> Findings:
    """Rank the samples of the forget set and unseen ones by their margin."""
    own = seen.models[title].sets
    return {"auc": finding_of(auc(own["forget"]["margin"], own["unseen"]["margin"]))}


forgetting_tests.register(
    "membership",
    ObservedTest(
        name="membership",
        title="Are forgotten records better known than unseen ones?",
        text=(
            "An attack ranks records by the probability that the model gives to the true answer, "
            "with forgotten records as members and unseen records of the same kind as "
            "non-members. AUC is the percentage of pairs in which the forgotten record is ranked "
            "higher; 50 % is chance."
        ),
        place=10,
        tier="basic",
        quantities=(AUC,),
        needs=frozenset(("chances", "unseen")),
        sets=("forget", "unseen"),
        find=find,
    ),
)
