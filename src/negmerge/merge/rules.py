"""◄ ADD A MERGE RULE here: one small class.

A rule is a fold: a kernel of `kernels.py` folds the task vectors into a few statistics per element,
and `finish` turns those into the merged value. `finish` is written with operators only, on whole
arrays: the same lines are compiled into the fused loop, run on numpy arrays when an accumulator
finishes, and run on torch tensors on a GPU. The fields of the class are the rule's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from numba.extending import register_jitable

from negmerge.errors import OptionError
from negmerge.merge import kernels
from negmerge.registry import Registry

Constants = tuple[float, ...]
A = Any  # float64 or int32 arrays, of numpy or of torch
Fold = kernels.Fold
Finish = Callable[..., A]


@dataclass(frozen=True)
class Rule:
    """What every rule has: a fold and a finish; its options are the fields of the subclass."""

    paper: ClassVar[str] = ""
    trimmed: ClassVar[Literal["", "members", "mean"]] = ""
    """Whose largest magnitudes the engine finds first (by the options `density` and `scope`)."""
    mostly_dense: ClassVar[bool] = False
    """Whether results have few zeros; only a matter of speed."""
    fold: ClassVar[Fold]
    """The fold of `kernels.py` whose statistics `finish` takes."""
    finish: ClassVar[Finish]
    """The merged values from (constants, *statistics)."""

    def parts(self) -> tuple[Fold, Finish]:
        """Fold and finish, where they depend on the options."""
        return type(self).fold, type(self).finish

    def streamed(self) -> tuple[Fold, Finish | None]:
        """Fold and finish where all members are seen at once: the same values, found faster."""
        return self.parts()

    def constants(self, n: int) -> Constants:
        """Numbers for `finish`, from the options and the number of members."""
        return (float(n),)

    def divisor(self, n: int) -> float:
        """What finished values are divided by: n where `finish` gives a sum over the members.

        Dividing afterwards spares the elements that are dropped.
        """
        return 1.0

    def limits(self) -> tuple[float, ...]:
        """Numbers for the fold, from the options."""
        return (0.0,)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def options(self) -> dict[str, Any]:
        """The options with their values."""
        return asdict(self)


rules: Registry[type[Rule]] = Registry("rule")
R = TypeVar("R", bound=type[Rule])


def rule(cls: R) -> R:
    """Register a rule under its class name in lower case."""
    rules.register(cls.__name__.lower(), cls)
    return cls


def summary(cls: type[Rule]) -> str:
    """The first line of a rule's docstring."""
    return (cls.__doc__ or "").strip().splitlines()[0]


def choices(cls: type[Rule]) -> dict[str, tuple[str, Any]]:
    """A rule's options: name → (what it takes, default).

    >>> choices(rules.get("ties"))["scope"]
    ('model|tensor', 'model')
    """
    hints = get_type_hints(cls)
    return {f.name: (_takes(hints[f.name]), f.default) for f in fields(cls)}


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """A rule by name, its options checked; values may be text, as on the command line.

    >>> make_rule("consensus", {"quorum": "0.8"})
    Consensus(reduce='mean', signed=False, quorum=0.8, zeros='strict')
    """
    cls = rules.get(name)
    known = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    values = {}
    for key, value in (options or {}).items():
        if key not in names:
            has = f"it has: {', '.join(names)}" if names else "it has none"
            raise OptionError(f"rule {name!r} has no option {key!r}; {has}")
        values[key] = _parse(f"{name} option {key}", value, known[key])
    return cls(**values)


