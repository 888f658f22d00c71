"""Verbs that compare measured numbers with known ones, and exit with 1 if one differs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from negmerge.errors import OptionError, printable
from negmerge.support.progress import make_progress
from negmerge.support.terminal import print_tables

OFFLINE = "HF_HUB_OFFLINE"
"""The environment variable that keeps the Hub's libraries, imported later, from downloading."""
DIFFERS = 1
"""The exit code if a number differs from the known one."""


def reproduce_authors(
    checkpoints: Path | None,
    out: Path | None,
    trust: bool,
    changes: Sequence[str],
    expected: Path | None,
    as_json: bool,
) -> None:
    """Run `negmerge reproduce authors`."""
    if checkpoints is None:
        raise OptionError("authors: wanted --checkpoints FOLDER, the folder of the authors' files")
    from negmerge.paper.authors import compare_release
    from negmerge.paper.verdicts import rendered

    with make_progress("json" if as_json else "auto") as progress:
        made = compare_release(checkpoints, out, trust, changes, expected, progress)
    if as_json:
        print(json.dumps({"event": "result"} | made.tree()))
    else:
        print_tables([rendered(made.expected.what, made.rows), *map(printable, made.notes)])
        print(printable(f"table: {made.folder / 'authors.md'}"))
    if not made.passed:
        raise SystemExit(DIFFERS)


def check_model(
    kind: str,
    name: str,
    pretrained: str | None,
    changes: Sequence[str],
    download: bool,
    as_json: bool,
) -> None:
    """Run `negmerge check`."""
    if not download:
        os.environ[OFFLINE] = "1"
    from negmerge.paper.verdicts import rendered
    from negmerge.paper.zero_shot import check

    with make_progress("json" if as_json else "auto") as progress:
        options = {"pretrained": pretrained, "changes": changes, "download": download}
        made = check(kind, name, progress=progress, **options)
    if as_json:
        print(json.dumps({"event": "result"} | made.tree()))
    else:
        title = f"{made.model}: zero-shot accuracy in percent"
        print_tables([rendered(title, made.rows), *map(printable, made.notes)])
    if not made.passed:
        raise SystemExit(DIFFERS)
