"""The CLIP scenario: a pretrained model forgets one data set and keeps another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.errors import MismatchError, OptionError, ValueRangeError, quoted
from negmerge.evaluation.search import Advance, Evaluator
from negmerge.scenarios.base import Given, PanelContent, PanelModel, TrainingSet, Use, identity
from negmerge.scenarios.clip.anatomy import anatomy
from negmerge.scenarios.clip.classifier import ClipClassifier, count_frozen, freeze_parts
from negmerge.scenarios.clip.heads import cached_head, ready_head, sentences_of
from negmerge.scenarios.clip.linearized import LinearEvaluator, LinearizedClassifier
from negmerge.scenarios.clip.pretrained import ClipSource
from negmerge.scenarios.clip.prompts import PLAIN, prompts_of
from negmerge.scenarios.clip.settings import ClipSettings
from negmerge.scenarios.images import ClassifierScenario, empty_panel
from negmerge.scenarios.settings import Description, Setup
from negmerge.training.feeds import Feed, Indices
from negmerge.training.layers import channels_last
from negmerge.training.samples import Inputs
from negmerge.training.seeds import seed_of, set_apart
from negmerge.training.weights import load_model, load_tensors
from negmerge.vectors.task_vector import TaskVector
from negmerge.vision.augment import LEAST
from negmerge.vision.datasets import Images, Source, datasets, load, load_some, resolve
from negmerge.vision.feed import ImageFeed
from negmerge.vision.original_feed import OriginalFeed
from negmerge.vision.originals import Originals, load_originals
from negmerge.vision.settings import Data
from negmerge.vision.splits import balanced, held_out_of

LINEAR_NOTE = (
    "clip.linear: all scores are of the linearised model; unlearned/model.safetensors holds its "
    "weights θ₀ − λτ, and was not measured as an ordinary CLIP"
)


class ClipScenario(ClassifierScenario):
    """A CLIP model with one head for the forget set and one for the control set.

    As in the task-vector protocol, a tenth of each training set, at most 5,000 images, chooses λ,
    and the test sets are reported.
    """

    def __init__(self, settings: ClipSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.settings, self.clip = settings, settings.clip
        self.source = ClipSource(settings.model.name, self.clip.pretrained)

    def check(self) -> None:
        self.source.fingerprint  # noqa: B018 (reads the configuration and finds the weights)
        self.heads  # noqa: B018 (opens the data, builds the heads that are not in the cache)
        self.check_shown_classes()
        network, name = self.model().eval(), quoted(self.source.name)
        device = next(network.parameters()).device
        image = torch.zeros((1, 3, self.source.size, self.source.size), device=device)
        with torch.inference_mode():
            found = self.template.visual.eval()(image.cpu())
        if not isinstance(found, Tensor) or found.dim() != 2:
            raise OptionError(
                f"model.name {name}: the image encoder does not return one vector of features for "
                "each image; use another model"
            )
        for part, head in self.heads.items():
            if head.shape[1] != found.shape[1]:
                raise MismatchError(
                    f"model.name {name}: the head of the {part} set has {head.shape[1]} features, "
                    f"the image encoder has {found.shape[1]}"
                )
            with torch.inference_mode():
                outputs = self.logits(network, part, image)
            if not outputs.isfinite().all():
                raise ValueRangeError(
                    f"model.name {name}: the outputs for the {part} set are not finite; the "
                    "weights or the class embeddings are damaged"
                )

    # ----------------------------------------------------------------------------------------- data

    def _source_of(self, data: Data) -> Source:
        """A data set, with images prepared as for the training of the model."""
        given, source = data.given(), self.source
        fixed = {"size": source.size, "channels": 3, "mean": source.mean, "std": source.std}
        for field in sorted(fixed.keys() & given.keys()):
            where = "data" if data is self.settings.data else "clip.control"
            what = "image size" if field == "size" else field
            raise OptionError(f"{where}.{field}: CLIP models fix the {what}; remove this field")
        fixed |= {"fit": source.fit, "interpolation": source.interpolation}
        return resolve(data.name, **fixed, **given)

    def _where(self, data: Data) -> dict[str, Any]:
        """How to load a data set; the default root of the control set is that of the forget set."""
        root = data.root or self.settings.data.root
        where = {"root": root, "revision": data.revision, "progress": self.progress}
        return {"source": self._source_of(data), **where}

    @cached_property
    def originals(self) -> Originals:
        """The original training pictures of the set to forget."""
        found = load_originals(split="train", **self._where(self.settings.data))
        if not len(held_out_of(len(found))[1]):
            raise OptionError(
                f"data: {len(found)} training images are too few to hold a tenth out, which "
                "chooses λ; use a larger data set"
            )
        return found

    @cached_property
    def forget(self) -> tuple[Images, Images]:
        """Validation and test images of the set to forget."""
        self.originals  # noqa: B018 (raises if there are no validation images)
        where = self._where(self.settings.data)
        return load(split="train", part="held_out", **where), load(split="test", **where)

    @cached_property
    def control(self) -> tuple[Images, Images]:
        """Validation and test images of the control set; of a large set, the reported ones."""
        return self._drawn[1]

    @property
    def _sets(self) -> dict[str, tuple[Data, tuple[Images, Images]]]:
        return {
            "forget": (self.settings.data, self.forget),
            "retain": (self.clip.control, self.control),
        }

    @property
    def parts(self) -> dict[str, Indices]:
        """The positions of the images that train, that choose λ, and that are reported."""
        return self._drawn[0]

    @cached_property
    def _drawn(self) -> tuple[dict[str, Indices], tuple[Images, Images]]:
        """The parts, and the control set, whose test images are drawn by their labels."""
        rng = np.random.default_rng(seed_of("clip", self.seed))
        samples, limit = self.samples, self.settings.data.limit
        train, test = self.originals, self.forget[1]
        control, where = self.clip.control, self._where(self.clip.control)
        validation = load(split="train", part="held_out", **where)
        rest, held_out = held_out_of(len(train))

        def some(labels: Indices, count: int | None) -> Indices:
            return balanced(labels, count, rng)

        found = {
            "train": rest[some(train.labels[rest], limit.train)],
            # Of the validation images only, in the order in which they are decoded.
            "choose_forget": np.sort(held_out).searchsorted(
                held_out[some(train.labels[held_out], samples)]
            ),
            "choose_retain": some(validation.labels, samples),
            "forget": some(test.labels, limit.test),
        }
        reported, found["retain"] = load_some(
            split="test", choose=lambda labels: some(labels, control.limit.test), **where
        )
        for name in ("forget", "retain") if self.tunes else ():
            part = found[f"choose_{name}"]
            own, rest = set_apart(len(part), name, self.seed)
            found |= {f"tune_{name}": part[own], f"choose_{name}": part[rest]}
        for name, part in found.items():
            if not len(part):
                raise OptionError(
                    f"data: no images are left for {name}; use a larger data set or limit"
                )
        return found, (validation, reported)

    def train_set(self, name: TrainingSet) -> Feed:
        """The training images of the forget set, the only set that models are trained on."""
        assert name == "forget", "a CLIP model is fine-tuned on the forget set only"
        return self._train_feed

    @cached_property
    def _train_feed(self) -> OriginalFeed:
        """One feed for all members: it may keep decoded pictures in memory."""
        data, source = self.settings.data, self._source_of(self.settings.data)
        known = (data.words or data.name).rstrip("/").rpartition("/")[2].lower()
        grey = known in datasets and datasets.get(known).channels == 1
        where = self.parts["train"]
        return OriginalFeed(self.originals, where, source, self.clip.augmentation, grey)

    def eval_sets(self, use: Use) -> dict[str, Feed]:
        """The validation sets, which choose λ and tune, or the test sets, which are reported."""
        split, prefix = (1, "") if use == "report" else (0, f"{use}_")
        return {
            name: ImageFeed(self._sets[name][1][split], self.parts[prefix + name])
            for name in ("retain", "forget")
        }

    @property
    def class_names(self) -> Sequence[str]:
        """The class names of the forget set."""
        return self.forget[0].classes

    # --------------------------------------------------------------------------------------- models

    @cached_property
    def heads(self) -> dict[str, Tensor]:
        """The frozen head of each set, built once and kept in the cache."""
        return {
            name: cached_head(self.source, data.name, test.classes, data.words, self.progress)
            for name, (data, (_, test)) in self._sets.items()
        }

    def _sentences(self, data: Data, names: tuple[str, ...]) -> list[list[str]]:
        return sentences_of(self.source, data.name, names, data.words)

    def _words(self, data: Data, names: tuple[str, ...]) -> str:
        """A hash of the class names and of their sentences."""
        return identity(names, self._sentences(data, names))

    @property
    def notes(self) -> list[str]:
        """Remarks for the user before the work begins."""
        found = self.source.notes + ([LINEAR_NOTE] if self.clip.linear else [])
        for data, (_, images) in self._sets.values():
            known = prompts_of(data.words or data.name) is not PLAIN
            if not known and ready_head(self.source, data.name, images.classes) is None:
                example = self._sentences(data, images.classes)[0][0]
                found.append(
                    f"{data.name}: has no registered prompts; its classes get plain ones, such as "
                    f"“{example}”; if it is a copy of a known set, name that set in `words`"
                )
        return found

    @cached_property
    def template(self) -> ClipClassifier:
        """The architecture with random weights; frozen parameters require no gradient."""
        kind = LinearizedClassifier if self.clip.linear else ClipClassifier
        clip = self.source.without_text(self.source.build())
        network = kind(clip, self.heads, self.source.mean, self.source.std)
        freeze_parts(network, self.clip.freeze)
        return network

    def model(self, weights: Path | None = None, seed: int = 0) -> nn.Module:
        """The network with the weights of a file or of the source; linear around them if asked."""
        network = copy.deepcopy(self.template)
        if weights is None:
            network.load_state_dict(self.source.without_text(self.source.load()).state_dict())
        else:
            load_model(weights, network)
        network = channels_last(network.to("cuda" if torch.cuda.is_available() else "cpu"))
        return network.linearise() if isinstance(network, LinearizedClassifier) else network

    def export(self, weights: Path) -> list[Path]:
        """Write a folder that open_clip opens: the whole CLIP model and its configuration.

        A linearised model is not exported: its weights have a meaning only around the original.
        """
        if self.clip.linear:
            return []
        return self.source.save(weights.parent, load_tensors(weights)[0])

    # --------------------------------------------------------------------------------------- record

    def draw(self, panel: str, models: Sequence[PanelModel], advance: Advance) -> PanelContent:
        """Grad-CAM; a linearised network has no gradient for it."""
        if self.clip.linear:
            return empty_panel("a linearised network has no gradient that Grad-CAM could show")
        return super().draw(panel, models, advance)

    def details(self, tau: TaskVector) -> dict[str, Any]:
        """The number of merged models, and the zeros by part of the image encoder."""
        return {"members": tau.origin.n, "elements": tau.elements, "anatomy": anatomy(tau)}

    def original(self) -> Given:
        """The pretrained model."""
        return Given(None, self.identity)

    def logits(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The logits of a batch, by the head of its set."""
        return model(inputs, name)

    @property
    def stands_alone(self) -> bool:
        """Whether the model is not linearised: then its weights need those of the original."""
        return not self.clip.linear

    def features(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The features of the image encoder."""
        assert isinstance(model, ClipClassifier)
        assert isinstance(inputs, Tensor)
        return model.features(inputs)

    def evaluator(self, model: nn.Module, tau: TaskVector) -> Evaluator:
        """Measures θ − λτ at any λ; for a linearised model, all λ from one pass."""
        if isinstance(model, LinearizedClassifier):
            return LinearEvaluator(self, model, tau)
        return super().evaluator(model, tau)

    def recalibration_set(self) -> tuple[str, Feed]:
        """The forget set; a linearised model has the statistics of the original."""
        if self.clip.linear:
            raise OptionError(
                "buffers: got recalibrate, and a linearised model has the statistics of the "
                "original; set buffers to keep"
            )
        return super().recalibration_set()

    @property
    def identity(self) -> list[Any]:
        train = self.originals
        own = [train.fingerprint, self._words(self.settings.data, train.classes)]
        trained = [self._part_hashes["train"], LEAST, self.clip.augmentation]
        return [own, trained, self.source.fingerprint, self.clip.freeze, self.clip.linear]

    @property
    def scored_on(self) -> list[Any]:
        names = self.control[1].classes
        sets = [images.fingerprint for images in (*self.forget, *self.control)]
        return [sets, self._part_hashes, self._words(self.clip.control, names), self.identity]

    @cached_property
    def _part_hashes(self) -> dict[str, str]:
        return {name: identity(part.tolist()) for name, part in self.parts.items()}

    def describe(self) -> Description:
        """The sizes of all sets, and facts about the model."""
        frozen = ["attention projections"] if self.clip.freeze == "attention" else []
        return Description(
            scenario="clip",
            data=self.settings.data.name,
            control=self.clip.control.name,
            classes=len(self.class_names),
            forgotten_class=None,
            looked=False,
            sizes={name: len(self.parts[name]) for name in ("train", "forget", "retain")},
            chosen_on={name: len(self.parts[f"choose_{name}"]) for name in ("retain", "forget")},
            fingerprint=identity(self.scored_on),
            labels=np.bincount(self.originals.labels[self.parts["train"]]).tolist(),
            model={
                "name": self.source.name,
                "pretrained": self.source.pretrained,
                "quick_gelu": self.source.quick_gelu,
                "frozen_parts": ["heads", "text", *frozen],
                "linear": self.clip.linear,
                **count_frozen(self.template),
            },
            notes=self.notes,
            **self.source.base,
        )