def _takes(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return {bool: "true|false", float: "number", int: "whole number"}[hint]


def _parse(where: str, value: Any, hint: Any) -> Any:
    text = str(value).strip().lower()
    if get_origin(hint) is Literal and text in get_args(hint):
        return text
    if hint is bool and text in ("true", "false"):
        return text == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            pass
    raise OptionError(f"{where}: got {value!r}, wanted {_takes(hint)}")


def _share(where: str, value: float, least: float) -> None:
    if not least < value <= 1:
        raise OptionError(f"{where}: got {value}, wanted more than {least} and at most 1")


# ------------------------------------------------------------------------------------ consensus


@dataclass(frozen=True)
class _Voting(Rule):
    def _needed(self, n: int, quorum: float, zeros: str) -> Constants:
        """(n, a, b): an element is kept with at least a + b·voters votes of one sign."""
        # 0.7 · 10 is 7.000000000000001 in binary: whole numbers of votes must stay whole.
        slack = 1e-9
        if zeros == "abstain":
            return (float(n), -slack, quorum)
        return (float(n), float(ceil(quorum * n - slack)), 0.0)


@register_jitable
def kept(c: Constants, positive: A, negative: A) -> A:
    """Where enough members share a sign."""
    voters = positive + negative
    return (positive >= c[1] + c[2] * voters) | (negative >= c[1] + c[2] * voters)


def _mean_strict(c: Constants, total: A, positive: A, negative: A) -> A:
    return total * ((positive >= c[1]) | (negative >= c[1]))


def _mean_kept(c: Constants, total: A, positive: A, negative: A) -> A:
    return total * kept(c, positive, negative)


def _nearest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return nearest * kept(c, positive, negative)


def _farthest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    farthest = high * (high >= -low) + low * (high < -low)
    return farthest * kept(c, positive, negative)


def _lowest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return low * kept(c, positive, negative)


def _highest(c: Constants, total: A, positive: A, negative: A, low: A, high: A, nearest: A) -> A:
    return high * kept(c, positive, negative)


@rule
@dataclass(frozen=True)
class Consensus(_Voting):
    """Keep the elements whose sign all members share, and average them (NegMerge).

    reduce: the value kept: the mean, or the member nearest to (min) or farthest from (max) zero.
    signed: let min and max compare signed values instead of magnitudes.
    quorum: the share of members that must agree, above one half.
    zeros: whether a member that did not change an element blocks it (strict) or abstains.
    """

    paper: ClassVar[str] = "NegMerge, ICML 2025, Eq. 1; reduce: Table C1"
    reduce: Literal["mean", "min", "max"] = "mean"
    signed: bool = False
    quorum: float = 1.0
    zeros: Literal["strict", "abstain"] = "strict"

    def __post_init__(self) -> None:
        _share("consensus option quorum", self.quorum, 0.5)

    def divisor(self, n: int) -> float:
        return float(n) if self.reduce == "mean" else 1.0

    def parts(self) -> tuple[Fold, Finish]:
        if self.reduce == "mean":
            return kernels.fold_votes, _mean_strict if self.zeros == "strict" else _mean_kept
        if self.signed:
            return kernels.fold_spread, _lowest if self.reduce == "min" else _highest
        return kernels.fold_spread, _nearest if self.reduce == "min" else _farthest

    def streamed(self) -> tuple[Fold, Finish | None]:
        if (self.reduce, self.zeros, self.quorum) == ("mean", "strict", 1):
            return kernels.fold_unanimous, None
        return self.parts()

    def constants(self, n: int) -> Constants:
        return self._needed(n, self.quorum, self.zeros)


@rule
@dataclass(frozen=True)
class Conflict(_Voting):
    """Keep the mean where members disagree: what consensus leaves out.

    quorum, zeros: as in consensus; the two rules always add up to uniform.
    """

    paper: ClassVar[str] = "NegMerge, ICML 2025, Table 3"
    quorum: float = 1.0
    zeros: Literal["strict", "abstain"] = "strict"

    def __post_init__(self) -> None:
        _share("conflict option quorum", self.quorum, 0.5)

    fold = staticmethod(kernels.fold_votes)

    def divisor(self, n: int) -> float:
        return float(n)

    def constants(self, n: int) -> Constants:
        return self._needed(n, self.quorum, self.zeros)

    @staticmethod
    def finish(c: Constants, total: A, positive: A, negative: A) -> A:
        return total * (kept(c, positive, negative) ^ True)


# -------------------------------------------------------------------------------------- averages


@rule
@dataclass(frozen=True)
class Uniform(Rule):
    """The plain mean of all task vectors (a uniform soup)."""

    paper: ClassVar[str] = "Model soups, ICML 2022; Task arithmetic, ICLR 2023"
    mostly_dense = True
    fold = staticmethod(kernels.fold_total)

    def divisor(self, n: int) -> float:
        return float(n)

    @staticmethod
    def finish(c: Constants, total: A) -> A:
        return total


@rule
@dataclass(frozen=True)
class Localize(Rule):
    """Keep the largest magnitudes of the mean, whatever the signs of the members.

    density: the share of elements to keep.
    scope: take that share of the whole model or of each tensor.
    """

    paper: ClassVar[str] = "Localize-and-Stitch, TMLR 2025 (its dataless top-k mask)"
    trimmed = "mean"
    density: float = 0.1
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        _share("localize option density", self.density, 0.0)

    fold = staticmethod(kernels.fold_total)

    @staticmethod
    def finish(c: Constants, total: A) -> A:
        mean = total / c[0]
        return mean * ((mean >= c[1]) | (-mean >= c[1]))


# -------------------------------------------------------------------------- elections, magnitudes


@rule
@dataclass(frozen=True)
class Ties(Rule):
    """Trim each task vector, elect a sign by sum, average the members that have it (TIES).

    density: the share of each task vector to keep, by magnitude.
    scope: take that share of the whole model or of each tensor.
    """

    paper: ClassVar[str] = "TIES-Merging, NeurIPS 2023"
    trimmed = "members"
    density: float = 0.2
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        _share("ties option density", self.density, 0.0)

    fold = staticmethod(kernels.fold_split)

    @staticmethod
    def finish(c: Constants, total: A, gain: A, loss: A, gains: A, losses: A) -> A:
        elected = gain + loss
        up = (elected > 0) | ((elected == 0) & (c[1] > 0))
        return gain / (gains + (gains == 0)) * up + loss / (losses + (losses == 0)) * (up ^ True)


@rule
@dataclass(frozen=True)
class MagMax(Rule):
    """Take, for each element, the change of largest magnitude; of two equal ones the positive."""

    paper: ClassVar[str] = "MagMax, ECCV 2024"
    mostly_dense = True
    fold = staticmethod(kernels.fold_reach)

    def streamed(self) -> tuple[Fold, Finish | None]:
        return kernels.fold_farthest, None

    @staticmethod
    def finish(c: Constants, low: A, high: A) -> A:
        return high * (high >= -low) + low * (high < -low)


@rule
@dataclass(frozen=True)
class Tall(Rule):
    """Keep the mean where enough members find their own change in it (TALL-mask consensus).

    factor: member k is active where |τₖ| ≥ factor · |τ̄ − τₖ|, τ̄ the mean of the pool.
    agree: how many members must be active.
    """

    paper: ClassVar[str] = "TALL masks, ICML 2024"
    factor: float = 0.4
    agree: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise OptionError(f"tall option factor: got {self.factor}, wanted a number > 0")
        if self.agree < 1:
            raise OptionError(f"tall option agree: got {self.agree}, wanted at least 1")

    fold = staticmethod(kernels.fold_active)

    def constants(self, n: int) -> Constants:
        return (float(n), float(self.agree))

    def divisor(self, n: int) -> float:
        return float(n)

    def limits(self) -> tuple[float, ...]:
        return (self.factor,)

    @staticmethod
    def finish(c: Constants, total: A, active: A) -> A:
        return total * (active >= c[1])
