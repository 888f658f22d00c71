"""What is known of a data set: where it is, its columns, how its images are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from negmerge.errors import OptionError, quoted
from negmerge.vision.decode import Fit, Interpolation

GREY: dict[str, Any] = {"channels": 1, "mean": (0.5,), "std": (0.25,)}
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


class DataSize(NamedTuple):
    """Numbers of training images, test images and classes."""

    train: int
    test: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """Location, columns and preprocessing of a data set; the defaults are usual on the Hub.

    >>> Source(name="someone/birds", hub="someone/birds", size=64).label
    'label'

    Args:
        name: the registered name, or the Hub id or path given to `resolve`.
        hub: the id on the Hugging Face Hub; None if the data set is not there.
        config: the configuration (subset) on the Hub.
        image, label, id: names of the columns.
        train, test: names of the two splits.
        test_share: the share of each class of the training split that is the test set instead; for
            data without a test split.
        size: height and width of the decoded images.
        channels: 1 (grey) or 3 (colour).
        mean, std: of pixels in [0, 1], for each channel; the model normalises with them.
        flip: whether training images are mirrored at random.
        crop: the zero padding of the random crop of training images.
        fit, interpolation: how images of another size are resized; see `decode`.
        summary, licence: texts for `negmerge list datasets`.
        counts: how many images and classes there are, if that is known.
        checked: where id, configuration, columns, splits and counts on the Hub were read; None if
            nobody compared them with a published description.
    """

    name: str
    hub: str | None = None
    config: str | None = None
    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    size: int
    channels: int = 3
    mean: tuple[float, ...] = IMAGENET["mean"]
    std: tuple[float, ...] = IMAGENET["std"]
    flip: bool = True
    crop: int = 0
    id: str | None = None
    fit: Fit = "crop"
    interpolation: Interpolation = "bicubic"
    summary: str = ""
    licence: str = ""
    counts: DataSize | None = None
    checked: str | None = None
    test_share: float | None = None

    def __post_init__(self) -> None:
        where = f"data set {quoted(self.name)}"
        if self.size < 1:
            raise OptionError(f"{where}: size {self.size}, wanted at least 1")
        if self.channels not in (1, 3):
            raise OptionError(f"{where}: channels {self.channels}, wanted 1 or 3")
        for field in ("mean", "std"):
            if (count := len(getattr(self, field))) != self.channels:
                raise OptionError(
                    f"{where}: {field} has {count} numbers, wanted {self.channels}, one for each "
                    "channel"
                )
