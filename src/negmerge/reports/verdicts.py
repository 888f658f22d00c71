"""The rules of the verdicts on the first screen of a page, all in one place.

A rule compares numbers of the unlearned model with those of the original and of the retrained model
and returns an `Answer`. Two numbers are told apart if their difference is larger than its own 95 %
interval. A rule never passes what was not measured: without a retrained model no answer is good,
and a forget metric at the retrained level is not enough if a test tells the two models apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from negmerge.evaluation.criteria import KEPT, kept
from negmerge.evidence.findings import Finding
from negmerge.evidence.verdicts import verdict
from negmerge.reports.ranking import join_names

Standing = Literal["good", "mixed", "bad", "unknown"]


@dataclass(frozen=True)
class Outcome:
    """What a test of forgetting shows.

    Args:
        title: of the test.
        told: whether it tells the unlearned model from the retrained one.
        sees: whether it tells the original, which knows the forget set, from the retrained one; if
            not, it shows nothing by not telling the unlearned model apart.
    """

    title: str
    told: bool
    sees: bool


@dataclass(frozen=True)
class Answer:
    """The verdict on one question.

    Args:
        rule: the name of the rule that gave it.
        standing: `good`, `mixed`, `bad`, or `unknown` if it was not measured.
        word: the answer in a few words.
        text: why.
    """

    rule: str
    standing: Standing
    word: str
    text: str


@dataclass(frozen=True)
class Numbers:
    """A metric of the three models that a rule compares; None for a model without it.

    Args:
        name: the label of the metric.
        better: `lower`, `higher` or `reference`, as in `evaluation.metrics.Metric`.
    """

    name: str
    better: str
    original: Finding | None
    unlearned: Finding | None
    retrained: Finding | None

    @property
    def outcome(self) -> Outcome | None:
        """What the metric shows as a test of forgetting; None if it was not measured."""
        found = [verdict(one, self.retrained) for one in (self.unlearned, self.original)]
        return None if "unknown" in found else Outcome(self.name, *(v != "alike" for v in found))

    def worse(self, than: Finding | None) -> bool:
        """Whether the unlearned model is told apart from a number, and worse."""
        return verdict(self.unlearned, than) == ("above" if self.better == "lower" else "below")


NO_CONTROL = "no retrained model"
MOST_LEFT = 0.5
"""The share of the way from the original to the retrained model that may be left for a yes."""


# --------------------------------------------------------------------------------- Is it forgotten?


def is_forgotten(forget: Numbers, tests: Sequence[Outcome], added: bool = False) -> Answer:
    """Judge whether the forget set is forgotten.

    Args:
        forget: the forget metric; `better` is the direction of forgetting.
        tests: what other tests of forgetting show.
        added: whether the task vector was added, to learn.
    """
    if added:
        text = "the task vector was added: this run learns the forget set instead of forgetting it"
        return Answer("added", "unknown", "Not asked", text)
    if verdict(forget.unlearned, forget.original) == "unknown":
        return Answer("not_measured", "unknown", "Not measured", f"{forget.name} was not measured")
    forgets = "above" if forget.better == "higher" else "below"
    moved = verdict(forget.unlearned, forget.original) == forgets
    beside = verdict(forget.unlearned, forget.retrained)
    if not moved:
        return _unmoved(forget, beside)
    if beside == "unknown":
        text = f"it knows less than before; {NO_CONTROL}: whether it is enough was not measured"
        return Answer("no_control", "unknown", "Not measured", text)
    told = [test for test in tests if test.told]
    shown = [test for test in tests if test.sees and not test.told]
    also = f"; it is also told from the retrained model by {_count(told, 'test')}" if told else ""
    if beside == forgets:
        text = f"less is known than by a model that never saw it, which can show{also}"
        return Answer("overdone", "mixed", "Partly: too much", text)
    if beside != "alike":
        text = f"it knows less than before, but more than the retrained model{also}"
        return Answer("knows_more", "mixed", "Partly", text)
    if told:
        text = "this number is that of the retrained model, but the two are told apart by "
        text += f"{len(told)} of {_count([*told, *shown], 'test')}"
        return Answer("told_apart", "mixed", "Partly", text)
    remains = _remains(forget)
    if remains > MOST_LEFT:
        text = "not told from the retrained model by this number, but with so few samples "
        text += f"{min(100 * remains, 100):.0f} % of the difference may be left"
        return Answer("coarse", "mixed", "Partly shown", text)
    if not shown:
        text = "this number is that of the retrained model; no other test could confirm it"
        return Answer("untested", "mixed", "Partly shown", text)
    text = (
        f"not told apart from the retrained model, by this number and {_count(shown, 'test')}; "
        "that is no proof"
    )
    return Answer("matches", "good", "Yes, as far as tested", text)


def _remains(forget: Numbers) -> float:
    """The share of the distance from the original to the retrained model that may be left.

    It is the far end of the 95 % interval of the distance of the unlearned model.
    """
    sign = -1 if forget.better == "higher" else 1
    least, most = _difference(forget.unlearned, forget.retrained)
    whole = sign * sum(_difference(forget.original, forget.retrained)) / 2
    return max(sign * least, sign * most, 0.0) / whole if whole > 0 else 1.0


def _unmoved(forget: Numbers, beside: str) -> Answer:
    """The answer for a model whose forget metric is not told apart from the original's."""
    if beside == "unknown":
        text = f"it may know as much as before; {NO_CONTROL} to compare with"
        return Answer("unchanged", "bad", "Not shown", text)
    if beside != "alike":
        text = "it may know as much as before, and more than the retrained model"
        return Answer("unchanged", "bad", "No", text)
    if verdict(forget.original, forget.retrained) == "alike":
        text = "this number does not tell even the original from the retrained model"
        return Answer("blind", "unknown", "Not shown", text)
    text = "too few samples to tell it from the original, or from the retrained model"
    return Answer("too_few", "unknown", "Not shown", text)


