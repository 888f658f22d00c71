"""The verb that sends the unlearned model of a run, or its patch, to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from negmerge.cli.app import Flag, Json, app
from negmerge.errors import printable
from negmerge.support.progress import make_progress
from negmerge.support.terminal import print_result


@app.command
def push(
    run: Path,
    repo: str,
    /,
    *,
    what: Literal["model", "patch", "both"] = "model",
    private: Flag = False,
    dry_run: Flag = False,
    json_: Json = False,
) -> None:
    """Send the unlearned model of a finished run, or its patch, to the Hugging Face Hub.

    The token is the one of `hf auth login`, or HF_TOKEN.

    Args:
        run: A run directory.
        repo: The id on the Hub, USER/NAME; it is made if it does not exist.
        what: The model, the patch, or both in one repository; whoever has both has the original.
        private: Only the owner sees it.
        dry_run: Send nothing; show every file with its size, and the text of the model card.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.runs.store import open_run

    found = open_run(run)  # before imports that take seconds
    from negmerge.api.push import push as send

    with make_progress("json" if json_ else "auto") as progress:
        done = send(found, repo, what=what, private=private, dry_run=dry_run, progress=progress)
    if dry_run and not json_:
        for name, count in done.files.items():
            print(printable(f"{count:>15,}  {name}"))
        for text in (done.card, done.results):
            print("", *map(printable, (text or "").splitlines()), sep="\n")
    verb = "would be sent" if dry_run else "sent"
    seen = "private" if private else "public, if it is new"
    print_result(
        asdict(done),
        f"{repo} ({seen}): {len(done.files)} files {verb}, {decimal(sum(done.files.values()))}"
        f"{'' if done.commit is None else f'; {done.commit}'}",
        json_,
    )
