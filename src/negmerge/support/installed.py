"""What is installed: versions, and the extras whose libraries are missing; imports none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

NOT_FOR_USERS = ("all", "dev", "docs", "test")
"""Extras that are for work on the package, or only join others."""
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<inner>[^]]*)\])?\s*\(?(?P<least>>=[\w.]+)?[^;]*"
    r"(?:;.*extra == ['\"](?P<extra>[\w-]+)['\"])?"
)


@dataclass(frozen=True)
class Library:
    """A library that the package, or one of its extras, needs.

    Args:
        name: its name on PyPI.
        installed: the installed version; None if it is missing.
        least: the oldest version that is enough, if one is stated.
    """

    name: str
    installed: str | None
    least: str | None

    @property
    def too_old(self) -> bool:
        """Whether an older version than the oldest allowed one is installed."""
        if self.installed is None or self.least is None:
            return False
        return _numbers(self.installed) < _numbers(self.least)


@dataclass(frozen=True)
class Extra:
    """An extra of the package and the libraries that it adds."""

    name: str
    libraries: tuple[Library, ...]

    @property
    def missing(self) -> list[str]:
        """The libraries that are not installed."""
        return [library.name for library in self.libraries if library.installed is None]

    @property
    def command(self) -> str:
        """The command that installs the extra."""
        return f"pip install 'negmerge[{self.name}]'"


def installed_version(name: str) -> str | None:
    """Return the version of an installed library.

    >>> installed_version("no-such-library") is None
    True
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def libraries() -> dict[str, Extra]:
    """Return the libraries of the base install, under "", and of each extra.

    >>> "numpy" in [library.name for library in libraries()[""].libraries]
    True
    """
    try:
        wanted = requires("negmerge") or []
    except PackageNotFoundError:  # the source is used without an installation
        wanted = []
    found: dict[str, list[Library]] = {"": []}
    for text in wanted:
        match = _REQUIREMENT.match(text)
        if match is None or match["extra"] in NOT_FOR_USERS:
            continue
        own = found.setdefault(match["extra"] or "", [])
        if match["name"] != "negmerge":
            least = match["least"].removeprefix(">=") if match["least"] else None
            own.append(Library(match["name"], installed_version(match["name"]), least))
    return {name: Extra(name, tuple(some)) for name, some in found.items()}


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version.

    >>> _numbers("2.10.0+cpu") < _numbers("2.9"), _numbers("2.10.0rc1")
    (False, (2, 10, 0))
    """
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
