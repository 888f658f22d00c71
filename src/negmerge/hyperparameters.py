"""How one model is trained: the numbers, checked, and the learning rate they give at each step."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
HELD_OUT = 5000
"""The validation images of a set, at most, in the CLIP protocol."""


class Strict(BaseModel):
    """Settings that refuse unknown fields and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class RandAugment(Strict):
    """Strength of RandAugment: `n` operations of magnitude `m`, of 31 levels."""

    n: Annotated[int, Field(ge=1, le=10)] = 1
    m: Annotated[int, Field(ge=0, le=30)] = 5


class Augmentation(Strict):
    """What is done to a training image; the defaults of the data set apply where None."""

    crop: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Zero padding of the random crop; 0: no crop."""
    flip: bool | None = None
    randaugment: RandAugment | None = None


class HyperParameters(Strict):
    """Everything that decides how a model is trained, apart from the data and the seed.

    >>> HyperParameters(epochs=2, lr=0.1, schedule="cosine").rate(step=5, steps=10)
    0.05
    """

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    lr: Positive = 0.1
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD; AdamW keeps its usual betas."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5e-4
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: Annotated[tuple[Share, ...], Field(max_length=100)] = (0.5, 0.75)
    """Where `step` divides the learning rate by ten, as shares of the training."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; a tenth of all steps if there are not more than these."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip: Positive | None = None
    """Largest global norm of the gradient."""
    precision: Literal["float32", "bfloat16"] = "float32"
    augment: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _ordered(self) -> HyperParameters:
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError("milestones: wanted in rising order")
        return self

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a training of `steps` steps."""
        warmup = self.warmup if self.warmup < steps else steps // 10
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + cos(pi * (step - warmup) / max(steps - warmup, 1)))
        if self.schedule == "step":
            return self.lr * 0.1 ** sum(step >= share * steps for share in self.milestones)
        return self.lr
