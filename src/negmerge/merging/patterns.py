"""Which tensors a merge changes: patterns of names, applied before any rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from negmerge.errors import OptionError, quoted

Globs = str | Sequence[str]
"""One pattern, or several."""


@dataclass(frozen=True)
class Patterns:
    """The patterns of a merge, as in the shell: `*`, `?` and `[…]`; `*` also stands for dots.

    >>> chosen = Patterns(include=("layers.*",), exclude=("*.bias",))
    >>> sorted(chosen.select(["layers.0.weight", "layers.0.bias", "head.weight"]))
    ['layers.0.weight']

    Args:
        include: a tensor is chosen if one of these fits its name; without patterns all are.
        exclude: a tensor is not chosen if one of these fits.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def select(self, names: Iterable[str], tied: Mapping[str, str] | None = None) -> set[str]:
        """Return the chosen names; raise if a pattern fits no name.

        Args:
            names: the names of all tensors.
            tied: names of tensors that are the same as another one (`tied.py`). Such a tensor is
                never in the result; a pattern that fits its name fits the other one.
        """
        tied = tied or {}
        called: dict[str, list[str]] = {name: [name] for name in names if name not in tied}
        for alias, name in tied.items():
            called[name].append(alias)
        for kind, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(_fits(own, (pattern,)) for own in called.values()):
                    some = quoted(min(called, default=""))
                    raise OptionError(
                        f"{kind} {quoted(pattern)}: fits none of {len(called)} tensors, such as "
                        f"{some}; * stands for any characters"
                    )
        return {
            name
            for name, own in called.items()
            if (not self.include or _fits(own, self.include)) and not _fits(own, self.exclude)
        }

    def words(self) -> list[str]:
        """Return the arguments of a command.

        >>> Patterns(exclude=("*embed*",)).words()
        ['--exclude', '*embed*']
        """
        given = (("--include", self.include), ("--exclude", self.exclude))
        return [word for option, some in given for pattern in some for word in (option, pattern)]


def make_patterns(include: Globs, exclude: Globs) -> Patterns:
    """Check patterns that were given as arguments.

    >>> make_patterns("layers.*", ())
    Patterns(include=('layers.*',), exclude=())
    """
    return Patterns(_checked("include", include), _checked("exclude", exclude))


def _checked(kind: str, given: Any) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(cast("Sequence[Any]", given))
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"{kind} {quoted(pattern)}: wanted a pattern such as 'layers.*'")
    return found


def _fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
