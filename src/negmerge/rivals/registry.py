"""The registry of rivals: functions that change a model in place, their data and their settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import ValidationError, create_model
from torch import Tensor, nn

from negmerge.errors import OptionError, printable
from negmerge.registry import Registry, nearest
from negmerge.support.progress import Advance
from negmerge.training.feeds import Batch, Feed, TrainingSet
from negmerge.training.hyperparameters import HyperParameters, Strict
from negmerge.training.loop import Objective, Trained, cross_entropy, train
from negmerge.training.outputs import predictions_of

T = TypeVar("T", bound=Strict)

VERSION = 1
"""A part of the keys of trainings; raised when the same settings give other weights."""

DataUsed = Literal["all", "retain", "forget"]
SETS: dict[DataUsed, tuple[TrainingSet, ...]] = {
    "all": ("forget", "retain"),
    "retain": ("retain",),
    "forget": ("forget",),
}
Outputs = Literal["classes", "texts"]
"""What a model predicts: the class of a sample, or the tokens of a text."""
Predict = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""Returns logits (samples × predictions × classes) and the true classes, -100 where there is none.
A classifier makes one prediction for a sample, a language model one for each answer token."""


@dataclass(frozen=True)
class Task:
    """The argument of a rival.

    Args:
        model: the model, which is changed in place.
        feeds: the sets that the rival uses, by name.
        state: the file that keeps a training in progress.
        save_every: the least seconds between two saves of the state; see `StateSaver`.
        advance: called with the number of samples after each batch.
        loss: the loss that the original was trained with; cross-entropy if not given.
        predict: the predictions for a batch; those of a classifier if not given.
    """

    model: nn.Module
    feeds: Mapping[str, Feed]
    settings: HyperParameters
    seed: int
    state: Path | None = None
    save_every: float = 15.0
    advance: Advance = lambda count: None
    loss: Objective | None = None
    predict: Predict = predictions_of

    @property
    def objective(self) -> Objective:
        """The loss that the original was trained with."""
        return self.loss or cross_entropy(self.settings)

    def train(
        self,
        feed: Feed,
        objective: Objective | None = None,
        mask: Mapping[str, Tensor] | None = None,
    ) -> Trained:
        """Train the model by the training loop.

        Args:
            objective: the loss, if it is not that of the original.
            mask: by name, the elements that may change.
        """
        return train(
            self.model,
            feed,
            self.settings,
            self.seed,
            objective=objective or self.objective,
            mask=mask,
            state=self.state,
            save_every=self.save_every,
            advance=self.advance,
        )


class Range(NamedTuple):
    """The range in which an option is tuned, in equal steps or in equal ratios."""

    low: float
    high: float
    even: Literal["ratios", "steps"] = "ratios"

    def points(self, count: int) -> list[float]:
        """Return values from the low end to the high end; a single value is the middle.

        >>> Range(1e-3, 1e-1).points(3), Range(0.1, 0.9, "steps").points(1)
        ([0.001, 0.01, 0.1], [0.5])
        """
        shares = [k / (count - 1) for k in range(count)] if count > 1 else [0.5]
        low, high = self.low, self.high
        if self.even == "steps":
            return [float(f"{low + (high - low) * share:.6g}") for share in shares]
        return [float(f"{low * (high / low) ** share:.6g}") for share in shares]


FORGET_ONLY = Range(1e-5, 1e-2)
"""The learning rate of a method without the retain set; the usual one destroys the model."""


class Published(NamedTuple):
    """The published hyper-parameters of a method, and the ranges of the options that are tuned."""

    settings: HyperParameters
    search: Mapping[str, Range]


Function = Callable[..., Trained]
"""Takes a task, and options as keyword arguments; returns the cost."""


def by_epochs(sizes: Mapping[str, int], settings: HyperParameters) -> int:
    """The samples that a method processes if it uses each sample once per epoch."""
    return settings.epochs * sum(sizes.values())


