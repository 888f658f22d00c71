"""Folders of transformers with an image classifier: configuration, preprocessor, weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from logging import CRITICAL
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from negmerge.checkpoints.checkpoint import Checkpoint, read_within
from negmerge.errors import FileError, NegMergeError, quoted
from negmerge.support.reading import parse_json
from negmerge.training.seeds import fork_random_state
from negmerge.training.weights import load_tensors
from negmerge.vision.decode import Interpolation
from negmerge.vision.pretrained import CONFIG, PREPROCESSOR, ImageModel, Preparation, numbers

HALF = (0.5, 0.5, 0.5)
FURTHER = ("backbone", "use_pretrained_backbone", "use_timm_backbone", "quantization_config")
"""Fields of a configuration that fetch further models, or need further libraries."""
SPARE = 10_000_000
"""Weights that a network may have beside those of its files, such as tables of positions."""
RESAMPLING: dict[Any, Interpolation] = {2: "bilinear", 3: "bicubic"}
"""The numbers of Pillow."""


class TransformersModel(ImageModel):
    """A classifier in the format of transformers."""

    library: Literal["timm", "transformers"] = "transformers"

    @cached_property
    def settings(self) -> Any:
        """The configuration as an object of transformers."""
        from transformers import AutoConfig

        for name in FURTHER:
            if self.config.get(name):
                raise FileError(f"{self.path / CONFIG}: {name}: is not supported; remove it")
        with self._quiet():
            return AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )

    @property
    def classes(self) -> int:
        return int(self.settings.num_labels)

    @property
    def labels(self) -> list[str] | None:
        names = self.settings.id2label
        found = [str(names[k]) for k in range(self.classes)]
        return None if found == [f"LABEL_{k}" for k in range(self.classes)] else found

    @cached_property
    def images(self) -> dict[str, Any]:
        """The content of `preprocessor_config.json`."""
        raw = read_within(self.path, PREPROCESSOR)
        return {} if raw is None else parse_json(raw, self.path / PREPROCESSOR, "content")

    @property
    def preparation(self) -> Preparation:
        own = self.images
        if (
            own.get("do_rescale") is False
            or abs(own.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6
        ):
            raise ValueError(f"{PREPROCESSOR}: wanted pixels between 0 and 1, rescaled by 1/255")
        cropped = own.get("do_center_crop") and own.get("crop_size") is not None
        given = own["crop_size"] if cropped else own.get("size")
        size, square = _size(self.config.get("image_size", 224) if given is None else given)
        mean, std = numbers(own.get("image_mean"), HALF), numbers(own.get("image_std"), HALF)
        if own.get("do_normalize") is False:
            mean, std = (0.0,) * len(mean), (1.0,) * len(std)
        how = RESAMPLING.get(own.get("resample"), "bilinear")
        return Preparation(size, mean, std, "squash" if square and not cropped else "crop", how)

    def build(self, classes: int) -> nn.Module:
        from copy import deepcopy

        from transformers import AutoModelForImageClassification

        settings = deepcopy(self.settings)
        settings.num_labels = classes
        with self._quiet():
            made = AutoModelForImageClassification.from_config(
                settings, trust_remote_code=False, attn_implementation=self._attention
            )
        # The state has the names of files: those of the module change with transformers.
        rename(made, self.names)
        return made

    @property
    def _kind(self) -> Any:
        """The class of the model."""
        from transformers import AutoModelForImageClassification

        with self._quiet():
            found = AutoModelForImageClassification._model_mapping[type(self.settings)]
        return found[0] if isinstance(found, tuple) else found

    @property
    def _attention(self) -> str:
        """The implementation: that of torch where there is one; a configuration could name code."""
        return "sdpa" if getattr(self._kind, "_supports_sdpa", False) else "eager"

    def check(self) -> None:
        """Raise if the configuration describes a network that is much larger than the weights."""
        from transformers import AutoModelForImageClassification

        with self._quiet(), torch.device("meta"):
            made = AutoModelForImageClassification.from_config(
                self.settings, trust_remote_code=False, attn_implementation=self._attention
            )
        wanted = sum(tensor.numel() for tensor in made.state_dict().values())
        with Checkpoint(self.path) as file:
            found = sum(info.elements for info in file.tensors.values())
        if wanted > 2 * found + SPARE:
            raise FileError(
                f"{self.path / CONFIG}: describes a network of {wanted:,} weights, the files have "
                f"{found:,}; wanted weights that fit {CONFIG}"
            )

    def _opened(self) -> Any:
        from transformers import AutoModelForImageClassification

        with self._quiet(), fork_random_state(), torch.device("cpu"):
            model, found = AutoModelForImageClassification.from_pretrained(
                self.path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation=self._attention,
                ignore_mismatched_sizes=True,  # they are told below, in one line
                output_loading_info=True,
            )
        for problem in ("missing_keys", "mismatched_keys"):
            if found.get(problem):
                first = min(key if isinstance(key, str) else key[0] for key in found[problem])
                raise FileError(
                    f"{self.path}: the weights do not fit {CONFIG}: {problem.split('_')[0]} "
                    f"{quoted(first)}; wanted a whole classifier"
                )
        return model

    def weights(self) -> dict[str, Tensor]:
        model = self._opened()
        rename(model, self.names)
        return dict(model.state_dict())

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of tensors in files, by their names in the module, where they differ."""
        model = self._opened()
        inside = [*model.state_dict()]
        marks = {name: torch.tensor([float(k)], device="cpu") for k, name in enumerate(inside)}
        with self._quiet(), tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=marks)
            stored = {int(t[0]): name for name, t in load_tensors(Path(folder))[0].items()}
        if {*stored} != {*range(len(inside))}:  # the library joins or splits tensors
            return {}
        return {name: stored[k] for k, name in enumerate(inside) if stored[k] != name}

    def configuration(self, labels: list[str], images: Preparation) -> dict[str, dict[str, Any]]:
        drop = ("torch_dtype", "auto_map", "_name_or_path", "num_labels")
        config = {name: value for name, value in self.config.items() if name not in drop}
        config |= {
            "architectures": [self._kind.__name__],
            "dtype": "float32",
            "id2label": {str(k): name for k, name in enumerate(labels)},
            "label2id": {name: k for k, name in enumerate(labels)},
        }
        if "image_size" in config:
            config["image_size"] = images.size
        square = {"height": images.size, "width": images.size}
        squash = images.fit == "squash"
        prepared = {name: v for name, v in self.images.items() if name != "auto_map"} | {
            "do_resize": True,
            "size": square if squash else {"shortest_edge": images.size},
            "do_center_crop": not squash,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(images.mean),
            "image_std": list(images.std),
            "resample": next(k for k, how in RESAMPLING.items() if how == images.interpolation),
        }
        prepared = prepared | ({} if squash else {"crop_size": square})
        return {CONFIG: config, PREPROCESSOR: prepared}

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Without progress bars and log lines; an error is one line that names the folder."""
        from transformers.utils import logging

        logging.disable_progress_bar()  # the program shows progress itself
        level = logging.get_verbosity()
        logging.set_verbosity(CRITICAL)
        try:
            yield
        except NegMergeError:
            raise
        except Exception as error:  # a configuration or a file of others may raise anything
            raise self.failure(error) from None
        finally:
            logging.set_verbosity(level)


def _size(given: Any) -> tuple[int, bool]:
    """Return the height and width of images, and whether both sides are resized to it."""
    if isinstance(given, dict):
        if "shortest_edge" in given:
            return int(given["shortest_edge"]), False
        given = (given["height"], given["width"])
    high, wide = (given, given) if isinstance(given, int) else given
    if high != wide:
        raise ValueError(f"images of {high}×{wide} pixels, wanted a square")
    return int(high), True


def rename(model: nn.Module, names: dict[str, str]) -> None:
    """Let the state of a model have other names for some of its tensors, by their own names."""
    back = {other: name for name, other in names.items()}

    def outwards(module: nn.Module, state: dict[str, Tensor], prefix: str, local: Any) -> None:
        for name in [*state]:
            tensor = state.pop(name)
            own = name.removeprefix(prefix)
            state[prefix + names.get(own, own)] = tensor

    def inwards(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        for name in [*state]:
            tensor = state.pop(name)
            own = name.removeprefix(prefix)
            state[prefix + back.get(own, own)] = tensor

    if names:
        model.register_state_dict_post_hook(outwards)
        model.register_load_state_dict_pre_hook(inwards)
