"""The statistics that the rules of an accumulator share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from negmerge.errors import OptionError
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.rule import Rule, rules
from negmerge.merging.statistics import TOTAL, Statistic

Limits = FirstPass | tuple[float, ...]
"""The source of limits: a first pass over each member, or the options of a rule."""


@dataclass(frozen=True)
class SharedStatistics:
    """The statistics that some rules need, each kept once, and the sources of their limits."""

    by_name: Mapping[str, Statistic]
    limits: Mapping[str, Limits]

    @classmethod
    def of(cls, rules: Mapping[str, Rule]) -> SharedStatistics:
        """Collect the statistics of rules; raise if two rules cannot share one."""
        found: dict[str, Statistic] = {}
        limits: dict[str, Limits] = {}
        for name, rule in rules.items():
            for one in _needed(rule):
                if one.all_members:
                    raise OptionError(
                        f"rule {name!r} needs all members at once and cannot be accumulated; "
                        f"rules that can: {', '.join(accumulable_rules())}"
                    )
                same = found.setdefault(one.name, one) == one
                if one.limited:
                    same &= limits.setdefault(one.name, _limits_of(rule)) == _limits_of(rule)
                if not same:
                    raise OptionError(
                        f"rule {name!r}: another rule of this accumulator defines the statistic "
                        f"{one.name!r} differently, or has other limits; make an accumulator for "
                        "each of the rules"
                    )
        return cls(found, limits)

    def serve(self, rule: Rule) -> bool:
        """Return whether the statistics of a rule are among these, with the same limits."""
        return all(
            self.by_name.get(one.name) == one
            and (not one.limited or self.limits[one.name] == _limits_of(rule))
            for one in _needed(rule)
        )


def _needed(rule: Rule) -> list[Statistic]:
    """Return the statistics of a rule, and the total if its first pass is about the mean."""
    return [*rule.parts()[0], *([TOTAL] if rule.first_pass_of("mean") else [])]


def _limits_of(rule: Rule) -> Limits:
    return rule.first_pass_of("members") or rule.limits()


def accumulable_rules() -> list[str]:
    """Return the names of the rules that an accumulator can serve.

    >>> "consensus" in accumulable_rules(), "tall" in accumulable_rules()
    (True, False)
    """
    return [name for name in rules if not any(s.all_members for s in rules.get(name)().parts()[0])]
