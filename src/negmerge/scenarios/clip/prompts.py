"""Prompts of data sets for zero-shot heads: sentence templates and cleaned class names.

They are those of OpenAI's CLIP and of the task-vector protocol (Ilharco et al., 2023), with the
numbers of epochs that NegMerge fine-tunes on each set. ◄ ADD A DATA SET TO THE CLIP SCENARIO: one
entry of `PROMPTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from negmerge.errors import OptionError, quoted
from negmerge.registry import Registry
from negmerge.scenarios.clip.library import open_clip

Clean = Callable[[Sequence[str]], list[str]]
"""From the class names of a data set to the words that templates take, in the same order."""


def spaces(names: Sequence[str]) -> list[str]:
    """Replace underscores by spaces.

    >>> spaces(["baseball_diamond"])
    ['baseball diamond']
    """
    return [name.replace("_", " ") for name in names]


def scenes(names: Sequence[str]) -> list[str]:
    """SUN397: remove the initial that its folder names begin with.

    >>> scenes(["a_abbey", "/a/airplane_cabin", "apse/indoor"])
    ['abbey', 'airplane cabin', 'apse indoor']
    """
    return [re.sub("[_/]", " ", re.sub("^/?[a-z][_/](?=.)", "", name)) for name in names]


def land_use(names: Sequence[str]) -> list[str]:
    """EuroSAT: replace folder names by OpenAI's class names; other names stay.

    >>> land_use(["AnnualCrop", "SeaLake", "pasture land"])
    ['annual crop land', 'lake or sea', 'pasture land']
    """
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower() for name in names]
    return [LAND_USE.get(name, name) for name in words]


def signs(names: Sequence[str]) -> list[str]:
    """GTSRB: replace numbers by OpenAI's descriptions; other names stay.

    >>> signs(["14", "00000", "stop"])
    ['stop', 'red and white circle 20 kph speed limit', 'stop']
    """
    wrong = [name for name in names if name.isdigit() and int(name) >= len(SIGNS)]
    if wrong:
        raise OptionError(
            f"gtsrb: got class {quoted(wrong[0])}, wanted a number below {len(SIGNS)}"
        )
    return [SIGNS[int(name)] if name.isdigit() else name for name in names]


def imagenet(names: Sequence[str]) -> list[str]:
    """ImageNet: OpenAI's names of all 1,000 classes; a subset keeps its own names.

    >>> imagenet(["tench, Tinca tinca"])
    ['tench']
    """
    if len(names) == 1000:
        return _thousand(names)
    wrong = [name for name in names if re.fullmatch(r"n?\d+", name)]
    if wrong:
        raise OptionError(
            f"imagenet: got {len(names)} classes, among them {quoted(wrong[0])}: WordNet ids and "
            "numbers have names only if all 1,000 classes are there; use a copy of the set whose "
            "classes have names"
        )
    return [name.partition(",")[0].replace("_", " ") for name in names]


def _thousand(names: Sequence[str]) -> list[str]:
    """OpenAI's names for WordNet ids, for numbers, or for names that share words with them."""
    words: list[str] = list(open_clip().IMAGENET_CLASSNAMES)
    if all(re.fullmatch(r"n\d{8}", name) for name in names):
        places = {name: place for place, name in enumerate(sorted(names))}
        return [words[places[name]] for name in names]
    if all(name.isdigit() for name in names) and {*map(int, names)} == {*range(1000)}:
        return [words[int(name)] for name in names]
    alike = [
        not _words(name).isdisjoint(_words(word)) for name, word in zip(names, words, strict=True)
    ]
    if sum(alike) < len(words) / 2:
        raise OptionError(
            f"imagenet: got classes that begin with {quoted(names[0])}, {quoted(names[1])}; wanted "
            "WordNet ids, numbers, or names in ImageNet's order"
        )
    return words


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


class Epochs(NamedTuple):
    """Epochs of fine-tuning in the paper, with RandAugment and without it (`plain`)."""

    randaugment: int
    plain: int


@dataclass(frozen=True)
class Prompts:
    """The sentences of one data set.

    Args:
        templates: sentences with `{}` for the class; if there are none, ImageNet's 80 templates.
        epochs: epochs of fine-tuning in the paper, if the set is one of its eight.
        numbers: the largest number of classes that may all have numbers as names.
    """

    templates: tuple[str, ...]
    clean: Clean = spaces
    epochs: Epochs | None = None
    numbers: int = 0

    def words(self, names: Sequence[str]) -> list[list[str]]:
        """Return the sentences of each class.

        >>> PLAIN.words(["cat"])
        [['a photo of a cat.', 'a photo of the cat.']]
        """
        nameless = [name for name in names if re.fullmatch(r"n?\d+", name)]
        if len(nameless) == len(names) > self.numbers:
            raise OptionError(
                f"the {len(names)} classes have the names {quoted(names[0])}, {quoted(names[-1])}, "
                "…: a zero-shot head needs words; use a copy of the set whose classes have names"
            )
        make = [template.format for template in self.templates]
        make = make or open_clip().OPENAI_IMAGENET_TEMPLATES
        return [[sentence(name) for sentence in make] for name in self.clean(names)]


PLAIN = Prompts(("a photo of a {}.", "a photo of the {}."), numbers=10)
"""The prompts of every set that is not registered."""

