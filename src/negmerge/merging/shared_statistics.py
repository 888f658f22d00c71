"""The statistics that the rules of an accumulator share."""

from __future__ import annotations

from collections.abc import Mapping

from negmerge.errors import OptionError
from negmerge.merging.first_pass import FirstPass
from negmerge.merging.rule import Rule, rules
from negmerge.merging.statistics import TOTAL, Statistic

Limits = FirstPass | tuple[float, ...]
"""The source of limits: a first pass over each member, or the options of a rule."""


def shared_statistics(rules: Mapping[str, Rule]) -> dict[Statistic, Limits | None]:
    """Return the statistics of rules, each once, with the source of its limits.

    Raise if two rules cannot share a statistic, or if one needs all members at once.
    """
    found: dict[str, tuple[Statistic, Limits | None]] = {}
    for name, rule in rules.items():
        for one, limits in needed_by(rule).items():
            if one.all_members:
                raise OptionError(
                    f"rule {name!r} needs all members at once and cannot be accumulated; "
                    f"rules that can: {', '.join(accumulable_rules())}"
                )
            if found.setdefault(one.name, (one, limits)) != (one, limits):
                raise OptionError(
                    f"rule {name!r}: another rule of this accumulator defines the statistic "
                    f"{one.name!r} differently, or has other limits; make an accumulator for "
                    "each of the rules"
                )
    return dict(found.values())


def needed_by(rule: Rule) -> dict[Statistic, Limits | None]:
    """Return the statistics of a rule, and the total if its first pass is about the mean."""
    limits = rule.first_pass_of("members") or rule.limits()
    total = [TOTAL] if rule.first_pass_of("mean") else []
    return {one: limits if one.limited else None for one in (*rule.parts()[0], *total)}


def accumulable_rules() -> list[str]:
    """Return the names of the rules that an accumulator can serve.

    >>> "consensus" in accumulable_rules(), "tall" in accumulable_rules()
    (True, False)
    """
    return [name for name in rules if not any(s.all_members for s in rules.get(name)().parts()[0])]
