"""Who belongs where: nobody twice, nobody lost, and λ is not chosen on what is reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.data.datasets import Images
from negmerge.data.splits import balanced, divide, make_splits
from negmerge.errors import NegMergeError
from negmerge.recipe import Forget


def labelled(count: int, classes: int = 10, ids: bool = False) -> Images:
    labels = np.arange(count) % classes
    names = np.array([f"img{i}" for i in range(count)]) if ids else None
    pixels = np.zeros((count, 1, 1, 1), np.uint8)
    return Images(pixels, labels, names, tuple(f"class {c}" for c in range(classes)), "f")


@given(
    fraction=st.floats(0.01, 0.9),
    validation=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 5),
    limit=st.sampled_from([None, 100, 333]),
)
def test_parts_are_disjoint_and_complete(fraction, validation, seed, limit):
    train, test = labelled(500), labelled(200)
    splits = make_splits(train, test, Forget(fraction=fraction), validation, seed, (limit, None))
    whole = np.concatenate([splits.retain, splits.forget, splits.validation])
    assert len(np.unique(whole)) == len(whole) == (limit or 500)
    assert np.array_equal(splits.train, np.union1d(splits.retain, splits.forget))
    counts = np.bincount(train.labels[splits.validation], minlength=10)
    assert counts.max() - counts.min() <= 1
    again = make_splits(train, test, Forget(fraction=fraction), validation, seed, (limit, None))
    assert again.fingerprint == splits.fingerprint
    other = make_splits(train, test, Forget(fraction=fraction), validation, seed + 1, (limit, None))
    assert other.fingerprint != splits.fingerprint


def test_the_two_layouts_of_cifar10():
    train, test = labelled(50_000), labelled(10_000)
    paper = make_splits(train, test, Forget(fraction=0.1))
    assert [len(p) for p in (paper.retain, paper.forget, paper.test)] == [45_000, 5_000, 10_000]
    salun = make_splits(train, test, Forget(fraction=0.1), validation=0.1)
    sizes = [len(p) for p in (salun.retain, salun.forget, salun.validation)]
    assert sizes == [40_500, 4_500, 5_000]
    assert np.bincount(train.labels[salun.validation]).tolist() == [500] * 10


@pytest.mark.parametrize("which", [3, "class 3"])
def test_a_class_leaves_the_test_set_too(which):
    train, test = labelled(500), labelled(200)
    splits = make_splits(train, test, Forget(**{"class": which}), validation=0.1)
    assert splits.forgotten_class == 3
    assert set(train.labels[splits.forget]) == {3}
    for labels in (train.labels[splits.retain], train.labels[splits.validation]):
        assert 3 not in labels
    assert 3 not in test.labels[splits.test]
    assert len(splits.test) == 180


def test_a_part_of_a_class_is_records_not_a_class():
    splits = make_splits(labelled(500), labelled(200), Forget(**{"class": 3, "count": 7}))
    assert (len(splits.forget), splits.forgotten_class, len(splits.test)) == (7, None, 200)


def test_lists_of_positions_and_of_ids(tmp_path: Path):
    file = tmp_path / "forget.txt"
    file.write_text("# records to erase\n5\n\n17\n3\n")
    splits = make_splits(labelled(50), labelled(20), Forget(indices=file))
    assert splits.forget.tolist() == [3, 5, 17]
    file.write_text("img5\nimg17\n")
    splits = make_splits(labelled(50, ids=True), labelled(20), Forget(ids=file))
    assert splits.forget.tolist() == [5, 17]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("5\n5\n", "indices", "1 records are listed twice"),
        ("50\n", "indices", "record 1 is '50', wanted a position from 0 to 49"),
        ("-1\n", "indices", "wanted a position"),
        ("3.5\n", "indices", "wanted a position"),
        ("# nothing\n", "indices", "lists no records"),
        ("img3\nnobody\n", "ids", "1 of 2 ids are not in the training set, the first is 'nobody'"),
        (None, "ids", "cannot be read"),
    ],
)
def test_bad_lists(tmp_path: Path, text, kind, message):
    file = tmp_path / "forget.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(NegMergeError, match=message):
        make_splits(labelled(50, ids=True), labelled(20), Forget(**{kind: file}))


def test_records_that_were_never_trained_on_cannot_be_forgotten(tmp_path: Path):
    file = tmp_path / "forget.txt"
    file.write_text("\n".join(map(str, range(50))))
    with pytest.raises(NegMergeError, match="10 of 50 records are not in the training data"):
        make_splits(labelled(50), labelled(20), Forget(indices=file), validation=0.2)


def test_without_ids_a_list_of_ids_is_refused(tmp_path: Path):
    file = tmp_path / "forget.txt"
    file.write_text("img3\n")
    with pytest.raises(NegMergeError, match="has no ids"):
        make_splits(labelled(50), labelled(20), Forget(ids=file))


@given(validation=st.sampled_from([0.0, 0.2]), samples=st.integers(1, 400), seed=st.integers(0, 3))
def test_what_chooses_is_not_what_is_reported(validation, samples, seed):
    splits = make_splits(labelled(500), labelled(200), Forget(fraction=0.1), validation, seed)
    parts = divide(splits, samples, seed)
    assert not np.intersect1d(parts.retain, parts.report_retain).size
    assert not np.intersect1d(parts.forget, parts.report_forget).size
    assert np.array_equal(np.union1d(parts.forget, parts.report_forget), splits.forget)
    assert np.array_equal(np.union1d(parts.retain, parts.report_retain), splits.retain)
    assert len(parts.forget) == min(samples, len(splits.forget) // 2)
    if validation:
        assert parts.holdout_from == "validation"
        assert np.array_equal(parts.report_test, splits.test)
    else:
        assert not np.intersect1d(parts.holdout, parts.report_test).size


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(0, 80))
def test_balanced_takes_the_share_of_each_class(labels, count):
    array = np.array(labels)
    picked = balanced(array, count, np.random.default_rng(0))
    assert len(picked) == min(count, len(labels))
    for label in range(5):
        share = (array == label).sum() * len(picked) / len(labels)
        assert abs((array[picked] == label).sum() - share) <= 1
