"""How data sets are put into words for a zero-shot head: templates and tidy class names.

The words are those of OpenAI's CLIP and of the task-vector protocol (Ilharco et al., 2023), with
the epochs NegMerge fine-tunes on each set. ◄ ADD A DATA SET TO THE CLIP SCENARIO: one `add(...)`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from negmerge.errors import OptionError, shown
from negmerge.registry import Registry

Tidy = Callable[[Sequence[str]], list[str]]
"""From the class names as the set spells them to words for the templates, in the same order."""


def open_clip() -> Any:
    """The library, imported when it is first needed, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import open_clip as library
    return library


def spaces(names: Sequence[str]) -> list[str]:
    """Underscores to spaces.

    >>> spaces(["baseball_diamond"])
    ['baseball diamond']
    """
    return [name.replace("_", " ") for name in names]


def scenes(names: Sequence[str]) -> list[str]:
    """SUN397: without the initial that its folders begin with.

    >>> scenes(["a_abbey", "/a/airplane_cabin", "apse/indoor"])
    ['abbey', 'airplane cabin', 'apse indoor']
    """
    bare = [re.sub(r"^/?[a-z][_/](?=.)", "", name) for name in names]
    return [name.replace("_", " ").replace("/", " ") for name in bare]


def land_use(names: Sequence[str]) -> list[str]:
    """EuroSAT: folder names to OpenAI's, which are taken as they are.

    >>> land_use(["AnnualCrop", "SeaLake", "pasture land"])
    ['annual crop land', 'lake or sea', 'pasture land']
    """
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower() for name in names]
    return [LAND_USE.get(name, name) for name in words]


def signs(names: Sequence[str]) -> list[str]:
    """GTSRB: numbers to OpenAI's descriptions, which are taken as they are.

    >>> signs(["14", "00000", "stop"])
    ['stop', 'red and white circle 20 kph speed limit', 'stop']
    """
    wrong = [name for name in names if name.isdigit() and int(name) >= len(SIGNS)]
    if wrong:
        raise OptionError(f"gtsrb: class {shown(wrong[0])}: wanted a number below {len(SIGNS)}")
    return [SIGNS[int(name)] if name.isdigit() else name for name in names]


def imagenet(names: Sequence[str]) -> list[str]:
    """ImageNet: OpenAI's thousand names, in the usual order; a part of the set has its own words.

    >>> imagenet(["tench, Tinca tinca"])
    ['tench']
    """
    if len(names) == 1000:
        return _thousand(names)
    wrong = [name for name in names if re.fullmatch(r"n?\d+", name)]
    if wrong:
        raise OptionError(
            f"imagenet: {len(names)} classes, the first is {shown(wrong[0])}: WordNet ids and "
            "numbers are put into words only if all 1,000 are there"
        )
    return [name.partition(",")[0].replace("_", " ") for name in names]


def _thousand(names: Sequence[str]) -> list[str]:
    """OpenAI's words for WordNet ids, numbers or names that are recognisably the same classes."""
    words: list[str] = list(open_clip().IMAGENET_CLASSNAMES)
    if all(re.fullmatch(r"n\d{8}", name) for name in names):
        places = {name: place for place, name in enumerate(sorted(names))}
        return [words[places[name]] for name in names]
    if all(name.isdigit() for name in names) and {*map(int, names)} == {*range(1000)}:
        return [words[int(name)] for name in names]
    alike = [_letters(name) & _letters(word) for name, word in zip(names, words, strict=True)]
    if sum(map(bool, alike)) < len(words) / 2:
        raise OptionError(
            f"imagenet: the classes begin with {shown(names[0])}, {shown(names[1])}: wanted "
            "WordNet ids, numbers, or names in ImageNet's order"
        )
    return words


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


