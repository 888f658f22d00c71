"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CODE_OF_CONDUCT.md",
    *sorted(DOCS.rglob("*.md")),
]


def title(page: Path) -> str:
    """The name of a page in the list of tests."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The language and the text of every fenced block of some languages, in the order of a page."""
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        (language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in found
        if language in languages
    ]


def commands(page: Path) -> list[list[str]]:
    """The words of every negmerge, make and pip command in the blocks of a page.

    Lines with … or ... are sketches of a command.
    """
    text = page.read_text()
    shell = "".join(text for _, text in blocks(page, "sh", "console"))
    outside = re.sub(r"^ *```\w+\n.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [
        *re.findall(r"^(?:\$ )?((?:negmerge|make|pip) .*)$", shell, re.MULTILINE),
        *re.findall(r"^    ((?:negmerge|make|pip) .*)$", outside, re.MULTILINE),
    ]
    found = [
        shlex.split(line.partition(" | ")[0], comments=True) for line in lines if "…" not in line
    ]
    return [words for words in found if "..." not in " ".join(words)]


SHIM = """#!/bin/sh
case "$1" in
unlearn|study|reproduce) exec {python} -m negmerge.cli "$@" {changes} ;;
*) exec {python} -m negmerge.cli "$@" ;;
esac
"""


def with_smaller_runs(place: Path, changes: list[str]) -> dict[str, str]:
    """Environment variables with a `negmerge` that makes every run smaller by these changes."""
    shim = place / "bin" / "negmerge"
    shim.parent.mkdir()
    given = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    shim.write_text(SHIM.format(python=shlex.quote(sys.executable), changes=given))
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "NEGMERGE_CACHE": str(place / "cache"), "COLUMNS": "150"}
