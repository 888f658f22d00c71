"""What a merge rule is, and how rules are found by name; the rules are in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError
from negmerge.merging.first_pass import FirstPass, Floats
from negmerge.merging.folds import STRIP, Fold, State, Statistics
from negmerge.registry import Registry, nearest

Constants = tuple[float, ...]
A = Any  # a float64 or int32 array, of numpy or of torch
Finish = Callable[..., A]


@dataclass(frozen=True)
class Rule:
    """A merge rule: statistics and a finish. The fields of a subclass are its options."""

    paper: ClassVar[str] = ""
    mostly_dense: ClassVar[bool] = False
    """Whether results have few zeros; changes only the speed."""
    statistics: ClassVar[Statistics]
    """The statistics that the members are folded into."""
    finish: ClassVar[Finish]
    """Computes the merged values from (constants, *statistics)."""
    tallies: ClassVar[tuple[Finish, ...]] = ()
    """Functions of (constants, *statistics) that return an integer for each element. Their sums
    over the whole vector go to `final_constants`."""
    least_members: ClassVar[int] = 1
    """The least number of members that the rule can merge."""

    def parts(self) -> tuple[Statistics, Finish]:
        """Return the statistics and the finish, where they depend on the options."""
        return type(self).statistics, type(self).finish

    def direct_fold(self) -> Fold | None:
        """Return a fold that computes the finished values themselves, if the rule has one.

        It is faster and needs all members at once. A rule with tallies cannot have one.
        """
        return None

    def constants(self, n: int) -> Constants:
        """Return numbers for `finish` that depend on the options and the number of members."""
        return (float(n),)

    def divisor(self, n: int) -> float:
        """Return the divisor of the finished values: n where `finish` returns a sum over members.

        Only the elements that are kept are divided.
        """
        return 1.0

    def limits(self) -> tuple[float, ...]:
        """Return numbers for the statistics that depend on the options: one for all members."""
        return (0.0,)

    def first_pass(self) -> FirstPass | None:
        """Return what must be known of the whole vectors before the merge, if anything.

        Numbers of the members replace `limits`; a number of the mean is a constant that follows
        those of `constants`.
        """
        return None

    def final_constants(self, sums: Sequence[int]) -> Constants:
        """Return the last constants for `finish`, which depend on the sums of the tallies.

        The sums are known after the merge and are taken as zero until then. If the known sums give
        other constants, the merge is repeated. Tallies must not depend on these constants.
        """
        return ()

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return asdict(self)

    def first_pass_of(self, of: Literal["members", "mean"]) -> FirstPass | None:
        """Return the first pass if it is about the members, or about their mean."""
        first = self.first_pass()
        return first if first is not None and first.of == of else None

    def check_members(self, n: int) -> None:
        """Raise if a pool of n members is too small for the rule."""
        if n < self.least_members:
            raise OptionError(
                f"rule {self.name!r}: the pool has {n} member{'s' if n > 1 else ''}, wanted at "
                f"least {self.least_members}; add members, or name another rule"
            )


@dataclass(frozen=True)
class Numbers:
    """The limits and constants of a rule for each tensor.

    Args:
        first: the numbers that the first pass found for each tensor.
        sums: the sums of the tallies; empty until they are known.
    """

    rule: Rule
    n: int
    first: Mapping[str, Floats]
    sums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rule.check_members(self.n)

    def of(self, name: str) -> tuple[Floats, Constants, float]:
        """Return the limits of a tensor (for each member, or one for all), constants, divisor."""
        limits, constants = np.array(self.rule.limits()), self.rule.constants(self.n)
        if name in self.first:
            if self.rule.first_pass_of("members"):
                limits = self.first[name]
            else:
                constants += (float(self.first[name][0]),)
        return limits, constants + self.final_constants(), self.rule.divisor(self.n)

    def final_constants(self) -> Constants:
        """Return the constants that depend on the sums of the tallies."""
        return self.rule.final_constants(self.sums or (0,) * len(self.rule.tallies))


def new_memory(rule: Rule, dtype: Any) -> tuple[State, Floats, NDArray[np.uint8], NDArray[Any]]:
    """Return the working memory of a fold: statistics, values and flags of a strip, and edges.

    A direct fold writes the values themselves. `dtype` is the format of the rows, and of the edges.
    """
    values, edges = np.zeros(STRIP), np.zeros((3, STRIP), dtype)
    state: State = (values,)
    if not rule.direct_fold():
        state = tuple(np.zeros(STRIP, "i4" if one.count else "f8") for one in rule.parts()[0])
    return state, values, np.zeros(STRIP, np.uint8), edges


rules: Registry[type[Rule]] = Registry("rule", "negmerge.merging.rules")
R = TypeVar("R", bound=type[Rule])


def rule(cls: R) -> R:
    """Register a rule under its class name in lower case."""
    rules.register(cls.__name__.lower(), cls)
    return cls


def summary(cls: type[Rule]) -> str:
    """Return the first line of the docstring of a rule."""
    return (cls.__doc__ or "").strip().splitlines()[0]


def options_of(cls: type[Rule]) -> dict[str, tuple[str, Any]]:
    """Return the options of a rule: name → (accepted values, default).

    >>> options_of(rules.get("ties"))["scope"]
    ('model|tensor', 'model')
    """
    hints = get_type_hints(cls)
    return {f.name: (_accepted(hints[f.name]), f.default) for f in fields(cls)}


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """Make a rule by name, and check its options.

    >>> make_rule("consensus", {"quorum": "0.8"})
    Consensus(reduce='mean', signed=False, quorum=0.8, zeros='strict')

    Args:
        name: a name that `negmerge list rules` shows.
        options: the values of options, which may be text, as on the command line.
    """
    cls = rules.get(name)
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    values = {}
    for key, value in (options or {}).items():
        if key not in names:
            raise OptionError(
                f"rule {name!r} has no option {key!r}; its options: {', '.join(names) or 'none'}"
                f"{nearest(key, names)}"
            )
        values[key] = _parse(f"{name} option {key}", value, hints[key])
    return cls(**values)


def _accepted(hint: Any) -> str:
    """Describe the values that an option of a type accepts."""
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
    raise OptionError(f"{where}: got {value!r}, wanted {_accepted(hint)}")
