"""`nm.unlearn` with functions of one's own: any training code, any metric."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import negmerge as nm
from negmerge.evaluation.search import read_rows
from negmerge.runs.store import Run
from negmerge.scenarios.module.functions import text_of
from negmerge.support.files import lock_folder
from running import python

SEARCH = nm.Search(stop=1.0, count=5, limit=8.0)


def network(outputs: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


def clouds(seed: int) -> dict[str, Tensor]:
    """Two clouds of points: one is to be forgotten, the other to be kept."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(60, 4, generator=draw) + centre
        for name, centre in (("retain", -2.0), ("forget", 2.0))
    }


def steps(model: nn.Module, lr: float, count: int, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


# ------------------------------------------------------------------------- regression, a plain loop


class Regression:
    """The sum of four numbers; what was called is noted."""

    def __init__(self) -> None:
        self.seen, self.unseen = clouds(0), clouds(1)
        self.trained: list[nm.HyperParameters] = []
        self.measured = 0
        self.before: Callable[[nm.HyperParameters], None] = lambda settings: None
        self.model = network()
        both = torch.cat(list(self.seen.values()))
        steps(self.model, 0.02, 400, lambda: self.loss(self.model, both))

    @staticmethod
    def loss(model: nn.Module, points: Tensor) -> Tensor:
        return (model(points) - points.sum(1, keepdim=True)).square().mean()

    def fine_tune(self, model: nn.Module, settings: nm.HyperParameters) -> None:
        self.before(settings)
        self.trained.append(settings)
        model.train()
        for _ in range(settings.epochs):
            order = torch.randperm(60)  # seeded before each call
            for picked in order.split(settings.batch):
                steps(model, settings.lr, 1, lambda own=picked: self.forget_loss(model, own))

    def forget_loss(self, model: nn.Module, picked: Tensor) -> Tensor:
        return self.loss(model, self.seen["forget"][picked])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.measured += 1
        model.eval()
        with torch.no_grad():
            return {name: float(self.loss(model, x)) for name, x in self.unseen.items()}

    def unlearn(self, method: str = "consensus", **more: Any) -> nn.Module:
        given: dict[str, Any] = {
            "fine_tune": self.fine_tune,
            "evaluate": self.evaluate,
            "keep": 0.5,
            "lower": ("forget", "retain"),
            "pool": nm.Pool(
                settings={"batch": 20, "lr": 0.01}, grid={"epochs": [3, 6], "lr": [0.005, 0.01]}
            ),
            "search": SEARCH,
        }
        return nm.unlearn(self.model, method=method, **(given | more))


@pytest.fixture(scope="module")
def problem() -> Regression:
    return Regression()


@pytest.fixture(scope="module")
def forgot(problem: Regression) -> nn.Module:
    return problem.unlearn()


def test_a_regression_forgets_and_keeps_what_was_asked_for(problem: Regression, forgot: nn.Module):
    before, after = problem.evaluate(problem.model), problem.evaluate(forgot)
    assert after["forget"] > 2 * before["forget"]
    assert after["retain"] <= before["retain"] / 0.5 + 1e-6
    found = forgot.negmerge
    assert found.scale > 0
    assert found.method == "consensus"
    assert type(forgot) is nn.Sequential
    for name, row in (("original", before), ("unlearned", after)):
        for metric, value in row.items():
            assert found.scores[name][metric] == pytest.approx(value)
        assert "acc_forget" not in found.scores[name]
    assert (found.folder, found.page, found.warnings) == (None, None, ())


def test_the_model_and_the_callers_random_numbers_are_left_alone(problem: Regression):
    before = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    problem.model.train()[1].eval()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    one = problem.unlearn()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.array_equal(np.random.get_state()[1], state[2])  # noqa: NPY002
    assert [m.training for m in problem.model.modules()] == [True, True, False, True]
    assert all(torch.equal(t, before[name]) for name, t in problem.model.state_dict().items())
    torch.manual_seed(99)
    two = problem.unlearn()
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())
    other = problem.unlearn(seed=1)
    assert not all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


def test_members_are_trained_by_the_settings_of_the_pool(problem: Regression):
    problem.trained.clear()
    problem.unlearn()
    told = [(settings.epochs, settings.lr, settings.batch) for settings in problem.trained]
    assert told == [(3, 0.005, 20), (3, 0.01, 20), (6, 0.005, 20), (6, 0.01, 20)]


