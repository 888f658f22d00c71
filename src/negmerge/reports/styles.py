"""The style of each method in figures and tables: colour, marker and line dashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zlib import crc32

# The first value is for a light page, the second for a dark one. Each has a contrast of at least
# 3 : 1 with its background, and any two differ by at least 0.069 in OKLab.
COLOURS = {
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
REFERENCE_COLOURS = ("grey", "ink")
"""The colours of the original and the retrained model; no method gets them."""


class Style(NamedTuple):
    """A colour of `COLOURS`, a matplotlib marker, and line dashes (empty: a solid line)."""

    colour: str
    marker: str
    dashes: tuple[int, ...] = ()


STYLES = {
    "original": Style("grey", "s"),
    "retrained": Style("ink", "*"),
    "second retrained": Style("ink", "d"),
    "members": Style("grey", "."),
    "coin_flips": Style("grey", ".", (4, 3)),
    "consensus": Style("blue", "o"),
    "single_best": Style("orange", "D"),
    "uniform": Style("green", "^"),
    "ties": Style("purple", "v"),
    "magmax": Style("red", "P"),
    "greedy": Style("brown", "X"),
    "conflict": Style("pink", "d"),
    "localize": Style("teal", "p"),
    "tall": Style("olive", "h"),
    "finetune": Style("sky", "<"),
    "gradient_ascent": Style("wine", ">"),
    "random_label": Style("forest", "H"),
    "influence": Style("slate", "h"),
    "l1_sparse": Style("lime", "<"),
    "boundary_shrink": Style("violet", ">"),
    "boundary_expand": Style("magenta", "H"),
    "salun": Style("indigo", "p"),
    "forget": Style("red", "o"),
    "retain": Style("blue", "o"),
    "test": Style("olive", "o"),
}
Styles = Mapping[str, Style]
"""Styles by method."""

MARKERS = "o^vDPX<>dphH"
DASHES = ((6, 2), (2, 2), (7, 2, 2, 2))
SYMBOLS = {"o": "●", "s": "■", "*": "★", ".": "•", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖"}
SYMBOLS |= {"d": "♦", "p": "⬟", "h": "⬢", "<": "◀", ">": "▶", "H": "⬣"}
"""Characters that look like the markers, for legends and tables."""


def style_of(name: str) -> Style:
    """The style of a method; equal names always get equal styles.

    >>> style_of("consensus").colour, style_of("my_label") == style_of("my_label")
    ('blue', True)
    """
    return STYLES[name] if name in STYLES else styles_of([name])[name]


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """The styles of the methods of one page, all of different colours.

    Beyond 22 methods, colours repeat with other markers.

    >>> three = styles_of(["consensus", "consensus-4-1", "consensus-8-2"])
    >>> three["consensus"] == style_of("consensus"), len({style.colour for style in three.values()})
    (True, 3)
    """
    names = list(names)
    found = {name: STYLES[name] for name in names if name in STYLES}
    for count, name in enumerate(name for name in names if name not in STYLES):
        used = Counter(style.colour for style in found.values())
        marked = Counter(style.marker for style in found.values())
        both = Counter(style[:2] for style in found.values())
        free = [colour for colour in COLOURS if colour not in REFERENCE_COLOURS]
        start = crc32(name.encode()) % len(free)  # the same on every page
        colour = min(free[start:] + free[:start], key=lambda one: used[one])
        marker = min(MARKERS, key=lambda one: (both[colour, one], marked[one]))
        found[name] = Style(colour, marker, DASHES[count % len(DASHES)])
    return found
