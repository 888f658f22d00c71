"""The verbs of the command line: functions that import other modules when they are called."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import copysign
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, Token
from rich.filesize import decimal

from negmerge import plugins
from negmerge.cli.arguments import fraction, key_values, signed_scale, size
from negmerge.cli.listing import KINDS, Kind, listing_table
from negmerge.errors import NegMergeError, OptionError, printable
from negmerge.support.interrupts import ignore_interrupts, raise_interrupts
from negmerge.support.progress import make_progress
from negmerge.support.terminal import print_result, print_tables, print_warning, without_stdin

if TYPE_CHECKING:
    from negmerge.paper.verdicts import Comparison
    from negmerge.vectors.output import Applied

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
    return Path(tokens[0].value)


_OUT = Parameter(name=["--out", "-o"], converter=_output_path)
Out = Annotated[Path, _OUT]
OptionalOut = Annotated[Path | None, _OUT]
Set = Annotated[list[str] | None, Parameter(name="--set", negative="")]
Options = Annotated[list[str] | None, Parameter(negative="")]
Seeds = Annotated[list[int] | None, Parameter(consume_multiple=True, negative="")]
Json = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Annotated[bool, Parameter(negative="")]


@app.command
def unlearn(
    recipe: str | None = None, /, *, out: OptionalOut = None, set_: Set = None, json_: Json = False
) -> None:
    """Make a classifier or a CLIP forget; a second call continues an interrupted run.

    Args:
        recipe: A YAML file or the name of a shipped recipe (`negmerge list recipes`); by default
            the demo.
        out: The run directory; by default runs/NAME.
        set_: Change a field of the recipe, as key=value with a dotted key; may be repeated.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.runs.pipeline import run

    with make_progress("json" if json_ else "auto") as progress:
        done = run(recipe, out, set_ or [], progress)
        if not done.has_page:
            from negmerge.reports.page import report

            report(done, progress)
    if json_:
        result = {"run": str(done.folder), "page": str(done.page), "scores": done.result.tree()}
        print(json.dumps({"event": "result"} | result))
        return
    from negmerge.reports.inspection import scores_table

    print_tables(scores_table(done.result))
    print(printable(f"run: {done.folder}   unlearned model: {done.unlearned}"))
    print(printable(f"page: {done.page}"))


@app.command
def report(run: Path, /) -> None:
    """Build the page of a run again; the run may be unfinished.

    Args:
        run: A run directory.
    """
    from negmerge.runs.store import open_run

    found = open_run(run)  # before imports that take seconds
    from negmerge.reports.page import report as build

    with make_progress() as progress:
        print(printable(f"page: {build(found, progress)}"))


