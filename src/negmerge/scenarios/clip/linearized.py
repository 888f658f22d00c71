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
from negmerge.scenarios.clip.classifier import ClipClassifier


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