@dataclass(frozen=True)
class Prompts:
    """How one data set is put into words.

    templates: with `{}` for the class; none: ImageNet's 80. tidy: the clean-up of class names.
    epochs: of fine-tuning in the paper, if it is one of its eight sets.
    numbers: up to how many classes may be called by numbers.
    """

    templates: tuple[str, ...]
    tidy: Tidy
    epochs: int | None = None
    numbers: int = 0

    def words(self, names: Sequence[str]) -> list[list[str]]:
        """For each class, its sentences.

        >>> PLAIN.words(["cat"])
        [['a photo of a cat.', 'a photo of the cat.']]
        """
        nameless = [name for name in names if re.fullmatch(r"n?\d+", name)]
        if len(nameless) == len(names) > self.numbers:
            raise OptionError(
                f"the {len(names)} classes are called {shown(names[0])}, {shown(names[-1])}, …: a "
                "zero-shot head needs words; use a copy of the set whose labels have names"
            )
        tidy = self.tidy(names)
        if not self.templates:
            return [[make(name) for make in open_clip().OPENAI_IMAGENET_TEMPLATES] for name in tidy]
        return [[template.format(name) for template in self.templates] for name in tidy]


PLAIN = Prompts(("a photo of a {}.", "a photo of the {}."), spaces, numbers=10)
"""Of every set that has no entry."""

ALIASES = {"imagenet-1k": "imagenet", "stanford_cars": "cars"}
"""Names on the Hub that are not ours."""

prompts: Registry[Prompts] = Registry("prompts of data set")


def prompts_of(name: str) -> Prompts:
    """The prompts of a data set by its registered name, or the last part of a Hub id or a path.

    >>> prompts_of("mnist").epochs, prompts_of("tanganke/stanford_cars").epochs
    (30, 70)
    >>> prompts_of("someone/birds").epochs
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    last = ALIASES.get(last, last)
    return prompts.get(last) if last in prompts else PLAIN


def add(
    name: str,
    templates: Sequence[str],
    tidy: Tidy = spaces,
    epochs: int | None = None,
    numbers: int = 0,
) -> None:
    """Register the prompts of a data set."""
    prompts.register(name, Prompts(tuple(templates), tidy, epochs, numbers))


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
    "red circle with white horizonal stripe no entry",  # spelt so by OpenAI
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
    f"{WARNING} with bicyle warning",  # spelt so by OpenAI
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
NUMBER = ['a photo of the number: "{}".']
KINDS = ("imagery", "photo", "view")
LOOKS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")

add(
    "cars",
    [
        *(f"a photo of {which} {{}}." for which in ("a", "the", "my")),
        "i love my {}!",
        *(f"a photo of my {how} {{}}." for how in ("dirty", "clean", "new", "old")),
    ],
    epochs=70,
)
add(
    "dtd",
    [
        f"a photo of {which} {{}} {what}."
        for which in ("a", "the")
        for what in ("texture", "pattern", "thing", "object")
    ],
    epochs=100,
)
add(
    "eurosat",
    [f"a centered satellite photo of {which}{{}}." for which in ("", "a ", "the ")],
    land_use,
    epochs=40,
)
add(
    "gtsrb",
    [f'a {how} photo of a "{{}}" traffic sign.' for how in ("zoomed in", "centered", "close up")],
    signs,
    epochs=40,
    numbers=len(SIGNS),
)
add("mnist", NUMBER, epochs=30, numbers=10)
add(
    "resisc45",
    [
        f"{whence} {kind} of {which}{{}}."
        for which in ("", "a ", "the ")
        for kind in KINDS
        for whence in ("satellite", "aerial")
    ],
    epochs=40,
)
add("sun397", PLAIN.templates, scenes, epochs=40)
add("svhn", NUMBER, epochs=30, numbers=10)
add("imagenet", (), imagenet, numbers=1000)
for _name in ("cifar10", "cifar100"):
    add(
        _name,
        [
            template
            for which in ("a", "the")
            for template in (
                *(f"a {look}photo of {which} {{}}." for look in LOOKS),
                *(f"a photo of {which} {size} {{}}." for size in ("small", "big")),
            )
        ],
    )
