"""`nm.find_scale`: any metric, the strongest λ that keeps enough, and a model left as it was."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import negmerge as nm
from negmerge.support.progress import Quiet

positive = st.floats(0.01, 100)
curve = st.lists(positive, min_size=25, max_size=25)


class Dial(nn.Module):
    """One number, which is λ: the task vector is −1."""

    def __init__(self) -> None:
        super().__init__()
        self.dial = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(2)


def dial_tau() -> nm.TaskVector:
    base = {name: t.numpy().copy() for name, t in Dial().state_dict().items()}
    return nm.merge(base, [base | {"dial": np.full(1, -1.0, np.float32)}])


TAU = dial_tau()


def place_of(model: nn.Module) -> int:
    """λ in eighths, as far as the lists of the tests reach."""
    return min(round(8 * float(model.dial.detach())), 24)


def find(evaluate: Callable[..., Any], model: nn.Module | None = None, **more: Any):
    return nm.find_scale(model or Dial(), TAU, evaluate, progress=Quiet(), **more)


def as_lists(forget: list[float], retain: list[float]) -> Callable[..., dict[str, float]]:
    def evaluate(model: nn.Module) -> dict[str, float]:
        place = place_of(model)
        return {"forget": forget[place], "retain": retain[place], "place": place}

    return evaluate


@pytest.mark.parametrize("strategy", ["grid", "bracket"])
@pytest.mark.parametrize("lower", [(), ("retain",), ("forget",), ("forget", "retain")], ids=str)
@given(forget=curve, retain=curve, keep=st.floats(0.05, 1.0))
def test_what_is_chosen_keeps_enough_and_no_measured_scale_forgets_more(
    strategy, lower, forget, retain, keep
):
    search = nm.Search(stop=1.0, count=9, limit=3.0, strategy=strategy)
    found = find(as_lists(forget, retain), keep=keep, lower=lower, search=search)
    scales = [row["scale"] for row in found.rows]
    assert scales == sorted({*scales})
    zero = found.rows[0]
    assert zero["scale"] == 0.0
    for row in found.rows:
        assert row["forget"] == forget[int(row["place"])]
        assert row["place"] == min(round(8 * row["scale"]), 24)

    def allowed(row: dict[str, float]) -> bool:
        if "retain" in lower:
            return row["retain"] <= zero["retain"] / keep + 1e-9
        return row["retain"] >= keep * zero["retain"] - 1e-9

    known = {row["scale"]: row["forget"] for row in found.rows if allowed(row)}
    best = max(known.values()) if "forget" in lower else min(known.values())
    assert found.scale == min(scale for scale, forgot in known.items() if forgot == best)
    last = found.rows[-1]
    assert found.edge == allowed(last), "a larger λ may be better while the last one is allowed"
    if strategy == "grid":
        assert scales[:9] == [k / 8 for k in range(9)]
        assert (len(scales) > 9) == all(allowed(r) for r in found.rows if r["scale"] == 1.0)


@given(slope=st.floats(0.5, 50), keep=st.floats(0.5, 0.99))
def test_where_larger_scales_forget_and_lose_more_the_usual_search_goes_to_the_limit(slope, keep):
    asked: list[int] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        scale = float(model.dial.detach())
        asked.append(1)
        return {"forget": 100 - 3 * scale, "retain": 100 - slope * scale}

    found = find(evaluate, keep=keep)
    assert len(asked) == len(found.rows) <= 12
    limit = 100 * (1 - keep) / slope
    if limit < 64:
        assert 0.95 * limit - 1e-5 <= found.scale <= limit + 1e-5
        assert not found.edge
    elif limit > 64 / 0.95:
        assert (found.scale, found.edge) == (64.0, True)
    walked = find(evaluate, keep=keep, search=nm.Search(stop=1.0, count=9, limit=16.0))
    halved = find(evaluate, keep=keep, search=nm.Search(count=9, limit=16.0, strategy="bracket"))
    assert (halved.scale, halved.edge) == (walked.scale, walked.edge)
    assert len(halved.rows) <= len(walked.rows)


def test_a_broken_model_is_too_large_for_the_usual_search_and_an_error_of_a_grid():
    """As a loss that overflows: the λ is not allowed, and the model is not called unlearned."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        scale = float(model.dial.detach())
        return {"forget": 100 - scale, "retain": nan if scale > 3 else 100 - scale}

    found = find(evaluate, keep=0.9)
    assert 2.9 < found.scale <= 3
    assert not found.edge
    assert all(row["scale"] <= 3 for row in found.rows)
    with pytest.raises(nm.NegMergeError, match="λ = 4: evaluate: retain: got nan"):
        find(evaluate, keep=0.9, search=nm.Search(scales=(0.0, 4.0)))


