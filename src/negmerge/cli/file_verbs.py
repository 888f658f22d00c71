"""The verbs of checkpoints and patches: they import other modules when they are called."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import copysign
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.filesize import decimal

from negmerge.cli.app import Flag, Given, Json, Options, Out, RuleName, Set, app
from negmerge.cli.arguments import executor_settings, key_values, place, signed_scale, size
from negmerge.errors import OptionError, printable
from negmerge.support.compiler import start_compiler
from negmerge.support.progress import Progress, make_progress
from negmerge.support.terminal import print_result, print_tables, print_warning

if TYPE_CHECKING:
    from negmerge.runs.executors.settings import ExecutorSettings
    from negmerge.vectors.output import Applied
    from negmerge.vectors.task_vector import TaskVector


@app.command
def merge(
    base: Given,
    /,
    *models: Given,
    out: Out,
    rule: RuleName = "consensus",
    option: Options = None,
    include: Options = None,
    exclude: Options = None,
    buffers: Literal["keep", "merge"] = "keep",
    equalise: Flag = False,
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
    set_: Set = None,
    dry_run: Flag = False,
    json_: Json = False,
) -> None:
    """Merge fine-tuned models into one sparse patch, or with --negate or --add into a model.

    Args:
        base: The model from which all others were fine-tuned: a .safetensors file or a folder, or
            the URL of one.
        models: The fine-tuned models, files, folders or URLs; a URL may have a *. A folder may also
            have a LoRA adapter for the base.
        out: The patch to write; with --negate or --add the model, a .safetensors file or a folder.
        rule: The merge rule; `negmerge list rules` shows the rules and their options.
        option: An option of the rule, as key=value; may be repeated.
        include: A pattern of the names of tensors to merge, such as 'model.layers.*'; may be
            repeated. All others stay as they are.
        exclude: A pattern of the names of tensors that stay as they are, such as '*embed*'; may be
            repeated.
        buffers: Keep the base's BatchNorm statistics, or merge them like weights.
        equalise: Scale all members to one norm before the rule, so that longer steps alone give
            none more say; reads the models once more.
        layout: How tensors are stored; auto takes the smallest.
        values: Keep the values, or round them; bfloat16 halves the patch.
        negate: λ ≥ 0: write the model θ − λτ in one pass, and no patch.
        add: λ ≥ 0: write the model θ + λτ in one pass, and no patch.
        dtype: The format of the float tensors of the model.
        shard_size: Write the model as shards of at most this size, such as 5GB, with an index.
        workers: The number of threads, by default one per core; on a cluster the number of ranges
            at a time, by default one per machine.
        max_memory: The memory that the process, or each process of a cluster, may use, such as
            500MB or 2GiB.
        device: The device that computes: cpu or cuda.
        digest: Record SHA-256 of every input file.
        allow_duplicates: Accept models with the same weights.
        set_: executor.kind=ray merges on a Ray cluster whose machines see all files;
            executor.address and other fields of the executor say which; may be repeated.
        dry_run: Write no patch; merge a small part to tell the bytes, the memory and the seconds.
        json_: Print progress and result as JSON lines.
    """
    begun = time.perf_counter()
    start_compiler()
    base_place, pool = place(base), [*map(place, models)]
    limit = None if max_memory is None else size(max_memory, "--max-memory")
    settings = executor_settings(set_ or [])
    chosen = {"include": include or [], "exclude": exclude or [], "buffers": buffers}
    chosen |= {"equalise": equalise}
    if negate is not None or add is not None:
        scale = signed_scale(negate, add)
        given = {"--layout": layout != "auto", "--values": values != "keep", "--digest": digest}
        given |= {"--dry-run": dry_run}
        for option_name, is_given in given.items():
            if is_given:
                raise OptionError(
                    f"{option_name}: is for patches, and --negate and --add write none; remove it"
                )
        with (
            make_progress("json" if json_ else "auto") as progress,
            _on(settings, out, workers, progress) as (_, run_and_apply, where),
        ):
            done = run_and_apply(
                base_place,
                pool,
                scale,
                out,
                rule,
                key_values(option or []),
                dtype=dtype,
                shard_size=None if shard_size is None else size(shard_size, "--shard-size"),
                max_memory=limit,
                device=device,
                allow_duplicates=allow_duplicates,
                progress=progress,
                **chosen,
                **where,
            )
        _show_applied(done, scale, begun, json_)
        return
    if dtype != "keep" or shard_size is not None:
        raise OptionError("--dtype, --shard-size: are for models; add --negate λ or --add λ")
    from negmerge.checkpoints.checkpoint import Checkpoint
    from negmerge.checkpoints.remote import expand
    from negmerge.merging.estimate import estimate
    from negmerge.vectors.values import loss_text

    if dry_run:
        need = estimate(
            base_place,
            pool,
            rule,
            key_values(option or []),
            folder=out.absolute().parent,
            workers=workers,
            max_memory=limit,
            device=device,
            allow_duplicates=allow_duplicates,
            **chosen,
        )
        print_result(
            asdict(need),
            f"{rule} of {len(expand(pool))}: reads {decimal(need.read_bytes)}, writes about "
            f"{decimal(need.patch_bytes)}, needs at most {decimal(need.memory)} of memory, takes "
            f"about {need.seconds:.1f} s (from merging {need.sampled:.1%} of the elements)",
            json_,
        )
        return
    with (
        make_progress("json" if json_ else "auto") as progress,
        _on(settings, out, workers, progress) as (run, _, where),
    ):
        tau = run(
            base_place,
            pool,
            rule,
            key_values(option or []),
            out=out,
            layout=layout,
            values=values,
            max_memory=limit,
            device=device,
            allow_duplicates=allow_duplicates,
            digest=digest,
            progress=progress,
            **chosen,
            **where,
        )
    with Checkpoint(base_place) as model:
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


@contextmanager
def _on(
    settings: ExecutorSettings | None, out: Path, workers: int | None, progress: Progress
) -> Iterator[tuple[Callable[..., TaskVector], Callable[..., Applied], dict[str, Any]]]:
    """The functions that merge in this process or on a cluster, and their last arguments."""
    if settings is None or settings.kind == "local":
        from negmerge.merging.engine import merge as run
        from negmerge.merging.one_pass import merge_and_apply

        yield run, merge_and_apply, {"workers": workers}
        return
    from negmerge.runs.ranges import cluster_for, merge_and_apply_on, merge_on

    cluster, ranges = cluster_for(out, settings, workers, progress)
    with cluster:
        given = partial(merge_on, cluster), partial(merge_and_apply_on, cluster)
        yield *given, {"ranges": ranges}


@app.command
def apply(
    base: Given,
    patch: Given,
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
    start_compiler()
    from negmerge.vectors.apply import apply as run
    from negmerge.vectors.task_vector import TaskVector

    scale = signed_scale(negate, add)
    begun = time.perf_counter()
    with make_progress("json" if json_ else "auto") as progress:
        done = run(
            place(base),
            scale * TaskVector.load(place(patch)),
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
def inspect(file: Given, /, *, json_: Json = False) -> None:
    """Show the content of a patch, a checkpoint or an adapter, or the scores of a run.

    Args:
        file: A patch, a checkpoint file or folder, the folder of an adapter, the URL of one, or a
            run directory.
        json_: Print JSON instead of tables.
    """
    from negmerge.runs.store import is_run, open_run

    where = place(file)
    if isinstance(where, Path) and is_run(where):
        run = open_run(where)
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

    found = describe(where)
    print(json.dumps(found)) if json_ else print_tables(render(found))


@app.command
def convert(
    file: Given, /, *, out: Out, trust: Flag = False, key: str = "", strip_prefix: str = ""
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

    count = run(place(file), out, trust=trust, key=key, strip_prefix=strip_prefix)
    print(printable(f"{out}: {count} tensors, {decimal(out.stat().st_size)}"))
