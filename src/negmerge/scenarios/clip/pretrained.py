"""Where a CLIP model comes from: a tag of open_clip, a file, a folder, or this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from negmerge.checkpoints.checkpoint import Checkpoint, path_within
from negmerge.checkpoints.model_folder import base_of
from negmerge.checkpoints.remote import OTHER_WEIGHTS, resolved
from negmerge.errors import FileError, OptionError, quoted
from negmerge.registry import nearest
from negmerge.scenarios.clip.classifier import TEXT
from negmerge.scenarios.clip.config import check_config, read_config
from negmerge.scenarios.clip.library import open_clip, quiet
from negmerge.scenarios.clip.tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    folder_tokenizer,
    has_own_vocabulary,
    tokenizer_config,
)
from negmerge.scenarios.clip.transformers_clip import (
    model_config,
    preprocess_config,
    renamed,
    translated,
)
from negmerge.support.files import file_digest, write_file
from negmerge.support.remote.hub import is_repo
from negmerge.support.remote.scratch import Wanted, fetch_all
from negmerge.support.remote.stores import Store
from negmerge.support.remote.urls import is_url
from negmerge.training.weights import check_fit, load_tensors, save_tensors
from negmerge.vision.datasets import CLIP as OPENAI
from negmerge.vision.decode import Fit, Interpolation
from negmerge.vision.places import ASSETS

CONFIG, TRANSFORMERS_CONFIG = "open_clip_config.json", "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
)
EMBEDDINGS = "class_embeddings.safetensors"
OPENAI_ONLY = ("input_resolution", "context_length", "vocab_size")
"""Entries that only OpenAI's own files have."""
FOLDER_TOKENIZER = "own"
"""The `hf_tokenizer_name` of a folder of transformers; nothing is opened by this name."""
FITS: dict[str, Fit] = {"shortest": "crop", "squash": "squash"}
"""From the resize modes of open_clip to the values of `ClipSource.fit`."""


