"""The verbs of runs and of the paper's tables: they import other modules when they are called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.filesize import decimal

from negmerge.cli.app import (
    Flag,
    Given,
    Json,
    OptionalOut,
    OptionalSeeds,
    RecipeName,
    Set,
    TableName,
    app,
)
from negmerge.cli.arguments import fraction, place
from negmerge.errors import OptionError, printable
from negmerge.support.progress import make_progress
from negmerge.support.terminal import print_result, print_tables

if TYPE_CHECKING:
    from negmerge.paper.verdicts import Comparison


@app.command
def unlearn(
    recipe: RecipeName | None = None,
    /,
    *,
    out: OptionalOut = None,
    set_: Set = None,
    dry_run: Flag = False,
    json_: Json = False,
) -> None:
    """Make a trained model forget; a second call continues an interrupted run.

    Args:
        recipe: A YAML file or the name of a shipped recipe (`negmerge list recipes`); by default
            the demo.
        out: The run directory; by default runs/NAME.
        set_: Change a field of the recipe, as key=value with a dotted key; may be repeated.
        dry_run: Start nothing; tell the steps, what is done of them, disk, memory and time.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.runs.pipeline import run

    if dry_run:
        from negmerge.runs.pipeline import plan

        with make_progress("json" if json_ else "auto") as progress:
            planned = plan(recipe, out, set_ or [], progress)
        if json_:
            print(json.dumps({"event": "plan"} | planned.tree()))
        else:
            print("\n".join(map(printable, planned.lines())))
        return
    with make_progress("json" if json_ else "auto") as progress:
        done = run(recipe, out, set_ or [], progress)
        if not done.has_page:
            from negmerge.reports.page import report
            from negmerge.runs.recipe import load_recipe
            from negmerge.runs.tracking import track_page

            page = report(done, progress)
            track_page(load_recipe(recipe, set_ or []), done, page)
    if json_:
        result = {"run": str(done.folder), "page": str(done.page), "scores": done.result.tree()}
        print(json.dumps({"event": "result"} | result))
        return
    from negmerge.reports.inspection import scores_table

    print_tables(scores_table(done.result))
    print(printable(f"run: {done.folder}   unlearned model: {done.unlearned}"))
    print(printable(f"page: {done.page}"))


@app.command
def status(run: Path, /, *, json_: Json = False) -> None:
    """Show what a run is doing, from another terminal or another machine.

    Args:
        run: A run directory.
        json_: Print the status as JSON.
    """
    from negmerge.runs.status import describe, read_status
    from negmerge.runs.store import open_run

    found = open_run(run)
    shown = None if found.finished else read_status(found)
    if json_:
        working = shown is not None and shown.working
        state = "finished" if found.finished else "working" if working else "stopped"
        print(
            json.dumps({"run": str(run), "state": state, **(shown.model_dump() if shown else {})})
        )
        return
    for line in describe(found, shown):
        print(printable(line))


@app.command
def report(run: Path, /, *others: Path, out: OptionalOut = None) -> None:
    """Build the page of a run again, which may be unfinished, or a page that compares runs.

    Args:
        run: A run directory.
        others: Finished runs to compare with it, which have the same metrics.
        out: The folder of the comparison; by default runs/comparison.
    """
    from negmerge.runs.store import open_run

    found = open_run(run)  # before imports that take seconds
    if others:
        from negmerge.reports.comparison_page import compare

        print(printable(f"page: {compare([run, *others], out)}"))
        return
    if out is not None:
        raise OptionError(
            "--out: is for a comparison of several runs; the page of one run is in its folder"
        )
    from negmerge.reports.page import report as build

    with make_progress() as progress:
        print(printable(f"page: {build(found, progress)}"))


