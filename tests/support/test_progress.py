"""What is said of a long job where no bar can be drawn, by a clock of the test's own."""

from __future__ import annotations

import json

import pytest

from negmerge.runs.checks import default_trainings
from negmerge.runs.recipe import check_recipe
from negmerge.scenarios.classify.scenario import Classify
from negmerge.scenarios.settings import Setup
from negmerge.support.progress import JsonLines, Lines, Quiet, format_duration, make_progress


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worked(shows: Lines, clock: Clock, seconds: int, each: int = 1) -> None:
    """So many seconds of work, told every second."""
    for _ in range(seconds):
        clock.now += 1
        shows.advance(each)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_long_stage_has_a_line_when_it_begins_and_every_30_seconds(clock, capsys):
    with Lines(clock) as shows:
        shows.stage("fine-tuning 9 members", 2000, "samples")
        worked(shows, clock, 100, each=10)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fine-tuning 9 members: 6 % of 2,000 samples, about 3 min left",
        "fine-tuning 9 members: 20 % of 2,000 samples, about 3 min left",
        "fine-tuning 9 members: 36 % of 2,000 samples, about 2 min left",
    ]


def test_short_stages_are_silent_and_each_long_one_begins_with_a_line(clock, capsys):
    shows = Lines(clock)
    for name, seconds in (("short", 5), ("long", 20), ("short again", 9), ("last", 15)):
        shows.stage(name, 100, "samples")
        worked(shows, clock, seconds)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["long", "last"]


def test_waiting_for_workers_is_not_work_and_the_end_needs_no_line(clock, capsys):
    shows = Lines(clock)
    shows.stage("training", 8, "samples")
    clock.now += 100  # processes start
    worked(shows, clock, 7)
    clock.now += 30
    shows.advance(1)
    assert capsys.readouterr().err == ""


def test_bytes_are_told_for_people(clock, capsys):
    shows = Lines(clock)
    shows.stage("merging\x1b[31m", 4_000_000_000)
    worked(shows, clock, 12, each=100_000_000)
    assert capsys.readouterr().err == "merging\\x1b[31m: 28 % of 4.0 GB, about 29 s left\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3599, "60 min"), (7199, "2 h 0 min")],
)
def test_format_duration(seconds, words):
    assert format_duration(seconds) == words


def test_a_pipe_has_lines_and_json_stays_json(capsys):
    assert isinstance(make_progress(), Lines)
    assert isinstance(make_progress("json"), JsonLines)
    assert type(make_progress("quiet")) is Quiet
    make_progress().note("retraining", epochs=3)
    make_progress("json").note("retraining", epochs=3)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "note: retraining"
    assert json.loads(second) == {"event": "note", "text": "retraining", "epochs": 3}


# ----------------------------------------------------------------- trainings nobody has asked for


class Sizes(Classify):
    """A problem of which little but the sizes is known."""

    identity = ()

    def train_set(self, name: str) -> range:
        return range({"train": 1000, "retain": 900, "forget": 100}[name])


def told(**recipe) -> list[str]:
    tree = {"pool": {"grid": {"epochs": [10, 20]}}, "methods": ["consensus"]} | recipe
    checked = check_recipe(tree, "test")
    uses_reported_data = checked.settings.criterion(checked.criterion).uses_reported_data
    return [
        text
        for text, _ in default_trainings(
            checked, Sizes(checked.settings, Setup(uses_reported_data=uses_reported_data))
        )
    ]


def test_a_default_training_and_retraining_are_told_with_their_cost():
    original, retraining = told()
    assert original == (
        "training the original model: 30 epochs × 1,000 records = 30,000 samples, 50 % of all "
        "training of this run; 30 epochs are the default: set train.epochs, or give a trained "
        "model as model.weights"
    )
    assert retraining == (
        "retraining without the forget set, to compare with: 30 epochs × 900 records = 27,000 "
        "samples, 45 % of all training of this run; the recipe does not mention it: "
        "`retrain: null` skips it, and Avg. Gap with it"
    )


def test_rivals_count_for_the_whole():
    rival = {"name": "finetune", "options": {"epochs": 10}}
    assert "= 9,000 samples, 29 %" in told(train={"epochs": 10}, methods=["consensus", rival])[0]


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ({"train": {"epochs": 5}}, 1),
        ({"retrain": {}}, 1),
        ({"retrain": None}, 1),
        ({"model": {"weights": "given.safetensors"}}, 1),
        ({"train": {"lr": 0.1}, "retrain": {"weights": "given.safetensors"}}, 1),
        ({"train": {"epochs": 5}, "search": {"criterion": "oracle"}}, 0),
        ({"train": {"epochs": 5}, "retrain": {}}, 0),
    ],
)
def test_what_was_asked_for_is_not_told(recipe, count):
    assert len(told(**recipe)) == count
