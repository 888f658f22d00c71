"""Conversion of a CLIP folder of the library `transformers` to open_clip's names and fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from negmerge.errors import OptionError

RENAMED = (
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual.conv1."),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),  # transformers spells it so
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (r"^text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_model\.final_layer_norm\.", "ln_final."),
    (r"^text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"^visual_projection\.weight$", "visual.proj"),
    (r"^text_projection\.weight$", "text_projection"),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.self_attn\.[qkv]_proj\.", ".attn.in_proj_"),
    (r"\.layer_norm(\d)\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
)
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TEXT = VISION | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}
"""Values of fields that a configuration leaves out."""
BILINEAR, BICUBIC = 2, 3
"""The numbers of Pillow's filters."""
OLD_END = 2
"""The `eos_token_id` of old configurations, whatever the number of the end token is. transformers
then pools the token with the largest number in the sentence, as open_clip does."""


def renamed(name: str) -> str:
    """Return the name that open_clip gives to a tensor.

    >>> renamed("vision_model.encoder.layers.3.self_attn.k_proj.bias")
    'visual.transformer.resblocks.3.attn.in_proj_bias'
    """
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return name


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a file to open_clip's names and shapes.

    Query, key and value projections become one tensor, and the output projections are transposed.

    >>> translated({"visual_projection.weight": torch.zeros(2, 3)})["visual.proj"].shape
    torch.Size([3, 2])
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("position_ids"):
            continue
        if (match := re.search(r"\.self_attn\.([qkv])_proj\.", name)) is not None:
            if match[1] != "q":
                continue
            parts = [tensors.get(name.replace(".q_proj.", f".{k}_proj.")) for k in "qkv"]
            if any(part is None for part in parts):
                raise OptionError(f"{name}: the file has no key or value projection beside it")
            tensor = torch.cat([part for part in parts if part is not None])
        elif name in ("visual_projection.weight", "text_projection.weight"):
            tensor = tensor.T.contiguous()
        found[renamed(name)] = tensor
    return found


def model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a `config.json` to the `model_cfg` of open_clip.

    >>> model_config({"model_type": "clip"})["quick_gelu"]
    True
    """
    if config.get("model_type") != "clip":
        raise OptionError(f"model_type: got {config.get('model_type')!r}, wanted 'clip'")
    vision = VISION | (config.get("vision_config") or {})
    text = TEXT | (config.get("text_config") or {})
    activation, end = vision["hidden_act"], text["eos_token_id"]
    if activation != text["hidden_act"] or activation not in ("gelu", "quick_gelu"):
        raise OptionError(
            f"hidden_act: got {activation!r} in vision_config and {text['hidden_act']!r} in "
            "text_config, wanted 'gelu' or 'quick_gelu' in both"
        )
    usual_end = end in (OLD_END, text["vocab_size"] - 1)
    return {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": activation == "quick_gelu",
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "width": vision["hidden_size"],
            "layers": vision["num_hidden_layers"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            **_blocks(vision),
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "layers": text["num_hidden_layers"],
            **_blocks(text),
            **({} if usual_end else {"pool_type": "eos", "eos_id": end}),
        },
    }


def _blocks(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of the MLPs, and the layer norms if they are not the usual ones."""
    ratio, eps = encoder["intermediate_size"] / encoder["hidden_size"], encoder["layer_norm_eps"]
    usual = eps == VISION["layer_norm_eps"]
    return {"mlp_ratio": ratio} | ({} if usual else {"norm_kwargs": {"eps": eps}})


def preprocess_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a `preprocessor_config.json` to the `preprocess_cfg` of open_clip.

    >>> preprocess_config({"image_mean": [0.5, 0.5, 0.5], "resample": 2})
    {'mean': [0.5, 0.5, 0.5], 'interpolation': 'bilinear'}
    """
    found: dict[str, Any] = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    if config.get("do_normalize") is False:
        found |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    resample = config.get("resample", BICUBIC)
    if resample not in (BILINEAR, BICUBIC):
        raise OptionError(
            f"resample: got {resample!r}, wanted {BILINEAR} (bilinear) or {BICUBIC} (bicubic)"
        )
    found["interpolation"] = "bilinear" if resample == BILINEAR else None
    size, crop = config.get("size"), config.get("crop_size")
    if isinstance(size, dict) and "height" in size:
        found["resize_mode"] = "squash"
    elif size is not None and crop is not None and _edge(size) != _edge(crop):
        raise OptionError(f"size: got {size!r}, wanted the size of the crop, {crop!r}")
    return {field: value for field, value in found.items() if value is not None}


def _edge(size: Any) -> Any:
    """The length of a side, from a number or from a mapping by the name of the side."""
    return size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
