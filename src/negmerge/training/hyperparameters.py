"""Hyper-parameters of a training, and the learning rate of each step."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from negmerge.support.settings import Positive, Share, Strict

ADDED_LATER: dict[str, Any] = {"own": {}, "accumulate": 1, "compile": False, "checkpointing": False}
"""Fields that older versions did not have, and their defaults."""
COMPUTATION: dict[str, Any] = {"accumulate": 1, "compile": False, "precision": "float32"}
"""Fields that say how a step is computed, and their defaults; they change the last bits."""


class RandAugment(Strict):
    """RandAugment: `n` operations of magnitude `m`.

    torchvision has the magnitudes 0 to 30, timm 0 to 10.
    """

    n: Annotated[int, Field(ge=1, le=10)] = 1
    """The number of operations."""
    m: Annotated[int, Field(ge=0, le=30)] = 5
    """Their magnitude."""


class Augmentation(Strict):
    """Augmentation of training images; None means the default of the data set."""

    crop: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Zero padding of the random crop; 0: no crop."""
    flip: bool | None = None
    """Whether images are mirrored at random."""
    randaugment: RandAugment | None = None


class HyperParameters(Strict):
    """All settings of a training except the data and the seed.

    >>> HyperParameters(epochs=2, lr=0.1, schedule="cosine").rate(step=5, steps=10)
    0.05
    """

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    """Passes over the data."""
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Samples of a step."""
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Parts of a batch that run through the model one after the other, which saves memory."""
    lr: Positive = 0.1
    """The learning rate."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """For SGD; AdamW has the default betas of torch."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5e-4
    """The decay of the weights; AdamW's is decoupled from the gradient."""
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    """How the learning rate changes."""
    milestones: Annotated[tuple[Share, ...], Field(max_length=100)] = (0.5, 0.75)
    """Shares of the training after which the schedule `step` divides the learning rate by ten."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; a tenth of all steps if the training has no more than this."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the label that is spread over all classes."""
    clip: Positive | None = None
    """The largest global norm of the gradient; None: no clipping."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """`tf32`: float32 with faster, less exact products of matrices on a GPU; `bfloat16`: autocast,
    with weights, gradients and moments in float32."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them, which saves memory."""
    augment: Augmentation = Augmentation()
    own: dict[str, Any] = Field(default_factory=dict)
    """Further settings for the training code of the user; see `nm.unlearn`."""

    @model_serializer(mode="wrap")
    def _without_unused(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that were added later and have their default.

        The ids of trainings do not depend on a field that is not used.
        """
        tree = serialise(self)
        for name, default in ADDED_LATER.items():
            if tree.get(name) == default:
                del tree[name]
        return tree

    @model_validator(mode="after")
    def _ordered(self) -> HyperParameters:
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError("milestones: wanted rising order; sort them")
        return self

    def content(self) -> dict[str, Any]:
        """Return the settings that the weights depend on, as JSON; ids of trainings are made of it.

        Checkpointing is not among them: the weights have the same bits with and without.

        >>> HyperParameters(checkpointing=True).content() == HyperParameters().content()
        True
        """
        return self.model_dump(mode="json", exclude={"checkpointing"})

    def random_content(self) -> dict[str, Any]:
        """Return the settings that random numbers depend on, as JSON; seeds are made of it.

        How a step is computed is not among them: the samples, their order and their augmentation
        are the same.

        >>> HyperParameters(accumulate=2).random_content() == HyperParameters().content()
        True
        """
        return self.model_copy(update=COMPUTATION).content()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # the default fails on the dict `own`

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0, in a training of `steps` steps."""
        warmup = self.warmup if self.warmup < steps else steps // 10
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "linear":
            return self.lr * (steps - step) / max(steps - warmup, 1)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + cos(pi * (step - warmup) / max(steps - warmup, 1)))
        if self.schedule == "step":
            return self.lr * 0.1 ** sum(step >= share * steps for share in self.milestones)
        return self.lr
