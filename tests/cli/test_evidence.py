"""Tests of forgetting through the command line: every one beside its null, resumed, on the page."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from negmerge.evidence.findings import NO_REFERENCE, RETRAINED, TIERS, Evidence
from negmerge.evidence.registry import forgetting_tests
from negmerge.reports.page import report
from negmerge.runs.context import Context
from negmerge.runs.evidence import Examination
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.records import Done
from negmerge.runs.result import RunResult
from negmerge.runs.steps import Step
from negmerge.runs.store import Run, without_seconds
from negmerge.runs.watch import Watch
from negmerge.support.progress import Quiet
from running import negmerge, start
from toys import run_toy, toy_scenario

RECIPE = """
title: Evidence
data: {name: fashion_small, limit: {train: 300, test: 150}}
split: {forget: {class: 3}, validation: 0.1}
train: {epochs: 4, batch: 32, lr: 0.05, augment: {crop: 0, flip: false}}
pool: {settings: {batch: 16, lr: 0.05}, grid: {epochs: [1, 2]}}
methods: [consensus, {name: gradient_ascent, options: {epochs: 1}}]
search: {count: 3, samples: 20}
threads: 1
evidence: standard
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "r.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    negmerge(place, "unlearn", "r.yaml", "--out", "run")
    return place / "run"


def evidence_of(run: Path) -> Evidence:
    found = RunResult.model_validate(json.loads((run / "scores.json").read_text())).evidence
    assert found is not None
    return found


def test_every_test_of_the_tier_has_its_null_beside_it(finished: Path):
    evidence = evidence_of(finished)
    ours = [forgetting_tests.get(name) for name in forgetting_tests]
    assert {t.name for t in ours if TIERS.index(t.tier) < 2} == {*evidence.tests}
    for name, test in evidence.tests.items():
        assert test.missing is None, name
        assert {"original", "consensus", "gradient_ascent", test.null} <= {*test.models}
        quantity = test.quantities[0]
        for model in ("original", "consensus", test.null):
            found = test.finding(model, quantity.name)
            assert found is not None, (name, model)
            assert found.value is not None or found.why, (name, model)
            if found.value is not None and found.low is not None and found.high is not None:
                assert found.low <= found.value <= found.high, (name, model)
    # The retrained model never saw the class; the original knows it.
    relearned = evidence.tests["relearning"]
    assert relearned.finding("original", "steps").value == 0
    assert relearned.finding(RETRAINED, "steps").value > 0
    tpr = evidence.tests["rmia"].finding("original", "tpr")
    assert tpr.value is None
    assert re.fullmatch(r"not resolvable with \d+ negatives", tpr.why)
    assert evidence.seconds > 0