def test_settings_of_ones_own_reach_the_training(problem: Regression):
    seen: list[Any] = []

    def fine_tune(model: nn.Module, settings: nm.HyperParameters) -> None:
        seen.append(settings.own["rank"])
        problem.fine_tune(model, settings)

    pool = nm.Pool(settings={"epochs": 2, "batch": 20, "lr": 0.01}, grid={"own.rank": [4, 8]})
    problem.unlearn(fine_tune=fine_tune, pool=pool)
    assert seen == [4, 8]


def test_a_pool_that_is_not_kept_gives_the_same_model(forgot: nn.Module, tmp_path: Path):
    problem = Regression()
    pool = {"settings": {"batch": 20}, "grid": {"epochs": [3, 6], "lr": [0.005, 0.01]}}
    folded = problem.unlearn(pool=pool | {"keep": False}, out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("pool/*/*.safetensors"))
    for name, tensor in forgot.state_dict().items():
        torch.testing.assert_close(folded.state_dict()[name], tensor)


def rows_of(run: Path, title: str) -> list[dict[str, float]]:
    return read_rows(run / "sweeps" / f"{title}.csv")


def test_single_best_is_the_member_that_forgets_most_alone(problem: Regression, tmp_path: Path):
    run = tmp_path / "run"
    best = problem.unlearn("single_best", out=run)
    result = Run(run).result
    limit = 2 * result.original.value("retain") + 1e-9
    alone = {
        row.id: max(
            own["forget"] for own in rows_of(run, f"member-{row.id}") if own["retain"] <= limit
        )
        for row in result.pool
    }
    assert len(alone) == 4
    assert alone[result.first.member] == max(alone.values())
    assert best.negmerge.scores["unlearned"]["forget"] == pytest.approx(max(alone.values()))
    patch = nm.TaskVector.load(run / "patches/single_best.safetensors")
    (member,) = run.glob(f"pool/{result.first.member}/*.safetensors")
    own = nm.merge(run / "base.safetensors", [member])
    assert all(torch.equal(patch[name], own[name]) for name in own)


# ------------------------------------------------------------------------------ several labels each


def f1(model: nn.Module, points: Tensor, labels: Tensor) -> float:
    """The F1 of all labels together, in percent."""
    with torch.no_grad():
        said = model(points) > 0
    right = float((said & labels).sum())
    return 100 * 2 * right / max(float(said.sum() + labels.sum()), 1.0)


def test_a_multi_label_model_forgets_by_its_f1():
    sets = {
        name: (x, torch.stack([x[:, 0] > x[:, 1], x[:, 2] > x.mean()], 1))
        for name, x in clouds(0).items()
    }
    model = network(outputs=2)

    def loss(own: nn.Module, name: str) -> Tensor:
        points, labels = sets[name]
        return nn.functional.binary_cross_entropy_with_logits(own(points), labels.float())

    steps(model, 0.5, 500, lambda: loss(model, "forget") + loss(model, "retain"))

    def fine_tune(own: nn.Module, settings: nm.HyperParameters) -> Mapping[str, Tensor]:
        steps(own, settings.lr, settings.epochs, lambda: loss(own, "forget"))
        return own.state_dict()

    def evaluate(own: nn.Module) -> dict[str, float]:
        scores = {name: f1(own, *pair) for name, pair in sets.items()}
        return scores | {"positive": float((own(sets["forget"][0]) > 0).float().mean())}

    before = evaluate(model)
    assert min(before["forget"], before["retain"]) > 90
    pool = nm.Pool(settings={"lr": 0.3}, grid={"epochs": [20, 40, 60]})
    search = nm.Search(stop=4.0, count=9, limit=64.0, strategy="bracket")
    forgot = nm.unlearn(
        model, fine_tune=fine_tune, evaluate=evaluate, keep=0.9, pool=pool, search=search
    )
    after = evaluate(forgot)
    assert after["retain"] >= 0.9 * before["retain"]
    assert after["forget"] < before["forget"] - 10
    assert forgot.negmerge.scores["unlearned"]["positive"] == after["positive"]


