"""CLIP in its tangent space (Ortiz-Jimenez et al., 2023): features linear in the weights.

f(x; θ) = f(x; θ₀) + J(x)·(θ − θ₀), by one forward-mode product. The state has the tensors of the
ordinary network, so that members are ordinary files and are merged as such.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from negmerge.errors import OptionError
from negmerge.evaluation.observations import Columns, Observations, join_columns
from negmerge.evaluation.passes import batches, classification_columns, evaluating
from negmerge.evaluation.scores import Scores, score
from negmerge.evaluation.search import Advance
from negmerge.scenarios.clip.classifier import ClipClassifier
from negmerge.scenarios.data import DataScenario
from negmerge.training.feeds import Feed
from negmerge.training.samples import only_tensor
from negmerge.vectors.task_vector import TaskVector


class LinearizedClassifier(ClipClassifier):
    """A classifier whose encoder is linearised around its weights at the call of `linearise`."""

    def linearise(self) -> LinearizedClassifier:
        """Take the present weights as θ₀; return the network. Frozen weights have no tangent."""
        moving = {name: p for name, p in self.visual.named_parameters() if p.requires_grad}
        self.start = {name: weight.detach().clone() for name, weight in moving.items()}
        return self

    def train(self, mode: bool = True) -> LinearizedClassifier:
        """Set the mode of the heads; the encoder stays in evaluation mode."""
        super().train(mode)
        self.visual.eval()  # the statistics of a batch have no tangent
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Raise: torch cannot compute the activations of a forward-mode product again."""
        raise OptionError(
            "checkpointing: a linearised network does not support it; set checkpointing to false; "
            "accumulate saves memory too"
        )

    def parts(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(x; θ₀) and J(x)·(θ − θ₀); the features are their sum."""
        inputs = (pixels - self.mean) / self.std
        weights = dict(self.visual.named_parameters())
        change = {name: weights[name] - start for name, start in self.start.items()}

        def encode(moving: dict[str, Tensor]) -> Tensor:
            return functional_call(self.visual, moving, (inputs,))

        with forward_mode():
            at_start, slope, *_ = jvp(encode, (self.start,), (change,))
        return at_start, slope

    def features(self, pixels: Tensor) -> Tensor:
        at_start, slope = self.parts(pixels)
        return at_start + slope


@contextmanager
def forward_mode() -> Iterator[None]:
    """Compute attention by plain operations: fused ones have no forward-mode derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # torch warns of its own use of torch.jit.
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.jit")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class LinearEvaluator:
    """Measures θ₀ − λτ for any λ; the images run through the model once.

    The features of θ₀ − λτ are f(θ₀) − λ·Jτ.

    Args:
        model: the model, linear around θ₀.
    """

    single_pass = True

    def __init__(
        self, scenario: DataScenario, model: LinearizedClassifier, tau: TaskVector
    ) -> None:
        self.model, self.tau = model, tau
        self.feeds, self.metrics = scenario.eval_sets("choose"), scenario.metrics
        self.parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        """By set, for each batch: f(θ₀), −Jτ and the true classes."""

    def at(self, scale: float, advance: Advance) -> Scores:
        """Every metric at one λ."""
        return score(self.observations(scale, advance), self.metrics)

    def observations(
        self, scale: float, advance: Advance = lambda count: None
    ) -> dict[str, Observations]:
        """The observations of every set at one λ."""
        columns = sorted({column for metric in self.metrics for column in metric.columns})
        found: dict[str, Observations] = {}
        for name, feed in self.feeds.items():
            if name in self.parts:
                advance(len(feed))
            else:
                self.parts[name] = self._pass(feed, advance)
            parts: list[Columns] = []
            for at_start, slope, targets in self.parts[name]:
                with torch.inference_mode():
                    logits = self.model.classify(at_start + scale * slope, name)
                parts.append(classification_columns(logits, targets, columns))
            found[name] = join_columns(parts)
        return found

    def _pass(self, feed: Feed, advance: Advance) -> list[tuple[Tensor, Tensor, Tensor]]:
        device = self.model.mean.device
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        moved = self.tau.applied(self.model, -1.0)
        with evaluating(self.model), moved, torch.inference_mode():
            for picked in batches(len(feed)):
                inputs, targets = feed.test_batch(picked)
                pixels = only_tensor(inputs, "a linearised model").to(device)
                parts.append((*self.model.parts(pixels), targets))
                advance(len(picked))
        return parts
