"""Shows the examples of docstrings as code in the documentation; mkdocstrings loads this file.

An example begins with `>>>` and ends with a blank line. Without fences Markdown takes it for a
quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n *\S.*)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Put the examples of a docstring into blocks of code.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2\\n\\nArgs:").replace("`", "'"))
    Add.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    <BLANKLINE>
    Args:
    """
    return EXAMPLE.sub(r"\1```pycon\n\1\2\n\1```", text)


class Examples(griffe.Extension):
    """Rewrites every docstring that griffe has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
