"""Who belongs where: forget, retain, validation and test, seeded and fingerprinted.

The original model is trained on exactly retain ∪ forget, so the two are cut from the same indices
that it saw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from negmerge.data.draws import seed_of
from negmerge.data.records import positions_from, positions_of
from negmerge.errors import FileError, OptionError, shown
from negmerge.hyperparameters import HELD_OUT
from negmerge.reading import read_lines as lines_of

if TYPE_CHECKING:
    from negmerge.data.datasets import Images
    from negmerge.recipe import Forget

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """Positions in the training set (retain, forget, validation) and in the test set (test)."""

    retain: Indices
    forget: Indices
    validation: Indices
    test: Indices
    forgotten_class: int | None = None
    """The class, if all of it is forgotten; the test set then is without it."""

    @cached_property
    def train(self) -> Indices:
        """What the original model is trained on."""
        return np.sort(np.concatenate([self.retain, self.forget]))

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same positions."""
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
    """Cut a data set.

    validation: the share of each class that is held out of training.
    limit: use so many training and test images only, the same share of each class.
    """
    rng = np.random.default_rng(seed_of("splits", seed))
    listed = listed_to_forget(train, test, forget)
    if listed is not None and limit[0] is not None and limit[0] < len(listed):
        raise OptionError(
            f"{forget.indices or forget.ids}: lists {len(listed)} records, data.limit.train is "
            f"{limit[0]}; raise it or leave it out"
        )
    # What is drawn leaves the listed records where they are: among the training data.
    is_listed = np.isin(np.arange(len(train)), [] if listed is None else listed)
    usable = balanced(train.labels, limit[0], rng, last=~is_listed)
    tested = balanced(test.labels, limit[1], rng)
    count = round(validation * len(usable))
    held = balanced(train.labels[usable], count, rng, last=is_listed[usable])
    held_out = usable[held] if validation else usable[:0]
    rest = np.setdiff1d(usable, held_out)
    chosen, forgotten = (listed, None) if listed is not None else drawn(train, rest, forget, rng)
    retain = np.setdiff1d(rest, chosen)
    if forgotten is not None:
        # A model that never saw a class cannot be asked for it.
        tested = tested[test.labels[tested] != forgotten]
        held_out = held_out[train.labels[held_out] != forgotten]
    for name, part in {"forget": chosen, "retain": retain, "test": tested}.items():
        if not len(part):
            raise OptionError(f"split: the {name} set is empty; check split and data.limit")
    return Splits(retain, chosen, held_out, tested, forgotten)


def listed_to_forget(train: Images, test: Images, forget: Forget) -> Indices | None:
    """The positions that a list names, in rising order; None if nothing is listed."""
    if forget.indices is not None:
        return positions_from(read_lines(forget.indices), forget.indices, len(train))
    if forget.ids is not None:
        return positions_of(read_lines(forget.ids), forget.ids, train, test)
    return None


def drawn(
    train: Images, rest: Indices, forget: Forget, rng: np.random.Generator
) -> tuple[Indices, int | None]:
    """The positions of a share or a class, in rising order, and the class if it is a whole one."""
    if forget.fraction is not None:
        count = min(max(round(forget.fraction * len(rest)), 1), len(rest))
        return np.sort(rng.choice(rest, count, replace=False)), None
    assert forget.class_ is not None, "the recipe names one way to choose"
    label = class_index(forget.class_, train.classes)
    members = rest[train.labels[rest] == label]
    if forget.count is None or forget.count >= len(members):
        return members, label
    return np.sort(rng.choice(members, forget.count, replace=False)), None


def class_index(wanted: int | str, classes: tuple[str, ...]) -> int:
    """The number of a class given by number or name; a text is first of all a name.

    >>> class_index("cat", ("dog", "cat")), class_index(0, ("dog", "cat"))
    (1, 0)
    """
    named = classes.index(str(wanted)) if str(wanted) in classes else None
    counted = None
    if str(wanted).isdecimal() and len(str(wanted)) < 20 and int(wanted) < len(classes):
        counted = int(wanted)
    if named is not None and (isinstance(wanted, str) or counted in (None, named)):
        return named
    if named is not None and counted is not None:
        raise OptionError(
            f"split.forget.class {wanted}: may be number {wanted}, {shown(classes[counted])}, or "
            f'the name of number {named}; write the name in quotes: "{classes[counted]}" or '
            f'"{wanted}"'
        )
    if counted is not None:
        return counted
    names = ", ".join(f"{i} {shown(c, 40)}" for i, c in enumerate(classes[:20]))
    raise OptionError(f"split.forget.class {wanted!r}: no such class; there are: {names}")


def read_lines(path: Path) -> list[str]:
    """The lines of a list, without blanks and comments."""
    found = lines_of(path)
    if not found:
        raise FileError(f"{path}: lists no records; wanted one per line")
    return found


def held_out_of(size: int) -> tuple[Indices, Indices]:
    """The CLIP protocol's cut of a training set into the rest and a tenth, at most `HELD_OUT`.

    It is torch's `random_split` of seed 0, so that validation sets are those of published work.

    >>> rest, held_out = held_out_of(60_000)
    >>> len(rest), len(held_out), int(rest[0])
    (55000, 5000, 36044)
    """
    import torch

    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).numpy()
    count = min(size // 10, HELD_OUT)
    return order[: size - count], order[size - count :]


def balanced(
    labels: NDArray[Any],
    count: int | None,
    rng: np.random.Generator,
    last: NDArray[np.bool_] | None = None,
) -> Indices:
    """Positions of `count` samples in rising order, as many of each class as its share gives.

    last: which samples are taken only when there are no others.

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> labels[balanced(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    if count <= 0:
        return np.arange(0)
    order = rng.permutation(len(labels))
    # Each sample's rank within its class, as a share of the class: the smallest shares are taken.
    shares = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        shares[members] = (np.arange(len(members)) + 0.5) / len(members)
    late = np.zeros(len(labels), bool) if last is None else last
    return np.sort(order[np.lexsort((shares[order], late[order]))[:count]])


@dataclass(frozen=True)
class Parts:
    """Which samples choose λ and which are reported; disjoint unless λ may look (`oracle`)."""

    retain: Indices
    forget: Indices
    holdout: Indices
    """From the training set if there is validation data, else from the test set."""
    holdout_from: str
    report_retain: Indices
    report_forget: Indices
    report_test: Indices
    shared: bool
    """Whether a set was too small to be divided: then λ is chosen on what is reported."""


def divide(splits: Splits, samples: int, seed: int) -> Parts:
    """Set samples apart for the choice of λ: at most `samples` and half of each set."""
    rng = np.random.default_rng(seed_of("choice", seed))

    def cut(part: Indices) -> tuple[Indices, Indices]:
        if len(part) < 2:
            return part, part
        count = min(samples, len(part) // 2)
        picked = np.sort(rng.choice(part, count, replace=False))
        return picked, np.setdiff1d(part, picked)

    retain, report_retain = cut(splits.retain)
    forget, report_forget = cut(splits.forget)
    if len(splits.validation):
        holdout, holdout_from, report_test = splits.validation, "validation", splits.test
    else:
        (holdout, report_test), holdout_from = cut(splits.test), "test"
    return Parts(
        retain,
        forget,
        holdout,
        holdout_from,
        report_retain,
        report_forget,
        report_test,
        shared=min(len(splits.retain), len(splits.forget), len(splits.test)) < 2,
    )
