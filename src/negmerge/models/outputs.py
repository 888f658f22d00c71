"""How a classifier is called: by one tensor or by names, and what of its answer are the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def logits_of(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The logits of a batch; of an answer that has `.logits`, as Hugging Face's have, those.

    >>> import torch
    >>> logits_of(nn.Linear(2, 3), {"input": torch.zeros(5, 2)}).shape
    torch.Size([5, 3])

    inputs: a tensor, or tensors by the names of the model's arguments.
    """
    said: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return getattr(said, "logits", said)