# ------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_trainer_of_hugging_face_fine_tunes(tmp_path: Path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "vocab_size": 20, "num_labels": 2}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**small, hidden_dropout_prob=0.0))
    ids = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(0))
    rows = [
        {"input_ids": row, "attention_mask": torch.ones(6, dtype=torch.int64), "labels": k % 2}
        for k, row in enumerate(ids)
    ]

    def train(own: nn.Module, data: list[Any], epochs: int, lr: float) -> None:
        arguments = TrainingArguments(
            str(tmp_path / "trainer"),
            num_train_epochs=epochs,
            learning_rate=lr,
            per_device_train_batch_size=8,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(own, arguments, train_dataset=data).train()

    train(model, rows, 30, 1e-2)

    def fine_tune(own: nn.Module, settings: nm.HyperParameters) -> nn.Module:
        train(own, rows[:8], settings.epochs, settings.lr)
        return own

    def likelihood(own: nn.Module, data: list[Any]) -> float:
        inputs = {
            name: torch.stack([row[name] for row in data]) for name in rows[0] if name != "labels"
        }
        with torch.no_grad():
            shares = own.eval()(**inputs).logits.softmax(1)
        return float(shares[range(len(data)), [row["labels"] for row in data]].mean())

    def evaluate(own: nn.Module) -> dict[str, float]:
        return {"forget": likelihood(own, rows[:8]), "retain": likelihood(own, rows[8:])}

    before = evaluate(model)
    assert before["forget"] > 0.8
    pool = nm.Pool(settings={"lr": 1e-3}, grid={"epochs": [1, 2]})
    search = nm.Search(stop=8.0, count=9, limit=64.0, strategy="bracket")
    forgot = nm.unlearn(
        model, fine_tune=fine_tune, evaluate=evaluate, keep=0.8, pool=pool, search=search
    )
    assert type(forgot) is BertForSequenceClassification
    after = evaluate(forgot)
    assert after["forget"] < before["forget"]
    assert after["retain"] >= 0.8 * before["retain"] - 1e-6


# ------------------------------------------------------------------------ a folder, an interruption


def test_it_goes_on_where_it_was_interrupted_and_trains_nothing_again(tmp_path: Path):
    whole, broken = Regression(), Regression()
    one = whole.unlearn(out=tmp_path / "whole")
    trained, stops = broken.fine_tune, 2

    def count_calls(self: Regression) -> None:
        self.trained.clear()
        self.measured = 0

    def interrupted(settings: nm.HyperParameters) -> None:
        if len(broken.trained) == stops:
            raise KeyboardInterrupt

    broken.before = interrupted
    with pytest.raises(KeyboardInterrupt):
        broken.unlearn(out=tmp_path / "run")
    assert len(broken.trained) == stops
    assert len(list((tmp_path / "run").glob("pool/*/*.safetensors"))) == stops
    count_calls(broken)
    broken.before = lambda settings: None
    two = broken.unlearn(out=tmp_path / "run")
    assert [settings.epochs for settings in broken.trained] == [6, 6]
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())
    assert (
        Run(tmp_path / "run").read_manifest().problem
        == Run(tmp_path / "whole").read_manifest().problem
    )
    count_calls(broken)
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    three = broken.unlearn(out=tmp_path / "run")
    assert (broken.trained, broken.measured) == ([], 0), "it is finished"
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert three.negmerge == two.negmerge
    assert trained == broken.fine_tune


