"""The pools that `engine.py` merges: image towers in float32, language models in 16 bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "negmerge-bench"
Shapes = dict[str, tuple[int, ...]]
Pool = tuple[Path, list[Path]]
"""A base and its fine-tuned models."""


def vit_b32(layers: int = 12, width: int = 768) -> Shapes:
    """Shapes of CLIP's ViT-B/32 image tower: 87.8 M parameters."""
    shapes: Shapes = {
        "class_embedding": (width,),
        "positional_embedding": (50, width),
        "proj": (width, 512),
        "conv1.weight": (width, 3, 32, 32),
    }
    shapes |= {f"ln_{p}.{k}": (width,) for p in ("pre", "post") for k in ("weight", "bias")}
    for i in range(layers):
        block = f"transformer.resblocks.{i}."
        shapes |= {
            block + "ln_1.weight": (width,),
            block + "ln_1.bias": (width,),
            block + "attn.in_proj_weight": (3 * width, width),
            block + "attn.in_proj_bias": (3 * width,),
            block + "attn.out_proj.weight": (width, width),
            block + "attn.out_proj.bias": (width,),
            block + "ln_2.weight": (width,),
            block + "ln_2.bias": (width,),
            block + "mlp.c_fc.weight": (4 * width, width),
            block + "mlp.c_fc.bias": (4 * width,),
            block + "mlp.c_proj.weight": (width, 4 * width),
            block + "mlp.c_proj.bias": (width,),
        }
    return shapes


def llama(layers: int = 17, width: int = 1024, inner: int = 2816, words: int = 32768) -> Shapes:
    """Shapes of a Llama with tied embeddings; 252 M parameters by default."""
    shapes: Shapes = {"model.embed_tokens.weight": (words, width), "model.norm.weight": (width,)}
    for i in range(layers):
        block = f"model.layers.{i}."
        shapes |= {block + f"self_attn.{k}_proj.weight": (width, width) for k in "qkvo"}
        shapes |= {block + f"mlp.{k}_proj.weight": (inner, width) for k in ("gate", "up")}
        shapes[block + "mlp.down_proj.weight"] = (width, inner)
        shapes[block + "input_layernorm.weight"] = (width,)
        shapes[block + "post_attention_layernorm.weight"] = (width,)
    return shapes


def make_pool(
    folder: Path, shapes: Shapes, n: int, kind: torch.dtype = torch.float32, shards: int = 1
) -> Pool:
    """Write random weights whose changes are partly shared, so that signs agree as in the paper.

    Models of one shard are single files, others are folders with an index. What was written before
    is used again.
    """
    done = folder / "done"
    suffix = ".safetensors" if shards == 1 else ""
    paths = [folder / f"{name}{suffix}" for name in ("base", *(f"m{k}" for k in range(n)))]
    if not done.exists() or int(done.read_text()) < n:
        folder.mkdir(parents=True, exist_ok=True)
        for k, path in enumerate(paths):
            if not path.exists():
                _write(path, shapes, _values(k, kind), shards)
        done.write_text(str(n))
    return paths[0], paths[1:]


@cache
def _normal() -> torch.Tensor:
    """Return a block of random numbers, from which all tensors take theirs: random enough, fast."""
    return torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))


def _values(k: int, kind: torch.dtype) -> Callable[[int, tuple[int, ...]], torch.Tensor]:
    """Return the values of one tensor of model k; model 0 is the base."""

    def normal(stream: int, number: int, count: int) -> torch.Tensor:
        block = _normal()
        at = (stream * 7_368_787 + number * 1_299_709) % block.numel()
        rolled = torch.cat([block[at:], block[:at]])
        return rolled.repeat(-(-count // block.numel()))[:count]

    def values(number: int, shape: tuple[int, ...]) -> torch.Tensor:
        count = prod(shape)
        found = normal(0, number, count) * 2e-2
        if k:
            found += normal(1, number, count) * 2e-4 + normal(k + 1, number, count) * 3e-4
        return found.reshape(shape).to(kind)

    return values


def _write(
    path: Path,
    shapes: Shapes,
    values: Callable[[int, tuple[int, ...]], torch.Tensor],
    shards: int,
) -> None:
    names = list(shapes)
    total, seen = sum(map(prod, shapes.values())), 0
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for number, name in enumerate(names):
        parts[min(shards - 1, seen * shards // total)][name] = values(number, shapes[name])
        seen += prod(shapes[name])
    if shards == 1:
        save_file(parts[0], path)
        return
    path.mkdir(exist_ok=True)
    files = [f"model-{j + 1:05}-of-{shards:05}.safetensors" for j in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, path / file, {"format": "pt"})
    weight_map = {name: f for f, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(_config(shapes), indent=2))


def _config(shapes: Shapes) -> dict[str, Any]:
    """Return the configuration by which other programs know a Llama."""
    words, width = shapes["model.embed_tokens.weight"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_attention_heads": 16,
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in shapes),
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": words,
    }


def make_holes(folder: Path, shapes: Shapes, n: int) -> Pool:
    """Write models of bfloat16 tensors that take almost no space on the disk.

    They are zero, but for the first number of the largest tensor, in which they differ: models that
    are equal would be read once more, to sort them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.safetensors" for name in ("base", *(f"m{k}" for k in range(n)))]
    tensors: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        tensors[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    largest = max(tensors, key=lambda name: prod(shapes[name]))
    place = 8 + len(header) + tensors[largest]["data_offsets"][0]
    for number, path in enumerate(paths):
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)
            file.seek(place)
            file.write((0x3F80 + number).to_bytes(2, "little"))  # 1 and the next numbers
    return paths[0], paths[1:]


def files_of(paths: list[Path]) -> list[Path]:
    """Return the safetensors files of models."""
    return [
        file for p in paths for file in ([p] if p.is_file() else sorted(p.glob("*.safetensors")))
    ]
