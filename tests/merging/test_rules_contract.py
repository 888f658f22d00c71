"""What every registered rule must offer; a new one is tested the moment it is registered."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import negmerge as nm
import oracle
from negmerge.errors import NegMergeError, OptionError
from negmerge.merging.rules import Rule, make_rule, options_of, rule, rules, summary
from negmerge.merging.statistics import HIGH, LOW, TOTAL
from negmerge.registry import Registry

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", list(rules))
def test_every_rule_explains_itself(name):
    cls = rules.get(name)
    assert summary(cls).endswith(".")
    assert re.search(r"\d{4}", cls.paper), "the paper and its year"
    for option in options_of(cls):
        assert f"{option}" in (cls.__doc__ or ""), f"option {option} is not documented"


@pytest.mark.parametrize("name", list(rules))
def test_options_can_be_given_as_text(name):
    rule = make_rule(name)
    assert make_rule(name, {k: str(v).lower() for k, v in rule.options.items()}) == rule
    for option in rule.options:
        with pytest.raises(OptionError, match=f"{option}: got 'nonsense'"):
            make_rule(name, {option: "nonsense"})
    with pytest.raises(OptionError, match="has no option 'colour'"):
        make_rule(name, {"colour": "red"})


@pytest.mark.parametrize("name", list(rules))
def test_every_rule_can_be_computed_everywhere_and_has_an_oracle(name):
    statistics, finish = make_rule(name).parts()
    assert len(inspect.signature(finish).parameters) == 1 + len(statistics)
    assert name in oracle.RULES


def test_the_rules_of_the_contract_are_there():
    assert set(rules) >= {"consensus", "conflict", "uniform", "ties", "magmax", "localize", "tall"}
    assert set(rules) >= {"soft", "shrink"}


@pytest.mark.parametrize("value", [0, 5, -1])
def test_powers_of_the_agreement(value):
    with pytest.raises(OptionError, match=rf"power: got {value}, wanted a whole number from 1 to"):
        make_rule("soft", {"power": value})


@pytest.mark.parametrize("value", [-0.5, "nan", "inf", 1e7])
def test_numbers_of_standard_errors(value):
    with pytest.raises(OptionError, match=r"errors: got .*, wanted a number from 0 to 1000000"):
        make_rule("shrink", {"errors": value})


def test_registry_refuses_a_name_twice():
    shelf: Registry[int] = Registry("book")
    shelf.register("one", 1)
    with pytest.raises(ValueError, match="'one' is registered already"):
        shelf.register("one", 2)


def steady(stack):
    mean = stack.sum(0) / 3
    return np.where(abs(mean) >= 0.3 * (stack.max(0) - stack.min(0)), mean, 0)


def even(stack):
    together = (stack**2).sum(0) >= 2 * (stack**2).max(0)
    return np.where(together & ((abs(stack) >= 0.05).sum(0) >= 1.5), stack.sum(0) / 3, 0)


def directions(stack):
    return (stack / np.sqrt((stack**2).sum(1, keepdims=True))).sum(0) / 3


@pytest.mark.parametrize(
    ("number", "options", "naive"),
    [(0, {"ratio": 0.3}, steady), (1, {"least": 0.05}, even), (2, {}, directions)],
)
def test_a_rule_of_the_documentation_works(
    number, options, naive, small_pool, tmp_path, monkeypatch
):
    """docs/extend.md adds rules in one file; this runs that very text."""
    codes = re.findall(r"```python\n(.*?)```", (DOCS / "extend.md").read_text(), re.DOTALL)
    (tmp_path / f"my_rules{number}.py").write_text(dedent(codes[number]))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(rules)
    try:
        import_module(f"my_rules{number}")
        (name,) = set(rules) - before
        base, pool = small_pool
        cpu = nm.merge(base, pool, name, options)
        other = nm.merge(base, pool, name, options, device="torch-cpu")
        deltas = [nm.merge(base, [path]) for path in pool]

        def flat(tau):
            return np.concatenate([tau[name].double().numpy().reshape(-1) for name in tau])

        wanted = naive(np.stack([flat(delta) for delta in deltas]))
        np.testing.assert_allclose(flat(cpu), wanted, rtol=1e-6)
        np.testing.assert_array_equal(flat(cpu), flat(other))
        assert cpu.nonzero > 0
    finally:
        for name in set(rules) - before:
            rules.remove(name)


def unfit(c, total):  # of the statistics only the first
    return total


def beyond(c, total, low, high):
    return total * c[5]


def nothing(c, total, low, high):
    return None


def unknown_to_numba(c, total, low, high):
    return np.asarray(total, dtype="f8") * sorted({1.0})[0]


@pytest.mark.parametrize("finish", [unfit, beyond, nothing, unknown_to_numba])
def test_a_finish_that_cannot_be_used_is_one_line(finish, small_pool):
    odd = type("Odd", (Rule,), {"statistics": (TOTAL, LOW, HIGH), "finish": staticmethod(finish)})
    rule(odd)
    try:
        with pytest.raises(NegMergeError, match=r"operators and where \(docs/extend.md\)") as told:
            nm.merge(*small_pool, rule="odd")
        assert "\n" not in str(told.value)
    finally:
        rules.remove("odd")
