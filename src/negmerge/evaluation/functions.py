"""`nm.find_scale`: the search for λ with any function that measures a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from negmerge.errors import OptionError, ValueRangeError, quoted
from negmerge.evaluation.criteria import KEPT, choose, keep_share
from negmerge.evaluation.limits import Row, is_finite
from negmerge.evaluation.metrics import RESERVED
from negmerge.evaluation.scales import Search
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Advance, Curve, InPlace, search_scale
from negmerge.support.progress import Progress, make_progress
from negmerge.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from torch import nn

Evaluate = Callable[[Any], Mapping[str, float]]
"""A function that returns `forget`, `retain` and any other numbers of a model."""

DEFAULT_SEARCH = Search()
"""At most 12 λ, up to the limit of what must be kept."""

CHANGES = (
    "evaluate: changes weights or buffers of the model that it measures; call model.eval() in it, "
    "and train nothing"
)


@dataclass(frozen=True)
class FoundScale:
    """The result of a search for λ.

    Args:
        scale: the chosen λ.
        rows: all measurements in the order of λ: `scale` and the numbers that `evaluate` returned.
        edge: whether a λ larger than all tried ones may be better.
    """

    scale: float
    rows: list[Row]
    edge: bool


def find_scale(
    model: nn.Module,
    tau: TaskVector | str | Path,
    evaluate: Evaluate,
    *,
    keep: float = KEPT,
    lower: Collection[str] = (),
    search: Search | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FoundScale:
    """Find the λ at which θ − λτ forgets most and keeps a share of the `retain` of the original.

    >>> import numpy as np
    >>> import torch
    >>> import negmerge as nm
    >>> model = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> tuned = {"weight": np.array([[2.0], [1.1]], np.float32)}
    >>> tau = nm.merge({"weight": np.ones((2, 1), np.float32)}, [tuned])
    >>> def evaluate(model):
    ...     forget, retain = model.weight.detach().flatten().tolist()
    ...     return {"forget": forget, "retain": retain}
    >>> found = nm.find_scale(model, tau, evaluate, keep=0.94)
    >>> round(found.scale, 1), round(found.rows[0]["forget"], 2)
    (0.6, 1.0)

    Args:
        model: θ; it is changed in place for each λ and restored afterwards.
        tau: τ, or the file of a patch.
        evaluate: returns `forget` and `retain` of a model, and any other numbers; a higher value
            means that the model knows more. It must put the model into evaluation mode.
        keep: the share of the `retain` of the original model to keep.
        lower: which of `forget` and `retain` are smaller if a model knows more, such as losses and
            errors; `retain` may then grow to that of the original divided by `keep`. A loss near
            zero leaves no room to grow: return a score such as R² instead.
        search: the λ to try, as an `nm.Search` or a mapping of its fields; if not given, at most
            12, until a twentieth or less is left of what `retain` may lose. A λ at which a number
            is NaN or infinite is then too large; with a grid it is an error.
        progress: reports each evaluation; if not given, a bar or lines.
    """
    from negmerge.vectors.module import unit_scale  # needs torch

    vector = tau if isinstance(tau, TaskVector) else TaskVector.load(Path(tau))
    criterion, search = keep_share(keep, lower), checked_search(search)
    check_confidence(search)

    def measure(own: nn.Module, advance: Advance) -> Scores:
        scores = Scores(dict(checked_numbers(evaluate, own)))
        advance(1)
        return scores

    shown = make_progress() if progress is None else nullcontext(progress)
    with shown as report, restored_modes(model):
        report.stage("searching λ", search.passes(), "evaluations")
        curve = Curve(InPlace(model, vector, measure), 1, advance=report.advance)
        before = state_digest(model)
        rows = search_scale(curve, search, criterion, unit=unit_scale(vector, model))
        if state_digest(model) != before:
            raise OptionError(CHANGES)
    choice = choose(rows, criterion, tolerance=search.tolerance)
    return FoundScale(choice.scale, [row for row in rows if is_finite(row)], choice.edge)


def checked_search(search: Search | Mapping[str, Any] | None) -> Search:
    """Return the search of an argument: the default for None.

    >>> checked_search({"stop": -1})
    Traceback (most recent call last):
    negmerge.errors.OptionError: search.stop: Input should be greater than 0; got '-1'
    """
    if search is None:
        return DEFAULT_SEARCH
    try:
        return Search.model_validate(search)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("search", *first["loc"])))
        raise OptionError(f"{place}: {first['msg']}; got {quoted(first['input'])}") from None


def check_confidence(search: Search) -> None:
    """Raise if a search needs intervals, which `evaluate` does not return."""
    if search.confidence is not None:
        raise OptionError(
            "search.confidence: needs intervals, and evaluate returns only values; leave it out"
        )


def state_digest(model: nn.Module) -> str:
    """Return a hash of all weights and buffers.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> before = state_digest(model)
    >>> with torch.no_grad(): _ = model.bias.add_(1)
    >>> state_digest(model) == before
    False
    """
    import torch

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every layer after the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def checked_numbers(evaluate: Evaluate, model: Any) -> dict[str, float]:
    """Call a function with a model, and check the numbers that it returns.

    >>> checked_numbers(lambda model: {"forget": 1}, None)
    Traceback (most recent call last):
    negmerge.errors.OptionError: evaluate: returned no 'retain', only forget; wanted a mapping ...
    """
    found: Any = evaluate(model)
    wanted = "wanted a mapping of numbers, such as {'forget': 31.2, 'retain': 60.1}"
    if not isinstance(found, Mapping):
        raise OptionError(f"evaluate: returned a {type(found).__name__}; {wanted}")
    for name in ("forget", "retain"):
        if name not in found:
            only = ", ".join(map(str, found)) or "nothing"
            raise OptionError(f"evaluate: returned no {name!r}, only {only}; {wanted}")
    numbers: dict[str, float] = {}
    for name, value in found.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise OptionError(f"evaluate: {name}: got {quoted(value)}; {wanted}") from None
        if not isfinite(number):
            raise ValueRangeError(
                f"evaluate: {name}: got {number}; the model is broken, not unlearned; use a "
                "smaller learning rate, or smaller λ (search.stop, search.limit)"
            )
        if name in RESERVED:
            raise OptionError(f"evaluate: {name}: the name is reserved; choose another")
        numbers[str(name)] = number
    return numbers
