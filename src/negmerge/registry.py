"""Names for things that can be added: one registry for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Generic, TypeVar

from negmerge.errors import OptionError, shown

T = TypeVar("T")


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say of a name that nothing has: the nearest names, and then all of them.

    >>> unknown("recipe", "dmo", ["demo", "desk"])
    "unknown recipe 'dmo'; did you mean 'demo'? There are: demo, desk"
    """
    near = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"unknown {kind} {shown(name)}{hint} There are: {', '.join(known)}"


class Registry(Generic[T]):
    """A table from name to entry that refuses duplicates and suggests near misses.

    >>> colours = Registry[str]("colour")
    >>> colours.register("green", "#0f0")
    '#0f0'
    >>> colours.get("gren")
    Traceback (most recent call last):
    negmerge.errors.OptionError: unknown colour 'gren'; did you mean 'green'? There are: green
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry; a name that is taken raises."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Look an entry up; a miss names the nearest entries and then all of them."""
        if name in self._entries:
            return self._entries[name]
        raise OptionError(unknown(self.kind, name, sorted(self._entries)))

    def remove(self, name: str) -> None:
        """Forget an entry."""
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries
