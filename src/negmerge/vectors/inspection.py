"""The content of a patch, a checkpoint or an adapter, as data and as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from negmerge.checkpoints.adapter import Adapter, is_adapter_folder
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.state_dict import PathLike
from negmerge.support.terminal import escape_markup
from negmerge.vectors.patch import FORMATS, local_patch
from negmerge.vectors.task_vector import TaskVector
from negmerge.vectors.values import loss_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def inspect(path: PathLike) -> dict[str, Any]:
    """Describe a patch, a checkpoint or an adapter as plain data."""
    path = local_patch(path, or_model=True)
    if is_adapter_folder(path):
        with Adapter(path) as adapter:
            return describe_adapter(adapter)
    with Checkpoint(path, own=True) as file:
        if file.metadata.get("format") in FORMATS:
            return describe_patch(TaskVector.load(path))
        return describe_checkpoint(file)


def describe_patch(tau: TaskVector) -> dict[str, Any]:
    """The content and the origin of a task vector as plain data."""
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
        "values": origin.values,
        "base": origin.base,
        "members": origin.members,
        "dissent_sampled": origin.sampled,
        "pairwise_agreement": origin.pairwise,
        "chance_unanimous": 2.0 ** (1 - origin.n),
        "digests": origin.digests,
        "versions": origin.versions,
        "kept": origin.kept,
        "tied": origin.tied,
        "include": origin.include,
        "exclude": origin.exclude,
        "factors": origin.factors,
        **({"reshaped": origin.reshaped} if origin.reshaped else {}),
        **({"hub": origin.hub} if origin.hub else {}),
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
    """The content of a checkpoint as plain data, from the headers of its files.

    >>> import numpy as np
    >>> from negmerge.checkpoints.state_dict import StateDict
    >>> describe_checkpoint(StateDict({"w": np.zeros((2, 3), np.float32)}, "model"))["formats"]
    {'F32': 6}
    """
    formats: Counter[str] = Counter()
    for info in model.tensors.values():
        formats[info.dtype] += info.elements
    return {
        "kind": "checkpoint",
        "files": [path.name for path in model.files],
        "bytes": model.nbytes,
        "elements": formats.total(),
        "formats": dict(formats),
        "metadata": model.metadata,
        "tensors": {
            name: {"elements": i.elements, "shape": list(i.shape), "dtype": i.dtype}
            for name, i in sorted(model.tensors.items())
        },
    }


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """The content of an adapter as plain data."""
    changes = adapter.modules
    return {
        "kind": "adapter",
        "files": [path.name for path in adapter.files],
        "bytes": adapter.nbytes,
        "base": adapter.base_name,
        "elements": sum(info.elements for info in adapter.tensors.values()),
        "changes": sum(prod(c.a.shape[1:]) * c.b.shape[0] for c in changes.values())
        + sum(info.elements for info in adapter.full.values()),
        "use_rslora": adapter.config.get("use_rslora") is True,
        "transposed": adapter.transposed,
        "modules": {
            name: {
                "rank": change.rank,
                "alpha": change.alpha,
                "scaling": change.scaling,
                "inputs": prod(change.a.shape[1:]),
                "outputs": change.b.shape[0],
                "dtype": change.a.dtype,
            }
            for name, change in sorted(changes.items())
        },
        "full": {
            name: {"elements": i.elements, "shape": list(i.shape), "dtype": i.dtype}
            for name, i in sorted(adapter.full.items())
        },
    }


def render(found: dict[str, Any]) -> list[RenderableType]:
    """Tables for the terminal, from the result of `inspect`."""
    kinds = {"patch": _render_patch, "adapter": _render_adapter, "checkpoint": _render_checkpoint}
    return kinds[found["kind"]](found)


def _render_patch(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table

    options = ", ".join(f"{k}={v}" for k, v in found["options"].items())
    facts = {
        "rule": found["rule"] + (f" ({options})" if options else ""),
        "members": str(found["n"]),
        "elements": f"{found['elements']:,} in {len(found['tensors'])} tensors",
        "not zero": f"{found['nonzero']:,}",
        "zero": f"{found['sparsity']:.2%} of elements, "
        f"{found['sparsity_tensor_mean']:.2%} as the mean of tensors",
        **(
            {
                "agreement": f"{found['pairwise_agreement']:.2%} of pairs of signs (by chance 50 "
                f"%); all members agree by chance in {found['chance_unanimous']:.2%} of elements"
            }
            if found["pairwise_agreement"] is not None
            else {}
        ),
        "norm": f"{found['norm']:.6g}",
        **({"rounded": loss_text(found["values"])} if found["values"] else {}),
        **({"included": ", ".join(found["include"])} if found["include"] else {}),
        **({"excluded": ", ".join(found["exclude"])} if found["exclude"] else {}),
        **(
            {
                "equalised": f"the members were scaled to one norm, by factors from "
                f"{min(found['factors']):.4g} to {max(found['factors']):.4g}"
            }
            if found["factors"]
            else {}
        ),
        **(
            {"tied": ", ".join(f"{k} = {v}" for k, v in found["tied"].items())}
            if found["tied"]
            else {}
        ),
        **({"reshaped": ", ".join(found["reshaped"])} if "reshaped" in found else {}),
        "base": found["base"],
        **({"on the Hub": _hub_text(found["hub"])} if "hub" in found else {}),
        "made with": ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
    }
    tables: list[RenderableType] = [_facts(facts)]
    for group in ("depth", "component"):
        table = Table(group, "tensors", "elements", "not zero", "zero %", "tensor mean %")
        for column in table.columns[1:]:
            column.justify = "right"
        for name in sorted(found[group], key=natural_key):
            row = found[group][name]
            table.add_row(
                escape_markup(name),
                str(row["tensors"]),
                f"{row['elements']:,}",
                f"{row['nonzero']:,}",
                f"{100 * row['element_weighted']:.2f}",
                f"{100 * row['tensor_mean']:.2f}",
            )
        tables.append(table)
    members = _member_table(found)
    return [*tables, members] if members is not None else tables


def _hub_text(sources: Mapping[str, str]) -> str:
    """Where the models of a patch come from."""
    names = {k: "base" if k == "base" else f"member {int(k) + 1}" for k in sources}
    return ", ".join(f"{names[key]} {source}" for key, source in sources.items())


def _member_table(found: dict[str, Any]) -> RenderableType | None:
    """What is known of each member: how often it alone disagreed, and its factor."""
    from rich.table import Table

    vetoes, factors = any("sole_dissent" in m for m in found["members"]), found["factors"]
    if not vetoes and not factors:
        return None
    exact = found["dissent_sampled"] == found["elements"]
    how = "all elements" if exact else f"a sample of {found['dissent_sampled']:,} elements"
    table = Table("member", title=f"vetoes in {how}" if vetoes else None)
    if vetoes:
        table.add_column("sole dissenter %", justify="right")
    if factors:
        table.add_column("factor", justify="right")
    table.add_column("fingerprint")
    for k, member in enumerate(found["members"]):
        share = [f"{100 * member.get('sole_dissent', 0):.3f}"] if vetoes else []
        factor = [f"{factors[k]:.6g}"] if factors else []
        name, own = escape_markup(member["name"]), escape_markup(member["fingerprint"])
        table.add_row(name, *share, *factor, own)
    return table


def _facts(rows: Mapping[str, str]) -> RenderableType:
    """Two columns: labels and values, which are escaped."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for label, value in rows.items():
        table.add_row(f"[bold]{label}[/]", escape_markup(value))
    return table


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that orders numbers by value, before words.

    >>> sorted(["none", "10", "9", "layer10.0", "layer9.1"], key=natural_key)
    ['9', '10', 'layer9.1', 'layer10.0', 'none']
    """
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(False, int(p), "") if p.isdecimal() else (True, 0, p) for p in parts]


def _render_adapter(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table

    ranks = sorted({row["rank"] for row in found["modules"].values()})
    facts = {
        "adapter": "LoRA, rank-stabilised" if found["use_rslora"] else "LoRA",
        "base": found["base"] or "not named",
        "bytes": f"{found['bytes']:,}",
        "rank": ", ".join(map(str, ranks)) or "none",
        "elements": f"{found['elements']:,}, which change {found['changes']:,} weights of "
        f"{len(found['modules']) + len(found['full'])} tensors",
    }
    table = Table("module", "rank", "alpha", "scaling", "inputs", "outputs", "dtype")
    for column in table.columns[1:6]:
        column.justify = "right"
    for name, row in found["modules"].items():
        numbers = [f"{row[key]:g}" for key in ("rank", "alpha", "scaling")]
        sizes = [f"{row[key]:,}" for key in ("inputs", "outputs")]
        table.add_row(escape_markup(name), *numbers, *sizes, row["dtype"])
    tables: list[RenderableType] = [_facts(facts), table]
    if found["full"]:
        table = Table("whole tensor", "dtype", "shape", "elements")
        for name, row in found["full"].items():
            table.add_row(
                escape_markup(name), row["dtype"], str(tuple(row["shape"])), f"{row['elements']:,}"
            )
        tables.append(table)
    return tables


def _render_checkpoint(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table

    formats = ", ".join(f"{k} {v:,}" for k, v in found["formats"].items())
    facts = {
        "files": ", ".join(found["files"]),
        "bytes": f"{found['bytes']:,}",
        "elements": f"{found['elements']:,} in {len(found['tensors'])} tensors ({formats})",
    }
    table = Table("tensor", "dtype", "shape", "elements")
    table.columns[3].justify = "right"
    for name, row in found["tensors"].items():
        table.add_row(
            escape_markup(name), row["dtype"], str(tuple(row["shape"])), f"{row['elements']:,}"
        )
    return [_facts(facts), table]
