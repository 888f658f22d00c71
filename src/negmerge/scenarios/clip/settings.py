"""The fields of a recipe with `scenario: clip`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from negmerge.errors import OptionError
from negmerge.registry import nearest
from negmerge.scenarios.clip.prompts import Epochs, prompts, prompts_of
from negmerge.scenarios.image_settings import ImageSettings, hub_id_of
from negmerge.scenarios.settings import Description, Setup, scenarios
from negmerge.support.settings import NameOrPath, Strict
from negmerge.training.hyperparameters import HyperParameters
from negmerge.vision.augment import LARGEST_MAGNITUDE, Library
from negmerge.vision.settings import Data, Split
from negmerge.vision.splits import HELD_OUT

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario
    from negmerge.scenarios.workload import Workload


class ClipModel(Strict):
    """The model: an architecture of open_clip, a folder as open_clip writes it, or `desk_clip`."""

    name: NameOrPath = "ViT-B-32"
    """The name, path, URL or Hub id."""


class Clip(Strict):
    """A pretrained CLIP model forgets a whole data set (`data`) and keeps another."""

    pretrained: NameOrPath | None = None
    """For an architecture: a tag of open_clip, or a .safetensors file or its URL."""
    augmentation: Library = "timm"
    """The library of RandAugment. timm: its training transform, as the authors use it, with m up to
    10; torchvision: its RandAugment after open_clip's crop, with m up to 30."""
    control: Data = Data(name="imagenet")
    """The data set whose accuracy is kept; scores call it `retain`."""
    linear: bool = False
    """Fine-tune, merge and measure in the tangent space of the pretrained weights."""
    freeze: Literal["attention", "nothing"] = Field(default=None, validate_default=True)
    """What is frozen beside heads and text encoder. The default is that of the authors: the
    attention projections; nothing if `linear`."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _default_freeze(cls, given: Any, fields: ValidationInfo) -> Any:
        if given is not None:
            return given
        return "nothing" if fields.data.get("linear") else "attention"


OLD_FIELDS: dict[str, Any] = {"split": Split(), "retrain": None, "train": HyperParameters()}
"""Fields of other scenarios that older versions wrote into CLIP recipes, with these values."""


class ClipSettings(ImageSettings):
    """The fields of a recipe with `scenario: clip`."""

    kind = "clip"
    summary = "a CLIP model forgets a data set and keeps its zero-shot accuracy on another"
    reshapes = ("groups",)
    task = "zero-shot-image-classification"

    data: Data
    model: ClipModel = ClipModel()
    clip: Clip = Clip()

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if tree.get("data") is None or (
            isinstance(tree["data"], dict) and "name" not in tree["data"]
        ):
            raise ValueError("data.name: is missing; name the data set that the CLIP model forgets")
        for field, usual in OLD_FIELDS.items():
            if field in tree and not _is_default(tree[field], usual):
                raise ValueError(
                    f"{field}: CLIP models are pretrained and forget a whole data set; remove this "
                    "field"
                )
        model, clip = tree.get("model"), tree.get("clip")
        if isinstance(model, dict):
            if any(model.get(field) is not None for field in ("weights", "init")):
                raise ValueError("model: CLIP models take their weights from clip.pretrained")
            model = {k: v for k, v in model.items() if k not in ("weights", "init")}
        if isinstance(clip, dict) and isinstance(clip.get("control"), dict):
            clip = clip | {"control": {"name": "imagenet"} | clip["control"]}
        rest = {k: v for k, v in tree.items() if k not in OLD_FIELDS}
        return rest | {"model": model or {}, "clip": clip or {}}

    @model_validator(mode="after")
    def _fits(self) -> ClipSettings:
        control = self.clip.control
        for field, data in (("data", self.data), ("clip.control", control)):
            if data.words is not None and data.words not in prompts:
                known, near = ", ".join(prompts), nearest(data.words, prompts)
                raise ValueError(f"{field}.words: got {data.words!r}, wanted one of {known}{near}")
        if control.limit.train is not None:
            raise ValueError(
                "clip.control.limit.train: the control set is not trained on; remove this field"
            )
        if control.name == self.data.name:
            raise ValueError(f"clip.control: {control.name} is the set to forget; name another set")
        return self

    @classmethod
    def defaults(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Choose λ on all validation images, and fine-tune for the epochs of the paper.

        The epochs follow the data set and whether members have RandAugment.
        """
        data, pool, search = tree.get("data"), tree.get("pool", {}), tree.get("search", {})
        found = dict(tree)
        if isinstance(search, dict):
            found["search"] = {"samples": HELD_OUT} | search
        named = isinstance(data, dict) and (data.get("words") or data.get("name"))
        epochs = prompts_of(named).epochs if isinstance(named, str) else None
        if epochs is not None and isinstance(pool, dict):
            settings, grid = pool.get("settings", {}), pool.get("grid", {})
            trees = isinstance(settings, dict) and isinstance(grid, dict)
            if trees and "epochs" not in grid and "epochs" not in settings:
                own = {"epochs": _pick(epochs, randaugmented(settings, grid))}
                found["pool"] = pool | {"settings": own | settings}
        return found

    def check_members(self, members: Sequence[HyperParameters]) -> None:
        """Raise if a member has an augmentation that its library does not have."""
        most = LARGEST_MAGNITUDE[self.clip.augmentation]
        for augment in (member.augment for member in members):
            if augment.crop:
                raise OptionError(
                    f"pool: augment.crop: got {augment.crop}, but CLIP members crop the whole "
                    "image at random; remove this field"
                )
            if augment.randaugment is not None and augment.randaugment.m > most:
                raise OptionError(
                    f"pool: augment.randaugment.m: got {augment.randaugment.m}, wanted at most "
                    f"{most} for {self.clip.augmentation} (field clip.augmentation)"
                )

    def forgotten(self, about: Description) -> str:
        """The model, the set to forget and the control set."""
        return (
            f"what {(about.model or {})['name']} knows of {about.data}, by fine-tuning on "
            f"{about.sizes['train']:,} of its images; {about.control} is to be kept"
        )

    def data_names(self) -> list[str]:
        """The set to forget and the control set."""
        return [self.data.name, self.clip.control.name]

    def network(self) -> str | None:
        """The name, folder or Hub id of the model."""
        return self.model.name

    def hub_data(self, name: str) -> str | None:
        """The id of the control set for `retain`, else that of the set to forget."""
        return hub_id_of(self.clip.control.name if name == "retain" else self.data.name)

    def facts(self) -> dict[str, str]:
        """The number of images for fine-tuning, and the frozen attention weights."""
        limit, frozen = self.data.limit.train, "input and output projections, weights and biases"
        return {
            "images": "all" if limit is None else f"{limit:,}",
            "frozen": frozen if self.clip.freeze == "attention" else "none",
        }

    def workload(self, setup: Setup) -> Workload:
        """Imports torch."""
        from negmerge.scenarios.clip.workload import workload

        return workload(self, setup)

    def scenario(self, setup: Setup) -> Scenario:
        """Imports torch."""
        from negmerge.scenarios.clip.scenario import ClipScenario

        return ClipScenario(self, setup)


