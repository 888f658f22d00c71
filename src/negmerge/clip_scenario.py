"""The CLIP problem: one data set is forgotten, another is kept, the model is given."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.data.cache import cache_folder, only_one
from negmerge.data.datasets import Images, Source, load, resolve
from negmerge.data.draws import seed_of
from negmerge.data.feeds import Feed, ImageFeed, Indices
from negmerge.data.splits import balanced, held_out_of
from negmerge.errors import FileError, MismatchError, OptionError, ValueRangeError, shown
from negmerge.models.classifiers import channels_last
from negmerge.models.clip import ClipClassifier, count_frozen, freeze_parts, reader
from negmerge.models.heads import ready_head, zero_shot_head
from negmerge.models.linearized import LinearizedClassifier
from negmerge.models.pretrained import ClipSource
from negmerge.models.prompts import PLAIN, prompts_of
from negmerge.models.weights import load_model, load_tensors, save_tensors
from negmerge.progress import Progress, Quiet
from negmerge.recipe import Clip, Data, Recipe
from negmerge.scenario import Part, Scenario, Use, identity

LEAST = 0.9
"""The smallest share of the area in open_clip's random resized crop."""
TANGENT = (
    "clip.linear: all scores are of the linearised model; unlearned/model.safetensors holds its "
    "weights θ₀ − λτ, and was not measured as an ordinary CLIP"
)


def make_problem(recipe: Recipe, progress: Progress | None = None) -> Scenario | ClipScenario:
    """The problem a recipe describes."""
    return Scenario(recipe, progress) if recipe.clip is None else ClipScenario(recipe, progress)


def _kept_head(path: Path) -> Tensor | None:
    """A head that is in the cache; one that cannot be read is made again."""
    try:
        return load_tensors(path)[0]["head"] if path.is_file() else None
    except (FileError, KeyError):
        return None


