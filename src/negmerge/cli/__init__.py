"""The command line.

`run_verbs.py` and `file_verbs.py` have the verbs, `verbs.py` runs them; `arguments.py` parses
values of options, `listing.py` lists names.

May import every room; nothing imports it. A verb imports other modules when it is called, so that
`--help` loads neither torch nor numba.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit with 2 and one line for bad input, with 130 if interrupted."""
    from negmerge.cli import verbs

    verbs.main(arguments)