KILLED = """
import os, signal, sys
import torch
import negmerge as nm

def fine_tune(model, settings):
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        model.weight[0] += settings.lr

def evaluate(model):
    forget, retain = model.weight.detach().flatten().tolist()
    if sys.argv[2] == "kill early":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"forget": forget, "retain": retain}

model = torch.nn.Linear(1, 2, bias=False)
torch.nn.init.ones_(model.weight)
pool = nm.Pool(grid={"lr": [0.1, 0.2]})
nm.unlearn(model, fine_tune=fine_tune, evaluate=evaluate, pool=pool, out=sys.argv[1] or None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("out", "moment"), [("", "kill"), ("run", "kill early")])
def test_what_a_killed_call_leaves_is_removed_by_the_next(out: str, moment: str, tmp_path: Path):
    def call(how: str, code: int) -> None:
        python(tmp_path, "-c", KILLED, out, how, code=code, TMPDIR=str(tmp_path))

    in_use = tmp_path / ".negmerge-scratch-in_use"
    in_use.mkdir()
    with lock_folder(in_use):
        call(moment, -signal.SIGKILL)
        call("", 0)
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith(".negmerge-")}
    assert names == {in_use.name}
    assert not list(tmp_path.glob("run/.negmerge-*"))


def test_other_code_other_weights_or_another_metric_is_other_work(tmp_path: Path):
    problem = Regression()
    problem.unlearn(out=tmp_path / "run")
    problem.trained.clear()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {name: 2 * value for name, value in problem.evaluate(model).items()}

    problem.unlearn(out=tmp_path / "run", evaluate=evaluate)
    assert problem.trained == [], "another metric measures again, and trains nothing"

    def fine_tune(model: nn.Module, settings: nm.HyperParameters) -> None:
        problem.fine_tune(model, settings)

    again = problem.unlearn(out=tmp_path / "run", fine_tune=fine_tune)
    assert len(problem.trained) == 4
    assert again.negmerge.scores["original"]["forget"] == problem.evaluate(problem.model)["forget"]
    with torch.no_grad():
        problem.model[0].bias += 0.1
    with pytest.raises(nm.NegMergeError, match=r"base\.safetensors: .* name another --out"):
        problem.unlearn(out=tmp_path / "run")


def test_the_page_is_about_the_metrics_of_ones_own(tmp_path: Path):
    problem = Regression()
    forgot = problem.unlearn(out=tmp_path / "run")
    found = forgot.negmerge
    assert (found.folder, found.page) == (tmp_path / "run", tmp_path / "run/report/index.html")
    page = found.page.read_text(encoding="utf-8")
    assert "Sequential: consensus" in page
    for word in ("accuracy", "damaged", "MIA", "Avg. Gap"):
        assert word not in page, word
    run = Run(tmp_path / "run")
    assert run.verify()
    assert set(rows_of(run.folder, "consensus")[0]) == {"scale", "forget", "retain"}


def doubled(model: nn.Module, settings: nm.HyperParameters, times: int = 2) -> None:
    raise NotImplementedError


class Tuner:
    def __call__(self, model: nn.Module, settings: nm.HyperParameters) -> None:
        raise NotImplementedError


def test_functions_are_known_by_their_text():
    problem = Regression()
    assert text_of(partial(doubled, times=3)) == text_of(partial(doubled, times=3))
    assert text_of(partial(doubled, times=3)) != text_of(partial(doubled, times=4))
    assert "def doubled" in text_of(doubled)
    assert "class Tuner" in text_of(Tuner())
    assert "self.trained.append" in text_of(problem.fine_tune)
    assert text_of(partial(problem.fine_tune)) == text_of(Regression().fine_tune)
    assert text_of(len) != text_of(max)


# --------------------------------------------------------------------------------------- mistakes


def refused(problem: Regression, tmp_path: Path, **given: Any) -> str:
    """The one line that a mistake is told in."""
    problem.trained.clear()
    with pytest.raises(nm.NegMergeError) as caught:
        problem.unlearn(out=tmp_path / "run", **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


GOOD = {"forget": 1.0, "retain": 1.0}
EVALUATES: dict[str, tuple[Any, str]] = {
    "no mapping": (lambda model: 3.0, "evaluate: returned a float; wanted a mapping of numbers"),
    "no retain": (lambda model: {"forget": 1.0}, "evaluate: returned no 'retain', only forget"),
    "words": (lambda model: GOOD | {"f1": "high"}, "evaluate: f1: got 'high'; wanted a mapping"),
    "nan": (lambda model: GOOD | {"retain": float("nan")}, "evaluate: retain: got nan; the model"),
    "negative": (
        lambda model: GOOD | {"retain": -1.0},
        "retain: the original has -1; wanted at least 0",
    ),
}


@pytest.mark.parametrize(("evaluate", "message"), EVALUATES.values(), ids=EVALUATES)
def test_a_bad_evaluate_is_told_before_anything_is_trained(
    evaluate, message, problem: Regression, tmp_path: Path
):
    assert message in refused(problem, tmp_path, evaluate=evaluate)
    assert problem.trained == []
    assert not (tmp_path / "run").exists()


def spoilt(model: nn.Module, settings: nm.HyperParameters) -> None:
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))


FINE_TUNES: dict[str, tuple[Any, str]] = {
    "a number": (
        lambda model, settings: 5,
        "fine_tune: returned a int; wanted None, the trained module or its state dict",
    ),
    "another module": (
        lambda model, settings: nn.Linear(4, 3),
        "fine_tune: returned weights that do not fit the model: ",
    ),
    "too few weights": (
        lambda model, settings: {"0.weight": model[0].weight},
        "fine_tune: returned weights that do not fit the model: ",
    ),
    "nan": (spoilt, "0.weight"),
}


@pytest.mark.parametrize(("fine_tune", "message"), FINE_TUNES.values(), ids=FINE_TUNES)
def test_a_bad_fine_tune_is_told_with_the_member(
    fine_tune, message, problem: Regression, tmp_path: Path
):
    told = refused(problem, tmp_path, fine_tune=fine_tune)
    assert told.startswith("member 1 of 4: ")
    assert message in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"splits": {}}, "splits: give either splits, or fine_tune and evaluate"),
        (
            {"fine_tune": None},
            "fine_tune: is missing; wanted functions: fine_tune(model, settings)",
        ),
        ({"evaluate": None}, "evaluate: is missing; wanted functions"),
        ({"fine_tune": "train.py"}, "fine_tune: is a str; wanted functions"),
        ({"method": "salun"}, "method 'salun': needs sets of samples and a loss"),
        ({"method": "greedy"}, "method 'greedy': needs sets of samples and a loss"),
        ({"method": "consensos"}, "unknown method 'consensos'; did you mean 'consensus'"),
        ({"densty": 0.1, "method": "ties"}, "densty"),
        ({"keep": 1.5}, "keep: got 1.5, wanted a share above 0 and at most 1"),
        ({"lower": ("loss",)}, "lower: got 'loss', wanted forget or retain"),
        ({"search": {"count": 1}}, "search.count: Input should be greater than or equal to 2"),
        (
            {"fine_tune": None, "evaluate": None, "splits": {}},
            "lower: goes with evaluate; leave it out",
        ),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_one_line_before_any_work(
    given, message, problem: Regression, tmp_path: Path
):
    assert message in refused(problem, tmp_path, **given)
    assert problem.trained == []
    assert not (tmp_path / "run").exists()


def test_an_error_of_ones_own_code_is_ones_own(problem: Regression, tmp_path: Path):
    class MineError(Exception):
        pass

    def fine_tune(model: nn.Module, settings: nm.HyperParameters) -> None:
        raise MineError("out of tea")

    def evaluate(model: nn.Module) -> dict[str, float]:
        raise MineError("no cups")

    with pytest.raises(MineError, match=r"^out of tea$"):
        problem.unlearn(fine_tune=fine_tune, out=tmp_path / "run")
    with pytest.raises(MineError, match=r"^no cups$"):
        problem.unlearn(evaluate=evaluate)


# -------------------------------------------------------------------- settings that have no effect


def whole_batch(task: Regression, model: nn.Module, settings: nm.HyperParameters) -> None:
    """Training code without random numbers, which uses epochs and lr only."""
    task.trained.append(settings)
    loss = partial(task.loss, model, task.seen["forget"])
    steps(model, settings.lr / 10, settings.epochs, loss)


def test_members_that_only_an_unused_setting_tells_apart_are_refused_at_once():
    task = Regression()
    pool = nm.Pool(grid={"epochs": [2, 3], "label_smoothing": [0.0, 0.1]}, settings={"lr": 0.02})
    with pytest.raises(nm.NegMergeError, match=r"differ only in label_smoothing; wanted a pool"):
        task.unlearn(pool=pool, fine_tune=partial(whole_batch, task))
    assert len(task.trained) <= 3  # before the whole pool is trained


def test_the_default_pool_varies_what_training_code_uses():
    task = Regression()
    forgot = task.unlearn(pool=None, fine_tune=partial(whole_batch, task))
    assert len(task.trained) == 9
    assert forgot.negmerge.scale > 0


def test_checkpoints_of_the_training_of_the_user_are_refused():
    pool = nm.Pool(settings={"epochs": 4}, grid={"lr": [0.1, 0.2]}, checkpoints=[2, 4])
    with pytest.raises(nm.NegMergeError, match=r"^pool\.checkpoints: fine_tune returns when"):
        nm.unlearn(nn.Linear(2, 2), fine_tune=nothing, evaluate=nothing, pool=pool)


def nothing(*arguments: Any) -> Any:
    raise AssertionError("it was to be refused before any work")


def test_a_criterion_beside_evaluate_is_refused():
    task = Regression()
    with pytest.raises(nm.NegMergeError, match=r"search\.criterion: got 'oracle'; with evaluate"):
        task.unlearn(search={"criterion": "oracle"})
    assert not task.trained


def test_the_page_says_how_to_repeat_a_run_in_memory(tmp_path: Path):
    page = Regression().unlearn(out=tmp_path / "run").negmerge.page.read_text()
    assert "call it again with the same arguments" in page
    assert "negmerge unlearn recipe.yaml" not in page


def test_find_scale_takes_the_fields_of_a_search():
    model = nn.Linear(1, 2, bias=False)
    nn.init.ones_(model.weight)
    tau = nm.merge(
        {"weight": np.ones((2, 1), np.float32)}, [{"weight": np.full((2, 1), 1.5, "f4")}]
    )

    def evaluate(model: nn.Module) -> dict[str, float]:
        forget, retain = model.weight.detach().flatten().tolist()
        return {"forget": forget, "retain": retain}

    found = nm.find_scale(model, tau, evaluate, keep=0.5, search={"stop": 2, "count": 3})
    assert [row["scale"] for row in found.rows] == [0, 1, 2]
    with pytest.raises(nm.NegMergeError, match=r"search\.stop: .*; got '-2'"):
        nm.find_scale(model, tau, evaluate, search={"stop": -2})
