"""What the configuration of a CLIP folder may say: sizes and kinds of layers, and nothing else.

open_clip hands most fields on to other libraries, where some name a file, a repository on the Hub
or Python to run. A folder is data: whatever is not in these tables is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from negmerge.errors import FileError, shown

Count = Annotated[int, Field(ge=1, le=1_000)]
Size = Annotated[int, Field(ge=1, le=1 << 16)]
Words = Annotated[int, Field(ge=1, le=1 << 22)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(gt=0, le=1_000)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e6)]

REMEDIES = {
    "auto_map": "the folder asks for Python of its own, which is never run",
    "hf_model_name": (
        "a text side of the Hub is not fetched because a folder says so; set model.name to the "
        "architecture of open_clip and clip.pretrained to the file of weights"
    ),
}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Activation(_Table):
    """Options of the activation."""

    approximate: Literal["none", "tanh"] = "none"


class Norm(_Table):
    """Options of the layer norms."""

    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5


class Blocks(_Table):
    """What both sides have."""

    width: Size = 768
    mlp_ratio: Ratio = 4.0
    ls_init_value: Number | None = None
    final_ln_after_pool: bool = False
    output_tokens: bool = False
    act_kwargs: Activation | None = None
    norm_kwargs: Norm | None = None
    block_type: Literal["default", "custom"] | None = None
    qk_norm: bool = False
    scaled_cosine_attn: bool = False
    scale_heads: bool = False
    scale_attn_inner: bool = False
    scale_attn: bool = False
    scale_fc: bool = False


class Vision(Blocks):
    """The image side, of open_clip or of timm."""

    image_size: Size | Annotated[list[Size], Field(min_length=2, max_length=2)]
    layers: Count | Annotated[list[Count], Field(min_length=4, max_length=4)] = 12
    head_width: Size = 64
    patch_size: Size | None = 16
    patch_dropout: Share = 0.0
    attentional_pool: bool | Literal["parallel", "cascade"] = False
    attn_pooler_queries: Size = 256
    attn_pooler_heads: Size = 8
    no_ln_pre: bool = False
    pos_embed_type: Literal["learnable", "sin_cos_2d"] = "learnable"
    pool_type: Literal["tok", "avg", "none"] = "tok"
    # A name with a colon or a slash would be looked for on the Hub or in a folder.
    timm_model_name: Annotated[str, Field(pattern=r"^\w{1,80}(\.\w{1,80})?$")] | None = None
    timm_model_pretrained: bool = False
    timm_pool: Literal["", "abs_attn", "avg", "avgmax", "map", "max", "rot_attn", "token"] = "avg"
    timm_proj: Literal["", "linear", "mlp", "none"] | None = "linear"
    timm_proj_bias: bool = False
    timm_drop: Share = 0.0
    timm_drop_path: Share | None = None


class TokenizerOptions(_Table):
    """How sentences are tidied before they become tokens."""

    clean: Literal["canonicalize", "lower", "whitespace"] | None = None
    strip_sep_token: bool = False


class Text(Blocks):
    """The text side.

    hf_tokenizer_name: given, the folder has a `tokenizer.json`; the name itself is not looked up.
    """

    context_length: Size = 77
    vocab_size: Words = 49408
    hf_tokenizer_name: str | None = None
    tokenizer_mode: Literal["", "clips"] | None = None
    tokenizer_kwargs: TokenizerOptions | None = None
    heads: Size = 8
    layers: Count = 12
    embed_cls: bool = False
    pad_id: Annotated[int, Field(ge=0, le=1 << 22)] = 0
    eos_id: Annotated[int, Field(ge=0, le=1 << 22)] = 2
    no_causal_mask: bool = False
    pool_type: Literal["argmax", "eos", "first", "last", "none"] = "argmax"
    proj_bias: bool = False
    proj_type: Literal["linear", "none"] = "linear"

    @model_validator(mode="after")
    def _fits(self) -> Text:
        options = self.tokenizer_kwargs
        if options and "strip_sep_token" in options.model_fields_set and not self.hf_tokenizer_name:
            raise ValueError("tokenizer_kwargs.strip_sep_token needs hf_tokenizer_name")
        return self


class Captions(Text):
    """The decoder of a CoCa."""

    dim_head: Size = 64
    n_queries: Size = 256
    attn_pooler_heads: Size = 8


class Model(_Table):
    """`model_cfg` of open_clip."""

    embed_dim: Size
    vision_cfg: Vision
    text_cfg: Text
    multimodal_cfg: Captions | None = None
    custom_text: bool = False
    quick_gelu: bool = False
    init_logit_scale: Number = 0.0
    init_logit_bias: Number | None = None
    nonscalar_logit_scale: bool = False


class Preprocess(_Table):
    """`preprocess_cfg` of open_clip."""

    size: Size | Annotated[list[Size], Field(min_length=1, max_length=2)] | None = None
    mode: Literal["RGB"] = "RGB"
    mean: Annotated[list[Number], Field(min_length=3, max_length=3)] | None = None
    std: Annotated[list[Positive], Field(min_length=3, max_length=3)] | None = None
    interpolation: Literal["bicubic", "bilinear", "random"] | None = None
    resize_mode: Literal["longest", "shortest", "squash"] | None = None
    fill_color: Annotated[int, Field(ge=0, le=255)] = 0


class ClipConfig(_Table):
    """`open_clip_config.json`."""

    # `model_cfg` begins with pydantic's own prefix.
    model_config = ConfigDict(protected_namespaces=())

    model_cfg: Model
    preprocess_cfg: Preprocess | None = None


def check_config(path: Path, tree: Any) -> dict[str, Any]:
    """The parsed configuration as it is; raises unless all that it says is in the tables.

    >>> tree = {"model_cfg": {"embed_dim": 8, "vision_cfg": {"image_size": 8}, "text_cfg": {}}}
    >>> check_config(Path("open_clip_config.json"), tree) is tree
    True
    >>> tree["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"trust_remote_code": True}
    >>> check_config(Path("open_clip_config.json"), tree)
    Traceback (most recent call last):
    negmerge.errors.FileError: open_clip_config.json: model_cfg.text_cfg.tokenizer_kwargs.trust_...

    Args:
        path: the file, for the error.
        tree: what was read from it.
    """
    try:
        ClipConfig.model_validate(tree)
    except ValidationError as error:
        known, found = _fields(tree), error.errors()
        # Fields that are in no table first. pydantic puts names of types among those of fields.
        first = min(found, key=lambda one: one["type"] != "extra_forbidden")
        place = _dotted(first, known)
        if first["type"] == "extra_forbidden":
            usual = "a folder of a CLIP may not set this field; remove it"
            why = REMEDIES.get(str(first["loc"][-1]), usual)
            raise FileError(f"{path}: {place}: {why}") from None
        # A field of several types has an error for each of them.
        why = " or ".join(one["msg"].lower() for one in found if _dotted(one, known) == place)
        got = "" if first["type"] == "missing" else f"; got {shown(first['input'], 60)}"
        raise FileError(f"{path}: {place}: {why}{got}") from None
    return tree


def refuse_code(path: Path, tree: Mapping[str, Any]) -> None:
    """Raise if a configuration of `transformers` asks for Python of the folder's own."""
    if tree.get("auto_map"):
        raise FileError(f"{path}: auto_map: {REMEDIES['auto_map']}; remove the field")


def _dotted(error: Any, known: set[str]) -> str:
    """The place of an error, such as model_cfg.text_cfg.width."""
    *before, last = error["loc"] or ("the file",)
    names = [part for part in before if isinstance(part, int) or part in known]
    if error["type"] in ("extra_forbidden", "missing") or isinstance(last, int) or last in known:
        names.append(last)
    return shown(".".join(map(str, names)))[1:-1] or "the file"


def _fields(tree: Any) -> set[str]:
    """The names of all fields of a tree."""
    if not isinstance(tree, Mapping):
        return set()
    return set(map(str, tree)).union(*map(_fields, tree.values()))
