"""Does the forgetting survive rounding to bfloat16, int8 and int4?

A deployed model is often rounded. Where the change of a weight is smaller than a step of the
format, rounding brings the old value back (Zhang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import hypot

import torch
from torch import Tensor, nn

from negmerge.errors import ValueRangeError
from negmerge.evidence.findings import ORIGINAL, Finding, Quantity
from negmerge.evidence.registry import Findings, ModelTest, Subject, forgetting_tests
from negmerge.evidence.sets import some_of
from negmerge.scenarios.data import DataScenario
from negmerge.training.feeds import Feed
from negmerge.training.weights import load_tensors, named_weights

FORMATS = {"int4": 7, "int8": 127, "bf16": None}
"""The formats, the coarsest first; of those of whole numbers, the largest number."""
SAMPLES = 1000
"""The largest number of samples of each set that a rounded model is measured on."""


def rounded(weight: Tensor, levels: int | None, like: Tensor | None = None) -> Tensor:
    """Return a weight after rounding to bfloat16, or to whole numbers times a scale.

    The scale is one for each output channel (the first dimension): its largest magnitude divided by
    `levels`. Values beyond the largest number are cut off.

    >>> rounded(torch.tensor([[0.5, -1.0], [0.2, 0.1]]), 2)
    tensor([[ 0.5000, -1.0000],
            [ 0.2000,  0.1000]])

    Args:
        levels: the largest whole number; None for bfloat16.
        like: the weight that the scale is taken from; the weight itself if None.
    """
    if levels is None:
        return weight.to(torch.bfloat16).to(weight.dtype)
    scale = (weight if like is None else like).flatten(1).abs().amax(1) / levels
    scale = scale.reshape(-1, *(1 for _ in weight.shape[1:]))
    whole = torch.where(scale > 0, weight / scale, 0.0).round().clamp(-levels, levels)
    return whole * scale


def is_rounded(weight: Tensor, levels: int | None) -> bool:
    """Return whether a format rounds a weight: of whole numbers, only those with channels."""
    return weight.is_floating_point() and (levels is None or weight.dim() > 1)


def survival(before: Tensor, after: Tensor, levels: int | None) -> tuple[int, int]:
    """Return how many elements a change has, and how many of them differ after rounding.

    Both weights are rounded with the scale of the first.

    >>> survival(torch.tensor([[1.0, 0.4]]), torch.tensor([[1.0, 0.41]]), 7)
    (1, 0)
    """
    changed = before != after
    kept = rounded(before, levels, before) != rounded(after, levels, before)
    return int(changed.sum()), int((changed & kept).sum())


@contextmanager
def after_rounding(network: nn.Module, levels: int | None) -> Iterator[None]:
    """Round the weights of a network during the block."""
    kept = [(p, p.detach().clone()) for p in network.parameters() if is_rounded(p, levels)]
    try:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(rounded(before, levels))
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


def find_survival(before: Mapping[str, Tensor], network: nn.Module, levels: int | None) -> Finding:
    """Return the percentage of changed elements that still differ from the original's.

    Tensors of another shape, such as a last layer with one more output, are not compared.
    """
    changed = kept = 0
    for name, weight in named_weights(network).items():
        same = name in before and before[name].shape == weight.shape
        if same and is_rounded(weight, levels):
            old = before[name].to(weight.device, weight.dtype)
            own = survival(old, weight.detach(), levels)
            changed, kept = changed + own[0], kept + own[1]
    if not changed:
        return Finding(value=None, why="no weight differs from that of the original")
    return Finding(value=100 * kept / changed, n=changed)


def sets_of(scenario: DataScenario) -> dict[str, Feed]:
    """Return some samples of the reported forget and retain sets."""
    found = scenario.eval_sets("report")
    return {name: some_of(found[name], SAMPLES) for name in ("forget", "retain") if name in found}


def find_metrics(subject: Subject, rounding: AbstractContextManager[None]) -> dict[str, Finding]:
    """Return the forget and the retain metric of the model while it is rounded."""
    scenario, settings = subject.scenario, subject.scenario.settings
    metrics = {"forget": settings.forget_metric, "retain": settings.retain_metric}
    feeds = sets_of(scenario)
    with rounding:
        try:
            scores = scenario.measure_on(feeds, subject.network, subject.advance)
        except ValueRangeError as error:
            return {name: Finding(value=None, why=str(error)) for name in metrics}
    found: dict[str, Finding] = {}
    for name, metric in metrics.items():
        value = scores.values.get(metric)
        if value is None:
            found[name] = Finding(value=None, why=f"{metric} needs more than some samples")
        else:
            low, high = scores.intervals.get(metric, (None, None))
            n = scores.samples.get(name)
            found[name] = Finding(value=value, low=low, high=high, n=n)
    return found


def change(before: Finding, after: Finding) -> Finding:
    """Return the change of a metric by rounding; the errors of the two are taken as independent.

    >>> before, after = (Finding(value=v, low=v - 3, high=v + 3, n=9) for v in (60.0, 72.0))
    >>> change(before, after)
    Finding(value=12.0, low=7.75..., high=16.24..., n=9, ...)
    """
    if before.value is None or after.value is None:
        return Finding(value=None, why=before.why or after.why)
    ends = (before.low, before.high, after.low, after.high)
    value = after.value - before.value
    if None in ends:
        return Finding(value=value, n=after.n)
    old_low, old_high, new_low, new_high = (end for end in ends if end is not None)
    low = value - hypot(after.value - new_low, old_high - before.value)
    high = value + hypot(new_high - after.value, before.value - old_low)
    return Finding(value=value, low=low, high=high, n=after.n)


def find(subject: Subject) -> Findings:
    """Round the model to each format; measure it, and compare its weights with the original's."""
    found: Findings = {}
    unrounded = find_metrics(subject, nullcontext())["forget"]
    before = {} if subject.title == ORIGINAL else load_tensors(subject.original)[0]
    for format, levels in FORMATS.items():
        metrics = find_metrics(subject, after_rounding(subject.network, levels))
        found |= {f"{name}_{format}": one for name, one in metrics.items()}
        found[f"change_{format}"] = change(unrounded, metrics["forget"])
        if before:
            found[f"survival_{format}"] = find_survival(before, subject.network, levels)
    return found