def by_pairs(sizes: Mapping[str, int], settings: HyperParameters) -> int:
    """The samples of a method that takes as many retain samples as forget samples, or none."""
    return settings.epochs * sizes["forget"] * len(sizes)


@dataclass(frozen=True)
class Rival:
    """A method of the literature.

    Args:
        splits: the data that it uses.
        settings: the published hyper-parameters.
        search: the ranges of the options that are tuned.
        accepts: the hyper-parameters that have an effect.
        samples: from the sizes of the sets and the settings to the number of samples processed.
        delivered: defaults of options for the method that makes the unlearned model, where they
            differ.
        texts: what is published for language models; None: the method needs classes.
        forget_only: the range of the learning rate without the retain set.
    """

    function: Function
    splits: DataUsed
    paper: str
    settings: HyperParameters
    search: Mapping[str, Range]
    accepts: tuple[str, ...] = tuple(HyperParameters.model_fields)
    samples: Callable[[Mapping[str, int], HyperParameters], int] = by_epochs
    delivered: Mapping[str, Any] = field(default_factory=dict)
    texts: Published | None = None
    forget_only: Range = FORGET_ONLY

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return inspect.getdoc(self.function).splitlines()[0].rstrip(".")  # pyright: ignore

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The options, which are the keyword arguments of the function, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @cached_property
    def _options(self) -> type[Strict]:
        hints = get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {name: (hints[name], v) for name, v in self.defaults.items()}
        return create_model(self.name, __base__=Strict, **fields)

    def suited_to(self, outputs: Outputs) -> Rival:
        """Return the rival with what is published for a kind of model; raise if it needs classes.

        >>> rivals.get("finetune").suited_to("texts").settings.lr
        1e-05
        """
        if outputs == "classes":
            return self
        if self.texts is None:
            known = ", ".join(name for name in rivals if rivals.get(name).texts is not None)
            raise OptionError(
                f"method {self.name!r}: needs a classifier, and texts have no classes; wanted one "
                f"of {known}"
            )
        return replace(self, settings=self.texts.settings, search=self.texts.search)

    def run(self, task: Task, options: Mapping[str, Any]) -> Trained:
        """Change the model of a task; its integer buffers keep their values."""
        counters = {
            name: buffer.clone()
            for name, buffer in task.model.named_buffers()
            if not buffer.is_floating_point()
        }
        cost = self.function(task, **options)
        for name, value in counters.items():
            task.model.get_buffer(name).copy_(value)
        return cost

    def used(self, options: Mapping[str, Any]) -> DataUsed:
        """The data that is used with these options, named as in Table 2 of the paper."""
        return self.splits if options.get("use_retain", True) else "forget"

    def ranges(self, options: Mapping[str, Any]) -> dict[str, Range]:
        """The ranges of the tuned options that are not given."""
        found = dict(self.search)
        if self.used(options) != self.splits:
            found["lr"] = self.forget_only
        return {name: where for name, where in found.items() if name not in options}

    def resolve(
        self, given: Mapping[str, Any], settings: HyperParameters | None = None
    ) -> tuple[HyperParameters, dict[str, Any]]:
        """Return the complete and validated hyper-parameters and options.

        Args:
            settings: hyper-parameters in place of the published ones.
        """
        unknown = sorted(set(given) - {*self.defaults, *self.accepts})
        if unknown:
            raise OptionError(
                f"{self.name}: no option {unknown[0]!r}; wanted one of "
                + ", ".join(known := [*self.defaults, *self.accepts])
                + nearest(unknown[0], known)
            )
        own = {name: value for name, value in given.items() if name in self.defaults}
        options = self._checked(self._options, own).model_dump()
        tree = (settings or self.settings).model_dump(mode="json")
        if self.used(options) != self.splits:
            tree["lr"] = self.forget_only.points(1)[0]
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


rivals: Registry[Rival] = Registry("rival", "negmerge.rivals")


def rival(*values: Any, **fields: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as a rival, with the other fields of `Rival`."""

    def register(function: Function) -> Function:
        rivals.register(function.__name__, Rival(function, *values, **fields))
        return function

    return register
