"""The page of a run whose metrics are not those of images: words, axes, tables, exports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import negmerge as nm
from negmerge.cli import main
from negmerge.evaluation.metrics import metric_of
from negmerge.runs.store import Run
from regression import FORGET, RETAIN, SURPRISE, make_run, registered


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    with registered():
        found = make_run(tmp_path_factory.mktemp("regression") / "run")
        nm.report(found)
    return found


@pytest.fixture(scope="module")
def page(run: Run) -> str:
    return run.page.read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees, the drawings included."""
    page = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def section(page: str, id: str) -> str:
    found = re.search(rf'<section id="{id}".*?</section>', page, flags=re.DOTALL)
    assert found, id
    return found[0]


def test_nothing_is_missing_and_nothing_is_said_of_images(page: str):
    text = words(page)
    assert "Missing from this page" not in text
    for word in ("accuracy", "image", "MIA", "Avg. Gap", "nan", "points"):
        assert word not in text, word
    shown = re.findall(
        r"[\d.]+\s%", words(section(page, "scores")) + words(section(page, "sweeps"))
    )
    assert not shown or {one.replace("\xa0", " ") for one in shown} == {"95 %"}


def test_the_summary_has_the_metrics_of_the_run(page: str):
    text = words(page)
    assert (
        "Squared error on the forget set: 0.002 before, 0.05 after [0.045–0.06]. Retrained without "
        "the forget set: 0.06."
    ) in text
    assert "What was to be forgotten? 50 training records of houses. Method: NegMerge." in text
    assert "Is it forgotten? Partly" in text
    assert "Squared error on the retain set: 0.001 before, 0.0012 after." in text
    assert "squared error on the retain set 0.001 0.0012 0.0011" in text  # without an interval
    assert "surprise at the forget set, nats 2.5 2.5 2.5" in text
    assert "own number 123,457" in text
    assert "other attacks: only surprise was run" in text


def test_axes_are_turned_so_that_forgetting_is_right_and_keeping_is_up(page: str):
    drawing = section(page, "trade-off")
    assert "squared error on the forget set<" in drawing
    assert "squared error on the retain set (axis reversed)" in drawing
    assert "NegMerge (λ = 0.5): retain error 0.0012, forget error 0.05" in drawing
    spot = {
        name: [float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', part)[0]]
        for name, part in re.findall(
            r'<g class="named" data-of="(\w+)"[^>]*>(.*?)</g>\s*</g>', drawing, flags=re.DOTALL
        )
    }
    assert spot["uniform"][0] > spot["consensus"][0] > spot["original"][0]  # forgets more: right
    assert spot["original"][1] < spot["consensus"][1]  # SVG counts from the top: keeps more: up


def test_every_metric_of_the_sweep_has_a_curve(page: str):
    drawing = section(page, "sweeps")
    titles = re.findall(r'<svg class="chart" [^>]*aria-label="([^"]+) by λ', drawing)
    first = ["squared error on the forget set", "squared error on the retain set"]
    assert titles[:2] == first
    assert "own number" in titles
    assert "at most twice the original's" in drawing
    assert "Uniform Merge: λ = 0.5, 0.05, chosen" in drawing


def test_the_slider_has_what_was_measured_and_what_the_criterion_allows(page: str):
    found = re.search(r'id="slider-data">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    methods = json.loads(found[1])
    assert [(one["title"], one["label"], one["chosen"]) for one in methods] == [
        ("consensus", "NegMerge", 1),
        ("uniform", "Uniform Merge", 1),
    ]
    assert methods[0]["stops"] == [
        {"scale": "0", "note": "the original", "texts": ["0.002", "0.001", "1"]},
        {"scale": "0.5", "note": "chosen", "texts": ["0.05", "0.0012", "1"]},
        {"scale": "1", "note": "not allowed by keep_error", "texts": ["0.9", "0.004", "1"]},
    ]
    drawing = words(section(page, "sweeps"))
    assert "A retrained model was not measured on these data." in drawing


def test_methods_are_sorted_by_the_scenarios_own_criterion(run: Run, page: str):
    frame = pd.read_csv(run.tables / "scores.csv")
    assert list(frame["method"]) == ["original", "retrained", "uniform", "consensus", "finetune"]
    assert list(frame["by_keep_error"].dropna()) == [12.5, 20.0, 250.0]
    assert frame.loc[3, f"{FORGET}_high"] == pytest.approx(0.06)
    assert f"{RETAIN}_low" not in frame
    assert not {"avg_gap", "acc_forget", "mia"} & set(frame)
    assert "largest forget error with at most twice" in words(section(page, "scores"))
    markdown = (run.tables / "scores.md").read_text().splitlines()
    assert "| forget error | retain error | surprise nats | own number |" in markdown[0]
    assert "0.05 [0.045–0.06]" in markdown[5]
    latex = (run.tables / "scores.tex").read_text()
    assert "retain error & surprise nats" in latex


def test_a_metrics_histogram_and_a_panel_have_their_sections(page: str):
    drawing = section(page, "surprise")
    assert "Samples by how likely they are." in drawing
    assert "negative log-likelihood" in drawing
    assert "forget under original: 40 samples, 75.0 % of them between 0 and 2" in drawing
    panel = section(page, "examples")
    assert "Examples of what is predicted" in panel
    assert "three rooms: 210,000" in panel
    assert "<img" not in panel


def test_the_terminal_has_them_too(run: Run, capsys):
    with registered():
        main(["inspect", str(run.folder)])
    said = capsys.readouterr().out
    assert "forget error" in said
    assert "0.05 [0.045–0.06]" in said
    assert "Avg. Gap" not in said
    assert "%" not in said.replace("95 %", "").replace("zero %", "")
    with registered():
        main(["inspect", str(run.folder), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["scores"]["methods"][0][FORGET] == 0.05


def test_a_metric_that_nothing_registers_is_called_by_its_name(run: Run, tmp_path: Path):
    """As when the module that registers it was not imported."""
    with registered([]):
        page = nm.report(make_run(tmp_path / "run"))
    text = words(page.read_text(encoding="utf-8"))
    assert "Deviation forget: 0.002 before, 0.05 after" in text
    assert "deviation forget (axis reversed)" in text  # of the forget metric less is better
    assert "Surprise" not in text
    assert metric_of(SURPRISE).unit == ""


def test_reading_a_run_needs_no_torch(run: Run):
    script = (
        "import sys\n"
        "from regression import registered\n"
        "from negmerge.cli import main\n"
        "with registered():\n"
        f"    main(['report', {str(run.folder)!r}])\n"
        f"    main(['inspect', {str(run.folder)!r}])\n"
        "assert 'torch' not in sys.modules\n"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
