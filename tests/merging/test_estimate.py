"""A dry run tells what a merge needs, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from negmerge.cli import main
from negmerge.merging.estimate import estimate
from negmerge.merging.rules import rules


@pytest.fixture
def pool(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{k}.safetensors" for k in range(4)]
    for path in paths:
        small = rng.standard_normal(3).astype(np.float32)
        save_file({"w": rng.standard_normal((600, 1000)).astype(np.float32), "b": small}, path)
    return paths


@pytest.mark.parametrize("rule", list(rules))
def test_a_whole_sample_knows_the_size_of_the_patch(pool, rule, tmp_path):
    found = estimate(pool[0], pool[1:], rule, folder=tmp_path)
    assert found.sampled == 1
    assert found.elements == 600_003
    assert found.read_bytes == 4 * 4 * 600_003
    assert found.seconds > 0
    assert found.memory > found.patch_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in pool]


def test_the_command_tells_it_and_writes_no_patch(pool, tmp_path, capsys):
    out = tmp_path / "patch.safetensors"
    arguments = ["merge", *map(str, pool), "-o", str(out), "--dry-run"]
    main([*arguments, "--json"])
    need = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert need["read_bytes"] == 4 * 4 * 600_003
    main(["merge", *map(str, pool), "-o", str(out), "--json"])
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert need["patch_bytes"] == pytest.approx(made["tensor_bytes"], rel=0.01)
    out.unlink()
    main(arguments)
    assert "reads 9.6 MB, writes about" in capsys.readouterr().out
    assert not out.exists()
