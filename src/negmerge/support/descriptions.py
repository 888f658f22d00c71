"""The descriptions of the fields of settings, read from the source that declares them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache

from pydantic import BaseModel


@cache
def described(kind: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of the fields of a class: the text under a field, or its `Args:`.

    >>> from negmerge.support.settings import Strict
    >>> described(Strict)
    {}

    Args:
        kind: a class whose source is a file.
    """
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        for line in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(cls) or "", re.M):
            found[line[0]] = " ".join(line[1].split()).rstrip(".")
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for one, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(one.target, ast.Name)
                text = ast.literal_eval(after.value)
                found[one.target.id] = " ".join(text.split()).rstrip(".")
    return found
