"""Names that a shell offers while a command is typed; called for each press of the Tab key."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def recipes(_: object) -> list[str]:
    """Return the shipped recipes, and the YAML files of the current folder.

    >>> "demo" in recipes(None)
    True
    """
    shipped = Path(str(files("negmerge") / "recipes")).glob("*.yaml")
    own = [path.name for ending in ("yaml", "yml") for path in Path().glob(f"*.{ending}")]
    return sorted([*own, *(path.stem for path in shipped)])


def rules(_: object) -> list[str]:
    """Return the merge rules.

    >>> rules(None)[:2]
    ['conflict', 'consensus']
    """
    from negmerge.merging.rules import rules

    return [*rules]


def tables(_: object) -> list[str]:
    """Return the tables of the paper.

    >>> "T2" in tables(None)
    True
    """
    from negmerge.paper.experiments import experiments

    return [*experiments(), "authors"]
