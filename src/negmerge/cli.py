"""The command line: each verb is a function, and imports what it needs when it is called."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, Token

from negmerge.arguments import key_values, signed_scale, size
from negmerge.errors import NegMergeError, printable
from negmerge.interrupts import ignore, listen
from negmerge.progress import human, make_progress
from negmerge.terminal import say, show, unattended, warn

app = App(
    name="negmerge",
    help="Make a trained model forget: merge fine-tuned models by sign, subtract the result.",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)


def _named(_: Any, tokens: Sequence[Token]) -> Path:
    """A path that was given: an empty one would mean the current folder."""
    if not tokens[0].value:
        raise ValueError("is empty; name a file or folder")
    return Path(tokens[0].value)


Named = Parameter(name=["--out", "-o"], converter=_named)
Out = Annotated[Path, Named]
Json = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Parameter(negative="")


@app.command
def unlearn(
    recipe: str | None = None,
    /,
    *,
    out: Annotated[Path | None, Named] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    json_: Json = False,
) -> None:
    """Make a classifier or a CLIP forget, from data to unlearned model; run again, it goes on.

    Parameters
    ----------
    recipe
        A YAML file or the name of a shipped recipe (`negmerge list recipes`); none: the demo.
    out
        The run directory; runs/NAME if not given.
    set_
        Change a field of the recipe, as key=value with a dotted key; may be repeated.
    json_
        Print progress and result as JSON lines.
    """
    from negmerge.pipeline import run

    with make_progress("json" if json_ else "auto") as progress:
        done = run(recipe, out, set_ or [], progress)
        if not done.reported:
            from negmerge.report.page import report

            report(done, progress)
    if json_:
        result = {"run": str(done.folder), "page": str(done.page), "scores": done.scores}
        print(json.dumps({"event": "result"} | result))
        return
    from negmerge.report.tables import scores_table

    show(scores_table(done.scores))
    print(printable(f"run: {done.folder}   unlearned model: {done.unlearned}"))
    print(printable(f"page: {done.page}"))


@app.command
def report(run: Path, /) -> None:
    """Build the page of a run again, finished or not.

    Parameters
    ----------
    run
        A run directory.
    """
    from negmerge.rundir import need_run

    found = need_run(run)  # before what takes seconds to import
    from negmerge.report.page import report as build

    with make_progress() as progress:
        print(printable(f"page: {build(found, progress)}"))


@app.command
def reproduce(
    table: str,
    /,
    *,
    scale: Literal["desk", "paper"] = "desk",
    out: Annotated[Path | None, Named] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    yes: Annotated[bool, Flag] = False,
) -> None:
    """Make a table of the paper, measured beside published; run again, it goes on.

    Parameters
    ----------
    table
        Its name, such as T2 (`negmerge list tables`).
    scale
        The paper's settings, data and backbones, which need a GPU, or smaller ones for a desk.
    out
        Where the runs and the tables go; runs/reproduce-SCALE if not given.
    set_
        Change a field of every recipe, as key=value with a dotted key; may be repeated.
    yes
        Begin at the paper's scale; without it only the needs are said.
    """
    from negmerge.reproduction.reproduce import needs, rendered
    from negmerge.reproduction.reproduce import reproduce as make

    if scale == "paper":
        print(printable(needs(table, scale, set_ or [])))
        if not yes:
            print("Nothing was begun; --yes begins.")
            return
    with make_progress() as progress:
        made = make(table, scale, out, set_ or [], progress)
    show(rendered(made))
    print(printable(f"table: {made.folder / table}.md"))


@app.command
def verify(run: Path, /) -> None:
    """Recompute every hash of a run's manifest.

    Parameters
    ----------
    run
        A run directory, or its manifest.json.
    """
    from negmerge.rundir import Run

    found = Run(run.parent if run.name == "manifest.json" else run)
    count = found.check_own().verify()
    print(printable(f"{run}: {count} files as the manifest says"))


@app.command
def merge(
    base: Path,
    /,
    *models: Path,
    out: Out,
    rule: str = "consensus",
    option: list[str] | None = None,
    buffers: Literal["keep", "merge"] = "keep",
    layout: Literal["auto", "sparse", "dense"] = "auto",
    workers: int | None = None,
    max_memory: str | None = None,
    device: str = "cpu",
    digest: Annotated[bool, Flag] = False,
    allow_duplicates: Annotated[bool, Flag] = False,
    json_: Json = False,
) -> None:
    """Merge fine-tuned models into one sparse patch.

    Parameters
    ----------
    base
        The model that all others were fine-tuned from: a .safetensors file or a folder.
    models
        The fine-tuned models, files or folders.
    out
        The patch to write.
    rule
        How to merge; `negmerge list rules` shows them with their options.
    option
        An option of the rule, as key=value; may be repeated.
    buffers
        Keep the base's BatchNorm statistics, or merge them like weights.
    layout
        How tensors are stored; auto takes the smaller.
    workers
        Threads; all cores if not given.
    max_memory
        Memory the process may use, such as 500MB or 2GiB.
    device
        Where to compute: cpu or cuda.
    digest
        Record SHA-256 of every input file.
    allow_duplicates
        Accept models that hold the same weights.
    json_
        Print progress and result as JSON lines.
    """
    from negmerge.checkpoint import Checkpoint
    from negmerge.merge.engine import merge as run

    begun = time.perf_counter()
    with make_progress("json" if json_ else "auto") as progress:
        tau = run(
            base,
            models,
            rule,
            key_values(option or []),
            out=out,
            buffers=buffers,
            layout=layout,
            workers=workers,
            max_memory=None if max_memory is None else size(max_memory, "--max-memory"),
            device=device,
            allow_duplicates=allow_duplicates,
            digest=digest,
            progress=progress,
        )
    with Checkpoint(base) as model:
        base_bytes = model.nbytes
    held = sum(entry.nbytes for entry in tau.entries.values())
    result = {
        "patch": str(out),
        "rule": tau.origin.rule,
        "n": tau.origin.n,
        "elements": tau.elements,
        "nonzero": tau.nonzero,
        "sparsity": tau.sparsity(),
        "bytes": out.stat().st_size,
        "tensor_bytes": held,
        "base_bytes": base_bytes,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    say(
        result,
        f"{out}: {tau.origin.rule} of {tau.origin.n}, {tau.nonzero:,} of {tau.elements:,} elements "
        f"({tau.sparsity():.2%} zero), {human(result['bytes'])}, {result['seconds']:.1f} s",
        json_,
    )
    if 2 * held > base_bytes and not json_:
        wide = any(entry.dtype == "F64" for entry in tau.entries.values())
        stored = "float64 values, 8 bytes" if wide else "float32 values, 4 bytes"
        print(
            f"The tensors of the patch take {human(held)}, the base has {human(base_bytes)}: the "
            f"patch stores {stored} each, for the {1 - tau.sparsity():.1%} that are not zero."
        )
    if not tau.nonzero:
        warn("the patch is empty: nothing was kept, applying it changes nothing")


@app.command
def apply(
    base: Path,
    patch: Path,
    /,
    *,
    out: Out,
    negate: float | None = None,
    add: float | None = None,
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep",
    shard_size: str | None = None,
    workers: int | None = None,
    json_: Json = False,
) -> None:
    """Write the base minus (or plus) λ times a patch.

    Parameters
    ----------
    base
        The model the patch was made from.
    patch
        What `negmerge merge` wrote.
    out
        A .safetensors file, or a folder, which gets the base's configuration files too, and a
        README.md of its own.
    negate
        λ ≥ 0: forget, θ − λτ.
    add
        λ ≥ 0: learn, θ + λτ.
    dtype
        The format of the float tensors.
    shard_size
        Write a folder of shards of at most this size, such as 5GB, with an index.
    workers
        Threads; all cores if not given.
    json_
        Print progress and result as JSON lines.
    """
    from negmerge.dtypes import NAMES
    from negmerge.patching import apply as run
    from negmerge.task_vector import TaskVector

    scale = signed_scale(negate, add)
    begun = time.perf_counter()
    with make_progress("json" if json_ else "auto") as progress:
        done = run(
            base,
            scale * TaskVector.load(patch),
            out,
            dtype=dtype,
            shard_size=None if shard_size is None else size(shard_size, "--shard-size"),
            workers=workers,
            progress=progress,
        )
    result = {
        "out": str(out),
        "scale": scale,
        "bytes": done.nbytes,
        "nonzero": done.nonzero,
        "changed": done.changed,
        "clamped": done.clamped,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    say(
        result,
        f"{out}: θ {'−' if negate is not None else '+'} {abs(scale):g}·τ, "
        f"{done.changed:,} elements changed, {human(done.nbytes)}, {result['seconds']:.1f} s",
        json_,
    )
    if done.changed < 0.99 * done.nonzero and scale:
        share = done.changed / done.nonzero
        formats = {short: name for name, short in NAMES.items()}
        lost = ", ".join(f"{n:,} are too small for {formats[f]}" for f, n in done.lost.items())
        coarse = done.lost.keys() & {"BF16", "F16"}
        remedy = "; --dtype float32 keeps more of them" if coarse else ""
        warn(f"only {share:.1%} of the changes are in the output: {lost}{remedy}")
    if done.clamped:
        warn(f"{done.clamped} BatchNorm variances were kept from going below zero")


@app.command
def inspect(file: Path, /, *, json_: Json = False) -> None:
    """Show what a patch, a checkpoint or a run holds: sparsity, norm, origin; or the scores.

    Parameters
    ----------
    file
        A patch, a checkpoint file or folder, or a run directory.
    json_
        Print JSON instead of tables.
    """
    from negmerge.rundir import is_run, need_run

    if is_run(file):
        run = need_run(file)
        from negmerge.report.runs import describe_run

        found = describe_run(run)
        if json_:
            print(json.dumps(found))
        else:
            from negmerge.report.tables import run_tables

            show(run_tables(found))
        return
    from negmerge.inspection import inspect as describe
    from negmerge.inspection import render

    found = describe(file)
    if json_:
        print(json.dumps(found))
    else:
        show(render(found))


@app.command(name="list")
def list_(
    what: Literal[
        "rules", "selectors", "rivals", "criteria", "datasets", "models", "recipes", "tables"
    ],
    /,
    *,
    json_: Json = False,
) -> None:
    """List what can be chosen by name.

    Parameters
    ----------
    what
        The kind of thing.
    json_
        Print JSON instead of a table.
    """
    from negmerge.listing import KINDS, SHOWN

    found = KINDS[what]()
    if json_:
        print(json.dumps(found))
        return
    from rich.table import Table

    every = [field for field in next(iter(found.values())) if field != "paper"]
    fields = SHOWN.get(what, every)
    table = Table(what.removesuffix("s"), *(f.replace("_", " ") for f in fields), title=what)
    for name, entry in found.items():
        cells = [_cell(entry[field]) for field in fields]
        if "paper" in entry:
            cells[0] += f"\n[dim]{entry['paper']}[/]"
        table.add_row(name, *cells, end_section=True)
    table.columns[0].no_wrap = True
    show([table])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        lines = (f"{k}={v['takes']} ({str(v['default']).lower()})" for k, v in value.items())
        return "\n".join(lines)
    return "" if value is None else str(value)


@app.command
def convert(
    file: Path,
    /,
    *,
    out: Out,
    trust: Annotated[bool, Flag] = False,
    key: str = "",
    strip_prefix: str = "",
) -> None:
    """Write a PyTorch pickle, or renamed safetensors, as one safetensors file.

    Parameters
    ----------
    file
        A .pt, .pth or .bin file, or a safetensors file or folder.
    out
        The .safetensors file to write.
    trust
        Allow unpickling: only for files whose maker you trust.
    key
        Where in the pickle the weights are, such as state_dict.
    strip_prefix
        A prefix to take off every name, such as module.
    """
    from negmerge.convert import convert as run

    count = run(file, out, trust=trust, key=key, strip_prefix=strip_prefix)
    print(printable(f"{out}: {count} tensors, {human(out.stat().st_size)}"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit 0, 2 for bad input with one line about it, 130 if interrupted."""
    listen()
    try:
        with unattended():
            app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (NegMergeError, CycloptsError) as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        ignore()
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None


if __name__ == "__main__":
    main()
