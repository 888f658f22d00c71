"""One colour and one marker for a method, wherever it appears."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from zlib import crc32

# For a light and for a dark page; each has a contrast of 3 : 1 or more with its background.
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
}
KNOWN = {
    "original": ("grey", "s"),
    "retrained": ("ink", "*"),
    "members": ("grey", "."),
    "coin_flips": ("grey", "."),
    "consensus": ("blue", "o"),
    "single_best": ("orange", "D"),
    "uniform": ("green", "^"),
    "ties": ("purple", "v"),
    "magmax": ("red", "P"),
    "greedy": ("brown", "X"),
    "conflict": ("pink", "d"),
    "localize": ("teal", "p"),
    "tall": ("olive", "h"),
    "finetune": ("teal", "<"),
    "gradient_ascent": ("pink", ">"),
    "random_label": ("olive", "H"),
    "influence": ("brown", "h"),
    "l1_sparse": ("green", "<"),
    "boundary_shrink": ("purple", ">"),
    "boundary_expand": ("red", "H"),
    "salun": ("orange", "p"),
    "forget": ("red", "o"),
    "retain": ("blue", "o"),
    "test": ("olive", "o"),
}
Looks = Mapping[str, tuple[str, str]]
"""The colour's name and the marker of methods."""

MARKERS = "o^vsDPX<>dph"
SIGNS = {"o": "●", "s": "■", "*": "★", ".": "•", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖"}
SIGNS |= {"d": "♦", "p": "⬟", "h": "⬢", "<": "◀", ">": "▶", "H": "⬣"}


def look_of(name: str) -> tuple[str, str]:
    """The colour's name and the marker of a method; a name of one's own always gets the same.

    >>> look_of("consensus"), look_of("consensus-min")[0], look_of("salun_forget")[0]
    (('blue', 'o'), 'blue', 'orange')
    >>> look_of("my_label") == look_of("my_label")
    True
    """
    if name in KNOWN:
        return KNOWN[name]
    number = crc32(name.encode())
    own = [method for method in KNOWN if name.startswith((f"{method}-", f"{method}_"))]
    free = [colour for colour in PAIRS if colour not in ("grey", "ink", "blue")]
    colour = KNOWN[max(own, key=len)][0] if own else free[number % len(free)]
    taken = {marker for other, marker in KNOWN.values() if other == colour}
    markers = [marker for marker in MARKERS if marker not in taken]
    return colour, markers[number // 16 % len(markers)]


def looks_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The looks of the methods of one page: no two are alike, as long as there are markers.

    >>> three = looks_of(["consensus", "consensus-4-1", "consensus-8-2"])
    >>> three["consensus"] == look_of("consensus"), len(set(three.values()))
    (True, 3)
    """
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        colour, marker = look_of(name)
        taken = {own for other, own in (*KNOWN.values(), *found.values()) if other == colour}
        free = [own for own in MARKERS if own not in taken]
        again = (colour, marker) in found.values()
        found[name] = (colour, free[0] if again and free else marker)
    return found
