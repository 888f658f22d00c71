"""Avg. Gap is over the metrics that say so; a scenario may have none of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from negmerge.evaluation.metrics import metrics
from negmerge.reports.page import report
from toys import run_toy, toy_scenario


def test_without_a_metric_in_the_gap_there_is_no_gap(tmp_path: Path):
    with toy_scenario():
        usual = run_toy(tmp_path / "usual").result
        for name in ("error_forget", "error_retain"):
            metric = metrics.get(name)
            metrics.remove(name)
            metrics.register(name, replace(metric, in_gap=False))
        run = run_toy(tmp_path / "without")
        page = report(run).read_text(encoding="utf-8")
    rows = [run.result.original, run.result.retrain, *run.result.methods, *run.result.pool]
    assert [row.avg_gap for row in rows if row is not None] == [None] * len(rows)
    assert run.result.first.metrics == usual.first.metrics
    assert usual.first.avg_gap == pytest.approx(
        sum(abs(usual.first.value(m) - usual.retrain.value(m)) for m in usual.first.metrics) / 2
    )
    assert "Avg. Gap" not in page
    assert "damaged" not in page
