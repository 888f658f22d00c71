"""Parsing values of command-line options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from negmerge.errors import OptionError, printable, quoted
from negmerge.support.remote.urls import Place, is_url

if TYPE_CHECKING:
    from negmerge.runs.executors.settings import ExecutorSettings


def key_values(pairs: list[str]) -> dict[str, str]:
    """Parse key=value pairs of `--option`.

    >>> key_values(["quorum=0.8"])
    {'quorum': '0.8'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"--option {pair!r}: wanted key=value")
        if key in found:
            raise OptionError(f"--option {key}: given twice; remove one")
        found[key] = value
    return found


def place(text: str) -> Place:
    """Return a path, or the text of a URL.

    >>> place("pool/a.safetensors"), place("s3://bucket/a.safetensors")
    (PosixPath('pool/a.safetensors'), 's3://bucket/a.safetensors')
    """
    return text if is_url(text) else Path(text)


def executor_settings(changes: list[str]) -> ExecutorSettings | None:
    """Parse the `--set executor.KEY=VALUE` of a verb without a recipe; None if there are none.

    >>> executor_settings(["executor.kind=ray", "executor.address=auto"]).address
    'auto'
    """
    if not changes:
        return None
    from pydantic import ValidationError

    from negmerge.runs.executors.settings import ExecutorSettings
    from negmerge.runs.recipe import change_fields
    from negmerge.support.mistakes import first_mistake

    for change in changes:
        if not change.startswith("executor."):
            raise OptionError(f"--set {quoted(change)}: wanted executor.KEY=VALUE")
    tree: dict[str, Any] = {}
    change_fields(tree, changes)
    try:
        return ExecutorSettings.model_validate(tree["executor"])
    except ValidationError as error:
        mistake = first_mistake(error, ExecutorSettings).removeprefix("the recipe: ")
        raise OptionError(printable(f"--set executor.{mistake}")) from None


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
    """The factor of the task vector: −λ for `--negate`, λ for `--add`."""
    given = {"--negate": negate, "--add": add}
    found = [(option, scale) for option, scale in given.items() if scale is not None]
    if len(found) != 1:
        raise OptionError("wanted either --negate λ or --add λ")
    option, scale = found[0]
    if not 0 <= scale < float("inf"):
        raise OptionError(
            f"{option} {scale}: wanted a finite number ≥ 0; --negate subtracts and --add adds"
        )
    return -scale if option == "--negate" else scale


def fraction(text: str, where: str) -> tuple[int, int]:
    """Parse the number of a part and the number of parts.

    >>> fraction("2/5", "--part")
    (2, 5)
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f"{where} {text!r}: wanted K/N with K from 1 to N, such as 2/5")
    return int(match[1]), int(match[2])
