"""`nm.unlearn` on modules and datasets of one's own: what fits, and what is refused in one line."""

from __future__ import annotations

import copy
import json
import pickle
import runpy
from collections import UserDict
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import negmerge as nm
from negmerge.rivals import rivals
from negmerge.runs.store import Run, without_seconds
from negmerge.training.feeds import DatasetFeed
from negmerge.training.loop import train

POOL = nm.Pool(settings={"lr": 0.05, "batch": 8}, grid={"epochs": [1, 2]})
SEARCH = nm.Search(stop=1.0, count=3)
quiet = pytest.mark.filterwarnings("ignore::UserWarning")  # so little data may forget nothing


def numbers(size: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 4, generator=generator), torch.arange(size) % 3


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Calls(nn.Module):
    """A network whose inputs have names, or whose outputs are more than logits."""

    def __init__(self, then: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.body, self.then = network(), then

    def forward(self, values: Tensor, shift: Tensor | None = None) -> Any:
        return self.then(self.body(values if shift is None else values + shift))


class Samples(Dataset):
    """Samples made by a function, from the input, the label and the position."""

    def __init__(self, make: Callable[[Tensor, int, int], Any], size: int = 24) -> None:
        self.make, self.pairs = make, numbers(size)

    def __len__(self) -> int:
        return len(self.pairs[1])

    def __getitem__(self, index: int) -> Any:
        return self.make(self.pairs[0][index], int(self.pairs[1][index]), index)


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(*numbers(), strict=True)


def fails(values: Tensor, label: int, index: int) -> Any:
    if index == 20:
        raise ValueError("no such\nfile")
    return values, label


def given(model: nn.Module, forget: Any, **more: Any) -> nn.Module:
    unseen = TensorDataset(numbers(seed=1)[0].to(next(model.parameters(), x).dtype), y)
    splits = {"forget": forget, "test": unseen}
    return nm.unlearn(model, splits, **({"pool": POOL, "search": SEARCH} | more))


x, y = numbers()
SUPPORTED = "wanted one integer, the number of the class (regression, one-hot, multi-label and"
MISFITS: dict[str, tuple[Any, str]] = {
    "regression": (TensorDataset(x, y * 0.37), "sample 0 has the label torch.float32 of shape ()"),
    "float": (Samples(lambda v, k, i: (v, float(k))), f"has the label float; {SUPPORTED}"),
    "one-hot": (TensorDataset(x, nn.functional.one_hot(y)), "label torch.int64 of shape (3,)"),
    "multi-label": (Samples(lambda v, k, i: (v, [0, k])), "sample 0 has the label list"),
    "segmentation": (TensorDataset(x, torch.zeros(24, 8, 8).long()), "of shape (8, 8)"),
    "words": (Samples(lambda v, k, i: (v, "cat")), "sample 0 has the label str"),
    "late float": (Samples(lambda v, k, i: (v, k / 2 if i == 21 else k)), "sample 21 has the"),
    "above": (TensorDataset(x, y + 1), "sample 2 has label 3; wanted 0 to 2"),
    "below": (Samples(lambda v, k, i: (v, -100 if i == 23 else k)), "sample 23 has label -100"),
    "no label": (Samples(lambda v, k, i: {"values": v}), "without a label; got values; wanted"),
    "two labels": (
        Samples(lambda v, k, i: {"values": v, "label": k, "labels": k}),
        "has both 'labels' and 'label'",
    ),
    "text": (Samples(lambda v, k, i: {"text": "a", "label": k}), "input 'text' is list; wanted"),
    "input alone": (Samples(lambda v, k, i: v), "sample 0 is a Tensor; wanted (input, label)"),
    "three": (Samples(lambda v, k, i: (v, k, i)), "sample 0 is a tuple of 3; wanted (input, lab"),
    "unequal": (Samples(lambda v, k, i: (v[: 1 + i % 2], k)), "cannot be put into one batch: Runt"),
    "shape": (
        TensorDataset(torch.rand(24, 7), y),
        "float32 of shape (4, 7) in evaluation: Runtime",
    ),
    "float64": (TensorDataset(x.double(), y), "the model refuses a batch of torch.float64 of"),
    "not finite": (TensorDataset(x / 0, y), "outputs are NaN or infinite for 4 of 4 samples"),
    "empty": (TensorDataset(x[:0], y[:0]), "the set is empty"),
    "iterable": (Endless(), "Endless cannot be read by position; wanted a map-style Dataset"),
    "loader": (
        DataLoader(TensorDataset(x, y)),
        "position; wanted a map-style Dataset, with len() ",
    ),
    "raises": (Samples(fails), "sample 20 cannot be read: ValueError: no such file"),
    "none": (None, "NoneType cannot be read by position"),
}


@pytest.mark.parametrize(("forget", "message"), MISFITS.values(), ids=MISFITS)
def test_data_that_does_not_fit_is_one_line_before_any_work(forget, message, tmp_path: Path):
    for more in ({}, {"method": "gradient_ascent", "pool": None, "search": None}):
        with pytest.raises(nm.NegMergeError) as caught:
            given(network(), forget, out=tmp_path / "run", **more)
        assert str(caught.value).startswith("splits: forget: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("only one of me")


class Detached(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).detach()


class Words(nn.Module):
    """An embedding whose gradients are sparse, which the optimizers do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.table((values > 0.5).long()).mean(1))


MODELS: dict[str, tuple[nn.Module, str]] = {
    "tuple": (Calls(lambda z: (z, z)), "the model returns a tuple of 2; wanted a tensor of 4 × "),
    "dict": (Calls(lambda z: {"scores": z}), "returns a dict with scores; wanted a tensor of 4 × "),
    "no logits": (Calls(lambda z: SimpleNamespace(hidden=z)), "the model returns a SimpleNamespac"),
    "batch": (Calls(lambda z: z[:1]), "a tensor of shape (1, 3) for 4 samples; wanted (4, classe"),
    "tokens": (Calls(lambda z: z[:, None]), "a tensor of shape (4, 1, 3) for 4 samples; wanted (4"),
    "flat": (Calls(lambda z: z.mean(1)), "a tensor of shape (4,) for 4 samples"),
    "one output": (nn.Linear(4, 1), "one output for each sample; wanted one for each class"),
    "integers": (
        Calls(lambda z: z.argmax(1, keepdim=True) == y[:3]),
        "returns torch.bool; wanted ",
    ),
    "half": (network().half(), "of torch.float32 of shape (4, 4) in evaluation: RuntimeError"),
    "frozen": (network().requires_grad_(False), "no parameter requires a gradient"),
    "empty": (nn.Identity(), "no parameter requires a gradient"),
    "detached": (Detached(4, 3), "do not depend on a parameter that requires a gradient"),
    "lazy": (nn.LazyLinear(3), "'weight' has no values yet"),
    "meta": (nn.Linear(4, 3, device="meta"), "'weight' has no values yet"),
    "complex": (nn.Linear(4, 3, dtype=torch.complex64), "'weight' is torch.complex64"),
    "sparse": (Words(), "the gradient of 'table.weight' is sparse; wanted sparse=False"),
    "not copied": (Refusing(), "cannot be copied: RuntimeError: only one of me"),
    "batch norm": (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), "in training: ValueError"),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": lambda values: values}, "model: is a function; wanted a torch.nn.Module"),
        ({"model": network().state_dict()}, "model: is a OrderedDict; wanted a torch.nn.Module"),
        ({"splits": None}, "splits: is missing; wanted a mapping of datasets by name"),
        ({"splits": [TensorDataset(x, y)] * 2}, "splits: is a list; wanted a mapping"),
        ({"splits": {1: TensorDataset(x, y)}}, "splits: unknown set '1'"),
        ({"method": None}, "method: is a NoneType; wanted the name of"),
        ({"search": {"count": 0}}, "search.count: Input should be greater than or equal to 2"),
        ({"search": 3}, "search: has fields of its own; wanted a mapping"),
        ({"pool": {"grid": {"speed": [1]}}}, "pool: grid.speed: no such hyper-parameter"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, got '-1'"),
        ({"seed": "a"}, "seed: Input should be a valid integer"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(changed, message):
    data = TensorDataset(x, y)
    usual = {"model": network(), "splits": {"forget": data, "test": data}}
    with pytest.raises(nm.NegMergeError) as caught:
        nm.unlearn(**({"pool": POOL, "search": SEARCH} | usual | changed))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@quiet
def test_pool_and_search_may_be_mappings():
    data = TensorDataset(x, y)
    pool = {"settings": {"lr": 0.05, "batch": 8}, "grid": {"epochs": [1, 2]}}
    splits = {"forget": data, "test": data}
    found = nm.unlearn(network(), splits, pool=pool, search={"stop": 1.0, "count": 3})
    usual = nm.unlearn(network(), splits, pool=POOL, search=SEARCH)
    assert torch.equal(found[0].weight, usual[0].weight)


@quiet
@pytest.mark.parametrize("method", ["consensus", "finetune"])
def test_the_callers_random_numbers_go_on(method):
    data = TensorDataset(x, y)
    splits = {"forget": data, "retain": data, "test": data}
    more = {"epochs": 1} if method == "finetune" else {"pool": POOL, "search": SEARCH}
    before = torch.get_rng_state()
    nm.unlearn(network(), splits, method, **more)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(("model", "message"), MODELS.values(), ids=MODELS)
def test_a_model_that_does_not_fit_is_one_line_before_any_work(model, message, tmp_path: Path):
    few = 1 if "training" in message else 24
    for more in ({}, {"method": "gradient_ascent", "pool": None, "search": None}):
        with pytest.raises(nm.NegMergeError) as caught:
            given(model, TensorDataset(x[:few], y[:few]), out=tmp_path / "run", **more)
        assert str(caught.value).startswith(("splits: forget: the model", "model: ", "weights: "))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_rival_wants_the_classes_in_the_last_linear_layer():
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(8, 3), nn.Linear(4, 8)

        def forward(self, values: Tensor) -> Tensor:
            return self.head(self.body(values))

    data = TensorDataset(x, y)
    with pytest.raises(nm.NegMergeError, match=r"random_label: .*'body', has 8 outputs, .* 3 clas"):
        nm.unlearn(Swapped(), {"forget": data, "retain": data}, "random_label", epochs=1)


AS_NAMED: dict[str, Callable[[Tensor, int, int], Any]] = {
    "labels": lambda v, k, i: {"values": v, "labels": torch.tensor(k)},
    "label": lambda v, k, i: {"label": k, "values": v.numpy()},
    "lists": lambda v, k, i: {"values": v.tolist(), "label": k},
    "two inputs": lambda v, k, i: {"values": v - 1.0, "shift": torch.ones(4), "label": k},
    "mapping": lambda v, k, i: UserDict(values=v, label=k),
    "pair": lambda v, k, i: ({"values": v}, k),
}


@quiet
@pytest.mark.parametrize("make", AS_NAMED.values(), ids=AS_NAMED)
def test_dictionaries_and_logits_give_what_plain_samples_give(make):
    """The same training, whatever the samples and the outputs are wrapped in."""
    wrapped, data = Calls(lambda z: SimpleNamespace(logits=z, loss=None)), Samples(make)
    plain, named = Calls(), given(wrapped, data)
    assert type(named) is Calls
    settings = nm.HyperParameters(epochs=2, batch=8, lr=0.05)
    train(plain, DatasetFeed(TensorDataset(x, y)), settings, seed=0)
    train(wrapped, DatasetFeed(data), settings, seed=0)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(wrapped.state_dict()[name], tensor)


@quiet
@pytest.mark.parametrize("name", [name for name in rivals if name != "boundary_shrink"])
def test_rivals_take_dictionaries_and_logits(name):
    wrapped = Calls(lambda z: SimpleNamespace(logits=z))
    splits = {"forget": Samples(AS_NAMED["labels"]), "retain": Samples(AS_NAMED["labels"], 30)}
    few = {k: v for k, v in {"epochs": 1, "batch": 8}.items() if k in rivals.get(name).accepts}
    forgot = nm.unlearn(wrapped, splits, name, **few)
    before = wrapped.state_dict()
    assert any(not torch.equal(v, before[k]) for k, v in forgot.state_dict().items())


def test_boundary_shrink_moves_one_tensor_and_says_so():
    data = Samples(AS_NAMED["two inputs"])
    with pytest.raises(nm.NegMergeError, match=r"boundary_shrink: .*dictionary of values, shift"):
        nm.unlearn(Calls(), {"forget": data}, "boundary_shrink", epochs=1)


@quiet
def test_half_precision_that_computes_is_taken():
    for dtype in (torch.float16, torch.bfloat16):
        forgot = given(network().to(dtype), TensorDataset(x.to(dtype), y))
        assert {tensor.dtype for tensor in forgot.state_dict().values()} == {dtype}


# The result


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> nn.Module:
    out = tmp_path_factory.mktemp("own") / "run"
    with pytest.warns(UserWarning, match="nothing is forgotten|may be better"):
        return given(network(), TensorDataset(x, y), out=out, search=nm.Search(count=2))


def test_the_module_has_its_result_at_hand(result):
    found = result.negmerge
    assert type(result) is nn.Sequential
    assert isinstance(found, nm.Unlearned)
    assert found.method == "consensus"
    scores = json.loads((found.folder / "scores.json").read_text())
    assert found.scores == {"original": scores["original"], "unlearned": scores["methods"][0]}
    assert found.scale == scores["methods"][0]["scale"]
    assert found.scores["unlearned"]["acc_retain"] is None
    assert set(found.warnings) < set(scores["warnings"])
    assert found.page == found.folder / "report/index.html"
    page = found.page.read_text(encoding="utf-8")
    assert "Sequential: consensus" in page
    assert "damaged" not in page
    assert Run(found.folder).verify()
    with pytest.raises(FrozenInstanceError):
        found.scale = 1.0


@quiet
def test_the_result_stays_out_of_the_way(result, tmp_path: Path):
    assert result.state_dict().keys() == network().state_dict().keys()
    network().load_state_dict(result.state_dict())
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):  # noqa: S301
        assert again.negmerge == result.negmerge
        assert torch.equal(again(x), result(x))
    torch.save(result, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert loaded.negmerge == result.negmerge
    torch.save(result.state_dict(), tmp_path / "state.pt")
    network().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    before = result.negmerge
    second = given(result, TensorDataset(x, y), method="uniform")
    assert second.negmerge.method == "uniform"
    assert second.negmerge.folder is None
    assert result.negmerge is before


def test_an_attribute_of_the_same_name_is_not_overwritten():
    model = network()
    model.negmerge = "mine"
    with pytest.raises(nm.NegMergeError, match="model: has an attribute 'negmerge' of its own"):
        given(model, TensorDataset(x, y))


# From the first call to the page, and again


def test_your_own_model(capsys):
    example = Path(__file__).parents[2] / "examples" / "own_model.py"
    text = example.read_text()
    body = text[text.index("def main()") : text.index("if __name__")].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 15
    runpy.run_path(str(example), run_name="__main__")
    original, unlearned = capsys.readouterr().out.splitlines()
    before, after = (float(line.split("forget")[1].split("%")[0]) for line in (original, unlearned))
    assert before == 100
    assert after < 60


@pytest.mark.filterwarnings("ignore::UserWarning")  # so little data may have nothing to forget
def test_own_model_is_left_alone_and_resumes(tmp_path: Path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
    pool = nm.Pool(settings={"lr": 0.05, "batch": 8}, grid={"epochs": [2, 3]})
    splits = {"forget": data, "retain": data}
    search = nm.Search(stop=2.0, count=5)
    options = {"pool": pool, "search": search, "out": tmp_path / "run"}
    one = nm.unlearn(model, splits, "uniform", **options)
    changed = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*.safetensors")}
    two = nm.unlearn(model, splits, "uniform", **options)
    assert changed == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*.safetensors")}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())
    scores = without_seconds(json.loads((tmp_path / "run/scores.json").read_text()))
    assert scores["methods"][0]["criterion"] == "keep_retain"
    other = {"forget": data, "retain": TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)}
    nm.unlearn(model, other, "uniform", **options)
    assert changed.keys() != set((tmp_path / "run").rglob("*.safetensors"))  # other data, other ids
    with pytest.raises(nm.NegMergeError, match="wanted forget, and test"):
        nm.unlearn(model, {"forget": data}, pool=pool)
    with pytest.raises(nm.NegMergeError, match="needs the test set"):
        nm.unlearn(model, splits, pool=pool, search=nm.Search(criterion="match_holdout"))


class Closed(nn.Module):
    """Its encoder has no gradient, so that Grad-CAM finds none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images):
        with torch.no_grad():
            maps = self.encoder(images).relu()
        return self.head(maps.mean((2, 3)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # so little data may have nothing to forget
def test_a_network_that_grad_cam_cannot_see_through_is_unlearned_all_the_same(tmp_path: Path):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(30, 3, 8, 8), torch.arange(30) % 2)
    pool = nm.Pool(settings={"lr": 0.05, "batch": 8}, grid={"epochs": [1, 2]})
    nm.unlearn(Closed(), {"forget": data, "test": data}, pool=pool, out=tmp_path / "run")
    assert Run(tmp_path / "run").finished
    page = nm.report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Grad-CAM failed: " in page


# Hugging Face


@quiet
def test_a_hugging_face_image_classifier_with_its_page(tmp_path: Path):
    from datasets import Dataset as Table
    from transformers import ViTConfig, ViTForImageClassification

    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "num_labels": 3}
    model = ViTForImageClassification(ViTConfig(**small))
    rows = {"pixel_values": torch.rand(12, 3, 8, 8).tolist(), "label": [0, 1, 2] * 4}
    table = Table.from_dict(rows)
    splits = {"forget": table, "retain": table.with_format("torch")}
    forgot = nm.unlearn(model, splits, "uniform", pool=POOL, search=SEARCH, out=tmp_path / "run")
    assert type(forgot) is ViTForImageClassification
    seen = json.loads((tmp_path / "run/report/data/gradcam.json").read_text())
    assert seen["rows"]
    assert all(len(row["cells"]) == 1 + len(seen["columns"]) for row in seen["rows"])
    with pytest.raises(nm.NegMergeError, match=r"the input 'text' is list; wanted tensors or num"):
        nm.unlearn(model, splits | {"forget": table.add_column("text", ["a"] * 12)}, pool=POOL)


@quiet
def test_a_hugging_face_text_classifier():
    from transformers import BertConfig, BertForSequenceClassification

    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "vocab_size": 20, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(**small))
    ids = torch.randint(20, (12, 5), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(5, dtype=torch.int64)
    rows = [
        {"input_ids": row, "attention_mask": ones, "labels": k % 3} for k, row in enumerate(ids)
    ]
    splits: dict[str, Any] = {"forget": rows, "test": rows}
    forgot = nm.unlearn(model, splits, pool=POOL, search=SEARCH)
    assert forgot.negmerge.scores["unlearned"]["samples"] == {"forget": 6, "test": 6}
    wrong = [{"ids": row["input_ids"], "labels": 0} for row in rows]
    with pytest.raises(nm.NegMergeError, match=r"refuses a batch of 'ids' torch.int64 of shape"):
        nm.unlearn(model, splits | {"forget": wrong}, pool=POOL)
