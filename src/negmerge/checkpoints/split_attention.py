"""Attention that is stored as four layers Q, K, V and O, as in the checkpoints of the authors.

open_clip and torch store the first three as one tensor, `in_proj_weight`, and the last as
`out_proj`. `joined_attention` gives a state dict the names of open_clip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from negmerge.errors import FileError, quoted

SPLIT = re.compile(r"(?P<owner>(?:.*\.)?attn\.)(?P<part>[QKVO])\.(?P<kind>weight|bias)")
ATTENTION = re.compile(r"(?:.*\.)?attn\.(?:[QKVO]\.|in_proj_|out_proj\.)(?:weight|bias)")


def joined_attention(weights: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return weights by the names of open_clip; those that have no split attention unchanged.

    >>> import torch
    >>> split = {f"model.visual.0.attn.{k}.weight": torch.full((1, 1), ord(k)) for k in "QKVO"}
    >>> joined = joined_attention(split, "cars.pt")
    >>> {name: tensor.flatten().tolist() for name, tensor in joined.items()}
    {'visual.0.attn.in_proj_weight': [81, 75, 86], 'visual.0.attn.out_proj.weight': [79]}
    """
    if not any(SPLIT.fullmatch(name) for name in weights):
        return dict(weights)
    import torch

    prefix, found = clip_prefix(weights), dict[str, Any]()
    for name, tensor in weights.items():
        new = name
        if match := SPLIT.fullmatch(name):
            owner, part, kind = match["owner"], match["part"], match["kind"]
            if part == "O":
                new = f"{owner}out_proj.{kind}"
            else:
                parts = [f"{owner}{letter}.{kind}" for letter in "QKV"]
                _check_parts(weights, parts, where)
                if part != "Q":
                    continue
                new, tensor = f"{owner}in_proj_{kind}", torch.cat([weights[name] for name in parts])
        new = new.removeprefix(prefix)
        if new in found or (new != name and new in weights):
            raise FileError(
                f"{where}: {quoted(name)} becomes {quoted(new)}, which the file has too; remove "
                "one of them"
            )
        found[new] = tensor
    return found


def clip_prefix(weights: Mapping[str, Any]) -> str:
    """Return what stands before the names of open_clip, by the attention of one of its encoders.

    >>> clip_prefix({"head.weight": 0, "module.model.visual.0.attn.in_proj_weight": 0})
    'module.model.'
    >>> clip_prefix({"my.visual.copy.visual.transformer.0.attn.Q.weight": 0})
    'my.visual.copy.'
    """
    names = [name.split(".") for name in weights if ATTENTION.fullmatch(name)]
    for tower in ("visual", "transformer"):
        for parts in names:
            if tower in parts:
                last = len(parts) - parts[::-1].index(tower) - 1
                return "".join(f"{part}." for part in parts[:last])
    return ""


def _check_parts(weights: Mapping[str, Any], names: list[str], where: object) -> None:
    """Raise unless Q, K and V are there, with one shape and one number format."""
    missing = [name for name in names if name not in weights]
    if missing:
        present = next(name for name in names if name in weights)
        raise FileError(
            f"{where}: has {quoted(present)} but not {quoted(missing[0])}; wanted Q, K and V of "
            "each attention layer"
        )
    first = weights[names[0]]
    for name in names:
        own = weights[name]
        if own.dim() == 0 or (own.shape, own.dtype) != (first.shape, first.dtype):
            raise FileError(
                f"{where} {quoted(name)}: is {own.dtype} {tuple(own.shape)}, {quoted(names[0])} is "
                f"{first.dtype} {tuple(first.shape)}; wanted Q, K and V of one shape and format"
            )