def run_here(finished: Path, name: str, *changes: str) -> Path:
    """Run the recipe with changes in this process, with the trainings of the finished run."""
    place = finished.parent
    recipe = load_recipe(place / "r.yaml", changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEGMERGE_CACHE", str(place / "cache"))
        scenario, store = recipe.make_scenario(), Run(place / name, [finished])
        with store.locked():
            unlearn(Context(recipe, scenario, store, InProcess(scenario), Quiet()))
    return store.folder


def test_the_unlearned_weights_are_not_changed_by_the_tests(finished: Path, place: Path):
    run_here(finished, "plain", "evidence=basic")
    file = "unlearned/model.safetensors"
    assert (finished / file).read_bytes() == (place / "plain" / file).read_bytes()
    assert "evidence" not in (place / "plain" / "recipe.yaml").read_text()
    assert "evidence: standard" in (finished / "recipe.yaml").read_text()
    basic, standard = evidence_of(place / "plain"), evidence_of(finished)
    assert {test.tier for test in basic.tests.values()} == {"basic"}
    assert not (place / "plain" / "retrain-2.safetensors").exists()
    for name, test in basic.tests.items():
        assert test == standard.tests[name]


def test_the_second_retrained_model_is_another_one_and_in_the_manifest(finished: Path):
    files = json.loads((finished / "manifest.json").read_text())["files"]
    assert {"retrain-2.safetensors", "retrain-2.json"} <= {*files}
    assert files["retrain-2.safetensors"] != files["retrain.safetensors"]
    negmerge(finished.parent, "verify", "run")


def test_run_again_changes_nothing(finished: Path, place: Path):
    before = (finished / "scores.json").read_bytes()
    out, err = negmerge(place, "unlearn", "r.yaml", "--out", "run")
    assert (finished / "scores.json").read_bytes() == before
    assert "training a second" not in out + err


class Stopped(InProcess):
    """Runs some tests of models, then is interrupted."""

    left = 10

    def run(
        self, steps: Sequence[Step[Any]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[Any]]]:
        for position, done in super().run(steps, watch, stage_size):
            if isinstance(steps[position], Examination):
                if not self.left:
                    raise KeyboardInterrupt
                Stopped.left -= 1
            yield position, done


def test_interrupted_and_resumed_gives_the_same_numbers(place: Path, finished: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    recipe = load_recipe(place / "r.yaml")
    scenario, store = recipe.make_scenario(), Run(place / "stopped", [finished])
    with store.locked(), pytest.raises(KeyboardInterrupt):
        unlearn(Context(recipe, scenario, store, Stopped(scenario), Quiet()))
    ran: list[str] = []

    class Counted(InProcess):
        def run(self, steps: Sequence[Step[Any]], watch: Watch, stage_size: int | None = None):
            ran.extend(step.label for step in steps)
            return super().run(steps, watch, stage_size)

    with store.locked():
        unlearn(Context(recipe, scenario, store, Counted(scenario), Quiet()))
    tested = [label for label in ran if " of " in label]
    assert len(tested) == 3 * 4 - 10  # three tests of four models, without those that were done
    scores = [json.loads((one / "scores.json").read_text()) for one in (store.folder, finished)]
    assert without_seconds(scores[0]["evidence"]) == without_seconds(scores[1]["evidence"])


@pytest.mark.slow
def test_killed_among_the_tests_and_repeated_it_ends_with_the_same_scores(
    place: Path, finished: Path
):
    words = ("unlearn", "r.yaml", "--out", "killed", "--set", "workers=1")
    killed = place / "killed"

    def findings() -> int:
        """The number of tests of models that `.state` holds."""
        found = [path.read_bytes() for path in killed.glob(".state/*.json")]
        return sum(b'"repeat_0"' in text or b'"forget_int4"' in text for text in found)

    moments: list[Callable[[], bool]] = [
        lambda: findings() >= 2,  # models are being relearned
        lambda: findings() >= 6,  # models are being rounded
        (killed / "scores.json").exists,
    ]
    for moment in moments:
        process = start(place, *words)
        deadline = time.monotonic() + 500
        while not moment():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (killed / "manifest.json").exists()
    negmerge(place, *words)
    negmerge(place, "verify", "killed")
    trees = [json.loads((one / "scores.json").read_text()) for one in (killed, finished)]
    texts = [json.dumps(without_seconds(tree)) for tree in trees]  # also the order of fields
    assert texts[0] == texts[1]
    for name in ("unlearned/model.safetensors", "retrain-2.safetensors"):
        assert (killed / name).read_bytes() == (finished / name).read_bytes()


def test_the_page_says_what_was_shown_and_what_was_not(finished: Path):
    page = report(Run(finished)).read_text(encoding="utf-8")
    section = page.split('<section id="evidence"')[1].split("</section>")[0]
    text = " ".join(re.sub(r"<[^>]+>", " ", section.replace("\u00a0", " ")).split())
    evidence = evidence_of(finished)
    for name, test in evidence.tests.items():
        assert test.title in text
        part = section.split(f'id="evidence-{name}"')[1]
        assert "<svg" in part.split('<div class="part')[0]
        assert (finished / "report" / "tables" / f"evidence-{name}.csv").is_file()
    found = evidence.tests["prototypes"].finding("consensus", "accuracy")
    assert f"prototypes on forgotten samples: {found.value:.2f} %" in text
    assert "Not run: the tests of full evidence" in text
    assert "ToW" in page


def test_without_a_retrained_model_nothing_passes(finished: Path):
    run = run_here(finished, "alone", "retrain=null")
    evidence = evidence_of(run)
    for name in ("rmia", "strata", "distance"):
        assert evidence.tests[name].missing == NO_REFERENCE
    page = report(Run(run)).read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", page)
    assert f"This run has {NO_REFERENCE}" in text
    assert "A sceptic can tell" not in text
    assert "No difference was found" not in text


def test_a_scenario_without_probabilities_says_why(tmp_path: Path):
    with toy_scenario():
        # Of this seed λ = 1 is far from the limit, on every processor: the model does change.
        run = run_toy(tmp_path / "run", evidence="standard", seed=7)
        evidence = run.result.evidence
    assert evidence is not None
    assert run.result.first.scale == 1
    reasons = {name: test.missing for name, test in evidence.tests.items()}
    assert reasons["membership"] == (
        "the scenario observes no probability of the true answer to a sample"
    )
    assert reasons["relearning"] is not None
    assert reasons["precision"] is None
    assert reasons["distance"] is None
    survived = evidence.tests["precision"].finding("consensus", "survival_bf16")
    assert 0 < survived.value <= 100


def test_another_word_for_evidence_is_one_line(place: Path):
    _, err = negmerge(place, "unlearn", "r.yaml", "--set", "evidence=all", code=2)
    assert re.search(r"error: .*evidence: .*'basic', 'standard' or 'full', got 'all'", err)
