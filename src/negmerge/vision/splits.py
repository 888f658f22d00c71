"""Forget, retain, validation and test sets: positions in a data set, drawn with a seed.

The original model is trained on exactly retain ∪ forget.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError, quoted
from negmerge.registry import nearest
from negmerge.training.seeds import seed_of, set_apart
from negmerge.vision.records import listed_positions

if TYPE_CHECKING:
    from negmerge.vision.datasets import Images
    from negmerge.vision.settings import Forget

Indices = NDArray[np.int64]
HELD_OUT = 5000
"""The largest number of validation images in the CLIP protocol."""


@dataclass(frozen=True)
class Splits:
    """Positions in the training set (retain, forget, validation) and in the test set (test)."""

    retain: Indices
    forget: Indices
    validation: Indices
    test: Indices
    forgotten_class: int | None = None
    """The class, if all of it is forgotten; the test set has no images of it."""

    @cached_property
    def train(self) -> Indices:
        """The training set of the original model."""
        return np.sort(np.concatenate([self.retain, self.forget]))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the positions."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.retain, self.forget, self.validation, self.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, "<i8").tobytes())
        return digest.hexdigest()


def make_splits(
    train: Images,
    test: Images,
    forget: Forget,
    validation: float = 0.0,
    seed: int = 0,
    limit: tuple[int | None, int | None] = (None, None),
) -> Splits:
    """Split a data set into forget, retain, validation and test set.

    Args:
        validation: the share of each class that is held out of training.
        seed: decides which images are drawn.
        limit: the largest numbers of training and test images; classes keep their shares.
    """
    rng = np.random.default_rng(seed_of("splits", seed))
    listed = listed_positions(train, test, forget)
    if listed is not None and limit[0] is not None and limit[0] < len(listed):
        raise OptionError(
            f"{forget.indices or forget.ids}: lists {len(listed)} records, data.limit.train is "
            f"{limit[0]}; raise data.limit.train or remove it"
        )
    # Listed records stay in the training data: they are the last ones to be left out.
    is_listed = np.isin(np.arange(len(train)), [] if listed is None else listed)
    usable = balanced(train.labels, limit[0], rng, last=~is_listed)
    tested = balanced(test.labels, limit[1], rng)
    count = round(validation * len(usable))
    held = balanced(train.labels[usable], count, rng, last=is_listed[usable])
    held_out = usable[held] if validation else usable[:0]
    rest = np.setdiff1d(usable, held_out)
    chosen, forgotten = (listed, None) if listed is not None else draw(train, rest, forget, rng)
    retain = np.setdiff1d(rest, chosen)
    if forgotten is not None:  # neither set tests a class that the reference model never saw
        tested = tested[test.labels[tested] != forgotten]
        held_out = held_out[train.labels[held_out] != forgotten]
    for name, part in {"forget": chosen, "retain": retain, "test": tested}.items():
        if not len(part):
            raise OptionError(f"split: the {name} set is empty; check split and data.limit")
    return Splits(retain, chosen, held_out, tested, forgotten)


def draw(
    train: Images, rest: Indices, forget: Forget, rng: np.random.Generator
) -> tuple[Indices, int | None]:
    """Draw a share or a class; return its sorted positions, and the class if it is a whole one."""
    if forget.fraction is not None:
        count = min(max(round(forget.fraction * len(rest)), 1), len(rest))
        return np.sort(rng.choice(rest, count, replace=False)), None
    assert forget.class_ is not None, "`Forget` has exactly one way to choose"
    label = class_index(forget.class_, train.classes)
    members = rest[train.labels[rest] == label]
    if forget.count is None or forget.count >= len(members):
        return members, label
    return np.sort(rng.choice(members, forget.count, replace=False)), None


def class_index(wanted: int | str, classes: tuple[str, ...]) -> int:
    """Return the number of a class, given by number or name; for a str, names come first.

    >>> class_index("cat", ("dog", "cat")), class_index(0, ("dog", "cat"))
    (1, 0)
    """
    text = str(wanted)
    found = classes.index(text) if text in classes else None
    if text.isdecimal() and len(text) < 20 and int(text) < len(classes):
        number = int(text)
        if isinstance(wanted, int) and found not in (None, number):
            raise OptionError(
                f"split.forget.class {wanted}: may be number {wanted}, {quoted(classes[number])}, "
                f"or the name of number {found}; write the name in quotes: "
                f'"{classes[number]}" or "{wanted}"'
            )
        found = number if found is None else found
    if found is None:
        names = ", ".join(f"{i} {quoted(c, 40)}" for i, c in enumerate(classes[:20]))
        near = nearest(text, classes)
        raise OptionError(f"split.forget.class {wanted!r}: no such class; there are: {names}{near}")
    return found


def held_out_of(size: int) -> tuple[Indices, Indices]:
    """Split a training set as the CLIP protocol does: training and validation positions.

    The validation set is a tenth, at most `HELD_OUT`, drawn as torch's `random_split` with seed 0
    does, so that it is the one of published work.

    >>> rest, held_out = held_out_of(60_000)
    >>> len(rest), len(held_out), int(rest[0])
    (55000, 5000, 36044)
    """
    import torch

    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).numpy()
    count = min(size // 10, HELD_OUT)
    return order[: size - count], order[size - count :]


def held_out_rows(size: int) -> Indices:
    """Return the sorted validation positions of `held_out_of`.

    >>> len(held_out_rows(1_281_167)), held_out_rows(60_000)[:3]
    (5000, array([ 2, 23, 26]))
    """
    return np.sort(held_out_of(size)[1])


def balanced(
    labels: NDArray[Any],
    count: int | None,
    rng: np.random.Generator,
    last: NDArray[np.bool_] | None = None,
) -> Indices:
    """Draw `count` samples, of each class in proportion to its size; return sorted positions.

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> labels[balanced(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]

    Args:
        count: None draws all samples.
        last: marks samples to draw only when there are no others.
    """
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    if count <= 0:
        return np.arange(0)
    order = rng.permutation(len(labels))
    # Samples are drawn by their rank within the class, divided by the size of the class.
    shares = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    late = np.zeros(len(labels), bool) if last is None else last
    return np.sort(order[np.lexsort((shares[order], late[order]))[:count]])


@dataclass(frozen=True)
class SearchParts:
    """Samples that choose λ and samples that are reported, by set; disjoint unless `shared`."""

    choose: dict[str, Indices]
    """`retain`, `forget` and `holdout`."""
    report: dict[str, Indices]
    """`retain`, `forget` and `test`."""
    holdout_from: str
    """`validation` (positions in the training set) or `test`, if there is no validation set."""
    shared: bool
    """Whether a set has only one sample, which then both chooses λ and is reported."""
    tune: dict[str, Indices] = field(default_factory=dict)
    """`retain`, `forget` and `holdout` of methods with `groups`; empty without such a method."""


def divide_for_search(splits: Splits, samples: int, seed: int, tunes: bool = False) -> SearchParts:
    """Set samples apart for the choice of λ: at most `samples` and half of each set.

    With `tunes`, half of them tune instead; what is reported is the same.
    """
    rng = np.random.default_rng(seed_of("choice", seed))

    def cut(part: Indices) -> tuple[Indices, Indices]:
        if len(part) < 2:
            return part, part
        picked = np.sort(rng.choice(part, min(samples, len(part) // 2), replace=False))
        return picked, np.setdiff1d(part, picked)

    retain, forget = cut(splits.retain), cut(splits.forget)
    last, holdout_from = (splits.validation, splits.test), "validation"
    if not len(splits.validation):
        last, holdout_from = cut(splits.test), "test"
    shared = min(len(splits.retain), len(splits.forget), len(splits.test)) < 2
    choose = {"retain": retain[0], "forget": forget[0], "holdout": last[0]}
    report = {"retain": retain[1], "forget": forget[1], "test": last[1]}
    if not tunes:
        return SearchParts(choose, report, holdout_from, shared)
    halves = {name: set_apart(len(part), name, seed) for name, part in choose.items()}
    tune = {name: choose[name][own] for name, (own, _) in halves.items()}
    choose = {name: choose[name][rest] for name, (_, rest) in halves.items()}
    return SearchParts(choose, report, holdout_from, shared, tune)