@dataclass(frozen=True)
class ClipSource:
    """The architecture, the weights and the configuration of a CLIP model.

    >>> ClipSource("ViT-B-32", "openai").quick_gelu
    True

    Args:
        name: an architecture of open_clip, a folder as open_clip or transformers writes it, its
            URL or Hub id, or a CLIP model of this package.
        pretrained: for an architecture, a tag of open_clip or a .safetensors file.
    """

    name: str
    pretrained: str | None = None

    @cached_property
    def folder(self) -> Path | None:
        """The folder, if `name` is one."""
        for path in (ASSETS / self.name, self._place(self.name)):
            if any((path / name).is_file() for name in (CONFIG, TRANSFORMERS_CONFIG)):
                if self.pretrained is not None:
                    raise OptionError(
                        f"clip.pretrained: the folder {path} has its own weights; remove this field"
                    )
                return path
        return None

    @staticmethod
    def _place(name: str) -> Path:
        """The path on this machine; a URL or a Hub id is fetched, without pickles."""
        (place,) = resolved([name])
        if not is_url(place):
            return Path(name).expanduser()
        store = Store(place)
        files = store.files(deep=False)
        if store.kind == "folder":
            files = [f for f in files if not f.name.endswith(OTHER_WEIGHTS)]
        return fetch_all([Wanted(store, files, deep=False)])[0]

    @property
    def from_transformers(self) -> bool:
        """Whether the model is a folder as `transformers` writes it."""
        return self.folder is not None and not (self.folder / CONFIG).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """`model_cfg` and `preprocess_cfg` in the format of open_clip."""
        if self.folder is None:
            # With a prefix, such as hf-hub:, open_clip would read the Hub or a folder.
            model = None if ":" in self.name else open_clip().get_model_config(self.name)
            if model is None:
                hint = nearest(self.name, open_clip().list_models())
                raise OptionError(
                    f"model.name {quoted(self.name)}: neither a folder with {CONFIG} nor an "
                    f"architecture of open_clip, such as ViT-B-32{hint}"
                )
            return {"model_cfg": deepcopy(model), "preprocess_cfg": self._tag or {}}
        path = self.folder / (TRANSFORMERS_CONFIG if self.from_transformers else CONFIG)
        try:
            found = read_config(self.folder, path.name)
            if self.from_transformers:
                model = model_config(found)
                if has_own_vocabulary(self.folder):
                    model["text_cfg"]["hf_tokenizer_name"] = FOLDER_TOKENIZER
                images = preprocess_config(read_config(self.folder, PREPROCESSOR))
                found = {"model_cfg": model, "preprocess_cfg": images}
            check_config(path, found)
        except OptionError as error:
            raise FileError(f"{self.folder}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise FileError(f"{path}: is not the configuration of a CLIP model: {why}") from None
        return {name: found.get(name) or {} for name in ("model_cfg", "preprocess_cfg")}

    @cached_property
    def _tag(self) -> Mapping[str, Any] | None:
        """What open_clip knows about the tag, if `pretrained` is one."""
        if self.folder is not None or self.pretrained is None:
            return None
        return open_clip().get_pretrained_cfg(self.name, self.pretrained) or None

    @property
    def base(self) -> dict[str, Any]:
        """What a run records of the model that is to forget: Hub id, commit and licence."""
        if self.folder is not None:
            return base_of(self.name, self.folder)
        found = (self._tag or {}).get("hf_hub") or ""
        return {"base_model": found.rstrip("/")} if is_repo(found.rstrip("/")) else {}

    @property
    def _tags(self) -> list[str]:
        return open_clip().list_pretrained_tags_by_model(self.name)

    @property
    def quick_gelu(self) -> bool:
        """Whether the weights were trained with QuickGELU, OpenAI's approximation of GELU."""
        sections = (self.config["model_cfg"], self._tag or {})
        return any(section.get("quick_gelu", False) for section in sections)

    @cached_property
    def notes(self) -> list[str]:
        """Remarks for the user before the work begins."""
        if self.config["model_cfg"].get("quick_gelu", False):
            return []
        if self.quick_gelu:
            return [f"{self.name}: uses QuickGELU, because the {self.pretrained} weights need it"]
        if self._tag is None and self.pretrained is not None:
            tags = [open_clip().get_pretrained_cfg(self.name, tag) for tag in self._tags]
            if any(tag.get("quick_gelu", False) for tag in tags):
                return [
                    f"{self.name}: uses GELU, because the file {self.pretrained} does not name an "
                    "activation; if its weights are OpenAI's, which need QuickGELU, set model.name "
                    f"to {self.name}-quickgelu"
                ]
        return []

    @property
    def size(self) -> int:
        """Height and width of the input images, in pixels."""
        size = self.config["model_cfg"]["vision_cfg"].get("image_size", 224)
        high, wide = (size, size) if isinstance(size, int) else size
        if high != wide:
            raise OptionError(
                f"model.name {self.name}: takes images of {high}×{wide} pixels, wanted a square"
            )
        return high

    def _preprocess(self, field: str, default: Any) -> Any:
        return self.config["preprocess_cfg"].get(field) or default

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of the pixels, by channel."""
        return tuple(self._preprocess("mean", OPENAI["mean"]))

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation of the pixels, by channel."""
        return tuple(self._preprocess("std", OPENAI["std"]))

    @property
    def fit(self) -> Fit:
        """How an image that is not square is made square."""
        mode = self._preprocess("resize_mode", "shortest")
        if mode not in FITS:
            raise OptionError(
                f"model.name {self.name}: resize_mode: got {quoted(mode)}, wanted "
                f"{' or '.join(FITS)}"
            )
        return FITS[mode]

    @property
    def interpolation(self) -> Interpolation:
        """How pixels are interpolated; `random` is for training only, and means bicubic here."""
        return "bilinear" if self._preprocess("interpolation", "") == "bilinear" else "bicubic"

    @cached_property
    def weights(self) -> Path:
        """The file of weights; the weights of a tag are downloaded."""
        if self.folder is not None:
            for name in WEIGHTS:
                if (self.folder / name).is_file():
                    return path_within(self.folder, name)
            raise FileError(
                f"{self.folder}: has none of {', '.join(WEIGHTS)}; make one from a pickle with "
                "`negmerge convert`"
            )
        if self._tag is None:
            path = self._place(self.pretrained or "")
            if path.is_file() and path.suffix == ".safetensors":
                return path
            got = "nothing" if self.pretrained is None else quoted(self.pretrained)
            raise OptionError(
                f"clip.pretrained: got {got}, wanted a tag of {self.name} "
                f"({', '.join(self._tags) or 'there are none'}) or a .safetensors file (make one "
                "from a pickle with `negmerge convert`)"
            )
        with quiet():
            try:
                return Path(open_clip().download_pretrained(self._tag))
            except Exception as error:  # the Hub, the network and the disk raise different ones
                why = " ".join(str(error).split())[:200]
                raise FileError(
                    f"clip.pretrained {self.pretrained}: cannot be downloaded: {why}; name a "
                    ".safetensors file or a folder instead"
                ) from None

    @cached_property
    def fingerprint(self) -> str:
        """A text that changes with the weights, the architecture and the preparation of images."""
        embeddings = None if self.embeddings is None else file_digest(self.embeddings)
        made = [self.config["model_cfg"], self.quick_gelu, self.mean, self.std]
        if self.from_transformers and self._vocabulary is not None:
            made.append(file_digest(self._vocabulary))
        return json.dumps([file_digest(self.weights), embeddings, made], sort_keys=True)

    @property
    def _vocabulary(self) -> Path | None:
        """The file of the folder's own tokenizer, if the folder has one."""
        named = self.config["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
        return self._file(TOKENIZER) if named else None

    @property
    def embeddings(self) -> Path | None:
        """The file of ready-made class embeddings, if the folder has one."""
        return self._file(EMBEDDINGS)

    def _file(self, name: str) -> Path | None:
        path = None if self.folder is None else path_within(self.folder, name)
        return path if path is not None and path.is_file() else None

    # ------------------------------------------------------------------------------------- models

    def build(self) -> nn.Module:
        """Build the whole CLIP model with random weights."""
        library = open_clip()
        config = deepcopy(self.config["model_cfg"])
        config["quick_gelu"] = self.quick_gelu
        config["vision_cfg"].pop("timm_model_pretrained", None)
        hub_text = "hf_model_name" in config["text_cfg"]
        if hub_text:
            config["text_cfg"]["hf_model_pretrained"] = False
        kind = library.CLIP
        if config.pop("custom_text", False) or hub_text:
            kind = library.CoCa if "multimodal_cfg" in config else library.CustomTextCLIP
        try:
            with quiet():
                return kind(**config)
        except (TypeError, ValueError, ArithmeticError, AssertionError, LookupError, OSError,
                RuntimeError) as error:  # fmt: skip
            why = " ".join(str(error).split()) or type(error).__name__
            raise OptionError(f"model.name {quoted(self.name)}: cannot be built: {why}") from None

    @cached_property
    def tensor_names(self) -> frozenset[str] | None:
        """The names of the file's tensors; None for a tag, whose file has all of them."""
        if self._tag is not None:
            return None
        with Checkpoint(self.weights) as file:
            names = frozenset(file.tensors)
        return frozenset(map(renamed, names)) if self.from_transformers else names

    @property
    def has_text(self) -> bool:
        """Whether the file has a text encoder."""
        other = ("visual.", "logit_", *OPENAI_ONLY)
        names = self.tensor_names
        return names is None or any(not name.startswith(other) for name in names)

    def load(self) -> nn.Module:
        """Load the whole CLIP model in float32; the file may lack the text encoder."""
        clip = self.build()
        if self.tensor_names is None:  # a file of open_clip; torch's restricted unpickler reads it
            with quiet():
                open_clip().load_checkpoint(clip, str(self.weights), weights_only=True)
            return clip.float()
        tensors, _ = load_tensors(self.weights)
        if self.from_transformers:
            tensors = translated(tensors)
        if not self.tensor_names.isdisjoint(OPENAI_ONLY):
            if not self.quick_gelu:
                raise OptionError(
                    f"{self.weights}: is a file of OpenAI, trained with QuickGELU; set model.name "
                    f"to {self.name}-quickgelu"
                )
            tensors = {k: v for k, v in tensors.items() if k not in OPENAI_ONLY}
        wanted = clip.state_dict()
        if not self.has_text:
            wanted = {k: v for k, v in wanted.items() if k.startswith("visual.") or k in tensors}
        check_fit(self.weights, tensors, wanted, self.name, "check model.name")
        clip.load_state_dict(tensors, strict=False)  # check_fit has compared the names
        return clip.float()

    def save(self, folder: Path, changed: Mapping[str, Tensor]) -> list[Path]:
        """Write the model, some tensors changed, as a folder of open_clip; return its files."""
        state = self.load().state_dict()
        if not self.has_text:
            state = {k: v for k, v in state.items() if k in (self.tensor_names or ())}
        save_tensors(folder / WEIGHTS[0], state | dict(changed), {"format": "pt"})
        images = {
            "mean": list(self.mean),
            "std": list(self.std),
            "size": [self.size, self.size],
            "interpolation": self.interpolation,
            "resize_mode": next(mode for mode, fit in FITS.items() if fit == self.fit),
        }
        model = self.config["model_cfg"] | {"quick_gelu": self.quick_gelu}
        config = {"model_cfg": model, "preprocess_cfg": images}
        made = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
        if self.embeddings is not None:
            made[EMBEDDINGS] = self.embeddings.read_bytes()
        if (path := self._vocabulary) is not None:
            made[TOKENIZER] = path.read_bytes()
            made[TOKENIZER_CONFIG] = (json.dumps(tokenizer_config(path.parent)) + "\n").encode()
        for name, content in made.items():
            write_file(folder / name, content)
        return [folder / name for name in (WEIGHTS[0], *made)]

    def without_text(self, clip: nn.Module) -> nn.Module:
        """Remove the text transformer, and what the file does not have, from a model."""
        for name, _ in [*clip.named_children(), *clip.named_parameters(recurse=False)]:
            names = self.tensor_names
            if name in TEXT or not (names is None or any(n.split(".")[0] == name for n in names)):
                delattr(clip, name)
        return clip

    def tokenizer(self) -> Any:
        """Return the function that turns sentences into tokens."""
        text = self.config["model_cfg"]["text_cfg"]
        own = bool(text.get("hf_tokenizer_name"))
        with quiet():
            if self.folder is None:
                options = {"trust_remote_code": False} if own else {}
                return open_clip().get_tokenizer(self.name, **options)
            if own:
                return folder_tokenizer(self.folder, text)
            options = {k: v for k, v in (text.get("tokenizer_kwargs") or {}).items() if v}
            length = text.get("context_length", 77)
            return open_clip().SimpleTokenizer(context_length=length, **options)
