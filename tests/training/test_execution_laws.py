"""How steps are computed: checkpointing changes no bit, and all of it ends with the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from negmerge.errors import OptionError
from negmerge.rivals import rivals
from negmerge.runs.rival_trainings import make_rival_training
from negmerge.runs.trainings import Start, Training, make_training
from negmerge.training.execution import checkpointed, execution
from negmerge.training.feeds import DatasetFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import cross_entropy, train
from negmerge.training.memory import PeakMemory, StepMemory, check_step, measure_step

PLACE = Path("x")


def trainings_of(**fields: Any) -> list[Training]:
    """A member and a rival as a run plans them, with some settings changed."""
    kind: Any = SimpleNamespace(kind="classify")
    scenario: Any = SimpleNamespace(identity=["data"], seed=3, settings=kind, plugin_versions=[])
    settings, start = HyperParameters(**fields), Start(PLACE, "base")
    files: Any = (lambda key: PLACE / key, PLACE, start)
    rival = rivals.get("finetune")
    return [
        make_training(scenario, "member", "forget", settings, *files),
        make_rival_training(scenario, "rival", rival, {}, settings, *files),
    ]


@pytest.mark.parametrize(
    "how", [{"accumulate": 2}, {"compile": True}, {"precision": "bfloat16"}, {"precision": "tf32"}]
)
def test_how_a_step_is_computed_changes_the_id_and_no_random_number(how: dict[str, Any]):
    for usual, changed, other in zip(
        trainings_of(), trainings_of(**how), trainings_of(lr=0.3, **how), strict=True
    ):
        assert changed.key != usual.key
        assert changed.seed == usual.seed, "the order of the samples and their augmentation"
        assert other.seed != usual.seed, "each member of a pool has its own"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3),
            nn.Linear(4 * width, width), nn.Dropout(0.2),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Tower(nn.Module):
    """Blocks with dropout, and a switch for checkpointing as open_clip and timm have it."""

    def __init__(self, width: int = 16, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.grad_checkpointing, self.repeated = False, 0

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.grad_checkpointing:
                self.repeated += 1
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.visual, self.head = Tower(width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.visual(x))
        return found.mean(1) if found.dim() == 3 else found


def fresh(width: int = 16) -> Net:
    torch.manual_seed(0)
    return Net(width)


def feed(*shape: int) -> DatasetFeed:
    count, generator = 40, torch.Generator().manual_seed(1)
    inputs = torch.randn(count, *(shape or (16,)), generator=generator)
    return DatasetFeed(TensorDataset(inputs, torch.arange(count) % 3))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_checkpointing_gives_the_same_weights_bit_for_bit(precision, accumulate):
    settings = HyperParameters(
        epochs=3, batch=16, lr=0.01, optimizer="adamw", clip=1.0, precision=precision,
        accumulate=accumulate,
    )  # fmt: skip
    plain, twice = fresh(), fresh()
    done = train(plain, feed(), settings, seed=4)
    again = train(twice, feed(), settings.model_copy(update={"checkpointing": True}), seed=4)
    assert not plain.visual.repeated
    assert twice.visual.repeated, "the blocks were never checkpointed"
    assert not twice.visual.grad_checkpointing, "the switch is off again"
    assert again.loss == done.loss
    for name, value in plain.state_dict().items():
        assert torch.equal(value, twice.state_dict()[name]), name


def test_checkpointing_is_not_part_of_the_id_and_compilation_is():
    plain = HyperParameters()
    assert plain.content() == plain.model_dump(mode="json")
    assert {"compile", "checkpointing"}.isdisjoint(plain.content())
    assert HyperParameters(checkpointing=True).content() == plain.content()
    assert HyperParameters(checkpointing=True).model_dump()["checkpointing"] is True
    for change in ({"compile": True}, {"precision": "tf32"}, {"precision": "bfloat16"}):
        assert HyperParameters(**change).content() != plain.content()


class Unable(Tower):
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As open_clip's ResNet: the method exists and does nothing."""


def with_batch_norm() -> nn.Module:
    tower = Tower()
    tower.blocks.append(nn.BatchNorm1d(16))
    return tower


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(2, 2), "Linear has no set_grad_checkpointing or"),
        (Unable(), "Unable does not support it"),
        (with_batch_norm(), "Tower has BatchNorm, whose statistics would be updated twice"),
    ],
)
def test_a_network_without_checkpointing_is_refused(model, why):
    with pytest.raises(OptionError, match=rf"^checkpointing: {why}.*accumulate saves memory too$"):
        train(model, feed(), HyperParameters(checkpointing=True), seed=0)
    assert not getattr(model, "grad_checkpointing", False)


def test_models_of_transformers_are_switched_by_their_own_method():
    class Hugging(nn.Module):
        gradient_checkpointing = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict) -> None:
            assert gradient_checkpointing_kwargs == {"use_reentrant": False}
            self.gradient_checkpointing = True

    model = Hugging()
    with checkpointed(model):
        assert model.gradient_checkpointing
    assert not model.gradient_checkpointing