def _size(scenario: DataScenario) -> int:
    return (1 + len(FORMATS)) * sum(map(len, sets_of(scenario).values()))


def quantities() -> Iterator[Quantity]:
    """Yield the numbers for each format; first what the model knows again by rounding."""
    for format in FORMATS:
        yield Quantity(
            name=f"change_{format}",
            label=f"{{metric}}: change by rounding to {format}",
            short=f"by {format}",
            unit="points",
            of="forget",
            above=f"rounding to {format} brings back knowledge of the forget set",
        )
    for format in FORMATS:
        yield Quantity(
            name=f"forget_{format}",
            label=f"{{metric}} after rounding to {format}",
            short=f"forget, {format}",
            of="forget",
        )
    for format in FORMATS:
        yield Quantity(
            name=f"retain_{format}",
            label=f"{{metric}} after rounding to {format}",
            short=f"retain, {format}",
            of="retain",
        )
    for format in FORMATS:
        yield Quantity(
            name=f"survival_{format}",
            label=f"changed weights that still differ after rounding to {format}",
            short=f"survives {format}",
            better="higher",
        )


forgetting_tests.register(
    "precision",
    ModelTest(
        name="precision",
        title="Does the forgetting survive rounding?",
        text=(
            "The weights are rounded to bfloat16, or those with output channels to 8 or 4 bits "
            "with a scale for each channel, as a model is often deployed; then the forget and the "
            "retain metric are measured again, on some reported samples. Compared is the change "
            "of the forget metric by rounding: knowledge may come back. Beside it is the share of "
            "the changed weights that still differ from the original's after rounding."
        ),
        place=60,
        tier="basic",
        quantities=tuple(quantities()),
        needs=frozenset(("sets", "weights")),
        find=find,
        size=_size,
        version=2,
    ),
)