@app.command
def reproduce(
    table: TableName,
    /,
    *,
    scale: Literal["desk", "paper"] = "desk",
    out: OptionalOut = None,
    set_: Set = None,
    seeds: OptionalSeeds = None,
    part: str | None = None,
    yes: Flag = False,
    dry_run: Flag = False,
    checkpoints: Path | None = None,
    trust: Flag = False,
    expected: Path | None = None,
    json_: Json = False,
) -> None:
    """Make a table of the paper; a second call continues an interrupted run.

    `reproduce authors --checkpoints FOLDER` merges and measures the authors' own models; it exits
    with 1 if a number differs from the published one.

    Args:
        table: The name of the table, such as T2 (`negmerge list tables`), or authors.
        scale: The settings, data and backbones of the paper, which need a GPU, or smaller ones for
            a desktop computer.
        out: The folder of the runs and tables; by default runs/reproduce-SCALE.
        set_: Change a field of every recipe, as key=value with a dotted key; may be repeated.
        seeds: Make every run with each of these seeds, which are added to the recipe's; the table
            then has mean ± standard deviation.
        part: Make only a part of the runs, such as 2/5 on the second of five machines; the table
            uses all runs that are in the folder.
        yes: Start the runs of the paper's scale; by default only the requirements are printed.
        dry_run: Start nothing; tell the runs, those that are finished, disk, memory and time.
        checkpoints: For authors: the folder of the release, with zeroshot.pt and a folder or file
            for each fine-tuned model.
        trust: For authors: allow unpickling; only for files whose source you trust.
        expected: For authors: a JSON file with other numbers to compare with.
        json_: For authors: print progress and result as JSON lines.
    """
    if table == "authors":
        if checkpoints is None:
            raise OptionError(
                "authors: wanted --checkpoints FOLDER, the folder of the authors' files"
            )
        from negmerge.paper.authors import compare_release

        with make_progress("json" if json_ else "auto") as progress:
            compared = compare_release(checkpoints, out, trust, set_ or [], expected, progress)
        page = compared.folder / "authors.md"
        _show_comparison(compared, compared.expected.what, json_, f"table: {page}")
        return
    if checkpoints or trust or expected or json_:
        raise OptionError(f"{table}: --checkpoints, --trust, --expected and --json are for authors")
    from negmerge.paper.needs import finished_runs, measured_needs, needs
    from negmerge.paper.reproduction import folder_of, rendered
    from negmerge.paper.reproduction import reproduce as make
    from negmerge.paper.trials import trials_of

    share = None if part is None else fraction(part, "--part")
    if scale == "paper" or dry_run:
        trials = trials_of(table, scale, set_ or [], seeds, share)
        print(printable(needs(table, scale, trials, share)))
        if dry_run or not yes:
            with make_progress() as progress:
                print(printable(measured_needs(trials, progress)))
            print(printable(finished_runs(trials, folder_of(scale, out))))
            started = "" if dry_run else "; add --yes to start"
            print(f"Nothing was started{started}.")
            return
    with make_progress() as progress:
        made = make(table, scale, out, set_ or [], progress, seeds, share)
    print_tables(rendered(made))
    print(printable(f"table: {made.folder / table}.md"))


@app.command
def check(
    kind: Literal["clip"],
    name: str,
    /,
    *,
    pretrained: str | None = None,
    set_: Set = None,
    download: Flag = False,
    json_: Json = False,
) -> None:
    """Measure a pretrained model on the data that is found, beside known accuracies.

    Exits with 1 if an accuracy differs by more than a point. Nothing is downloaded by default.

    Args:
        kind: The kind of model: clip.
        name: An architecture of open_clip, such as ViT-B-32, a folder, or desk_clip.
        pretrained: The weights of an architecture: a tag of open_clip, by default openai, or a
            .safetensors file.
        set_: data.root=FOLDER, data.limit.test=COUNT or sets=[cars, imagenet]; may be repeated.
        download: Download weights and data sets that are not on this machine.
        json_: Print progress and result as JSON lines.
    """
    if not download:  # the Hub's libraries are imported later
        os.environ["HF_HUB_OFFLINE"] = "1"
    from negmerge.paper.zero_shot import check_clip

    with make_progress("json" if json_ else "auto") as progress:
        made = check_clip(name, pretrained, set_ or [], download, progress)
    _show_comparison(made, f"{made.model}: zero-shot accuracy in percent", json_)


def _show_comparison(made: Comparison, title: str, as_json: bool, *lines: str) -> None:
    """Print measured numbers beside known ones; exit with 1 if one differs."""
    from negmerge.paper.verdicts import rendered

    if as_json:
        print(json.dumps({"event": "result"} | made.tree()))
    else:
        print_tables([rendered(title, made.rows), *map(printable, made.notes)])
        for line in lines:
            print(printable(line))
    if not made.passed:
        raise SystemExit(1)


@app.command
def copy(source: Given, target: Given, /, *, dry_run: Flag = False, json_: Json = False) -> None:
    """Copy a finished run to a URL, or back; the manifest comes last.

    Args:
        source: The run directory, or the URL of a copy.
        target: The URL of the copy, or a new folder.
        dry_run: List the files and bytes that would be copied, and copy nothing.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.runs.copies import copy_run

    with make_progress("json" if json_ else "auto") as progress:
        done = copy_run(place(source), place(target), dry_run, progress)
    if dry_run and not json_:
        for name, count in done.sent.items():
            print(printable(f"{count:>15,}  {name}"))
    verb = "would be copied" if dry_run else "copied"
    print_result(
        {"target": done.target, "copied": done.sent, "unchanged": len(done.unchanged)},
        f"{done.target}: {len(done.sent)} files {verb}, {decimal(sum(done.sent.values()))}; "
        f"{len(done.unchanged)} are there already",
        json_,
    )


@app.command
def verify(run: Path, /) -> None:
    """Recompute every hash of a run's manifest.

    Args:
        run: A run directory, or its manifest.json.
    """
    from negmerge.runs.store import Run

    found = Run(run.parent if run.name == "manifest.json" else run)
    count = found.check_contents().verify()
    print(printable(f"{run}: {count} files match the manifest"))