def test_a_compiled_training_keeps_names_and_ends_uncompiled():
    """Compilation itself is left out here: it takes minutes."""
    plain, compiled = fresh(), fresh()
    settings = HyperParameters(epochs=1, batch=16, lr=0.01)
    train(plain, feed(), settings, seed=0)
    calls: list[bool] = []

    def objective(model, batch, epoch):
        calls.append(model._compiled_call_impl is not None)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with torch.compiler.set_stance("force_eager"):
        own = settings.model_copy(update={"compile": True})
        train(compiled, feed(), own, seed=0, objective=objective)
    assert calls
    assert all(calls)
    assert compiled._compiled_call_impl is None
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, compiled.state_dict()[name]), name


def test_tf32_is_allowed_within_a_training_only():
    before = torch.backends.cuda.matmul.allow_tf32
    with execution(fresh(), HyperParameters(precision="tf32")):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
    with execution(fresh(), HyperParameters()):
        assert torch.backends.cuda.matmul.allow_tf32 == before


# ------------------------------------------------------------------------------------------- memory


def test_the_peak_is_that_of_tensors_alive_at_once():
    with PeakMemory() as memory:
        kept = [torch.ones(100) for _ in range(3)]
        views = [one.view(10, 10).T for one in kept]  # views need no memory
        total = torch.zeros(100)
        for one in views:
            total += one.reshape(-1)  # a copy, which is freed
        del kept, views, one
        torch.zeros(50)
    assert memory.peak == 400 * 5
    assert memory.alive == 400


def naive_need(settings: HyperParameters, model: nn.Module, rows: int) -> int:
    """A whole step with gradients and moments, in one block that counts every tensor."""
    inputs, labels = feed().test_batch(torch.arange(rows).numpy())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):  # the second step has moments, and gradients to add to
        with PeakMemory() as memory:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            del loss
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    return 4 * weights + max(memory.peak + inputs.nbytes + labels.nbytes, weights)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_need_of_a_large_batch_follows_from_a_few_samples(checkpointing):
    settings = HyperParameters(batch=40, optimizer="adamw", checkpointing=checkpointing)
    model = fresh()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = measure_step(model, feed(), settings, cross_entropy(settings))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    model.visual.set_grad_checkpointing(checkpointing)
    assert found.need(40) == pytest.approx(naive_need(settings, model, 40), rel=0.05)
    assert found.need(40, 4) == pytest.approx(naive_need(settings, model, 10), rel=0.05)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_small_batches_are_measured_too(batch):
    """BatchNorm refuses a single sample, which no step of such a training has."""
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    model = nn.Sequential(*(layers if batch > 1 else layers[::2]))
    data = DatasetFeed(TensorDataset(torch.randn(9, 4), torch.arange(9) % 2))
    settings = HyperParameters(batch=batch)
    assert measure_step(model, data, settings, cross_entropy(settings)).per_sample > 0


def test_checkpointing_needs_less():
    plain = HyperParameters(batch=40)
    twice = plain.model_copy(update={"checkpointing": True})
    loss = cross_entropy(plain)
    one, two = (measure_step(fresh(), feed(), own, loss) for own in (plain, twice))
    assert two.per_sample < 0.5 * one.per_sample


def refusal(
    limit: float, settings: HyperParameters, model: nn.Module, data: DatasetFeed | None = None
) -> str:
    with pytest.raises(OptionError) as caught:
        check_step("pool.settings", model, data or feed(), settings, cross_entropy(settings), limit)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_step_that_does_not_fit_is_refused_with_settings_that_do():
    settings, model = HyperParameters(batch=40, optimizer="adamw"), fresh()
    loss = cross_entropy(settings)
    found = measure_step(model, feed(), settings, loss)
    check_step("pool.settings", model, feed(), settings, loss, found.need(40))
    line = refusal(found.need(40) - 1, settings, model)
    assert line.startswith("pool.settings: a step needs 0.00")
    assert "free; set pool.settings.accumulate=2 (0.00" in line
    assert "accumulate=5 (" in refusal(found.need(8), settings, model)
    split = settings.model_copy(update={"accumulate": 5})
    check_step("pool.settings", model, feed(), split, loss, found.need(8))


def test_a_step_that_only_fits_with_checkpointing_is_told_so():
    settings, model, long = HyperParameters(batch=40), fresh(), feed(500, 16)
    loss = cross_entropy(settings)
    twice = settings.model_copy(update={"checkpointing": True})
    one, two = (measure_step(model, long, own, loss) for own in (settings, twice))
    limit = one.need(40, 40) - 1  # too little for a single sample
    split = two.smallest_split(40, limit)
    line = refusal(limit, settings, model, long)
    assert f"set pool.settings.checkpointing=true and pool.settings.accumulate={split} (" in line
    line = refusal(1000, settings, model, long)
    assert line.endswith(
        "no accumulate makes it fit; use a smaller model, or a GPU with more memory"
    )
    fixed = twice.model_copy(update={"accumulate": split})
    check_step("pool.settings", model, long, fixed, loss, limit)


def test_a_step_that_cannot_even_be_measured_is_one_line():
    def objective(model, batch, epoch):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    settings = HyperParameters(batch=40)
    with pytest.raises(
        OptionError, match=r"^train: not even a step of a few samples fits, .* 8"
    ) as e:
        check_step("train", fresh(), feed(), settings, objective, 8e9)
    assert "\n" not in str(e.value)


def test_parts_are_never_smaller_than_a_sample():
    found = StepMemory(weights=0, trainable=0, moments=0, constant=0.0, per_sample=10.0)
    assert found.smallest_split(batch=8, limit=10) == 8
    assert found.smallest_split(batch=8, limit=9) is None
