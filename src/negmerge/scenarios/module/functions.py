"""A module in memory, and functions of the user that fine-tune and measure it."""

from __future__ import annotations

import copy
import dis
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CellType
from typing import Any, Unpack

from torch import Tensor, nn

from negmerge.errors import MismatchError, OptionError
from negmerge.evaluation.functions import (
    CHANGES,
    Evaluate,
    checked_numbers,
    restored_modes,
    state_digest,
)
from negmerge.evaluation.scores import Scores
from negmerge.scenarios.base import (
    Advance,
    Given,
    Scenario,
    TrainingOptions,
    TrainingSet,
    Use,
    identity,
)
from negmerge.scenarios.module.settings import FunctionSettings
from negmerge.scenarios.settings import Description, Setup
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained, check_finite
from negmerge.training.seeds import fork_all_random_states, seed_all
from negmerge.training.weights import load_model

FineTune = Callable[[Any, HyperParameters], "nn.Module | Mapping[str, Tensor] | None"]
"""Takes a copy of the model and the settings of a member; trains the copy in place and returns
None, or returns the trained module or its state dict."""


class FunctionScenario(Scenario):
    """A module and two functions of the user.

    Args:
        model: the original; it is copied, never changed.
        weights: a hash of its state.
        fine_tune: trains a copy on the data to forget.
        seed: the seed of all random numbers, together with the settings of each training.
    """

    unit = "steps"

    def __init__(
        self,
        settings: FunctionSettings,
        model: nn.Module,
        weights: str,
        fine_tune: FineTune,
        evaluate: Evaluate,
        seed: int,
    ) -> None:
        super().__init__(settings, Setup(seed))
        self.settings, self.module, self.weights = settings, model, weights
        self.fine_tune, self.evaluate = fine_tune, evaluate
        self.trained: dict[str, HyperParameters] = {}

    @property
    def identity(self) -> list[Any]:
        """The weights of the module and the source code of `fine_tune`."""
        return [self.weights, text_of(self.fine_tune), self.seed]

    @property
    def scored_on(self) -> list[Any]:
        """The weights of the module and the source code of `evaluate`."""
        return [self.weights, text_of(self.evaluate)]

    @property
    def name(self) -> str:
        """A hash of the module and of both functions."""
        return f"own-{identity(self.identity, self.scored_on)}"

    def check(self) -> None:
        """Measure the original, so that an error in `evaluate` shows before any training."""
        zero = self.measure(self.model(), "report").row()
        self.settings.criterion(self.settings.default_criterion).loss(zero, zero, None)

    def describe(self) -> Description:
        """A description without sizes: only the functions know the data."""
        return Description(data=self.name, sizes={}, chosen_on="the reported data", looked=True)

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """A copy of the module, with the weights of a file if one is given."""
        network = copy.deepcopy(self.module)
        if weights is not None:
            load_model(weights, network)
        return network

    def original(self) -> Given:
        """The module."""
        return Given(self.settings.model.weights, sha256=self.weights)

    def work(self, on: TrainingSet, settings: HyperParameters) -> int:
        """A training is one step."""
        return 1

    def size(self, use: Use) -> int:
        """A measurement is one step."""
        return 1

    def train(
        self,
        model: nn.Module,
        on: TrainingSet,
        settings: HyperParameters,
        seed: int,
        **options: Unpack[TrainingOptions],
    ) -> Trained:
        """Train the model by the user's function, which starts again after an interruption."""
        begun = time.monotonic()
        with fork_all_random_states():
            seed_all(seed)
            found: Any = self.fine_tune(model, settings)
        if isinstance(found, nn.Module):
            found = found.state_dict()
        if isinstance(found, Mapping):
            try:
                model.load_state_dict(dict(found))
            except RuntimeError as error:
                why = " ".join(str(error).split())[:300]
                raise MismatchError(
                    f"fine_tune: returned weights that do not fit the model: {why}"
                ) from None
        elif found is not None:
            raise OptionError(
                f"fine_tune: returned a {type(found).__name__}; wanted None, the trained module or "
                "its state dict"
            )
        check_finite(model)
        self._check_new(model, settings)
        if "advance" in options:
            options["advance"](1)
        return Trained(0, time.monotonic() - begun, 0.0)

    def _check_new(self, model: nn.Module, settings: HyperParameters) -> None:
        """Raise if a member has the weights of an earlier one: its own settings had no effect."""
        other = self.trained.setdefault(state_digest(model), settings)
        if other is settings:
            return
        one, two = other.model_dump(), settings.model_dump()
        names = [name for name in two if one.get(name) != two[name]]
        raise OptionError(
            f"fine_tune: two members have the same weights, and differ only in {', '.join(names)}; "
            "wanted a pool.grid of settings that fine_tune uses, such as epochs and lr"
        )

    def measure(self, model: nn.Module, use: Use, advance: Advance = lambda count: None) -> Scores:
        """Measure the model by the user's function."""
        before = state_digest(model)
        with restored_modes(model):
            values: dict[str, float | None] = dict(checked_numbers(self.evaluate, model))
        if state_digest(model) != before:
            raise OptionError(CHANGES)
        advance(1)
        return Scores(values)


def text_of(function: Callable[..., Any]) -> str:
    """Return what identifies a function: its source code and the plain values that it holds.

    Those are the arguments of a partial function, the defaults, and the variables of an enclosing
    function that this one does not set itself. Other values, such as data, are not looked at. A
    callable object is identified by the code of its class.

    >>> def scaled(model, by=2): return by
    >>> text_of(partial(scaled, by=2)) == text_of(partial(scaled, by=3))
    False
    """
    held: list[Any] = []
    while isinstance(function, partial):
        if function.args or function.keywords:
            held.append((function.args, function.keywords))
        function = function.func
    own = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(own, "__code__", None)
    if code is not None:
        held.append((own.__defaults__, own.__kwdefaults__))
        set_here = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"}
        cells = zip(code.co_freevars, own.__closure__ or (), strict=True)
        held.append({name: cell for name, cell in cells if name not in set_here})
    name = getattr(own, "__qualname__", type(own).__qualname__)
    text = repr([code.co_code, code.co_consts, code.co_names]) if code else name
    for known in (own, type(own)):
        with suppress(OSError, TypeError):
            text = inspect.getsource(known)
            break
    return f"{text}{[_plain(values) for values in held]!r}"


def _plain(value: Any) -> Any:
    """Return numbers, texts, tensors and functions in a value; None for anything else."""
    if isinstance(value, CellType):
        try:
            return _plain(value.cell_contents)
        except ValueError:  # not set yet
            return None
    if isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {str(name): _plain(own) for name, own in value.items()}
    return text_of(value) if inspect.isfunction(value) or isinstance(value, partial) else None