scenarios.register(ClipSettings.kind, ClipSettings)


def randaugmented(settings: Mapping[str, Any], grid: Mapping[str, Any]) -> set[bool]:
    """Return whether the members of a pool have RandAugment; both values if some have it.

    >>> randaugmented({}, {"augment.randaugment": [None, {"n": 1, "m": 5}]}) == {False, True}
    True

    Args:
        settings: the hyper-parameters that all members share, as a tree.
        grid: lists of values by hyper-parameter.
    """

    def has(augment: Any) -> bool:
        return isinstance(augment, Mapping) and augment.get("randaugment") is not None

    for name, values in grid.items():
        if name.startswith("augment.randaugment."):
            return {True}
        if name in ("augment", "augment.randaugment") and isinstance(values, list | tuple):
            return {v is not None if "." in name else has(v) for v in values}
    return {has(settings.get("augment"))}


def _pick(epochs: Epochs, augmented: set[bool]) -> int:
    if len(augmented) > 1:
        raise OptionError(
            "pool: has members with RandAugment and members without, which the paper trains for "
            f"{epochs.randaugment} and {epochs.plain} epochs; set pool.settings.epochs for all, or "
            "make two runs"
        )
    return epochs.randaugment if augmented == {True} else epochs.plain


def _is_default(given: Any, default: Any) -> bool:
    """Whether a field has its default value."""
    if default is None or given is None:
        return given is None
    try:
        return type(default).model_validate(given) == default
    except ValueError:
        return False