@app.command
def reproduce(
    table: str,
    /,
    *,
    scale: Literal["desk", "paper"] = "desk",
    out: OptionalOut = None,
    set_: Set = None,
    seeds: Seeds = None,
    part: str | None = None,
    yes: Flag = False,
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
    from negmerge.paper.needs import measured_needs, needs
    from negmerge.paper.reproduction import rendered
    from negmerge.paper.reproduction import reproduce as make
    from negmerge.paper.trials import trials_of

    share = None if part is None else fraction(part, "--part")
    if scale == "paper":
        trials = trials_of(table, scale, set_ or [], seeds, share)
        print(printable(needs(table, scale, trials, share)))
        if not yes:
            with make_progress() as progress:
                print(printable(measured_needs(trials, progress)))
            print("Nothing was started; add --yes to start.")
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
def verify(run: Path, /) -> None:
    """Recompute every hash of a run's manifest.

    Args:
        run: A run directory, or its manifest.json.
    """
    from negmerge.runs.store import Run

    found = Run(run.parent if run.name == "manifest.json" else run)
    count = found.check_contents().verify()
    print(printable(f"{run}: {count} files match the manifest"))


@app.command
def merge(
    base: Path,
    /,
    *models: Path,
    out: Out,
    rule: str = "consensus",
    option: Options = None,
    buffers: Literal["keep", "merge"] = "keep",
    layout: Literal["auto", "sparse", "dense"] = "auto",
    values: Literal["keep", "float32", "bfloat16"] = "keep",
    negate: float | None = None,
    add: float | None = None,
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep",
    shard_size: str | None = None,
    workers: int | None = None,
    max_memory: str | None = None,
    device: str = "cpu",
    digest: Flag = False,
    allow_duplicates: Flag = False,
    dry_run: Flag = False,
    json_: Json = False,
) -> None:
    """Merge fine-tuned models into one sparse patch, or with --negate or --add into a model.

    Args:
        base: The model from which all others were fine-tuned: a .safetensors file or a folder.
        models: The fine-tuned models, files or folders.
        out: The patch to write; with --negate or --add the model, a .safetensors file or a folder.
        rule: The merge rule; `negmerge list rules` shows the rules and their options.
        option: An option of the rule, as key=value; may be repeated.
        buffers: Keep the base's BatchNorm statistics, or merge them like weights.
        layout: How tensors are stored; auto takes the smallest.
        values: Keep the values, or round them; bfloat16 halves the patch.
        negate: λ ≥ 0: write the model θ − λτ in one pass, and no patch.
        add: λ ≥ 0: write the model θ + λτ in one pass, and no patch.
        dtype: The format of the float tensors of the model.
        shard_size: Write the model as shards of at most this size, such as 5GB, with an index.
        workers: The number of threads; by default one per core.
        max_memory: The memory that the process may use, such as 500MB or 2GiB.
        device: The device that computes: cpu or cuda.
        digest: Record SHA-256 of every input file.
        allow_duplicates: Accept models with the same weights.
        dry_run: Write no patch; merge a small part to tell the bytes, the memory and the seconds.
        json_: Print progress and result as JSON lines.
    """
    begun = time.perf_counter()
    limit = None if max_memory is None else size(max_memory, "--max-memory")
    if negate is not None or add is not None:
        scale = signed_scale(negate, add)
        given = {"--layout": layout != "auto", "--values": values != "keep", "--digest": digest}
        given |= {"--dry-run": dry_run}
        for option_name, is_given in given.items():
            if is_given:
                raise OptionError(
                    f"{option_name}: is for patches, and --negate and --add write none; remove it"
                )
        from negmerge.merging.one_pass import merge_and_apply

        with make_progress("json" if json_ else "auto") as progress:
            done = merge_and_apply(
                base,
                models,
                scale,
                out,
                rule,
                key_values(option or []),
                dtype=dtype,
                shard_size=None if shard_size is None else size(shard_size, "--shard-size"),
                buffers=buffers,
                workers=workers,
                max_memory=limit,
                device=device,
                allow_duplicates=allow_duplicates,
                progress=progress,
            )
        _show_applied(done, scale, begun, json_)
        return
    if dtype != "keep" or shard_size is not None:
        raise OptionError("--dtype, --shard-size: are for models; add --negate λ or --add λ")
    from negmerge.checkpoints.checkpoint import Checkpoint
    from negmerge.merging.engine import merge as run
    from negmerge.merging.estimate import estimate
    from negmerge.vectors.values import loss_text

    if dry_run:
        need = estimate(
            base,
            models,
            rule,
            key_values(option or []),
            folder=out.absolute().parent,
            buffers=buffers,
            workers=workers,
            max_memory=limit,
            device=device,
            allow_duplicates=allow_duplicates,
        )
        print_result(
            asdict(need),
            f"{rule} of {len(models)}: reads {decimal(need.read_bytes)}, writes about "
            f"{decimal(need.patch_bytes)}, needs at most {decimal(need.memory)} of memory, takes "
            f"about {need.seconds:.1f} s (from merging {need.sampled:.1%} of the elements)",
            json_,
        )
        return
    with make_progress("json" if json_ else "auto") as progress:
        tau = run(
            base,
            models,
            rule,
            key_values(option or []),
            out=out,
            buffers=buffers,
            layout=layout,
            values=values,
            workers=workers,
            max_memory=limit,
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
        "values": tau.origin.values,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    print_result(
        result,
        f"{out}: {tau.origin.rule} of {tau.origin.n}, {tau.nonzero:,} of {tau.elements:,} elements "
        f"({tau.sparsity():.2%} zero), {decimal(result['bytes'])}, {result['seconds']:.1f} s",
        json_,
    )
    if tau.origin.values and not json_:
        print(f"{loss_text(tau.origin.values)}.")
    if 2 * held > base_bytes and not json_:
        formats = {entry.dtype for entry in tau.entries.values()}
        stored = "bfloat16 values, 2 bytes" if "BF16" in formats else "float32 values, 4 bytes"
        stored = "float64 values, 8 bytes" if "F64" in formats else stored
        print(
            f"The patch has {decimal(held)} of tensors, the base has {decimal(base_bytes)}: the "
            f"patch stores {stored} each, for the {1 - tau.sparsity():.1%} that are not zero."
        )
    if not tau.nonzero:
        print_warning("the patch has only zeros; applying it changes nothing")


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

    Args:
        base: The model from which the patch was made.
        patch: A file that `negmerge merge` wrote.
        out: A .safetensors file, or a folder, which also gets the base's configuration files and a
            new README.md.
        negate: λ ≥ 0: forget, θ − λτ.
        add: λ ≥ 0: learn, θ + λτ.
        dtype: The format of the float tensors.
        shard_size: Write a folder of shards of at most this size, such as 5GB, with an index.
        workers: The number of threads; by default one per core.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.vectors.apply import apply as run
    from negmerge.vectors.task_vector import TaskVector

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
    _show_applied(done, scale, begun, json_)


def _show_applied(done: Applied, scale: float, begun: float, as_json: bool) -> None:
    """Print the result of a command that wrote a model, and warn about what is not in it."""
    from negmerge.checkpoints.dtypes import FLOAT_NAMES

    result = {
        "out": str(done.out),
        "scale": scale,
        "bytes": done.nbytes,
        "nonzero": done.nonzero,
        "changed": done.changed,
        "clamped": done.clamped,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    print_result(
        result,
        f"{done.out}: θ {'−' if copysign(1, scale) < 0 else '+'} {abs(scale):g}·τ, "
        f"{done.changed:,} elements changed, {decimal(done.nbytes)}, {result['seconds']:.1f} s",
        as_json,
    )
    if done.changed < 0.99 * done.nonzero and scale:
        share = done.changed / done.nonzero
        formats = {short: name for name, short in FLOAT_NAMES.items()}
        lost = ", ".join(f"{n:,} are too small for {formats[f]}" for f, n in done.lost.items())
        coarse = done.lost.keys() & {"BF16", "F16"}
        remedy = "; --dtype float32 keeps more of them" if coarse else ""
        print_warning(f"only {share:.1%} of the changes are in the output: {lost}{remedy}")
    if done.clamped:
        print_warning(f"{done.clamped} BatchNorm variances would be negative and were set to zero")


@app.command
def inspect(file: Path, /, *, json_: Json = False) -> None:
    """Show the content of a patch or a checkpoint, or the scores of a run.

    Args:
        file: A patch, a checkpoint file or folder, or a run directory.
        json_: Print JSON instead of tables.
    """
    from negmerge.runs.store import is_run, open_run

    if is_run(file):
        run = open_run(file)
        from negmerge.reports.inspection import contents_of, progress_text, scores_table

        contents = contents_of(run)
        if json_:
            print(json.dumps(contents))
        elif run.finished:
            print_tables(scores_table(run.result))
        else:
            progress = progress_text(contents)
            print_tables([f"the run is not finished (it has no manifest); it has {progress}"])
        return
    from negmerge.vectors.inspection import inspect as describe
    from negmerge.vectors.inspection import render

    found = describe(file)
    print(json.dumps(found)) if json_ else print_tables(render(found))


@app.command(name="list")
def list_(what: Kind, /, *, json_: Json = False) -> None:
    """List the names of rules, data sets and so on, with a summary of each.

    Args:
        what: The kind of name.
        json_: Print JSON instead of a table.
    """
    found = KINDS[what]()
    print(json.dumps(found)) if json_ else print_tables([listing_table(what, found)])


@app.command
def convert(
    file: Path, /, *, out: Out, trust: Flag = False, key: str = "", strip_prefix: str = ""
) -> None:
    """Convert a PyTorch pickle, or safetensors with other names, to one safetensors file.

    Args:
        file: A .pt, .pth or .bin file, or a safetensors file or folder.
        out: The .safetensors file to write.
        trust: Allow unpickling; only for files whose source you trust.
        key: The key of the weights in the pickle, such as state_dict.
        strip_prefix: A prefix that is removed from every name, such as module.
    """
    from negmerge.checkpoints.convert import convert as run

    count = run(file, out, trust=trust, key=key, strip_prefix=strip_prefix)
    print(printable(f"{out}: {count} tensors, {decimal(out.stat().st_size)}"))


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
