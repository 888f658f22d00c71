"""The verb that writes a patch as a LoRA adapter."""

from __future__ import annotations

import time

from rich.filesize import decimal

from negmerge.cli.app import Given, Json, Out, app
from negmerge.cli.arguments import place, signed_scale
from negmerge.support.terminal import print_result, print_warning


@app.command
def adapter(
    patch: Given,
    /,
    *,
    out: Out,
    rank: int,
    negate: float | None = None,
    add: float | None = None,
    base_name: str = "",
    json_: Json = False,
) -> None:
    """Write minus (or plus) λ times a patch as a LoRA adapter for the base, with its error.

    Args:
        patch: A file that `negmerge merge` wrote.
        out: The folder to write, which PeftModel.from_pretrained loads.
        rank: The rank of every matrix; a larger rank has a smaller error.
        negate: λ ≥ 0: the base with the adapter forgets, θ − λτ.
        add: λ ≥ 0: the base with the adapter learns, θ + λτ.
        base_name: The name of the base that peft loads, such as a Hub id.
        json_: Print the result as JSON.
    """
    from negmerge.vectors.adapter_output import save_adapter
    from negmerge.vectors.task_vector import TaskVector

    begun, scale = time.perf_counter(), signed_scale(negate, add)
    done = save_adapter(scale * TaskVector.load(place(patch)), out, rank, base_name)
    result = {
        "out": str(out),
        "scale": scale,
        "rank": rank,
        "bytes": done.nbytes,
        "error": done.error,
        "errors": done.errors,
        "left_out": done.left_out,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    worst = max(done.errors, key=lambda name: done.errors[name])
    print_result(
        result,
        f"{out}: LoRA of rank {rank} for {len(done.errors) - len(done.left_out)} modules, "
        f"{decimal(done.nbytes)}, relative error {done.error:.3g} "
        f"(at most {done.errors[worst]:.3g}, {worst}), {result['seconds']:.1f} s",
        json_,
    )
    if done.left_out:
        print_warning(
            f"{len(done.left_out)} tensors are no matrices of modules and are left out, first "
            f"{done.left_out[0]}; --exclude them from the merge to be without their part"
        )
