"""The rivals for language models, against losses and steps that are computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from negmerge.errors import OptionError
from negmerge.rivals import Task, rivals
from negmerge.rivals.language import answer_log_probability, divergence, frozen_copy
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import load_recipe
from negmerge.training.feeds import DatasetFeed, PairedFeed
from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.outputs import IGNORED

SGD = HyperParameters(epochs=1, batch=8, lr=0.1, momentum=0.0, weight_decay=0.0)


def feed(size: int, seed: int) -> DatasetFeed:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator)
    return DatasetFeed(TensorDataset(inputs, torch.randint(4, (size,), generator=generator)))


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(3, 4)


def step_of(name: str, settings: HyperParameters = SGD, **options: Any) -> Tensor:
    """The change of the weights of a linear model by a rival, with one step of 8 samples."""
    model = linear()
    task = Task(model, {"forget": feed(8, 2), "retain": feed(30, 3)}, settings, seed=5)
    rivals.get(name).run(task, options)
    return torch.cat([a.detach().flatten() - b.detach().flatten() for a, b in pairs(model)])


def pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return list(zip(model.parameters(), linear().parameters(), strict=True))


def by_hand(loss: Callable[[nn.Module], Tensor]) -> Tensor:
    model = linear()
    gradients = torch.autograd.grad(loss(model), list(model.parameters()))
    return torch.cat([-SGD.lr * gradient.flatten() for gradient in gradients])


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def drawn_pairs() -> tuple[Any, Any]:
    """The forget and the retain samples of the only step."""
    found = Steps()
    task = Task(linear(), {"forget": feed(8, 2), "retain": feed(30, 3)}, SGD, seed=5)
    task.train(PairedFeed(task.feeds["forget"], task.feeds["retain"]), found)
    ((inputs, retain), labels) = found.batches[0]
    return (inputs, labels), retain


class Steps:
    """An objective that keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def __call__(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        self.batches.append(batch)
        return sum((weight.sum() * 0 for weight in model.parameters()), torch.zeros(()))


def test_gradient_difference_is_descent_minus_ascent():
    forget, retain = drawn_pairs()
    for alpha in (1.0, 0.3):
        wanted = by_hand(
            lambda model, alpha=alpha: (
                alpha * cross_entropy(model, retain) - cross_entropy(model, forget)
            )
        )
        torch.testing.assert_close(step_of("gradient_difference", alpha=alpha), wanted)


def test_the_first_step_of_kl_ascent_and_npo_is_that_of_gradient_ascent():
    # At the original KL has its minimum, and NPO's loss has the slope of the log-probability.
    ascent = step_of("gradient_ascent")
    torch.testing.assert_close(step_of("kl_ascent", alpha=7.0), ascent, rtol=1e-4, atol=1e-6)
    for beta in (0.05, 2.0):
        torch.testing.assert_close(step_of("npo", beta=beta, use_retain=False), ascent)


def test_npo_adds_the_loss_on_the_retain_set():
    forget, retain = drawn_pairs()
    wanted = by_hand(lambda m: 0.5 * cross_entropy(m, retain) - cross_entropy(m, forget))
    torch.testing.assert_close(step_of("npo", alpha=0.5), wanted)


def test_npo_stops_pushing_answers_that_are_unlikely_enough():
    long = SGD.model_copy(update={"epochs": 60, "lr": 1.0})
    ascent, bounded = (
        step_of(name, long, **options).norm()
        for name, options in (
            ("gradient_ascent", {}),
            ("npo", {"beta": 2.0, "use_retain": False}),
        )
    )
    assert bounded < ascent / 5


def test_state_arithmetic_is_the_sum_of_two_task_vectors():
    settings = SGD.model_copy(update={"epochs": 3})
    changes: dict[str, Tensor] = {}
    for name, own in (("forget", feed(8, 2)), ("retain", feed(30, 3))):
        model = linear()
        Task(model, {}, settings, seed=5).train(own)
        changes[name] = torch.cat([(a - b).detach().flatten() for a, b in pairs(model)])
    found = step_of("state_arithmetic", settings, alpha=0.7, beta=0.2)
    torch.testing.assert_close(found, -0.7 * changes["forget"] + 0.2 * changes["retain"])


def test_divergence_and_answers_count_only_the_tokens_of_answers():
    generator = torch.Generator().manual_seed(0)
    own, before = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    targets = torch.tensor([[IGNORED, 2, 4], [1, IGNORED, IGNORED]])
    a, b = linear(), linear()
    task = Task(a, {}, SGD, 0, predict=lambda m, batch: (own if m is a else before, targets))
    batch: Any = (None, targets)
    p, q = before.softmax(-1), own.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    wanted = ((kl[0, 1] + kl[0, 2]) / 2 + kl[1, 0]) / 2
    torch.testing.assert_close(divergence(task, a, b, batch), wanted)
    logs = q.log()
    sums = torch.stack([logs[0, 1, 2] + logs[0, 2, 4], logs[1, 0, 1]])
    torch.testing.assert_close(answer_log_probability(task, a, batch), sums)


def test_pairs_follow_the_seed_and_use_all_others():
    paired = PairedFeed(feed(8, 2), feed(30, 3))
    seen: set[float] = set()
    for seed in range(40):
        (_, (others, _)), labels = paired.train_batch(np.arange(8), seed, Augmentation())
        (_, (again, _)), _ = paired.train_batch(np.arange(8), seed, Augmentation())
        assert torch.equal(others, again)
        assert labels.tolist() == paired.feed.test_batch(np.arange(8))[1].tolist()
        seen |= {*others[:, 0].tolist()}
    assert len(seen) == 30


def test_the_original_does_not_change_with_the_model():
    model = linear()
    original, before = frozen_copy(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())
    assert not any(weight.requires_grad for weight in original.parameters())


def test_rivals_with_classes_are_refused_for_texts():
    recipe = load_recipe("demo").model_copy(update={})
    check_methods(recipe)
    with pytest.raises(OptionError, match=r"'salun': needs a classifier.*npo"):
        rivals.get("salun").suited_to("texts")
    assert rivals.get("finetune").suited_to("texts").settings.optimizer == "adamw"
    assert rivals.get("finetune").suited_to("classes").settings.optimizer == "sgd"
