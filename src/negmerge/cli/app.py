"""The application of cyclopts that verbs register with, and the kinds of arguments they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, Token

from negmerge.cli import completers
from negmerge.support.remote.urls import is_url
from negmerge.support.seeds import parse_seeds

app = App(
    name="negmerge",
    help="Make a trained model forget: merge fine-tuned models by sign, subtract the result.",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)


def _output_path(_: Any, tokens: Sequence[Token]) -> Path:
    """Parse an output; an empty path would be the current folder."""
    if not tokens[0].value:
        raise ValueError("is empty; name a file or folder")
    if is_url(tokens[0].value):
        raise ValueError("is a URL; outputs are on this machine: write it here and copy it")
    return Path(tokens[0].value)


def _seeds(_: Any, tokens: Sequence[Token]) -> list[int]:
    """Parse seeds, as in `0-11`, `0,3,5` and `0 1 2`."""
    return parse_seeds([token.value for token in tokens])


_OUT = Parameter(name=["--out", "-o"], converter=_output_path)
Out = Annotated[Path, _OUT]
OptionalOut = Annotated[Path | None, _OUT]
if TYPE_CHECKING:
    Given = str
else:
    Given = str | Path  # always a str; shells complete paths because of the second type
"""A path or a URL; the `Path` of a URL would join its slashes."""
RecipeName = Annotated[str, Parameter(completer=completers.recipes)]
RuleName = Annotated[str, Parameter(completer=completers.rules)]
TableName = Annotated[str, Parameter(completer=completers.tables)]
Set = Annotated[list[str] | None, Parameter(name="--set", negative="")]
Options = Annotated[list[str] | None, Parameter(negative="")]
_SEEDS = Parameter(consume_multiple=True, negative="", converter=_seeds)
Seeds = Annotated[list[int], _SEEDS]
OptionalSeeds = Annotated[list[int] | None, _SEEDS]
Json = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Annotated[bool, Parameter(negative="")]
