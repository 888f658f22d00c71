"""What is typed on the command line, as numbers and names."""

from __future__ import annotations

import re

from negmerge.errors import OptionError


def key_values(pairs: list[str]) -> dict[str, str]:
    """Parse key=value options.

    >>> key_values(["quorum=0.8"])
    {'quorum': '0.8'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"--option {pair!r}: wanted key=value")
        if key in found:
            raise OptionError(f"--option {key}: given twice")
        found[key] = value
    return found


def size(text: str, where: str) -> int:
    """Parse a size in bytes.

    >>> size("1.5GiB", "--max-memory"), size("500MB", "--max-memory")
    (1610612736, 500000000)
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise OptionError(f"{where} {text!r}: wanted a size such as 500MB or 2GiB")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " KMGT".index(match[2].upper() or " "))


def signed_scale(negate: float | None, add: float | None) -> float:
    """λ with the sign of the verb; λ itself is never negative."""
    if (negate is None) == (add is None):
        raise OptionError("name either --negate λ or --add λ")
    scale = negate if negate is not None else add
    assert scale is not None
    verb = "--negate" if negate is not None else "--add"
    if not 0 <= scale < float("inf"):
        raise OptionError(
            f"{verb} {scale}: λ must be a finite number ≥ 0; --negate subtracts and --add adds"
        )
    return -scale if negate is not None else scale