ALIASES = {"imagenet-1k": "imagenet", "stanford_cars": "cars"}
"""From names on the Hub to registered names."""

prompts: Registry[Prompts] = Registry("prompts of data set")


def prompts_of(name: str) -> Prompts:
    """Return the prompts of a data set.

    >>> prompts_of("tanganke/stanford_cars").epochs
    Epochs(randaugment=70, plain=35)
    >>> prompts_of("someone/birds") is PLAIN
    True

    Args:
        name: its registered name, or a Hub id or a path that ends in it.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    last = ALIASES.get(last, last)
    return prompts.get(last) if last in prompts else PLAIN


LAND_USE = {
    "annual crop": "annual crop land",
    "herbaceous vegetation": "brushland or shrubland",
    "highway": "highway or road",
    "industrial": "industrial buildings or commercial buildings",
    "pasture": "pasture land",
    "permanent crop": "permanent crop land",
    "residential": "residential buildings or homes or apartments",
    "sea lake": "lake or sea",
}
ROUND, WARNING, BLUE = "red and white circle", "red and white triangle", "blue circle with white"
SIGNS = (
    *(f"{ROUND} {limit} kph speed limit" for limit in (20, 30, 50, 60, 70, 80)),
    "end / de-restriction of 80 kph speed limit",
    f"{ROUND} 100 kph speed limit",
    f"{ROUND} 120 kph speed limit",
    f"{ROUND} red car and black car no passing",
    f"{ROUND} red truck and black car no passing",
    f"{WARNING} road intersection warning",
    "white and yellow diamond priority road",
    "red and white upside down triangle yield right-of-way",
    "stop",
    f"empty {ROUND}",
    f"{ROUND} no truck entry",
    "red circle with white horizonal stripe no entry",  # OpenAI's spelling
    f"{WARNING} with exclamation mark warning",
    f"{WARNING} with black left curve approaching warning",
    f"{WARNING} with black right curve approaching warning",
    f"{WARNING} with black double curve approaching warning",
    f"{WARNING} rough / bumpy road warning",
    f"{WARNING} car skidding / slipping warning",
    f"{WARNING} with merging / narrow lanes warning",
    f"{WARNING} with person digging / construction / road work warning",
    f"{WARNING} with traffic light approaching warning",
    f"{WARNING} with person walking warning",
    f"{WARNING} with child and person walking warning",
    f"{WARNING} with bicyle warning",  # OpenAI's spelling
    f"{WARNING} with snowflake / ice warning",
    f"{WARNING} with deer warning",
    "white circle with gray strike bar no speed limit",
    f"{BLUE} right turn arrow mandatory",
    f"{BLUE} left turn arrow mandatory",
    f"{BLUE} forward arrow mandatory",
    f"{BLUE} forward or right turn arrow mandatory",
    f"{BLUE} forward or left turn arrow mandatory",
    f"{BLUE} keep right arrow mandatory",
    f"{BLUE} keep left arrow mandatory",
    f"{BLUE} arrows indicating a traffic circle",
    "white circle with gray strike bar indicating no passing for cars has ended",
    "white circle with gray strike bar indicating no passing for trucks has ended",
)
NUMBER = Prompts(('a photo of the number: "{}".',), numbers=10)
QUALITIES = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
CIFAR = Prompts(
    tuple(
        template
        for which in ("a", "the")
        for template in (
            *(f"a {quality}photo of {which} {{}}." for quality in QUALITIES),
            *(f"a photo of {which} {size} {{}}." for size in ("small", "big")),
        )
    )
)
PROMPTS = {
    "cars": Prompts(
        (
            *(f"a photo of {which} {{}}." for which in ("a", "the", "my")),
            "i love my {}!",
            *(f"a photo of my {how} {{}}." for how in ("dirty", "clean", "new", "old")),
        ),
        epochs=Epochs(70, 35),
    ),
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "dtd": Prompts(
        tuple(
            f"a photo of {which} {{}} {what}."
            for which in ("a", "the")
            for what in ("texture", "pattern", "thing", "object")
        ),
        epochs=Epochs(100, 76),
    ),
    "eurosat": Prompts(
        tuple(f"a centered satellite photo of {which}{{}}." for which in ("", "a ", "the ")),
        land_use,
        epochs=Epochs(40, 12),
    ),
    "gtsrb": Prompts(
        tuple(
            f'a {how} photo of a "{{}}" traffic sign.'
            for how in ("zoomed in", "centered", "close up")
        ),
        signs,
        epochs=Epochs(40, 11),
        numbers=len(SIGNS),
    ),
    "imagenet": Prompts((), imagenet, numbers=1000),
    "mnist": replace(NUMBER, epochs=Epochs(30, 5)),
    "resisc45": Prompts(
        tuple(
            f"{whence} {kind} of {which}{{}}."
            for which in ("", "a ", "the ")
            for kind in ("imagery", "photo", "view")
            for whence in ("satellite", "aerial")
        ),
        epochs=Epochs(40, 15),
    ),
    "sun397": Prompts(PLAIN.templates, scenes, epochs=Epochs(40, 14)),
    "svhn": replace(NUMBER, epochs=Epochs(30, 4)),
}
for _name, _prompts in PROMPTS.items():
    prompts.register(_name, _prompts)
