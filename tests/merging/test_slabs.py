"""Memory of results is used again, but never while something refers to it."""

from __future__ import annotations

import gc

import numpy as np

import negmerge as nm
from negmerge.merging.slabs import SLAB, Room, new_slab
from storage import dense


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_when_the_last_view_is_gone():
    slab = new_slab(5 * SLAB)  # a size that nothing else uses
    place, view = address(slab), slab[100:200].view(np.float32)
    del slab
    other = new_slab(5 * SLAB)
    assert address(other) != place
    del view
    gc.collect()
    assert address(new_slab(4 * SLAB + 1)) == place


def test_results_do_not_overlap():
    room = Room()
    first = room.free(1000, np.float32)
    first[:] = 1
    room.take(10 * 4)
    second = room.free(1000, np.float64)
    second[:] = 2
    assert (first[:10] == 1).all()
    assert address(second) % 64 == 0
    assert room.free(SLAB, np.float64).size == SLAB  # larger than a slab


def test_a_later_merge_does_not_change_an_earlier_result():
    rng = np.random.default_rng(0)
    models = [{"w": rng.standard_normal(30000).astype(np.float32)} for _ in range(5)]
    for rule in ("consensus", "uniform"):
        kept = nm.merge(models[0], models[1:3], rule)
        before = dense(kept)["w"].copy()
        for _ in range(3):
            nm.merge(models[1], models[3:], rule)
        np.testing.assert_array_equal(dense(kept)["w"], before)
