"""The entry of the command line: all verbs, plug-ins, errors and exit codes."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from cyclopts import CycloptsError, Group, MissingArgumentError, Parameter

from negmerge import plugins
from negmerge.cli import (  # noqa: F401 (register their verbs)
    adapter_verb,
    completion_verb,
    doctor_verb,
    file_verbs,
    init_verb,
    push_verb,
    run_verbs,
    schema_verb,
    study_verb,
)
from negmerge.cli.app import Json, app
from negmerge.cli.first_screen import FIRST_SCREEN
from negmerge.cli.listing import KINDS, Kind, listing_table
from negmerge.errors import NegMergeError, printable
from negmerge.support.interrupts import ignore_interrupts, raise_interrupts
from negmerge.support.terminal import print_tables, without_stdin


@app.command(name="list")
def list_(what: Kind, /, *, json_: Json = False) -> None:
    """List the names of rules, data sets and so on, with a summary of each.

    Args:
        what: The kind of name.
        json_: Print JSON instead of a table.
    """
    found = KINDS[what]()
    print(json.dumps(found)) if json_ else print_tables([listing_table(what, found)])


app.meta.group_parameters = Group("Parameters of every command", sort_key=9)
app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def load_plugins(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    plugin: Annotated[list[str] | None, Parameter(negative="")] = None,
) -> None:
    """Load the plug-ins, then run a verb.

    Args:
        plugin: A Python file or module that registers rules, rivals, data sets or other entries;
            may be repeated.
    """
    for name in plugin or []:
        plugins.load(name)
    if not tokens:
        print(FIRST_SCREEN, end="")
        return
    app(tokens, **PLAIN)


PLAIN: dict[str, Any] = {
    "exit_on_error": False,
    "print_error": False,
    "result_action": "return_value",
}
"""Arguments of cyclopts: raise errors, and do not print results."""


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and run the verb; exit with the codes of `negmerge.cli.main`."""
    raise_interrupts()
    try:
        with without_stdin():
            app.meta(arguments, **PLAIN)
    except (NegMergeError, CycloptsError) as error:
        print(f"error: {printable(' '.join(_mistake(error).split()))}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        ignore_interrupts()
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if (line := plugins.failure(error)) is None:
            raise
        print(f"error: {printable(line)}", file=sys.stderr)
        raise SystemExit(2) from None


def _mistake(error: NegMergeError | CycloptsError) -> str:
    """Return the text of an error; cyclopts says of a missing option that it requires a value."""
    if isinstance(error, MissingArgumentError) and error.argument and error.keyword is None:
        verb = " ".join(error.command_chain or ())
        name = error.argument.name
        return f"{verb}: {name} is missing; `negmerge {verb} --help` lists what it takes"
    return str(error)
