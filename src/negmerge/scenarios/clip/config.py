"""The fields that the configuration of a CLIP folder may set: sizes and kinds of layers only.

open_clip passes most fields on to other libraries, where some fields name a file, a repository on
the Hub or Python code to run. A folder is data: a field that is not in these tables is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from negmerge.checkpoints.checkpoint import read_within
from negmerge.errors import FileError, quoted
from negmerge.support.reading import parse_json

Count = Annotated[int, Field(ge=1, le=1_000)]
Size = Annotated[int, Field(ge=1, le=1 << 16)]
Words = Annotated[int, Field(ge=1, le=1 << 22)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(gt=0, le=1_000)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e6)]


class _Table(BaseModel):
    # pydantic reserves names that begin with `model_`, as the field `model_cfg` does.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Activation(_Table):
    """Options of the activation."""

    approximate: Literal["none", "tanh"] = "none"


class Norm(_Table):
    """Options of the layer norms."""

    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5


class Blocks(_Table):
    """Fields of the transformer blocks of both encoders."""

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
    """The image encoder, of open_clip or of timm."""

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
    # timm looks for a name with a colon or a slash on the Hub or in a folder.
    timm_model_name: Annotated[str, Field(pattern=r"^\w{1,80}(\.\w{1,80})?$")] | None = None
    timm_model_pretrained: bool = False
    timm_pool: Literal["", "abs_attn", "avg", "avgmax", "map", "max", "rot_attn", "token"] = "avg"
    timm_proj: Literal["", "linear", "mlp", "none"] | None = "linear"
    timm_proj_bias: bool = False
    timm_drop: Share = 0.0
    timm_drop_path: Share | None = None


class TokenizerOptions(_Table):
    """How sentences are cleaned before they become tokens."""

    clean: Literal["canonicalize", "lower", "whitespace"] | None = None
    strip_sep_token: bool = False


class Text(Blocks):
    """The text encoder."""

    context_length: Size = 77
    vocab_size: Words = 49408
    hf_tokenizer_name: str | None = None
    """If set, the folder has a `tokenizer.json`; nothing is opened by this name."""
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
    """The caption decoder of a CoCa model."""

    dim_head: Size = 64
    n_queries: Size = 256
    attn_pooler_heads: Size = 8


class Architecture(_Table):
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

    model_cfg: Architecture
    preprocess_cfg: Preprocess | None = None


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of a folder; a missing file is an empty object.

    Raises `FileError` for a link that leads out of the folder, and for a file that names Python
    code to run.
    """
    raw, path = read_within(folder, name), folder / name
    tree = {} if raw is None else parse_json(raw, path, "content")
    if tree.get("auto_map"):
        raise FileError(
            f"{path}: auto_map: the folder names Python code of its own, which is never run; "
            "remove this field"
        )
    return tree


def check_config(path: Path, tree: Any) -> None:
    """Raise `FileError` if a configuration sets a field that is not in the tables, or a bad value.

    >>> tree = {"model_cfg": {"embed_dim": 8, "vision_cfg": {"image_size": 8}, "text_cfg": {}}}
    >>> check_config(Path("open_clip_config.json"), tree)
    >>> tree["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"trust_remote_code": True}
    >>> check_config(Path("open_clip_config.json"), tree)
    Traceback (most recent call last):
    negmerge.errors.FileError: open_clip_config.json: model_cfg.text_cfg.tokenizer_kwargs.trust_...
    """
    try:
        ClipConfig.model_validate(tree)
    except ValidationError as error:
        # Unknown fields come first.
        found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        first, place = found[0], _place(found[0], tree)
        if first["type"] != "extra_forbidden":
            # A field that allows several types has one error for each type.
            why = " or ".join(one["msg"].lower() for one in found if _place(one, tree) == place)
            why += "" if first["type"] == "missing" else f"; got {quoted(first['input'], 60)}"
        elif first["loc"][-1] == "hf_model_name":
            why = (
                "a folder may not name a text encoder on the Hub; set model.name to the "
                "architecture of open_clip and clip.pretrained to the file of weights"
            )
        else:
            why = "a CLIP folder may not set this field; remove it"
        raise FileError(f"{path}: {place}: {why}") from None


def _place(error: Any, tree: Any) -> str:
    """The field of a validation error, such as model_cfg.text_cfg.width."""
    names: list[str] = []
    for part in error["loc"]:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            if error["type"] != "missing":
                continue  # pydantic's name of a type, where a field allows several
        names.append(str(part))
    return quoted(".".join(names))[1:-1] or "the file"
