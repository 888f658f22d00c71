"""Markdown of texts that may hold anything, and the YAML block at the top of a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from negmerge.errors import printable

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#+!|~&$@^])")


def plain(text: object) -> str:
    """Return a text on one line whose characters are all shown as they are.

    >>> plain("<b>a|b</b> [x](y) line\\n2")
    '\\\\<b\\\\>a\\\\|b\\\\</b\\\\> \\\\[x\\\\](y) line 2'
    """
    shown = _MARKUP.sub(r"\\\1", printable(" ".join(str(text).split())))
    return rf"\{shown}" if shown[:1] in ("-", "=") else shown


def code(text: object) -> str:
    """Return Markdown code on one line; characters of the text that would end it are replaced.

    >>> code("a`b|c")
    "`a'b¦c`"
    """
    return f"`{printable(str(text)).replace('`', chr(39)).replace('|', '¦')}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the cells are Markdown already.

    >>> table(["", "value"], [["λ", "0.5"]])
    ['| | value |', '|---|---|', '| λ | 0.5 |']
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines[0] = lines[0].replace("|  |", "| |")
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def front_matter(tree: Mapping[str, Any]) -> str:
    """Return a YAML block without the fields that are None, between two lines of dashes.

    Control characters of texts are escaped, line feeds too.

    >>> print(front_matter({"license": "mit", "base_model": None}), end="")
    ---
    license: mit
    ---
    """
    known = {name: value for name, value in tree.items() if value is not None}
    return f"---\n{to_yaml(known)}---\n"


def to_yaml(tree: Any) -> str:
    """Return plain data as YAML; control characters of texts are escaped.

    >>> to_yaml([{"notes": "95 %"}])
    '- notes: 95 %\\n'
    """
    return yaml.safe_dump(_printable(tree), sort_keys=False, allow_unicode=True)


def _printable(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {printable(str(name)): _printable(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_printable(value) for value in tree]
    return printable(tree) if isinstance(tree, str) else tree
