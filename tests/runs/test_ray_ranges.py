"""Merges on a Ray cluster: the bytes of a merge by one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import negmerge as nm
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.ranges import cluster_for, merge_and_apply_on, merge_on
from negmerge.support.progress import Quiet

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def test_a_cluster_gives_the_same_bytes(tmp_path):
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(2000, generator=draw) for name in "abcdef"}
    paths = [tmp_path / f"m{k}.safetensors" for k in range(4)]
    save_file(base, paths[0])
    for path in paths[1:]:
        change = {n: v + 0.1 * torch.randn(v.shape, generator=draw) for n, v in base.items()}
        save_file(change, path)
    local, out = tmp_path / "local.safetensors", tmp_path / "out.safetensors"
    cluster, ranges = cluster_for(out, ExecutorSettings(kind="ray"), 2, Quiet())
    with cluster:
        nm.merge(paths[0], paths[1:], "ties", out=local)
        merge_on(cluster, paths[0], paths[1:], "ties", out=out, ranges=ranges)
        assert out.read_bytes() == local.read_bytes()
        nm.merge_and_apply(paths[0], paths[1:], -0.5, local)
        merge_and_apply_on(cluster, paths[0], paths[1:], -0.5, out, ranges=ranges)
        assert out.read_bytes() == local.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted([*paths, local, out])
