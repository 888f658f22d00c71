"""Image classifiers of timm and transformers: folders, or models of the Hugging Face Hub.

A folder is data: only its safetensors files are opened, a library builds the network, and no code
of the folder is run. `timm_folder.py` and `transformers_folder.py` know the two formats.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from negmerge.checkpoints.checkpoint import read_within
from negmerge.checkpoints.model_folder import CARD, WEIGHTS, fetch_folder
from negmerge.errors import FileError, MismatchError, OptionError, quoted
from negmerge.support.files import file_digest, write_file
from negmerge.support.reading import parse_json
from negmerge.support.remote.hub import is_repo
from negmerge.training.layers import final_linear
from negmerge.vision.decode import Fit, Interpolation

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
LARGEST = 4096
"""The largest height and width of images."""


@dataclass(frozen=True)
class Preparation:
    """How a model wants its images.

    Args:
        size: the height and width.
        mean, std: of pixels in [0, 1], for each channel.
        fit, interpolation: how images of another size are resized; see `decode`.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "crop"
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        numbers = [*self.mean, *self.std]
        sane = all(isinstance(n, int | float) and abs(n) < 1e6 for n in numbers)
        if not 1 <= self.size <= LARGEST or not sane or not all(n > 0 for n in self.std):
            raise ValueError(f"cannot prepare images as {self}")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(f"wanted 1 or 3 channels, got mean {self.mean} and std {self.std}")

    def fields(self) -> dict[str, Any]:
        """The fields of `Source`, which a recipe may replace."""
        return {**vars(self), "channels": len(self.mean)}


class ImageModel(ABC):
    """A classifier in a folder.

    Args:
        name: the folder or Hub id, as the recipe has it.
        path: the folder on this machine.
        config: the content of its `config.json`.

    Class attributes:
        library: the library that opens it.
    """

    library: Literal["timm", "transformers"]

    def __init__(self, name: str, path: Path, config: dict[str, Any]) -> None:
        self.name, self.path, self.config = name, path, config

    @property
    @abstractmethod
    def classes(self) -> int:
        """The number of classes that the weights are for."""

    @property
    @abstractmethod
    def labels(self) -> list[str] | None:
        """The names of the classes, if the folder has them."""

    @property
    @abstractmethod
    def preparation(self) -> Preparation:
        """How the model wants its images."""

    @abstractmethod
    def check(self) -> None:
        """Raise if the configuration does not fit the weights, before a network takes memory."""

    @abstractmethod
    def build(self, classes: int) -> nn.Module:
        """The network with random weights; its state has the names of the file."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights of the folder in float32, by their names."""

    @abstractmethod
    def configuration(self, labels: list[str], images: Preparation) -> dict[str, dict[str, Any]]:
        """The JSON files beside weights of other classes or images, by name."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration and the weights."""
        files = [self.path / CONFIG, self.path / PREPROCESSOR]
        files += sorted(path for kind in WEIGHTS for path in self.path.glob(kind))
        return " ".join(file_digest(path)[:16] for path in files if path.is_file())

    def load(self, network: nn.Module) -> None:
        """Load the weights of the folder; a last layer of another number of classes stays."""
        head = final_linear(network)[0]
        tensors, wanted = self.weights(), network.state_dict()
        for name, here in wanted.items():
            there = tensors.get(name)
            if there is None or there.shape != here.shape:
                if there is not None and name.rpartition(".")[0] == head:
                    tensors[name] = here
                    continue
                found = "has no such tensor" if there is None else f"has shape {(*there.shape,)}"
                raise MismatchError(
                    f"{self.path} {quoted(name)}: the folder {found}, {CONFIG} wants "
                    f"{(*here.shape,)}; wanted weights that fit {CONFIG}"
                )
        network.load_state_dict({name: tensors[name] for name in wanted})

    def export(self, folder: Path, labels: list[str], images: Preparation) -> list[Path]:
        """Write the JSON files that the library needs beside `model.safetensors`."""
        found: list[Path] = []
        for name, tree in self.configuration(labels, images).items():
            found.append(folder / name)
            write_file(found[-1], (json.dumps(tree, indent=2) + "\n").encode())
        return found

    def failure(self, error: Exception) -> FileError:
        """The error for a folder that the library cannot open."""
        why = " ".join(str(error).split())[:300] or type(error).__name__
        return FileError(f"{self.path}: {self.library} cannot open the model: {why}")


def is_image_model(name: str) -> bool:
    """Whether a name of a recipe is a folder or a Hub id, and not a registered network.

    >>> is_image_model("timm/resnet18.a1_in1k"), is_image_model("resnet18")
    (True, False)
    """
    return is_repo(name) or Path(name).is_dir()


@cache
def image_model(name: str, revision: str | None = None) -> ImageModel:
    """Open the folder of a classifier, or fetch it from the Hub.

    Args:
        name: the folder or Hub id.
        revision: branch, tag or commit on the Hub.
    """
    from negmerge.vision.timm_folder import TimmModel
    from negmerge.vision.transformers_folder import TransformersModel

    if Path(name).is_dir():
        path = Path(name)
    else:
        path = fetch_folder("model.name", name, [CONFIG, PREPROCESSOR, CARD, *WEIGHTS], revision)
    raw = read_within(path, CONFIG)
    if raw is None:
        raise FileError(f"{path}: has no {CONFIG}; wanted a folder of timm or transformers")
    config = parse_json(raw, path / CONFIG, "content")
    if (path / "adapter_config.json").exists():
        raise OptionError(f"model.name {quoted(name)}: is an adapter; wanted a whole classifier")
    kind = TimmModel if isinstance(config.get("architecture"), str) else TransformersModel
    made = kind(name, path, config)
    try:
        _ = made.classes, made.preparation, made.labels
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise FileError(
            f"{path / CONFIG}: is not the configuration of an image classifier: {why}"
        ) from None
    made.check()
    return made


def numbers(given: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    """Return a list of numbers of a configuration, or the default."""
    return default if given is None else tuple(float(value) for value in given)