def test_confidence_needs_intervals():
    with pytest.raises(nm.NegMergeError, match=r"search.confidence: needs intervals, and evaluate"):
        find(lambda model: pytest.fail("measured"), search={"confidence": 0.95})


def test_the_model_is_changed_while_it_is_measured_and_left_as_it_was():
    torch.manual_seed(0)
    model = Dial().train()
    model.norm.eval()  # as one freezes its statistics
    with torch.no_grad():
        model.dial.fill_(0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[float] = []

    def evaluate(own: nn.Module) -> dict[str, float]:
        assert own is model
        own.eval()
        seen.append(round(float(own.dial.detach()), 6))
        return {"forget": -float(own.dial.detach()) + 100, "retain": 1.0}

    found = find(evaluate, model, search=nm.Search(scales=(0.0, 0.25, 0.5)))
    assert seen == [0.1, 0.35, 0.6]
    assert found.scale == 0.5
    assert found.edge
    assert [module.training for module in model.modules()] == [True, False]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@given(raises_at=st.integers(0, 8))
def test_the_model_is_left_as_it_was_when_evaluate_raises(raises_at: int):
    model = Dial()
    model.norm.eval()
    with torch.no_grad():
        model.dial.fill_(np.float32(1 / 3))
    bits = model.dial.detach().clone()
    calls: list[int] = []

    class MineError(Exception):
        pass

    def evaluate(own: nn.Module) -> dict[str, float]:
        own.eval()
        calls.append(1)
        if len(calls) > raises_at:
            raise MineError("out of tea")
        return {"forget": 1.0, "retain": 1.0}

    with pytest.raises(MineError, match=r"^out of tea$"):
        find(evaluate, model, search=nm.Search(count=9))
    assert torch.equal(model.dial, bits)
    assert [module.training for module in model.modules()] == [True, False]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "evaluate: returned a NoneType; wanted a mapping of numbers, such as {'forget'"),
        (3.0, "evaluate: returned a float; wanted a mapping"),
        ([1.0, 2.0], "evaluate: returned a list; wanted a mapping"),
        ({}, "evaluate: returned no 'forget', only nothing; wanted"),
        ({"forget": 1.0}, "evaluate: returned no 'retain', only forget; wanted"),
        ({"forget": "low", "retain": 1.0}, "evaluate: forget: got 'low'; wanted a mapping of"),
        ({"forget": None, "retain": 1.0}, "evaluate: forget: got 'None'; wanted"),
        (
            {"forget": torch.zeros(2), "retain": 1.0},
            "evaluate: forget: got 'tensor([0., 0.])'; wanted a mapping of numbers",
        ),
        ({"forget": 1j, "retain": 1.0}, "evaluate: forget: got '1j'; wanted"),
        ({"forget": nan, "retain": 1.0}, "evaluate: forget: got nan; the model is broken, not"),
        ({"forget": 1.0, "retain": float("inf")}, "λ = 0: evaluate: retain: got inf"),
        ({"forget": 1.0, "retain": 1.0, "other": nan}, "λ = 0: evaluate: other: got nan"),
    ],
    ids=str,
)
def test_what_evaluate_must_return_is_told_in_one_line(returned, message):
    model = Dial()
    with pytest.raises(nm.NegMergeError) as caught:
        find(lambda model: returned, model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert float(model.dial.detach()) == 0.0


@pytest.mark.parametrize("lower", [(), ("retain",)])
def test_a_share_of_a_negative_number_is_told(lower):
    """As a log-likelihood is: 95 % of it would be more than the original has."""
    with pytest.raises(nm.NegMergeError) as caught:
        find(lambda model: {"forget": -1.0, "retain": -2.5}, lower=lower)
    assert str(caught.value).startswith("retain: the original has -2.5; wanted at least 0, because")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 0.0}, "keep: got 0.0, wanted a share above 0 and at most 1"),
        ({"keep": 1.5}, "keep: got 1.5, wanted"),
        ({"keep": nan}, "keep: got nan, wanted"),
        ({"lower": ("loss",)}, "lower: got 'loss', wanted forget or retain"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_measured(given, message):
    with pytest.raises(nm.NegMergeError) as caught:
        find(lambda model: pytest.fail("measured"), **given)
    assert message in str(caught.value)


def test_numbers_may_be_tensors_and_numpys():
    found = find(
        lambda model: {
            "forget": torch.tensor(2.0) - model.dial.detach()[0],
            "retain": np.float32(1.0),
            "other": True,
        },
        search=nm.Search(scales=(0.0, 1.0)),
    )
    assert found.rows == [
        {"scale": 0.0, "forget": 2.0, "retain": 1.0, "other": 1.0},
        {"scale": 1.0, "forget": 1.0, "retain": 1.0, "other": 1.0},
    ]
    assert all(type(value) is float for row in found.rows for value in row.values())


def test_the_task_vector_may_be_a_file_and_the_result_is_that_of_the_vector(tmp_path: Path):
    TAU.save(tmp_path / "patch.safetensors")
    evaluate = as_lists([100.0 - k for k in range(25)], [100.0 - 2 * k for k in range(25)])
    for tau in (tmp_path / "patch.safetensors", str(tmp_path / "patch.safetensors")):
        found = nm.find_scale(Dial(), tau, evaluate, progress=Quiet())
        assert found == find(evaluate)
    assert found.scale == 0.25
    with pytest.raises(nm.NegMergeError, match="missing"):
        nm.find_scale(Dial(), tmp_path / "missing.safetensors", evaluate, progress=Quiet())


def test_a_task_vector_of_another_model_is_told():
    other = nm.merge({"w": np.ones(2, np.float32)}, [{"w": np.zeros(2, np.float32)}])
    with pytest.raises(nm.NegMergeError, match="'w'"):
        nm.find_scale(Dial(), other, lambda model: pytest.fail("measured"), progress=Quiet())


def test_every_evaluation_is_told_of():
    class Told(Quiet):
        stages: tuple[Any, ...] = ()
        count = 0

        def stage(self, name: str, total: int, unit: str = "bytes") -> None:
            self.stages += ((name, total, unit),)

        def advance(self, count: int) -> None:
            self.count += count

    told = Told()
    search = nm.Search(count=5)
    nm.find_scale(
        Dial(), TAU, lambda model: {"forget": 1, "retain": 1}, search=search, progress=told
    )
    assert told.stages == (("searching λ", 5, "evaluations"),)
    assert told.count == 5


def test_an_evaluate_that_changes_the_model_is_refused():
    """The statistics of a layer in training mode change with every batch."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        model.train()
        model.norm(torch.randn(4, 2))
        return {"forget": 1.0, "retain": 1.0}

    with pytest.raises(nm.errors.OptionError, match=r"evaluate: changes weights or buffers"):
        find(evaluate)


def test_other_numbers_at_some_scale_are_refused():
    def evaluate(model: nn.Module) -> dict[str, float]:
        more = {"rare": 1.0} if place_of(model) else {}
        return {"forget": 1.0, "retain": 1.0} | more

    with pytest.raises(nm.errors.MismatchError, match=r"only one of the two has rare"):
        find(evaluate)
