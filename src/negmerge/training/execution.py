"""How the steps of a training are computed: number format, compilation, checkpointing.

None of this changes the names of the weights, and all of it ends with the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from negmerge.errors import OptionError
from negmerge.training.hyperparameters import HyperParameters

SWITCHES = ("set_grad_checkpointing", "gradient_checkpointing_enable")
"""The methods by which networks of open_clip, timm and transformers turn checkpointing on."""
FLAGS = ("grad_checkpointing", "gradient_checkpointing")
"""The attributes that these methods set in the modules that support checkpointing."""


def autocast(settings: HyperParameters, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: bfloat16 where torch allows it, if the settings say."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")


@contextmanager
def execution(model: nn.Module, settings: HyperParameters) -> Iterator[None]:
    """Compute the steps of a training as its settings say, within the block.

    Args:
        model: the model in training; compiled or checkpointed within the block only.
    """
    with ExitStack() as stack:
        if settings.precision == "tf32":
            backend: Any = torch.backends.cuda.matmul
            stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = True
        if settings.checkpointing:
            stack.enter_context(checkpointed(model))
        if settings.compile:
            # `model.compile` keeps the names of the weights; `torch.compile(model)` would not.
            stack.callback(setattr, model, "_compiled_call_impl", None)
            model.compile()
        yield


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Compute activations twice instead of keeping them, by the network's own checkpointing.

    The gradients have the same bits: random numbers of the first pass are drawn again in the
    second. BatchNorm would update its statistics twice, and is refused.

    Args:
        model: a network that has one of `SWITCHES`, or a module that contains one.
    """
    name = type(model).__name__
    remedy = "set checkpointing to false; accumulate saves memory too"
    found = [(m, s) for m in model.modules() for s in SWITCHES if hasattr(m, s)]
    if not found:
        raise OptionError(f"checkpointing: {name} has no {' or '.join(SWITCHES)}; {remedy}")
    if any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise OptionError(
            f"checkpointing: {name} has BatchNorm, whose statistics would be updated twice in each "
            f"step; {remedy}"
        )
    module, switch = found[0]
    before = [(m, f, getattr(m, f)) for m in model.modules() for f in FLAGS if hasattr(m, f)]
    with ExitStack() as stack:
        for owner, flag, value in before:
            stack.callback(setattr, owner, flag, value)
        if switch == SWITCHES[0]:
            getattr(module, switch)()
        else:
            getattr(module, switch)(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not any(getattr(owner, flag) for owner, flag, _ in before):
            raise OptionError(f"checkpointing: {name} does not support it; {remedy}")
        yield
