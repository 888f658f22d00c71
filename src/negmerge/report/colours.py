"""One look for a method, wherever it appears: a colour, a marker, and the dashes of its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zlib import crc32

# For a light and for a dark page; each has a contrast of 3 : 1 or more with its background, and
# any two are well apart in both (0.069 or more in OKLab).
PAIRS = {
    "blue": ("#0b62c1", "#6cb2ff"),
    "orange": ("#b65300", "#ffa657"),
    "green": ("#1a7f37", "#56d364"),
    "purple": ("#8250df", "#c297ff"),
    "red": ("#cf222e", "#ff7b72"),
    "teal": ("#0a7a83", "#4fd1d9"),
    "pink": ("#bf3989", "#f778ba"),
    "brown": ("#7d5530", "#d7a77a"),
    "olive": ("#6c6a00", "#d2cf4a"),
    "grey": ("#6e7781", "#9198a1"),
    "ink": ("#24292f", "#e6edf3"),
    "violet": ("#50038f", "#8961c6"),
    "wine": ("#750524", "#b35c65"),
    "sky": ("#1392d4", "#2e82b6"),
    "forest": ("#244806", "#668554"),
    "slate": ("#524569", "#c8bedf"),
    "indigo": ("#2726cc", "#607fff"),
    "lime": ("#7f951c", "#95a955"),
    "magenta": ("#d33ccc", "#c958c2"),
    "mint": ("#459c7a", "#a5e9ca"),
    "ochre": ("#ac803e", "#a98553"),
    "plum": ("#80027c", "#fb9ef3"),
    "rose": ("#f81f58", "#e94c66"),
    "clay": ("#b4666d", "#cb8a8e"),
}
REFERENCES = ("grey", "ink")
"""The colours of what methods are compared with; no method has them."""


class Look(NamedTuple):
    """The colour's name, the marker, and the lengths of a line's dashes and gaps (none: solid)."""

    colour: str
    marker: str
    dashes: tuple[int, ...] = ()


KNOWN = {
    "original": Look("grey", "s"),
    "retrained": Look("ink", "*"),
    "members": Look("grey", "."),
    "coin_flips": Look("grey", ".", (4, 3)),
    "consensus": Look("blue", "o"),
    "single_best": Look("orange", "D"),
    "uniform": Look("green", "^"),
    "ties": Look("purple", "v"),
    "magmax": Look("red", "P"),
    "greedy": Look("brown", "X"),
    "conflict": Look("pink", "d"),
    "localize": Look("teal", "p"),
    "tall": Look("olive", "h"),
    "finetune": Look("sky", "<"),
    "gradient_ascent": Look("wine", ">"),
    "random_label": Look("forest", "H"),
    "influence": Look("slate", "h"),
    "l1_sparse": Look("lime", "<"),
    "boundary_shrink": Look("violet", ">"),
    "boundary_expand": Look("magenta", "H"),
    "salun": Look("indigo", "p"),
    "forget": Look("red", "o"),
    "retain": Look("blue", "o"),
    "test": Look("olive", "o"),
}
Looks = Mapping[str, Look]

MARKERS = "o^vDPX<>dphH"
DASHES = ((6, 2), (2, 2), (7, 2, 2, 2))
SIGNS = {"o": "●", "s": "■", "*": "★", ".": "•", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖"}
SIGNS |= {"d": "♦", "p": "⬟", "h": "⬢", "<": "◀", ">": "▶", "H": "⬣"}


def look_of(name: str) -> Look:
    """The look of a method; a name of one's own always gets the same.

    >>> look_of("consensus").colour, look_of("my_label") == look_of("my_label")
    ('blue', True)
    """
    return KNOWN[name] if name in KNOWN else looks_of([name])[name]


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The looks of the methods of one page: all differ in colour, beyond 22 in colour or marker.

    >>> three = looks_of(["consensus", "consensus-4-1", "consensus-8-2"])
    >>> three["consensus"] == look_of("consensus"), len({look.colour for look in three.values()})
    (True, 3)
    """
    names = list(names)
    found = {name: KNOWN[name] for name in names if name in KNOWN}
    for count, name in enumerate(name for name in names if name not in KNOWN):
        worn = Counter(look.colour for look in found.values())
        marked = Counter(look.marker for look in found.values())
        both = Counter(look[:2] for look in found.values())
        free = [colour for colour in PAIRS if colour not in REFERENCES]
        start = crc32(name.encode()) % len(free)  # pages with the same name have the same colour
        colour = min(free[start:] + free[:start], key=lambda one: worn[one])
        marker = min(MARKERS, key=lambda one: (both[colour, one], marked[one]))
        found[name] = Look(colour, marker, DASHES[count % len(DASHES)])
    return found
