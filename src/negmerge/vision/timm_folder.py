"""Folders of timm: `config.json` with an architecture, and `model.safetensors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from negmerge.checkpoints.checkpoint import SINGLE_FILE, Checkpoint, path_within
from negmerge.errors import FileError, MismatchError, quoted
from negmerge.training.weights import load_tensors
from negmerge.vision.decode import Interpolation
from negmerge.vision.pretrained import CONFIG, ImageModel, Preparation, numbers
from negmerge.vision.source import IMAGENET

RESERVED = frozenset(
    {
        "cache_dir", "checkpoint_path", "exportable", "features_only", "in_chans", "no_jit",
        "num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
        "pretrained_model_args", "pretrained_strict", "scriptable",
    }
)  # fmt: skip
"""Arguments of timm's builder that a folder does not set: some of them name files."""
RESAMPLING: dict[str, Interpolation] = {"bicubic": "bicubic", "bilinear": "bilinear"}


class TimmModel(ImageModel):
    """A classifier in the format of timm."""

    library: Literal["timm", "transformers"] = "timm"

    @property
    def pretrained(self) -> dict[str, Any]:
        """The part of the configuration about the weights; older files have no such part."""
        found = self.config.get("pretrained_cfg", self.config)
        return found if isinstance(found, dict) else {}

    @property
    def classes(self) -> int:
        found = self.config.get("num_classes", self.pretrained.get("num_classes", 1000))
        if not isinstance(found, int) or not 1 <= found <= 1 << 22:
            raise ValueError(f"num_classes: got {found!r}, wanted the number of classes")
        return found

    @property
    def labels(self) -> list[str] | None:
        found = self.config.get("label_names", self.pretrained.get("label_names"))
        names = found if isinstance(found, list) and len(found) == self.classes else None
        return None if names is None else [str(name) for name in names]

    @property
    def preparation(self) -> Preparation:
        own = self.pretrained
        channels, height, width = own.get("input_size", (3, 224, 224))
        if height != width:
            raise ValueError(f"input_size: got {height}×{width}, wanted a square")
        mean, std = (
            numbers(own.get("mean"), IMAGENET["mean"]),
            numbers(own.get("std"), IMAGENET["std"]),
        )
        if len(mean) != channels:
            raise ValueError(f"input_size: {channels} channels, and mean has {len(mean)}")
        how = RESAMPLING.get(str(own.get("interpolation", "bicubic")), "bicubic")
        fit = "squash" if own.get("crop_mode") == "squash" else "crop"
        return Preparation(height, mean, std, fit, how)

    def build(self, classes: int) -> nn.Module:
        import timm

        name = self.config["architecture"]
        if ":" in name or not timm.is_model(name):  # a prefix would open the Hub, or a folder
            raise FileError(f"{self.path / CONFIG}: timm has no architecture {quoted(name)}")
        channels = len(self.preparation.mean)
        try:
            return timm.create_model(
                name, pretrained=False, num_classes=classes, in_chans=channels, **self._arguments()
            )
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
                TypeError, ValueError) as error:  # fmt: skip
            raise self.failure(error) from None

    def _arguments(self) -> dict[str, Any]:
        """The arguments of the architecture: numbers, flags, and names of kinds of layers."""
        found = self.config.get("model_args") or {}
        if not isinstance(found, dict):
            raise FileError(f"{self.path / CONFIG}: model_args: wanted a mapping")
        for name, value in found.items():
            plain = value is None or isinstance(value, bool | int | float)
            plain = plain or (isinstance(value, str) and value.replace("_", "").isalnum())
            listed = isinstance(value, list) and all(isinstance(v, int | float) for v in value)
            if not (plain or listed):
                raise FileError(
                    f"{self.path / CONFIG}: model_args.{quoted(name)}: got {quoted(value)}, wanted "
                    "a number, a flag or a word"
                )
        return {name: value for name, value in found.items() if name not in RESERVED}

    def check(self) -> None:
        if not self._file.is_file():
            raise FileError(
                f"{self.path}: has no {SINGLE_FILE}; make one from a pickle with `negmerge convert`"
            )
        with Checkpoint(self._file) as file:
            shapes = {name: info.shape for name, info in file.tensors.items()}
        with torch.device("meta"):
            network = self.build(self.classes).state_dict()
        wanted = {name: (*tensor.shape,) for name, tensor in network.items()}
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                raise MismatchError(
                    f"{self.path} {quoted(name)}: {SINGLE_FILE} has shape {shapes.get(name)}, "
                    f"{CONFIG} wants {wanted.get(name)}; wanted weights that fit {CONFIG}"
                )

    @property
    def _file(self) -> Path:
        return path_within(self.path, SINGLE_FILE)

    def weights(self) -> dict[str, Tensor]:
        tensors = load_tensors(self._file)[0]
        return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}

    def configuration(self, labels: list[str], images: Preparation) -> dict[str, dict[str, Any]]:
        stale = ("label_names", "label_descriptions", "label_offset", "labels", "test_input_size",
                 "test_crop_pct", "custom_load", "num_classes", "hf_hub_id", "url", "file",
                 "architecture")  # fmt: skip
        own = {name: value for name, value in self.pretrained.items() if name not in stale}
        own |= {
            "num_classes": len(labels),
            "input_size": [len(images.mean), images.size, images.size],
            "mean": list(images.mean),
            "std": list(images.std),
            "interpolation": images.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash" if images.fit == "squash" else "center",
        }
        tree: dict[str, Any] = {
            "architecture": self.config["architecture"],
            "num_classes": len(labels),
            "label_names": labels,
        }
        if arguments := self._arguments():
            tree["model_args"] = arguments
        return {CONFIG: tree | {"pretrained_cfg": own}}
