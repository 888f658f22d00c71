"""Registries: tables from names to the rules, rivals, metrics and so on that can be added."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Generic, TypeVar

from negmerge import plugins
from negmerge.errors import OptionError, quoted

T = TypeVar("T")

PLURALS = {"criterion": "criteria", "data set": "datasets", "evidence": "evidence"}


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown name: the nearest names, then all names.

    >>> unknown_name("recipe", "dmo", ["demo", "desk"])
    "unknown recipe 'dmo'; did you mean 'demo'? There are: demo, desk"
    """
    return (
        f"unknown {kind} {quoted(name)}{nearest(name, known) or '.'} There are: {', '.join(known)}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the names most like a given one; "" if none is like it.

    >>> nearest("grean", ["green", "red"]), nearest("blue", ["green", "red"])
    ("; did you mean 'green'?", '')
    """
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(quoted, near))}?" if near else ""


class Registry(Generic[T]):
    """A table from name to entry that refuses duplicates and suggests near misses.

    >>> colours = Registry[str]("colour")
    >>> colours.register("green", "#0f0")
    '#0f0'
    >>> colours.get("gren")
    Traceback (most recent call last):
    negmerge.errors.OptionError: unknown colour 'gren'; did you mean 'green'? There are: green

    Args:
        kind: the noun for an entry, in messages.
        homes: modules that register entries; of a package all modules are imported.
        reserved: names that mean something else.
    """

    def __init__(self, kind: str, *homes: str, reserved: Collection[str] = ()) -> None:
        self.kind, self.reserved = kind, reserved
        self._entries: dict[str, T] = {}
        self._sources: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._homes = homes
        self._complete = False

    @property
    def group(self) -> str:
        """The group of entry points that register entries of this kind.

        >>> Registry("rule").group, Registry("data set").group
        ('negmerge.rules', 'negmerge.datasets')
        """
        return f"negmerge.{PLURALS.get(self.kind, f'{self.kind}s')}"

    def _load(self) -> None:
        """Import the modules of this package that register entries."""
        homes, self._homes = self._homes, ()
        try:
            for home in homes:
                package = import_module(home)
                for module in iter_modules(getattr(package, "__path__", [])):
                    import_module(f"{home}.{module.name}")
        except BaseException:  # such as a missing extra; the next look-up raises it again
            self._homes = homes
            raise

    def _load_plugins(self) -> None:
        """Import the entry points of other packages."""
        if self._complete:
            return
        self._complete = True
        for point in plugins.load_group(self.group):
            if point.attr and point.name not in self._entries:
                plugins.warn(
                    point,
                    f"{point.module} registers no {self.kind} {point.name!r}; give the entry point "
                    f"the name of its {self.kind}",
                )

    def register(self, name: str, entry: T) -> T:
        """Add an entry; raise if the name is taken."""
        source = plugins.registering_file()
        if source:
            self._load()  # names of this package are taken, whoever is imported first
        if name in self._entries:
            place = Path(self._sources[name]).name or "this package"
            raise ValueError(
                f"{self.kind} {name!r} is registered already, by {place}; choose another name"
            )
        if name in self.reserved:
            raise ValueError(f"{self.kind} {name!r}: the name is reserved; choose another")
        fields = getattr(entry, "__dataclass_fields__", {})
        if "name" in fields and (own := getattr(entry, "name", None)) != name:
            raise ValueError(f"{self.kind} {name!r}: its field name is {own!r}; make them equal")
        self._check(name, entry)
        self._entries[name] = entry
        self._sources[name] = source
        self._versions.pop(source, None)
        return entry

    def _check(self, name: str, entry: T) -> None:
        """Raise if an entry does not go with those that are registered."""

    def get(self, name: str) -> T:
        """Return an entry; raise an error with the nearest names if there is none."""
        if name in self:
            return self._entries[name]
        raise OptionError(unknown_name(self.kind, name, sorted(self._entries)))

    def source(self, name: str) -> str:
        """Return the plug-in file that registered an entry; "" for entries of this package."""
        return self._sources[name]

    def versions(self, *names: str) -> list[str]:
        """Return hashes of the plug-in files that define these entries; none for this package.

        The keys of results contain them: what a plug-in computes may change when its file does.
        """
        sources = [self._sources[name] for name in names if name in self]
        for source in filter(None, sources):
            # Once: a module that a plug-in imports later does not change the keys of a run.
            if source not in self._versions:
                self._versions[source] = plugins.version(source)
        return [self._versions[source] for source in sources if source]

    def remove(self, name: str) -> None:
        """Remove an entry."""
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        self._load_plugins()
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        self._load()
        if name not in self._entries:
            self._load_plugins()
        return name in self._entries
