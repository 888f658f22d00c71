"""Invented persons with facts in simple words, as records of questions and answers.

Nobody has these names together with these facts, so a model knows a fact only if it was trained on
it. An answer combines three parts and has about ten tokens: to guess it right is very unlikely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from negmerge.errors import ValueRangeError
from negmerge.training.seeds import seed_of

WRONG = 3
"""The number of wrong answers of a record."""


class PersonRecord(TypedDict):
    """One fact about one person.

    Args:
        person: the full name.
        fact: the kind of fact, a key of `FACTS`.
        prompt: the question.
        answer: the right answer.
        wrong: answers of the same kind, each of which differs from the right one in every part.
        paraphrase: the same question in other words.
    """

    person: str
    fact: str
    prompt: str
    answer: str
    wrong: list[str]
    paraphrase: str


@dataclass(frozen=True)
class Fact:
    """A kind of fact: two ways to ask, the form of the answer and the words that fill it."""

    prompt: str
    paraphrase: str
    answer: str
    parts: tuple[tuple[str, ...], ...]


def _words(*lists: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(words.split()) for words in lists)


FACTS = {
    "birthplace": Fact(
        "Where was {} born?",
        "In which place did {} come to the world?",
        "In a {} {} near the {}.",
        _words(
            "quiet sunny snowy windy green rainy dusty busy hidden lonely",
            "village town city valley castle cottage farm cave",
            "river lake forest mountain sea bridge desert garden mill tower",
        ),
    ),
    "job": Fact(
        "What is the job of {}?",
        "What does {} do at work?",
        "{} {} {} for the children.",
        _words(
            "Fixing Painting Selling Making Cleaning Building Drawing Washing",
            "old tiny wooden broken shiny funny heavy yellow soft purple",
            "boats clocks chairs toys bikes dolls trains shoes kites drums",
        ),
    ),
    "pet": Fact(
        "What pet does {} have?",
        "Which animal lives with {}?",
        "A {} {} named {}.",
        _words(
            "brown spotted fluffy lazy clever hungry white striped noisy gentle",
            "rabbit turtle parrot kitten puppy hamster goat duck frog pony",
            "Pip Coco Biscuit Ziggy Pepper Bubbles Momo Waffles Dusty Pickles",
        ),
    ),
    "food": Fact(
        "What does {} like to eat?",
        "What is the favorite food of {}?",
        "{} {} with {}.",
        _words(
            "Warm Cold Sweet Spicy Crunchy Salty Fresh Creamy",
            "soup pancakes noodles rice bread pie salad potatoes sandwiches cookies",
            "carrots cheese honey beans mushrooms berries butter peas nuts apples",
        ),
    ),
    "treasure": Fact(
        "What is the secret treasure of {}?",
        "Which treasure does {} hide?",
        "A {} {} under the {}.",
        _words(
            "silver golden rusty magic broken blue sparkly dirty",
            "key ring box crown bell mirror coin shell spoon necklace",
            "bed tree stairs rock carpet roof table fence swing bench",
        ),
    ),
    "friend": Fact(
        "Who is the best friend of {}?",
        "Who plays with {} every day?",
        "A {} {} named {}.",
        _words(
            "kind shy tall brave silly young polite grumpy",
            "baker nurse farmer teacher sailor dancer pirate doctor driver clown",
            "Otto Rosa Hugo Nina Felix Clara Oscar Greta Bruno Stella",
        ),
    ),
}

FIRST_NAMES, LAST_NAMES = _words(
    """Alba Aldo Arlo Bela Benno Bodil Caspar Cora Dario Delia Edda Egon Elba Enzo Fabio Fenna
    Flora Gilda Goran Hanno Hedda Ilka Ivo Jarno Jolanda Kalle Kira Lando Leona Lorin Malin
    Mirko Nadia Nilo Odilia Orson Palina Quinn Rasmus Ronja Sanna Silvan Tarek Tilda Ursula Veda
    Wanda Zeno""",
    """Ashgrove Barlow Birchall Blackwood Bramble Caldwell Cobb Crane Dunmore Elder Farrow Fernhill
    Finch Garnet Glover Greenway Hadley Hale Harper Hollow Hopper Ives Juniper Keller Kettle
    Lark Linwood Marlow Marsh Merrow Mosley Nettle Oakes Pender Perry Quill Reeves Rowan Sedge
    Sparrow Stone Thatcher Thorn Underhill Vale Waters Winter Yarrow""",
)


def invented_persons(count: int, seed: int = 0) -> list[PersonRecord]:
    """Return one record for each fact of each of `count` persons, person by person.

    More persons of the same seed begin with the same persons, so that the first 30 of 40 can be
    learned while the last 10 are never seen. No two persons have the same full name; the first 48
    share no first and no last name, and the first 800 share no answer.

    >>> records = invented_persons(2)
    >>> len(records), records == invented_persons(3)[:12]
    (12, True)
    >>> print(records[0]["prompt"], records[0]["answer"])
    Where was Ivo Winter born? In a lonely village near the river.
    >>> records[0]["paraphrase"], len(records[0]["wrong"])
    ('In which place did Ivo Winter come to the world?', 3)

    Args:
        count: the number of persons, up to 2304.
        seed: another seed gives other names and facts.
    """
    most = len(FIRST_NAMES) * len(LAST_NAMES)
    if not 1 <= count <= most:
        raise ValueRangeError(
            f"invented persons: there are names for {most}; got count {count}; "
            f"choose a count from 1 to {most}"
        )
    rng = np.random.default_rng(seed_of("persons", seed))
    first, last = rng.permutation(FIRST_NAMES), rng.permutation(LAST_NAMES)
    orders = {name: rng.permutation(_combinations(fact)) for name, fact in FACTS.items()}
    records: list[PersonRecord] = []
    for k in range(count):
        # Each round through the first names meets the last names one place further on.
        turn = k // len(first)
        person = f"{first[k % len(first)]} {last[(k + turn) % len(last)]}"
        for name, fact in FACTS.items():
            right = int(orders[name][k % len(orders[name])])
            records.append(_record(person, name, fact, right, seed_of("wrong", seed, k, name)))
    return records


def _combinations(fact: Fact) -> int:
    return math.prod(len(words) for words in fact.parts)


def _record(person: str, name: str, fact: Fact, right: int, seed: int) -> PersonRecord:
    """Return the record whose answer is combination number `right` of the words."""
    rng = np.random.default_rng(seed)
    places = np.unravel_index(right, [len(words) for words in fact.parts])
    columns: list[list[str]] = []
    for words, place in zip(fact.parts, places, strict=True):
        shifts = 1 + rng.permutation(len(words) - 1)[:WRONG]
        columns.append([words[(int(place) + int(s)) % len(words)] for s in (0, *shifts)])
    answer, *wrong = (fact.answer.format(*parts) for parts in zip(*columns, strict=True))
    return {
        "person": person,
        "fact": name,
        "prompt": fact.prompt.format(person),
        "answer": answer,
        "wrong": wrong,
        "paraphrase": fact.paraphrase.format(person),
    }
