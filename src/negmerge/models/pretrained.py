"""Where a CLIP comes from: open_clip's tags, a file, a folder, this package."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from negmerge.checkpoint import Checkpoint, inside, read_inside
from negmerge.errors import FileError, OptionError, shown
from negmerge.files import file_digest, write_file
from negmerge.models.clip import TEXT
from negmerge.models.clip_config import check_config, refuse_code
from negmerge.models.prompts import open_clip
from negmerge.models.tokenizer import (
    ABOUT,
    TOKENIZER,
    about_tokenizer,
    folder_tokenizer,
    has_own_words,
)
from negmerge.models.transformers_clip import (
    model_config,
    preprocess_config,
    renamed,
    translated,
)
from negmerge.models.weights import check_fit, load_tensors, save_tensors
from negmerge.reading import parse_json_value
from negmerge.terminal import unattended

ASSETS = Path(str(files("negmerge") / "assets"))
CONFIG, FOREIGN = "open_clip_config.json", "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
)
EMBEDDINGS = "class_embeddings.safetensors"
OPENAI_ONLY = ("input_resolution", "context_length", "vocab_size")
"""Entries that only OpenAI's own files have."""
OWN_WORDS = "own"
"""What a configuration calls the tokenizer that lies beside it; the name is not looked up."""
FITS: dict[str, Literal["crop", "squash"]] = {"shortest": "crop", "squash": "squash"}
"""open_clip's resize modes, as we call them."""