# -------------------------------------------------------------------------------- What did it cost?


def what_it_cost(retain: Numbers, others: Iterable[Numbers] = ()) -> Answer:
    """Judge what the model lost beside the forget set.

    Args:
        retain: the retain metric.
        others: other metrics of data that was to be kept.
    """
    if verdict(retain.unlearned, retain.original) == "unknown":
        return Answer("not_measured", "unknown", "Not measured", f"{retain.name} was not measured")
    known = [one for one in (retain, *others) if one.unlearned is not None]
    lost = [one for one in known if one.worse(one.original)]
    control = retain.retrained is not None
    beyond = [one for one in lost if one.retrained is None or one.worse(one.retrained)]
    none = "" if control else f"; {NO_CONTROL}: what retraining loses was not measured"
    if not lost and not _keeps(retain, surely=True):
        text = f"too few samples to exclude a loss of {100 * (1 - KEPT):.0f} %{none}"
        return Answer("too_few", "unknown", "Not shown", text)
    behind = [one for one in known if one.retrained is not None and one.worse(one.retrained)]
    if not lost and behind:
        text = f"no loss beyond chance, but the retrained model is better: {_named(behind)}"
        return Answer("behind", "mixed", "Nothing against the original", text)
    if not lost:
        standing: Standing = "good" if control else "unknown"
        text = f"no loss beyond chance against the original{none}"
        return Answer("nothing", standing, "Nothing measurable", text)
    if not beyond:
        text = f"worse than the original, but not than the retrained model: {_named(lost)}"
        return Answer("as_retraining", "good", "No more than retraining", text)
    against = "the original and the retrained model" if control else "the original"
    much = [one for one in beyond if not _keeps(one)]
    if much:
        text = f"keeps less than {100 * KEPT:.0f} % of the original: {_named(much)}{none}"
        return Answer("much", "bad", "Much", text)
    return Answer("some", "mixed", "A little", f"worse than {against}: {_named(beyond)}{none}")


def _keeps(one: Numbers, surely: bool = False) -> bool:
    """Whether the unlearned model keeps the share `KEPT` of the original's value.

    Args:
        surely: whether it does so at the worse end of the 95 % interval of the difference.
    """
    (before, _), lower = _with_reach(one.original), one.better == "lower"
    least, most = _difference(one.unlearned, one.original)
    change = (most if lower else least) if surely else (least + most) / 2
    return kept({"": before + change}, {"": before}, "", KEPT, lower)


# ------------------------------------------------------------------------------ Can it be trusted?


def can_be_trusted(
    tests: Sequence[Outcome],
    control: bool,
    damaged: Sequence[str] = (),
    warnings: Sequence[str] = (),
    looked: bool = False,
) -> Answer:
    """Judge how far the other verdicts can be trusted.

    Args:
        tests: what the tests of forgetting show.
        control: whether there is a retrained model.
        damaged: files that were changed, or could not be read.
        warnings: those of the run that concern the unlearned model.
        looked: whether λ was chosen on the reported data.
    """
    if damaged:
        text = "files of the run were changed or are damaged; see “Missing from this page”"
        return Answer("damaged", "bad", "No", text)
    doubts = ["λ was chosen on the reported data"] if looked else []
    if warnings:
        doubts.append(f"{_count(warnings, 'warning')} below")
    if not control:
        more = f"; {' and '.join(doubts)}" if doubts else ""
        text = f"{NO_CONTROL}: forgetting as if never seen was not measured{more}"
        return Answer("no_control", "unknown", "Not measured", text)
    if not any(test.told or test.sees for test in tests):
        doubts.append("no test tells even the original from the retrained model")
    if doubts:
        return Answer("doubts", "mixed", "With care", " and ".join(doubts))
    text = "one run with one seed; another seed or another attack may show more"
    return Answer("one_run", "good", "As far as one run shows", text)


# ------------------------------------------------------------------------------------------ helpers


def _difference(one: Finding | None, other: Finding | None) -> tuple[float, float]:
    """The 95 % interval of a difference, with the difference in its middle; errors independent."""
    (own, reach), (its, other_reach) = _with_reach(one), _with_reach(other)
    half = hypot(reach, other_reach)
    return own - its - half, own - its + half


def _with_reach(found: Finding | None) -> tuple[float, float]:
    """A number, and how far its interval reaches; 0 if it has none."""
    assert found is not None
    assert found.value is not None
    ends = [end for end in (found.low, found.high) if end is not None]
    return found.value, max((abs(end - found.value) for end in ends), default=0.0)


def _count(found: Sequence[object], what: str) -> str:
    """A number of things.

    >>> _count(["a"], "test"), _count(["a", "b"], "test")
    ('1 test', '2 tests')
    """
    return f"{len(found)} {what}{'' if len(found) == 1 else 's'}"


def _named(found: Sequence[Numbers]) -> str:
    """The labels of some metrics."""
    return join_names([one.name for one in found], most=3)
