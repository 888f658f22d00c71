"""Splits are disjoint and complete, and λ is not chosen on reported samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.errors import NegMergeError, OptionError
from negmerge.vision.datasets import Images
from negmerge.vision.settings import Forget
from negmerge.vision.splits import balanced, class_index, divide_for_search, make_splits


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
def test_a_forgotten_class_is_not_in_the_test_set(which):
    train, test = labelled(500), labelled(200)
    splits = make_splits(train, test, Forget(**{"class": which}), validation=0.1)
    assert splits.forgotten_class == 3
    assert set(train.labels[splits.forget]) == {3}
    for labels in (train.labels[splits.retain], train.labels[splits.validation]):
        assert 3 not in labels
    assert 3 not in test.labels[splits.test]
    assert len(splits.test) == 180


def test_a_part_of_a_class_keeps_the_class_in_the_test_set():
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


def split_by(lines: str | bytes, tmp_path: Path, kind: str = "ids", ids=None, **options):
    """Split 50 images by a list of records."""
    file = tmp_path / "forget.txt"
    file.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    train = labelled(50, ids=True)
    if ids is not None:
        train = replace(train, ids=np.array(ids) if len(ids) else None)
    return make_splits(train, labelled(20), Forget(**{kind: file}), **options)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("5\n7\n5\n", "indices", "1 of 3 records are listed twice, the first is '5'"),
        ("50\n", "indices", "record 1 is '50', wanted a position from 0 to 49"),
        ("-1\n", "indices", "wanted a position"),
        ("3.5\n", "indices", "wanted a position"),
        ("9" * 5000, "indices", "wanted a position"),
        ("# nothing\n", "indices", "lists no records"),
        ("img3\nimg3\n", "ids", "1 of 2 records are listed twice, the first is 'img3'"),
        (b"\xff\xfei\x00", "ids", "not UTF-8"),
        ("²\n", "indices", "wanted a position"),
        ("img3\0\n", "ids", "NUL"),
    ],
)
def test_bad_lists(tmp_path: Path, text, kind, message):
    with pytest.raises(NegMergeError, match=message):
        split_by(text, tmp_path, kind)


def test_a_missing_list(tmp_path: Path):
    with pytest.raises(NegMergeError, match="no such file"):
        make_splits(labelled(50, ids=True), labelled(20), Forget(ids=tmp_path / "none.txt"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "img3\nimmg17\nnobody\n",
            "2 of 3 ids are not in the training set, the first is 'immg17', did you mean 'img17'?; "
            "ids of this data set look like 'img0' and 'img49'",
        ),
        (
            "img3\nxyzzy\n",
            "the first is 'xyzzy'; ids of this data set look like 'img0' and 'img49'",
        ),
        ("id\nimg3\n", "'id' looks like the name of a column; remove the first line"),
        ("id,label\nimg3,1\n", "'img3,1' has several columns; list only ids, one per line"),
        ("img3;1\n", "'img3;1' has several columns; list only ids, one per line"),
        ('"img3"\n', "did you mean 'img3'"),
    ],
)
def test_errors_of_unknown_ids_show_example_ids(tmp_path: Path, text, message):
    with pytest.raises(NegMergeError) as caught:
        split_by(text, tmp_path)
    assert message in str(caught.value)


PATHS = [f"train/{'cat' if k % 2 else 'dog'}/{k // 2}.png" for k in range(49)] + ["train/cat/x.png"]


def test_file_names_are_enough_if_they_are_unique(tmp_path: Path):
    assert split_by("x.png\ntrain/dog/3.png\n", tmp_path, ids=PATHS).forget.tolist() == [6, 49]
    assert split_by("cat/3.png\n", tmp_path, ids=PATHS).forget.tolist() == [7]
    assert split_by("24.png\n", tmp_path, ids=PATHS).forget.tolist() == [48]
    candidates = "'3.png' may be 'train/dog/3.png' or 'train/cat/3.png'; write the whole id"
    with pytest.raises(NegMergeError, match=candidates):
        split_by("x.png\n3.png\n", tmp_path, ids=PATHS)
    for text in ("name,label\nx.png,1\n", '"x.png";"1"\n'):
        with pytest.raises(NegMergeError, match="has several columns; list only ids"):
            split_by(text, tmp_path, ids=PATHS)
    with pytest.raises(NegMergeError, match="is in quotes; remove them"):
        split_by('"x.png"\n', tmp_path, ids=PATHS)
    twice = "1 of 2 records are listed twice, the first is 'train/cat/x.png'"
    with pytest.raises(NegMergeError, match=twice):
        split_by("x.png\ntrain/cat/x.png\n", tmp_path, ids=PATHS)
    # A complete id has priority over the end of another id.
    whole = ["a/7", "7", *PATHS[2:]]
    assert split_by("7\n", tmp_path, ids=whole).forget.tolist() == [1]


def test_an_id_of_several_records_means_all_of_them(tmp_path: Path):
    people = [f"person {k // 5}" for k in range(50)]
    splits = split_by("person 2\nperson 0\n", tmp_path, ids=people)
    assert splits.forget.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_lists_from_other_programs(tmp_path: Path):
    windows = b"\xef\xbb\xbfimg5\r\n\r\n  img17 \r\n# comment\r\n"
    assert split_by(windows, tmp_path).forget.tolist() == [5, 17]
    assert split_by(b"\xef\xbb\xbf5\r\n17", tmp_path, "indices").forget.tolist() == [5, 17]
    numbers = [str(1000 + k) for k in range(50)]
    assert split_by("1005\n", tmp_path, ids=numbers).forget.tolist() == [5]


def test_an_id_of_the_test_set_is_named_in_the_error(tmp_path: Path):
    file = tmp_path / "forget.txt"
    file.write_text("img3\nother3\n")
    test = replace(labelled(20), ids=np.array([f"other{k}" for k in range(20)]))
    with pytest.raises(NegMergeError, match="'other3', which is in the test set"):
        make_splits(labelled(50, ids=True), test, Forget(ids=file))


def test_without_ids_a_list_of_ids_is_refused(tmp_path: Path):
    with pytest.raises(NegMergeError, match=r"has no ids.*data.id.*split.forget.indices"):
        split_by("img3\n", tmp_path, ids=[])


@given(
    listed=st.sets(st.integers(0, 499), min_size=1, max_size=100),
    validation=st.sampled_from([0.1, 0.3]),
    limit=st.sampled_from([None, 333]),
)
def test_listed_records_stay_in_the_training_set(tmp_path_factory, listed, validation, limit):
    file = tmp_path_factory.mktemp("list") / "forget.txt"
    file.write_text("\n".join(map(str, listed)))
    given = labelled(500), labelled(200), Forget(indices=file), validation, 0, (limit, None)
    splits = make_splits(*given)
    assert splits.forget.tolist() == sorted(listed)
    assert len(splits.validation) == round(validation * (limit or 500))
    assert len(splits.train) + len(splits.validation) == (limit or 500)
    assert not np.intersect1d(splits.validation, splits.forget).size
    labels = labelled(500).labels
    left = np.bincount(np.delete(labels, sorted(listed)), minlength=10)
    if limit is None:  # classes keep their shares among unlisted records
        held = np.bincount(labels[splits.validation], minlength=10)
        assert abs(held / held.sum() - left / left.sum()).max() < 0.1


def test_a_limit_below_the_length_of_the_list_is_refused(tmp_path: Path):
    many = "".join(f"img{k}\n" for k in range(10))
    with pytest.raises(
        NegMergeError, match=r"lists 10 records, data\.limit\.train is 5; raise data"
    ):
        split_by(many, tmp_path, limit=(5, None))


def test_an_ambiguous_class_is_refused():
    folders = ("1", "10", "2")  # sorted as text
    assert class_index("1", folders) == 0
    assert class_index(2, folders) == 2
    assert class_index(10, folders) == 1
    assert class_index(0, folders) == 0
    message = r"class 1: may be number 1, '10', or the name of number 0; write the name in quotes: "
    with pytest.raises(NegMergeError, match=message + r"\"10\" or \"1\""):
        class_index(1, folders)


def test_a_validation_share_of_almost_all_images_is_refused():
    with pytest.raises(NegMergeError, match=r"split: the forget set is empty; check split"):
        make_splits(labelled(50), labelled(20), Forget(fraction=0.1), validation=0.999)


def test_draws_are_those_of_recorded_runs(tmp_path: Path):
    """A change of the draws would change every recorded result."""
    file = tmp_path / "forget.txt"
    file.write_text("0\n2\n4\n7\n8\n9\n")  # none of them is drawn with this seed
    cases = {
        "90aaccaa9c71868d6c061b9d512ea81c": (Forget(fraction=0.1), 0.1, None, None),
        "bd127edadb1a3e37baef956800ba783d": (Forget(fraction=0.3), 0.2, 333, 50),
        "3b00991f71eddb2dcfb04e581340dabe": (Forget(**{"class": 3}), 0.1, None, None),
        "06ea54ba08e65e3524516c7ddc5084f6": (Forget(**{"class": 3, "count": 7}), 0.1, 300, None),
        "4bf3b772e818ff05fd0cf9e58833b839": (Forget(indices=file), 0.1, 400, None),
    }
    for fingerprint, (forget, validation, *limit) in cases.items():
        splits = make_splits(labelled(500), labelled(200), forget, validation, 3, tuple(limit))
        assert splits.fingerprint == fingerprint


@given(validation=st.sampled_from([0.0, 0.2]), samples=st.integers(1, 400), seed=st.integers(0, 3))
def test_samples_that_choose_are_not_reported(validation, samples, seed):
    splits = make_splits(labelled(500), labelled(200), Forget(fraction=0.1), validation, seed)
    parts = divide_for_search(splits, samples, seed)
    for name in ("retain", "forget"):
        chosen, reported = parts.choose[name], parts.report[name]
        assert not np.intersect1d(chosen, reported).size
        assert np.array_equal(np.union1d(chosen, reported), getattr(splits, name))
    assert len(parts.choose["forget"]) == min(samples, len(splits.forget) // 2)
    if validation:
        assert parts.holdout_from == "validation"
        assert np.array_equal(parts.report["test"], splits.test)
    else:
        assert not np.intersect1d(parts.choose["holdout"], parts.report["test"]).size


@given(validation=st.sampled_from([0.0, 0.2]), samples=st.integers(2, 400), seed=st.integers(0, 3))
def test_samples_that_tune_are_taken_from_those_that_choose(validation, samples, seed):
    splits = make_splits(labelled(500), labelled(200), Forget(fraction=0.1), validation, seed)
    plain, parts = (divide_for_search(splits, samples, seed, tunes) for tunes in (False, True))
    assert plain.tune == {}
    for name, before in plain.choose.items():
        tuned, chosen = parts.tune[name], parts.choose[name]
        assert np.array_equal(np.union1d(tuned, chosen), before)
        assert len(tuned) + len(chosen) == len(before)
        assert len(chosen) - len(tuned) in (0, 1)
    for name, reported in plain.report.items():
        assert np.array_equal(parts.report[name], reported)


def test_a_set_too_small_to_tune_is_an_error():
    splits = make_splits(labelled(500), labelled(200), Forget(fraction=0.1), 0.2, 0)
    with pytest.raises(OptionError, match=r"^groups: 1 samples of the retain set choose λ, and "):
        divide_for_search(splits, 1, 0, tunes=True)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(0, 80))
def test_balanced_takes_the_share_of_each_class(labels, count):
    array = np.array(labels)
    picked = balanced(array, count, np.random.default_rng(0))
    assert len(picked) == min(count, len(labels))
    for label in range(5):
        share = (array == label).sum() * len(picked) / len(labels)
        assert abs((array[picked] == label).sum() - share) <= 1