@dataclass(frozen=True)
class ClipSource:
    """Where a CLIP comes from.

    >>> ClipSource("ViT-B-32", "openai").quick_gelu
    True

    name: an open_clip architecture, a folder as open_clip or transformers writes it, or a CLIP of
        this package.
    pretrained: of an architecture: open_clip's tag, or a .safetensors file.
    """

    name: str
    pretrained: str | None = None

    @cached_property
    def folder(self) -> Path | None:
        """The folder, if it is one."""
        for path in (ASSETS / self.name, Path(self.name).expanduser()):
            if any((path / name).is_file() for name in (CONFIG, FOREIGN)):
                if self.pretrained is not None:
                    raise OptionError(f"clip.pretrained: {path} has its own weights; leave it out")
                return path
        return None

    @property
    def foreign(self) -> bool:
        """Whether it is a folder as `transformers` writes it."""
        return self.folder is not None and not (self.folder / CONFIG).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """`model_cfg` and `preprocess_cfg` as open_clip has them."""
        if self.folder is None:
            model = open_clip().get_model_config(self.name)
            if model is None:
                raise OptionError(
                    f"model.name {shown(self.name)}: neither a folder with {CONFIG} nor an "
                    f"architecture of open_clip, such as ViT-B-32{self._near()}"
                )
            tag = self._tag or {}
            return {"model_cfg": deepcopy(model), "preprocess_cfg": tag}
        path = self.folder / (FOREIGN if self.foreign else CONFIG)
        try:
            found = parse_json_value(read_inside(self.folder, path.name) or b"", path, "content")
            if self.foreign:
                refuse_code(path, found)
                model = model_config(found)
                if has_own_words(self.folder):
                    model["text_cfg"]["hf_tokenizer_name"] = OWN_WORDS
                # Without a file for the images, they are prepared as for OpenAI's.
                shown_as = parse_json_value(
                    read_inside(self.folder, PREPROCESSOR) or b"{}",
                    self.folder / PREPROCESSOR,
                    "content",
                )
                refuse_code(self.folder / PREPROCESSOR, shown_as)
                found = {"model_cfg": model, "preprocess_cfg": preprocess_config(shown_as)}
            check_config(path, found)
        except OptionError as error:
            raise FileError(f"{self.folder}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise FileError(f"{path}: is not the configuration of a CLIP: {why}") from None
        return {name: found.get(name) or {} for name in ("model_cfg", "preprocess_cfg")}

    def _near(self) -> str:
        near = get_close_matches(self.name, open_clip().list_models(), 3)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    @cached_property
    def _tag(self) -> Mapping[str, Any] | None:
        if self.folder is not None or self.pretrained is None:
            return None
        return open_clip().get_pretrained_cfg(self.name, self.pretrained) or None

    @property
    def quick_gelu(self) -> bool:
        """Whether the activation is OpenAI's approximation, as the weights were trained with."""
        return self._built_quick or bool((self._tag or {}).get("quick_gelu", False))

    @property
    def _built_quick(self) -> bool:
        return bool(self.config["model_cfg"].get("quick_gelu", False))

    @cached_property
    def notes(self) -> list[str]:
        """What deserves attention."""
        if self._built_quick:
            return []
        if self.quick_gelu:
            return [f"{self.name}: switched to QuickGELU, which the {self.pretrained} weights need"]
        if self._tag is None and self.pretrained is not None and self._ambiguous():
            return [
                f"{self.name}: computed with GELU, for the file {self.pretrained} does not say; "
                f"weights of OpenAI need QuickGELU: set model.name to {self.name}-quickgelu then"
            ]
        return []

    def _ambiguous(self) -> bool:
        """Whether some weights of this architecture were trained with QuickGELU."""
        library = open_clip()
        tags = library.list_pretrained_tags_by_model(self.name)
        found = [library.get_pretrained_cfg(self.name, tag) for tag in tags]
        return any(tag.get("quick_gelu", False) for tag in found)

    @property
    def size(self) -> int:
        """Height and width of the images it takes."""
        size = self.config["model_cfg"]["vision_cfg"].get("image_size", 224)
        high, wide = (size, size) if isinstance(size, int) else size
        if high != wide:
            raise OptionError(f"model.name {self.name}: takes {high}×{wide}, wanted a square")
        return high

    @property
    def mean(self) -> tuple[float, ...]:
        """Of the pixels, by channel."""
        own = self.config["preprocess_cfg"].get("mean")
        return tuple(own or open_clip().OPENAI_DATASET_MEAN)

    @property
    def std(self) -> tuple[float, ...]:
        """Of the pixels, by channel."""
        own = self.config["preprocess_cfg"].get("std")
        return tuple(own or open_clip().OPENAI_DATASET_STD)

    @property
    def fit(self) -> Literal["crop", "squash"]:
        """How an image that is not square is made so."""
        mode = self.config["preprocess_cfg"].get("resize_mode") or "shortest"
        if not isinstance(mode, str) or mode not in FITS:
            raise OptionError(
                f"model.name {self.name}: resize mode {shown(mode)}, wanted {' or '.join(FITS)}"
            )
        return FITS[mode]

    @property
    def interpolation(self) -> Literal["bicubic", "bilinear"]:
        """How pixels are resized."""
        own = self.config["preprocess_cfg"].get("interpolation") or "bicubic"
        return "bilinear" if own == "bilinear" else "bicubic"  # `random` is for training

    @cached_property
    def weights(self) -> Path:
        """The file of weights; a tag is fetched."""
        if self.folder is not None:
            for name in WEIGHTS:
                if (self.folder / name).is_file():
                    return inside(self.folder, name)
            raise FileError(
                f"{self.folder}: has none of {', '.join(WEIGHTS)}; `negmerge convert` makes one "
                "of a pickle"
            )
        if self.pretrained is None:
            tags = ", ".join(open_clip().list_pretrained_tags_by_model(self.name)) or "none"
            raise OptionError(
                f"clip.pretrained: not given; {self.name} has the tags {tags}; a .safetensors "
                "file will do too"
            )
        path = Path(self.pretrained).expanduser()
        if self._tag is None:
            if not path.is_file() or path.suffix != ".safetensors":
                tags = ", ".join(open_clip().list_pretrained_tags_by_model(self.name)) or "none"
                raise OptionError(
                    f"clip.pretrained {shown(self.pretrained)}: wanted a tag of {self.name} "
                    f"({tags}) or a .safetensors file (`negmerge convert` makes one of a pickle)"
                )
            return path
        with _quiet():
            try:
                return Path(open_clip().download_pretrained(self._tag))
            except Exception as error:  # the Hub, the network and the disk each have their own
                why = " ".join(str(error).split())[:200]
                raise FileError(
                    f"clip.pretrained {self.pretrained}: cannot be fetched: {why}; name a "
                    ".safetensors file or a folder instead"
                ) from None

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights and of what computes with them."""
        embeddings = None if self.embeddings is None else file_digest(self.embeddings)
        made = [self.config["model_cfg"], self.quick_gelu, self.mean, self.std]
        if self.foreign:  # others have their name, and runs go by it
            made += [file_digest(path) for path in self._words()]
        return json.dumps([file_digest(self.weights), embeddings, made], sort_keys=True)

    def _words(self) -> list[Path]:
        """The file of the folder's own tokenizer, if it has one."""
        if self.folder is None or not self.config["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
            return []
        path = inside(self.folder, TOKENIZER)
        return [path] if path.is_file() else []

    @property
    def embeddings(self) -> Path | None:
        """The file of ready-made class embeddings, if there is one."""
        path = None if self.folder is None else inside(self.folder, EMBEDDINGS)
        return path if path is not None and path.is_file() else None

    # ------------------------------------------------------------------------------------- making

    def build(self) -> nn.Module:
        """The whole CLIP, with fresh weights."""
        library = open_clip()
        config = deepcopy(self.config["model_cfg"])
        config["quick_gelu"] = self.quick_gelu
        config["vision_cfg"].pop("timm_model_pretrained", None)
        foreign = "hf_model_name" in config["text_cfg"]
        if foreign:
            config["text_cfg"]["hf_model_pretrained"] = False
        kind = library.CLIP
        if config.pop("custom_text", False) or foreign:
            kind = library.CoCa if "multimodal_cfg" in config else library.CustomTextCLIP
        try:
            with _quiet():
                return kind(**config)
        except (TypeError, ValueError, ArithmeticError, AssertionError, LookupError, OSError,
                RuntimeError) as error:  # fmt: skip
            why = " ".join(str(error).split()) or type(error).__name__
            raise OptionError(f"model.name {shown(self.name)}: cannot be built: {why}") from None

    @cached_property
    def names(self) -> frozenset[str] | None:
        """The tensors of the file; None for a tag's, which the library reads, and which has all."""
        if self._tag is not None:
            return None
        with Checkpoint(self.weights) as file:
            names = frozenset(file.tensors)
        return frozenset(map(renamed, names)) if self.foreign else names

    @property
    def speaks(self) -> bool:
        """Whether the file has a text side."""
        silent = ("visual.", "logit_", *OPENAI_ONLY)
        return self.names is None or any(not name.startswith(silent) for name in self.names)

    def load(self) -> nn.Module:
        """The whole CLIP with its weights, in float32; a file may be without the text side."""
        clip = self.build()
        if self.names is None:  # of a tag; torch's restricted unpickler reads it
            with _quiet():
                open_clip().load_checkpoint(clip, str(self.weights), weights_only=True)
            return clip.float()
        tensors, _ = load_tensors(self.weights)
        if self.foreign:
            tensors = translated(tensors)
        if not self.names.isdisjoint(OPENAI_ONLY):
            if not self.quick_gelu:
                raise OptionError(
                    f"{self.weights}: is OpenAI's own, trained with QuickGELU; set model.name to "
                    f"{self.name}-quickgelu"
                )
            tensors = {k: v for k, v in tensors.items() if k not in OPENAI_ONLY}
        wanted = clip.state_dict()
        if not self.speaks:
            wanted = {k: v for k, v in wanted.items() if k.startswith("visual.") or k in tensors}
        check_fit(self.weights, tensors, wanted, self.name, "check model.name")
        clip.load_state_dict(tensors, strict=False)  # all that must be there is
        return clip.float()

    def save(self, folder: Path, changed: Mapping[str, Tensor]) -> list[Path]:
        """Write the CLIP with changed weights as a folder that open_clip and this package open."""
        state = self.load().state_dict()
        if not self.speaks:
            state = {k: v for k, v in state.items() if k in (self.names or ())}
        save_tensors(folder / WEIGHTS[0], state | dict(changed), {"format": "pt"})
        shown_as = {"mean": list(self.mean), "std": list(self.std), "size": [self.size, self.size]}
        shown_as |= {"interpolation": self.interpolation}
        shown_as["resize_mode"] = next(mode for mode, fit in FITS.items() if fit == self.fit)
        model = self.config["model_cfg"] | {"quick_gelu": self.quick_gelu}
        config = {"model_cfg": model, "preprocess_cfg": shown_as}
        write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        made = [folder / WEIGHTS[0], folder / CONFIG]
        if self.embeddings is not None:
            write_file(folder / EMBEDDINGS, self.embeddings.read_bytes())
            made.append(folder / EMBEDDINGS)
        for path in self._words():
            write_file(folder / TOKENIZER, path.read_bytes())
            write_file(folder / ABOUT, (json.dumps(about_tokenizer(path.parent)) + "\n").encode())
            made += [folder / TOKENIZER, folder / ABOUT]
        return made

    def strip(self, clip: nn.Module) -> nn.Module:
        """Without the text transformer, and without what the file does not have."""
        for name, _ in [*clip.named_children(), *clip.named_parameters(recurse=False)]:
            known = self.names is None or any(n.split(".")[0] == name for n in self.names)
            if name in TEXT or not known:
                delattr(clip, name)
        return clip

    def tokenizer(self) -> Any:
        """What turns sentences into tokens."""
        text = self.config["model_cfg"]["text_cfg"]
        own = bool(text.get("hf_tokenizer_name"))
        with _quiet():
            if self.folder is None:
                options = {"trust_remote_code": False} if own else {}
                return open_clip().get_tokenizer(self.name, **options)
            if own:
                return folder_tokenizer(self.folder, text)
            options = {k: v for k, v in (text.get("tokenizer_kwargs") or {}).items() if v}
            length = text.get("context_length", 77)
            return open_clip().SimpleTokenizer(context_length=length, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines, progress bars and questions of the library; we say what goes wrong."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), unattended():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
