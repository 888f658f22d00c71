"""Invented persons: the same each time, distinct, and answers that cannot be guessed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negmerge.errors import ValueRangeError
from negmerge.text.persons import FACTS, FIRST_NAMES, LAST_NAMES, WRONG, invented_persons

ALL = len(FIRST_NAMES) * len(LAST_NAMES)


def parts(fact: str, answer: str) -> tuple[str, ...]:
    """The words that fill an answer, found word by word in the form of its kind."""
    form = FACTS[fact].answer.rstrip(".").split()
    words = answer.rstrip(".").split()
    assert len(form) == len(words)
    assert all(f in ("{}", w) for f, w in zip(form, words, strict=True))
    return tuple(w for f, w in zip(form, words, strict=True) if f == "{}")


@given(count=st.integers(1, 20), more=st.integers(0, 9), seed=st.integers(-5, 2**63))
def test_more_persons_begin_with_the_same_persons(count: int, more: int, seed: int):
    records = invented_persons(count, seed)
    assert len(records) == count * len(FACTS)
    assert records == invented_persons(count + more, seed)[: len(records)]


def test_another_seed_gives_other_persons_and_facts():
    one, two = invented_persons(40, 0), invented_persons(40, 1)
    assert len({r["person"] for r in one} & {r["person"] for r in two}) < 10
    assert sum(a["answer"] == b["answer"] for a, b in zip(one, two, strict=True)) < 5


@pytest.mark.parametrize("seed", [0, 7])
def test_names_and_answers_are_shared_as_little_as_can_be(seed: int):
    records = invented_persons(ALL, seed)
    names = [r["person"] for r in records[:: len(FACTS)]]
    assert len(set(names)) == ALL
    firsts, lasts = zip(*(name.split() for name in names[: len(FIRST_NAMES)]), strict=True)
    assert len(set(firsts)) == len(set(lasts)) == len(FIRST_NAMES)
    for fact in FACTS:
        answers = [r["answer"] for r in records[: 800 * len(FACTS)] if r["fact"] == fact]
        assert len(set(answers)) == 800


def test_a_record_asks_twice_about_its_person_and_its_wrong_answers_are_wrong_in_every_part():
    records = invented_persons(60, 3)
    for one, two in pairwise(records):
        assert (one["prompt"], one["person"]) != (two["prompt"], two["person"])
    for record in records:
        fact = FACTS[record["fact"]]
        assert record["prompt"] == fact.prompt.replace("{}", record["person"])
        assert record["paraphrase"] == fact.paraphrase.replace("{}", record["person"])
        assert len(record["wrong"]) == WRONG
        told = [parts(record["fact"], a) for a in (record["answer"], *record["wrong"])]
        for words, used in zip(fact.parts, zip(*told, strict=True), strict=True):
            assert len(set(used)) == WRONG + 1
            assert set(used) <= set(words)


@pytest.mark.parametrize("count", [0, -1, ALL + 1])
def test_a_count_without_names_is_refused(count: int):
    with pytest.raises(ValueRangeError, match=f"got count {count}; choose a count from 1 to {ALL}"):
        invented_persons(count)
