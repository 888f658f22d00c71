"""Ranges of about equal size; part files that give back what was stored, or show damage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from negmerge.errors import FileError
from negmerge.merging.part_file import CannotStore, PartFile, PartWriter
from negmerge.merging.parts import cut
from negmerge.support.files import atomic_file


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 20))
def test_ranges_are_contiguous_and_about_equal(sizes, count):
    ranges = cut(sizes, count)
    assert 1 <= len(ranges) <= count
    assert [k for first, stop in ranges for k in range(first, stop)] == list(range(len(sizes)))
    assert all(first < stop for first, stop in ranges)
    largest = max(sum(sizes[first:stop]) for first, stop in ranges)
    assert largest <= sum(sizes) / count + max(sizes) + 1


NUMBERS = st.sampled_from([np.uint8, np.uint64, np.int64, np.float32, np.float64, np.bool_])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | NUMBERS.flatmap(lambda kind: arrays(kind, st.sampled_from([(), (0,), (3,), (2, 3)])))
    | st.floats(allow_nan=False).map(np.float64)
)
TREES = st.recursive(
    LEAVES, lambda some: st.lists(some, max_size=3) | st.lists(some, max_size=3).map(tuple)
)


def same(one, two) -> bool:
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, np.ndarray | np.generic):
        kinds = type(one) is type(two) and one.dtype == two.dtype and one.shape == two.shape
        return kinds and one.tobytes() == two.tobytes()
    return type(one) is type(two) and one == two


def write(path: Path, results: list) -> Path:
    with atomic_file(path) as descriptor, PartWriter(descriptor) as writer:
        for result in results:
            writer.add(result)
        writer.finish({"key": "k"})
    return path


@settings(deadline=None)
@given(st.lists(TREES, max_size=5))
def test_a_part_file_gives_back_what_was_stored(results):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "a"), results)
        with PartFile(path) as file:
            assert file.facts == {"key": "k"}
            assert file.is_intact()
            assert len(file) == len(results)
            assert same(list(file), results)
        assert write(Path(folder, "b"), results).read_bytes() == path.read_bytes()


def test_damage_is_seen(tmp_path):
    results = [(3, np.arange(20.0)), [np.ones(5, np.uint8), "text"]]
    path = write(tmp_path / "part", results)
    whole = path.read_bytes()
    harmless = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            with PartFile(path) as file:
                if file.is_intact():  # some bytes of a zip file mean nothing, such as dates
                    assert same(list(file), results)
                    harmless += 1
        except FileError:
            pass
    assert harmless < len(whole) / 3
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(FileError, match="is damaged"):
            PartFile(path)


@pytest.mark.parametrize("result", [{"a": 1}, object(), np.array(["a"]), [b"bytes"]])
def test_other_results_are_refused(result, tmp_path):
    with pytest.raises(CannotStore):
        write(tmp_path / "part", [result])
    assert not any(tmp_path.iterdir())
