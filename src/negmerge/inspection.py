"""What is in a file: a patch or a checkpoint, as data and as tables."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from negmerge.checkpoint import Checkpoint
from negmerge.patch import FORMAT
from negmerge.task_vector import TaskVector
from negmerge.terminal import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

PathLike = str | os.PathLike[str]


def inspect(path: PathLike) -> dict[str, Any]:
    """Describe a patch or a checkpoint as plain data.

    >>> import negmerge as nm
    >>> base, pool = getfixture("small_pool")
    >>> inspect(base)["kind"]
    'checkpoint'
    """
    with Checkpoint(path, own=True) as file:
        if file.metadata.get("format") == FORMAT:
            return describe_patch(TaskVector.load(path))
        return describe_checkpoint(file)


def describe_patch(tau: TaskVector) -> dict[str, Any]:
    """What a patch holds and where it came from."""
    origin = tau.origin
    return {
        "kind": "patch",
        "rule": origin.rule,
        "options": origin.options,
        "n": origin.n,
        "elements": tau.elements,
        "nonzero": tau.nonzero,
        "sparsity": tau.sparsity(),
        "sparsity_tensor_mean": tau.sparsity(by="tensor_mean"),
        "norm": tau.norm(),
        "base": origin.base,
        "members": origin.members,
        "dissent_sampled": origin.sampled,
        "digests": origin.digests,
        "versions": origin.versions,
        "kept": origin.kept,
        "depth": {k: asdict(v) for k, v in tau.sparsity(by="depth").items()},
        "component": {k: asdict(v) for k, v in tau.sparsity(by="component").items()},
        "tensors": {
            name: {
                "elements": e.elements,
                "nonzero": e.nonzero,
                "shape": list(e.shape),
                "dtype": e.dtype,
                "layout": e.layout,
            }
            for name, e in tau.entries.items()
        },
    }


def describe_checkpoint(model: Checkpoint) -> dict[str, Any]:
    """What a checkpoint holds, from its headers alone."""
    formats: dict[str, int] = {}
    for info in model.tensors.values():
        formats[info.dtype] = formats.get(info.dtype, 0) + info.elements
    return {
        "kind": "checkpoint",
        "files": [path.name for path in model.files],
        "bytes": model.nbytes,
        "elements": sum(info.elements for info in model.tensors.values()),
        "formats": formats,
        "metadata": model.metadata,
        "tensors": {
            name: {"elements": i.elements, "shape": list(i.shape), "dtype": i.dtype}
            for name, i in sorted(model.tensors.items())
        },
    }


def render(found: dict[str, Any]) -> list[RenderableType]:
    """Tables for the terminal."""
    return _render_patch(found) if found["kind"] == "patch" else _render_checkpoint(found)


def _render_patch(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table

    options = ", ".join(f"{k}={v}" for k, v in found["options"].items())
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("rule", plain(found["rule"] + (f" ({options})" if options else ""))),
        ("members", str(found["n"])),
        ("elements", f"{found['elements']:,} in {len(found['tensors'])} tensors"),
        ("not zero", f"{found['nonzero']:,}"),
        (
            "zero",
            f"{found['sparsity']:.2%} of elements, "
            f"{found['sparsity_tensor_mean']:.2%} as the mean of tensors",
        ),
        ("norm", f"{found['norm']:.6g}"),
        ("base", plain(found["base"])),
        ("made with", plain(", ".join(f"{k} {v}" for k, v in found["versions"].items()))),
    ):
        facts.add_row(f"[bold]{label}[/]", value)
    shown_tables: list[RenderableType] = [facts]
    for group in ("depth", "component"):
        rows = sorted(found[group].items(), key=lambda kv: natural(kv[0]))
        table = Table(group, "tensors", "elements", "not zero", "zero %", "tensor mean %")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, row in rows:
            table.add_row(
                plain(name),
                str(row["tensors"]),
                f"{row['elements']:,}",
                f"{row['nonzero']:,}",
                f"{100 * row['element_weighted']:.2f}",
                f"{100 * row['tensor_mean']:.2f}",
            )
        shown_tables.append(table)
    if any("sole_dissent" in m for m in found["members"]):
        exact = found["dissent_sampled"] == found["elements"]
        how = "all elements" if exact else f"a sample of {found['dissent_sampled']:,} elements"
        table = Table("member", "sole dissenter %", "fingerprint", title=f"vetoes, from {how}")
        table.columns[1].justify = "right"
        for member in found["members"]:
            table.add_row(
                plain(member["name"]),
                f"{100 * member.get('sole_dissent', 0):.3f}",
                plain(member["fingerprint"]),
            )
        shown_tables.append(table)
    return shown_tables


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts numbers by value, before words.

    >>> sorted(["none", "10", "9", "layer10.0", "layer9.1"], key=natural)
    ['9', '10', 'layer9.1', 'layer10.0', 'none']
    """
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(False, int(p), "") if p.isdecimal() else (True, 0, p) for p in parts]


def _render_checkpoint(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    formats = ", ".join(f"{k} {v:,}" for k, v in found["formats"].items())
    for label, value in (
        ("files", ", ".join(map(plain, found["files"]))),
        ("bytes", f"{found['bytes']:,}"),
        ("elements", f"{found['elements']:,} in {len(found['tensors'])} tensors ({formats})"),
    ):
        facts.add_row(f"[bold]{label}[/]", value)
    table = Table("tensor", "dtype", "shape", "elements")
    table.columns[3].justify = "right"
    for name, row in found["tensors"].items():
        table.add_row(plain(name), row["dtype"], str(tuple(row["shape"])), f"{row['elements']:,}")
    return [facts, table]