class ClipScenario:
    """The forget set, the control set, and a CLIP with a head for each.

    The validation rule is the task-vector protocol's: a tenth of each training set, at most 5,000,
    chooses λ; the test sets are reported.
    """

    def __init__(self, recipe: Recipe, progress: Progress | None = None) -> None:
        assert recipe.clip is not None, "the recipe has a section clip"
        self.recipe, self.progress, self.seed = recipe, progress, recipe.seed
        self.clip: Clip = recipe.clip
        self.source = ClipSource(recipe.model.name, recipe.clip.pretrained)

    def check(self) -> None:
        """Find what is wrong with the recipe's data, model or files before hours of work."""
        self.source.fingerprint  # noqa: B018 (reads the configuration and finds the weights)
        self.heads  # noqa: B018 (opens the data, builds what is not in the cache)
        network, name = self.network().eval(), shown(self.source.name)
        device = next(network.parameters()).device
        image = torch.zeros((1, 3, self.source.size, self.source.size), device=device)
        with torch.inference_mode():
            found = self.template.visual.eval()(image.cpu())
        if not isinstance(found, Tensor) or found.dim() != 2:
            raise OptionError(
                f"model.name {name}: its image encoder gives no features of whole images"
            )
        for part, head in self.heads.items():
            if head.shape[1] != found.shape[1]:
                raise MismatchError(
                    f"model.name {name}: the head of the {part} set takes {head.shape[1]} "
                    f"features, the image encoder gives {found.shape[1]}"
                )
            with torch.inference_mode():
                outputs = reader(network, part)(image)
            if not outputs.isfinite().all():
                raise ValueRangeError(
                    f"model.name {name}: its outputs for the {part} set are not finite; its "
                    "weights or class embeddings are damaged"
                )

    # ----------------------------------------------------------------------------------------- data

    def shown(self, data: Data) -> Source:
        """A data set as the model is shown it."""
        given, source = data.given(), self.source
        as_trained = {"size": source.size, "channels": 3, "mean": source.mean, "std": source.std}
        for field in sorted(as_trained.keys() & given.keys()):
            where = "data" if data is self.recipe.data else "clip.control"
            raise OptionError(f"{where}.{field}: a CLIP says itself what it is shown; leave it out")
        as_trained |= {"fit": source.fit, "interpolation": source.interpolation}
        return resolve(data.name, **as_trained, **given)

    def open(self, data: Data, split: Any, **options: Any) -> Images:
        """A split of a data set, decoded; the control lies beside the other if nothing is said."""
        root = data.root or self.recipe.data.root
        where = {"root": root, "revision": data.revision, "progress": self.progress}
        return load(self.shown(data), split, **where, **options)

    @cached_property
    def forget(self) -> tuple[Images, Images]:
        """Training and test images of what is forgotten."""
        return self.open(self.recipe.data, "train"), self.open(self.recipe.data, "test")

    @cached_property
    def control(self) -> tuple[Images, Images]:
        """Validation and test images of what is kept."""
        control = self.clip.control
        return self.open(control, "train", part="held_out"), self.open(control, "test")

    @cached_property
    def parts(self) -> dict[str, Indices]:
        """Who trains, who chooses λ, who is reported."""
        rng = np.random.default_rng(seed_of("clip", self.seed))
        samples, data = self.recipe.search.samples, self.recipe.data
        train, test = self.forget
        rest, held_out = held_out_of(len(train))

        def some(of: Images, where: Indices, count: int | None) -> Indices:
            return where[balanced(of.labels[where], count, rng)]

        kept, kept_test = self.control
        found = {
            "train": some(train, rest, data.limit.train),
            "choose_forget": some(train, held_out, samples),
            "choose_retain": some(kept, np.arange(len(kept)), samples),
            "forget": some(test, np.arange(len(test)), data.limit.test),
            "retain": some(kept_test, np.arange(len(kept_test)), self.clip.control.limit.test),
        }
        for name, where in found.items():
            if not len(where):
                raise OptionError(f"data: no images are left for {name}: a set is too small")
        return found

    def training_feed(self, part: Part) -> Feed:
        """The forget set; nothing else is ever trained on."""
        assert part == "forget", "a CLIP is fine-tuned on the forget set only"
        return ImageFeed(self.forget[0], self.parts["train"], least=LEAST)

    def scoring_feeds(self, use: Use) -> dict[str, Feed]:
        """The validation sets, which choose λ, or the test sets, which are reported."""
        if use == "choose":
            return {
                "retain": ImageFeed(self.control[0], self.parts["choose_retain"]),
                "forget": ImageFeed(self.forget[0], self.parts["choose_forget"]),
            }
        return {
            "retain": ImageFeed(self.control[1], self.parts["retain"]),
            "forget": ImageFeed(self.forget[1], self.parts["forget"]),
        }

    @property
    def class_names(self) -> Sequence[str]:
        """What the labels of the forget set mean."""
        return self.forget[0].classes

    # -------------------------------------------------------------------------------------- network

    @cached_property
    def heads(self) -> dict[str, Tensor]:
        """The frozen head of each set, built once and kept in the cache."""
        sets = {
            "forget": (self.recipe.data, self.forget),
            "retain": (self.clip.control, self.control),
        }
        return {name: self._head(data, images[1].classes) for name, (data, images) in sets.items()}

    def _head(self, data: Data, names: tuple[str, ...]) -> Tensor:
        content = identity(self.source.fingerprint, data.name, self._words(data, names))
        path = cache_folder() / "heads" / f"{content}.safetensors"
        head = _kept_head(path)
        if head is None:
            with only_one(path):
                head = _kept_head(path)  # another run may have made it meanwhile
                if head is None:
                    head = self._make_head(path, data, names)
        return head

    def _make_head(self, path: Path, data: Data, names: tuple[str, ...]) -> Tensor:
        shows, prompts = self.progress or Quiet(), prompts_of(data.words or data.name)
        shows.stage(f"putting {data.name} into words", len(names), "classes")
        head = zero_shot_head(self.source, data.name, names, prompts, shows.advance)
        save_tensors(path, {"head": head}, {"data": data.name})
        return head

    def _sentences(self, data: Data, names: tuple[str, ...]) -> list[list[str]]:
        """For each class, its sentences; none for a ready-made head of classes without words."""
        try:
            return prompts_of(data.words or data.name).words(names)
        except OptionError:
            if ready_head(self.source, data.name, names) is None:
                raise
            return []

    def _words(self, data: Data, names: tuple[str, ...]) -> str:
        return identity(names, self._sentences(data, names))

    @property
    def notes(self) -> list[str]:
        """What deserves attention before hours of work."""
        found = self.source.notes + ([TANGENT] if self.clip.linear else [])
        for data, (_, images) in (
            (self.recipe.data, self.forget),
            (self.clip.control, self.control),
        ):
            known = prompts_of(data.words or data.name) is not PLAIN
            if not known and ready_head(self.source, data.name, images.classes) is None:
                example = self._sentences(data, images.classes)[0][0]
                found.append(
                    f"{data.name}: no set that is known; its classes are put as “{example}” (a "
                    "copy of a known set under another name: say which in `words`)"
                )
        return found

    @cached_property
    def template(self) -> ClipClassifier:
        """The architecture, with what is frozen marked."""
        kind = LinearizedClassifier if self.clip.linear else ClipClassifier
        clip = self.source.strip(self.source.build())
        network = kind(clip, self.heads, self.source.mean, self.source.std)
        freeze_parts(network, self.clip.freeze)
        return network

    def network(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """The network, with a file's weights or with the given ones; linear around either."""
        network = copy.deepcopy(self.template)
        if weights is None:
            network.load_state_dict(self.source.strip(self.source.load()).state_dict())
        else:
            load_model(weights, network)
        network = channels_last(network.to("cuda" if torch.cuda.is_available() else "cpu"))
        return network.linearise() if isinstance(network, LinearizedClassifier) else network

    def complete(self, weights: Path) -> list[Path]:
        """Put beside the unlearned weights what makes a CLIP of them that open_clip can open.

        The whole CLIP with its text side, its configuration, and ready-made heads if it has them.
        In the tangent space there is none: the weights mean something only around the original.
        """
        if self.clip.linear:
            return []
        return self.source.save(weights.parent, load_tensors(weights)[0])

    # --------------------------------------------------------------------------------------- record

    @property
    def identity(self) -> list[Any]:
        """What every model of this problem depends on."""
        train = self.forget[0]
        own = [train.fingerprint, self._words(self.recipe.data, train.classes)]
        trained = [self._places["train"], LEAST]
        return [own, trained, self.source.fingerprint, self.clip.freeze, self.clip.linear]

    @property
    def scored_on(self) -> list[Any]:
        """What every score depends on beside the weights."""
        names = self.control[1].classes
        sets = [images.fingerprint for images in (*self.forget, *self.control)]
        return [sets, self._places, self._words(self.clip.control, names), self.identity]

    @cached_property
    def _places(self) -> dict[str, str]:
        """A hash of who is in each part."""
        return {name: identity(part.tolist()) for name, part in self.parts.items()}

    def describe(self) -> dict[str, Any]:
        """The sizes of all parts and what the model is, for the record."""
        sizes = {name: len(self.parts[name]) for name in ("train", "forget", "retain")}
        chosen_on = {name: len(self.parts[f"choose_{name}"]) for name in ("retain", "forget")}
        return {
            "scenario": "clip",
            "data": self.recipe.data.name,
            "control": self.clip.control.name,
            "classes": len(self.forget[0].classes),
            "forgotten_class": None,
            "sizes": sizes,
            "looked": False,
            "chosen_on": chosen_on,
            "fingerprint": identity(self.scored_on),
            "labels": np.bincount(self.forget[0].labels[self.parts["train"]]).tolist(),
            "model": {
                "name": self.source.name,
                "pretrained": self.source.pretrained,
                "quick_gelu": self.source.quick_gelu,
                "frozen_parts": ["heads", "text"]
                + (["attention projections"] if self.clip.freeze == "attention" else []),
                "linear": self.clip.linear,
            }
            | count_frozen(self.template),
            "notes": self.notes,
        }
