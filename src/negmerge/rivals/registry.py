"""What a rival is: a function that changes a model in place, the data it may use, its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import ValidationError, create_model
from torch import Tensor, nn

from negmerge.data.feeds import Feed
from negmerge.errors import OptionError, printable
from negmerge.hyperparameters import HyperParameters, Strict
from negmerge.registry import Registry
from negmerge.training import Objective, Trained, train

T = TypeVar("T", bound=Strict)

VERSION = 1
"""Of the rivals: raised when the same settings give other weights; nothing old is reused then."""

Splits = Literal["all", "retain", "forget"]
Part = Literal["forget", "retain"]
PARTS: dict[Splits, tuple[Part, ...]] = {
    "all": ("forget", "retain"),
    "retain": ("retain",),
    "forget": ("forget",),
}


@dataclass(frozen=True)
class Task:
    """What a rival gets.

    model: to be changed in place. feeds: the splits it may use, by name, and no others.
    settings, seed: its budget, and what decides everything that is random.
    state: a file that keeps a training in progress. save_every: seconds between two saves.
    advance: told of samples that are done.
    """

    model: nn.Module
    feeds: Mapping[str, Feed]
    settings: HyperParameters
    seed: int
    state: Path | None = None
    save_every: float = 15.0
    advance: Callable[[int], None] = lambda count: None

    def train(
        self,
        feed: Feed,
        objective: Objective | None = None,
        mask: Mapping[str, Tensor] | None = None,
    ) -> Trained:
        """The one training loop, with this task's settings, seed, state and progress."""
        return train(
            self.model,
            feed,
            self.settings,
            self.seed,
            objective=objective,
            mask=mask,
            state=self.state,
            save_every=self.save_every,
            advance=self.advance,
        )


class Range(NamedTuple):
    """Where a tuned option is searched, in even steps or in even ratios."""

    low: float
    high: float
    even: Literal["ratios", "steps"] = "ratios"

    def points(self, count: int) -> list[float]:
        """Values from the low end to the high end; a single one is the middle.

        >>> Range(1e-3, 1e-1).points(3), Range(0.1, 0.9, "steps").points(1)
        ([0.001, 0.01, 0.1], [0.5])
        """
        shares = [k / (count - 1) for k in range(count)] if count > 1 else [0.5]
        low, high = self.low, self.high
        if self.even == "steps":
            return [float(f"{low + (high - low) * share:.6g}") for share in shares]
        return [float(f"{low * (high / low) ** share:.6g}") for share in shares]


FORGET_ONLY = Range(1e-5, 1e-2)
"""The learning rate of a method that is denied the retain set: its usual one destroys the model."""


Function = Callable[..., Trained]
"""(task, and its own options by keyword) → cost."""


def by_epochs(sizes: Mapping[str, int], settings: HyperParameters) -> int:
    """Samples of a method that passes over its splits once an epoch."""
    return settings.epochs * sum(sizes.values())


@dataclass(frozen=True)
class Rival:
    """A method of the literature, under the same conditions as the merged task vectors.

    splits: the data it uses. paper: where it is from. settings: the published ones.
    search: the options that tuning tries, and where. accepts: the settings that mean something.
    samples: how many it processes, from the sizes of its splits and the settings.
    """

    function: Function
    splits: Splits
    paper: str
    settings: HyperParameters
    search: Mapping[str, Range]
    accepts: tuple[str, ...] = tuple(HyperParameters.model_fields)
    samples: Callable[[Mapping[str, int], HyperParameters], int] = by_epochs

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return inspect.getdoc(self.function).splitlines()[0].rstrip(".")  # pyright: ignore

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Its own options: the keyword arguments of the function, and their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @cached_property
    def _options(self) -> type[Strict]:
        hints = get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {name: (hints[name], v) for name, v in self.defaults.items()}
        return create_model(self.name, __base__=Strict, **fields)

    def run(self, task: Task, options: Mapping[str, Any]) -> Trained:
        """Change the task's model; its integer buffers stay what they were."""
        counters = {
            name: buffer.clone()
            for name, buffer in task.model.named_buffers()
            if not buffer.is_floating_point()
        }
        cost = self.function(task, **options)
        for name, buffer in task.model.named_buffers():
            if name in counters:
                buffer.copy_(counters[name])
        return cost

    def used(self, options: Mapping[str, Any]) -> Splits:
        """The data it uses with these options, in the words of the paper's Table 2."""
        return self.splits if options.get("use_retain", True) else "forget"

    def ranges(self, options: Mapping[str, Any]) -> dict[str, Range]:
        """What tuning tries with these options: whatever they do not fix."""
        found = dict(self.search)
        if self.used(options) != self.splits:
            found["lr"] = FORGET_ONLY
        return {name: where for name, where in found.items() if name not in options}

    def resolve(
        self, given: Mapping[str, Any], settings: HyperParameters | None = None
    ) -> tuple[HyperParameters, dict[str, Any]]:
        """Settings and own options, whole and checked.

        given: settings and options by name. settings: instead of the published ones.
        """
        unknown = sorted(set(given) - {*self.defaults, *self.accepts})
        if unknown:
            raise OptionError(
                f"{self.name}: no option {unknown[0]!r}; it takes "
                + ", ".join([*self.defaults, *self.accepts])
            )
        own = {name: value for name, value in given.items() if name in self.defaults}
        options = self._checked(self._options, own).model_dump()
        tree = (settings or self.settings).model_dump(mode="json")
        if self.used(options) != self.splits:
            tree["lr"] = FORGET_ONLY.points(1)[0]
        tree |= {name: value for name, value in given.items() if name not in own}
        return self._checked(HyperParameters, tree), options

    def _checked(self, kind: type[T], values: Mapping[str, Any]) -> T:
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            message = f"{self.name}: {place}: {first['msg']}, got {first.get('input')!r}"
            raise OptionError(printable(message)) from None


rivals: Registry[Rival] = Registry("rival")


def rival(
    splits: Splits,
    paper: str,
    settings: HyperParameters,
    search: Mapping[str, Range],
    **more: Any,
) -> Callable[[Function], Function]:
    """Register a function as a rival; the arguments are the fields of `Rival`."""

    def register(function: Function) -> Function:
        rivals.register(function.__name__, Rival(function, splits, paper, settings, search, **more))
        return function

    return register
