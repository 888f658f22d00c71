"""Each rival does what its paper says, checked a second way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from negmerge.errors import NegMergeError
from negmerge.rivals import Task, rivals
from negmerge.rivals.boundary_shrink import perturbed_labels
from negmerge.rivals.gradients import total_gradient
from negmerge.rivals.random_label import mislabelled
from negmerge.rivals.salun import largest
from negmerge.runs.checks import check_rival
from negmerge.runs.methods import Method
from negmerge.runs.rival_trainings import tuning_grid
from negmerge.training.feeds import DatasetFeed, JoinedFeed, epoch_of
from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.seeds import seed_of

CLASSES = 4


def blobs(count: int, seed: int, spread: float = 0.12) -> TensorDataset:
    """Points in the unit square around four corners."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    corners = np.array([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
    points = np.clip(corners[labels] + spread * rng.standard_normal((count, 2)), 0, 1)
    return TensorDataset(torch.tensor(points, dtype=torch.float32), torch.tensor(labels))


def trained() -> nn.Module:
    """A small network that knows the blobs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    points, labels = blobs(200, 0).tensors
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model


ORIGINAL = trained().state_dict()


def original() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    model.load_state_dict(ORIGINAL)
    return model


def unlearn(name: str, **given) -> nn.Module:
    rival = rivals.get(name)
    settings, options = rival.resolve(given)
    feeds = {"forget": DatasetFeed(blobs(40, 1)), "retain": DatasetFeed(blobs(160, 2))}
    model = original()
    rival.run(Task(model, feeds, settings, seed=0), options)
    return model.eval()


def loss(model: nn.Module, data: TensorDataset) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(data.tensors[0]), data.tensors[1]))


# ----------------------------------------------------------------------------- ascent, term, budget


def test_gradient_ascent_raises_the_forget_loss():
    before = loss(original(), blobs(40, 1))
    little = loss(unlearn("gradient_ascent", lr=0.01, batch=20), blobs(40, 1))
    much = loss(unlearn("gradient_ascent", lr=0.05, batch=20), blobs(40, 1))
    assert before < little < much


def test_finetune_lowers_the_retain_loss():
    assert loss(unlearn("finetune", batch=32), blobs(160, 2)) < loss(original(), blobs(160, 2))


def small(model: nn.Module) -> float:
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return float((weights.abs() < 1e-2).float().mean())


def test_l1_sparse_is_sparser_than_finetune():
    tuned = small(unlearn("finetune", batch=16, epochs=20, lr=0.05))
    sparse = small(unlearn("l1_sparse", batch=16, epochs=20, lr=0.05, alpha=3e-3))
    assert sparse > tuned + 0.1


def test_the_l1_term_fades_as_published():
    """Against the loop written out: α_e = α (1 − e / (E − no_l1_epochs)), on all weights."""
    given = {"batch": 160, "epochs": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    ours = unlearn("l1_sparse", alpha=0.01, no_l1_epochs=1, **given)
    model = original()
    points, labels = blobs(160, 2).tensors
    for strength in (0.01, 0.01 * 2 / 3, 0.01 / 3, 0.0):
        norm = sum(p.abs().sum() for p in model.parameters())
        total = cross_entropy(model(points), labels) + strength * norm
        for p, g in zip(
            model.parameters(), torch.autograd.grad(total, list(model.parameters())), strict=True
        ):
            p.data -= 0.1 * g
    for one, two in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_retrain_does_not_depend_on_the_model_it_is_given():
    feeds = {"retain": DatasetFeed(blobs(160, 2))}
    settings = HyperParameters(epochs=20, batch=16, lr=0.2)
    found = []
    for scale in (1.0, -3.0):
        model = original()
        for weight in model.parameters():
            weight.data *= scale
        rivals.get("retrain").run(Task(model, feeds, settings, seed=5), {})
        found.append(model)
    for one, two in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, two)
    points, labels = blobs(160, 2).tensors
    assert float((found[0](points).argmax(1) == labels).float().mean()) > 0.9


def test_retrain_refuses_what_it_cannot_draw_anew():
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(2))
            self.head = nn.Linear(2, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.token)

    task = Task(Token(), {"retain": DatasetFeed(blobs(10, 2))}, HyperParameters(epochs=1), 0)
    with pytest.raises(NegMergeError, match="retrain: 'token' belongs to a Token"):
        rivals.get("retrain").run(task, {})


# ------------------------------------------------------------------------------------ random labels


def test_random_labels_are_even_and_new_in_every_epoch():
    data = blobs(4000, 3)
    task = Task(original(), {"forget": DatasetFeed(data)}, HyperParameters(), 0)
    feed = mislabelled(task, use_retain=False, mixed=False)
    picked = np.arange(4000)
    first, second = (feed.train_batch(picked, seed, Augmentation())[1] for seed in (1, 2))
    for labels in (first, second):
        assert np.bincount(labels, minlength=CLASSES).min() > 900  # of 1000 expected
        same = float((labels == data.tensors[1]).float().mean())
        assert same == pytest.approx(1 / CLASSES, abs=0.03)  # the true one is as likely as others
    assert float((first == second).float().mean()) == pytest.approx(1 / CLASSES, abs=0.03)
    alone = feed.train_batch(picked[7:8], 1, Augmentation())[1]
    assert alone[0] == first[7]  # a label belongs to (seed, epoch, sample), not to a batch


@pytest.mark.parametrize("mixed", [False, True])
def test_the_retain_pass_has_the_true_labels_and_follows_the_forget_pass(mixed):
    forget, retain = blobs(10, 1), blobs(25, 2)
    feeds = {"forget": DatasetFeed(forget), "retain": DatasetFeed(retain)}
    settings = HyperParameters(batch=4)
    feed = mislabelled(Task(original(), feeds, settings, 0), True, mixed)
    assert isinstance(feed, JoinedFeed)
    batches = epoch_of(feed, settings, 0, 0)
    assert sorted(np.concatenate(batches)) == list(range(35))
    kinds = ["".join(sorted(set(np.where(b < 10, "f", "r")))) for b in batches]
    assert (sorted(kinds) == kinds and "fr" not in kinds) == (not mixed)
    inputs, labels = feed.train_batch(np.arange(10, 35), 0, Augmentation())
    assert torch.equal(inputs, retain.tensors[0])
    assert torch.equal(labels, retain.tensors[1])


# -------------------------------------------------------------------------------------------- SalUn


@pytest.mark.parametrize("keep", [0.1, 0.25, 0.5])
def test_the_mask_is_the_top_share_of_the_gradient(keep):
    """Against one backward pass over the whole forget set, sorted by numpy."""
    data, model = blobs(37, 1), original()
    gradient = total_gradient(model, DatasetFeed(data), batch=8)
    ours = largest(model, gradient.abs(), keep)
    whole = original()
    (-cross_entropy(whole(data.tensors[0]), data.tensors[1])).backward()
    flat = np.concatenate([np.abs(p.grad.numpy()).ravel() for p in whole.parameters()])
    count = int(keep * len(flat))
    threshold = np.sort(flat)[::-1][count - 1]
    assert np.sort(flat)[::-1][count] < threshold * (1 - 1e-4)  # no tie where the cut is
    wanted = flat >= threshold * (1 - 1e-5)
    found = np.concatenate([ours[name].numpy().ravel() for name, _ in whole.named_parameters()])
    assert found.sum() == count
    assert np.array_equal(found, wanted)
    shares = [float(mask.float().mean()) for mask in ours.values()]
    assert max(shares) > min(shares)  # ranked over the whole model, not tensor by tensor


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_masked_weights_keep_their_bits(optimizer):
    given = {"batch": 16, "epochs": 3, "weight_decay": 0.5, "optimizer": optimizer, "clip": 1.0}
    forgot = unlearn("salun", keep=0.3, lr=0.05, **given)
    before = original()
    forget = DatasetFeed(blobs(40, 1))
    mask = largest(before, total_gradient(before, forget, 16).abs(), 0.3)
    was = dict(before.named_parameters())
    moved = 0
    for name, weight in forgot.named_parameters():
        held = ~mask[name]
        assert torch.equal(weight[held], was[name][held]), name
        moved += int((weight != was[name]).sum())
    assert moved > 0.2 * sum(w.numel() for w in was.values())


def test_a_mask_of_everything_is_random_label():
    given = {"batch": 16, "epochs": 2, "lr": 0.02}
    one, two = unlearn("salun", keep=1.0, **given), unlearn("random_label", **given)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


# --------------------------------------------------------------------------------------- boundaries


def sectors() -> nn.Linear:
    """Three sectors of the plane, with straight boundaries at 30, 150 and 270 degrees."""
    model = nn.Linear(2, 3, bias=False)
    angles = torch.tensor([90.0, 210.0, 330.0]).deg2rad()
    model.weight.data = 20 * torch.stack([angles.cos(), angles.sin()], 1)
    return model


def test_boundary_shrink_labels_the_nearest_wrong_class():
    model = sectors()
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.uniform(-1, 1, (4000, 2)), dtype=torch.float32)
    scores = model(points).detach()
    labels = scores.argmax(1)
    # The distance to the boundary with class k is (s_y − s_k) / |w_y − w_k|: the same norms here.
    ranked = scores.sort(descending=True).values
    norm = (model.weight[0] - model.weight[1]).norm().item()
    near = (ranked[:, 0] - ranked[:, 1]) / norm
    second = (ranked[:, 0] - ranked[:, 2]) / norm
    nearest = scores.scatter(1, labels[:, None], -torch.inf).argmax(1)
    found = perturbed_labels(model, (points, labels), bound=0.1, pixels=False)
    # A step of 0.1 in both coordinates is at least 0.1 and at most 0.1414 long.
    close = (near < 0.09) & (second > 0.3)
    far = near > 0.15
    assert close.sum() > 100
    assert far.sum() > 1000
    assert torch.equal(found[close], nearest[close])
    assert torch.equal(found[far], labels[far])  # untargeted and bounded: the true label stays


def test_boundary_shrink_moves_pixels_within_their_range():
    seen: list[Tensor] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach())
            return super().forward(x)

    model = Spy(2, 3)
    points = torch.tensor([[0.0, 1.0], [0.97, 0.03], [0.5, 0.5]])
    perturbed_labels(model, (points, torch.tensor([0, 1, 2])), 0.1, pixels=True)
    moved = seen[-1]
    assert 0 <= moved.min() <= moved.max() <= 1
    assert torch.allclose(moved * 255, (moved * 255).round(), atol=1e-4)
    with pytest.raises(NegMergeError, match=r"inputs from -1 to 1, wanted pixels in \[0, 1\]"):
        perturbed_labels(model, (2 * points - 1, torch.tensor([0, 1, 2])), 0.1, pixels=True)


def test_boundary_expand_moves_the_forget_set_to_an_output_that_stays_or_goes():
    given = {"batch": 16, "epochs": 30, "lr": 0.05}
    points = blobs(40, 1).tensors[0]
    kept = unlearn("boundary_expand", **given)
    assert bool((kept(points).argmax(1) == CLASSES).all())
    gone = unlearn("boundary_expand", keep_extra=False, **given)
    assert gone(points).shape == (40, CLASSES)
    assert torch.equal(gone(points), kept(points)[:, :CLASSES])


# ---------------------------------------------------------------------------------------- influence


def fit(points: Tensor, labels: Tensor) -> nn.Linear:
    """Logistic regression to its optimum, by L-BFGS in double precision."""
    model = nn.Linear(points.shape[1], 2).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = cross_entropy(model(points), labels)
        total.backward()
        return total

    optimizer.step(closure)
    return model


def test_influence_predicts_exact_removal_on_a_convex_model():
    rng = np.random.default_rng(1)
    points = torch.tensor(rng.standard_normal((400, 10)))
    chance = torch.sigmoid(points @ torch.tensor(rng.standard_normal(10) / 3))
    labels = (torch.tensor(rng.uniform(size=400)) < chance).long()
    whole, rest = fit(points, labels), fit(points[40:], labels[40:])
    model = nn.Linear(10, 2)
    model.load_state_dict(whole.state_dict())
    feeds = {
        "forget": DatasetFeed(TensorDataset(points[:40].float(), labels[:40])),
        "retain": DatasetFeed(TensorDataset(points[40:].float(), labels[40:])),
    }
    settings = HyperParameters(batch=64)
    rivals.get("influence").run(Task(model, feeds, settings, seed=0), {"alpha": 1.0})

    def change(after: nn.Linear) -> np.ndarray:
        deltas = [
            (new.double() - old).detach().numpy().ravel()
            for new, old in zip(after.parameters(), whole.parameters(), strict=True)
        ]
        return np.concatenate(deltas)

    correlation = np.corrcoef(change(model), change(rest))[0, 1]
    assert correlation >= 0.9


def test_influence_is_the_published_recursion():
    """Against numpy: the retain gradient is of retain data, and no sample is augmented."""

    class AsItIs(DatasetFeed):
        def train_batch(self, picked, seed, augment):
            raise AssertionError("augmented")

    rng = np.random.default_rng(0)
    forget, retain = rng.standard_normal((6, 3)), rng.standard_normal((17, 3)) + 1
    labels = {"forget": np.arange(6) % 2, "retain": np.arange(17) % 2}
    model = nn.Linear(3, 2, bias=False).double()
    start = model.weight.detach().numpy().copy()

    def gradients(points: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        scores = np.exp(points @ start.T)
        chance = scores / scores.sum(1, keepdims=True) - np.eye(2)[wanted]
        return (chance[:, :, None] * points[:, None, :]).reshape(len(points), -1)

    of_forget = gradients(forget, labels["forget"])
    of_retain = gradients(retain, labels["retain"])
    k = of_forget.sum(0) / 23 - of_retain.sum(0) * 6 / (23 * 17)
    order = np.random.default_rng(seed_of("curvature", 9)).permutation(17)
    o = of_retain[order[0]].copy()
    for g in of_retain[order[1:]]:
        along, scale = o @ g, 1000 + o @ g
        k -= (k @ g) / scale * o
        o -= along / scale * o
    points = {"forget": forget, "retain": retain}
    feeds = {
        name: AsItIs(TensorDataset(torch.tensor(points[name]), torch.tensor(labels[name])))
        for name in points
    }
    rivals.get("influence").run(Task(model, feeds, HyperParameters(batch=4), 9), {"alpha": 2.0})
    found = model.weight.detach().numpy()
    np.testing.assert_allclose(found, start + 2 * k.reshape(2, 3), rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------- tuning


@pytest.mark.parametrize("name", [name for name in rivals if name != "retrain"])
@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_every_rival_has_the_same_number_of_tries(name, count):
    found = tuning_grid(rivals.get(name), {}, count)
    assert len(found) == count
    assert len({tuple(p.items()) for p in found}) == count
    for searched, where in rivals.get(name).search.items():
        values = [p[searched] for p in found]
        assert sorted(values) == where.points(count)  # each value once, from end to end


def test_what_is_given_is_not_tuned_and_forget_only_has_its_own_range():
    salun = rivals.get("salun")
    assert [set(p) for p in tuning_grid(salun, {"lr": 0.1}, 2)] == [{"keep"}, {"keep"}]
    rates = [p["lr"] for p in tuning_grid(salun, {"use_retain": False}, 4)]
    assert rates == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2])
    assert 1e-5 < salun.resolve({"use_retain": False})[0].lr < 1e-2
    assert salun.resolve({"use_retain": False, "lr": 0.5})[0].lr == 0.5
    method = Method(name="finetune", options={"lr": 0.1}, tune=True)
    with pytest.raises(NegMergeError, match="nothing is left to tune, its options fix lr"):
        check_rival(method, rivals.get("finetune"))
    with pytest.raises(NegMergeError, match=r"retrain.*is the reference of every run"):
        check_rival(Method(name="retrain"), rivals.get("retrain"))
