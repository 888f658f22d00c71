"""Scenarios whose model is a classifier, and the Grad-CAM panel of their page."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negmerge.errors import MismatchError, OptionError, quoted
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import batches, classification_columns, observe_set
from negmerge.evaluation.scores import cross_entropy
from negmerge.evaluation.search import Advance
from negmerge.registry import nearest
from negmerge.scenarios.base import PanelContent, PanelModel
from negmerge.scenarios.data import DataScenario
from negmerge.scenarios.image_settings import ImageSettings
from negmerge.training.feeds import Batch, Feed, Indices, spaced
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective
from negmerge.training.loop import cross_entropy as cross_entropy_loss
from negmerge.training.outputs import last_features, logits_of
from negmerge.training.samples import Inputs
from negmerge.vision.gradcam import grad_cam, picture

IMAGES = 4
"""How many forget images Grad-CAM shows."""


class ClassifierScenario(DataScenario):
    """A scenario whose model returns one logit for each class."""

    columns = ("correct", "confidence", "loss", "label", "logits")
    has_features = True

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The class names in the order of the labels; empty if they are not known."""

    def logits(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The logits of a batch of a set."""
        return logits_of(model, inputs)

    def features(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The input of the last linear layer, which must compute the logits."""
        return last_features(model, inputs)

    def draw(self, panel: str, models: Sequence[PanelModel], advance: Advance) -> PanelContent:
        """Return Grad-CAM maps of a few reported forget images, or why there are none."""
        feed = self.eval_sets("report")["forget"]
        picked = self.images_to_show(feed)
        if not len(picked):
            return empty_panel(f"the forget set has no image of {' or '.join(self.shown_classes)}")
        inputs, labels = feed.test_batch(picked)
        argument = None
        if isinstance(inputs, dict):
            if len(inputs) > 1:
                return empty_panel(f"the model has several inputs: {', '.join(inputs)}")
            ((argument, inputs),) = inputs.items()
        if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
            shape = tuple(inputs.shape[1:])
            return empty_panel(f"the inputs are not images, their shape is {shape}")
        names = [self.class_name(int(label)) for label in labels]
        alts = [f"forget image {k}, {name}" for k, name in enumerate(names, 1)]
        rows: list[list[dict[str, str]]] = [[] for _ in names]
        files: dict[str, bytes] = {}

        def add(title: str, pngs: list[bytes], captions: list[str], alts: list[str]) -> None:
            for k, (png, caption, alt) in enumerate(zip(pngs, captions, alts, strict=True)):
                file = f"gradcam-{k + 1}-{title}.png"
                rows[k].append({"file": file, "caption": caption, "alt": alt})
                files[file] = png

        add("image", [picture(pixels) for pixels in inputs], names, alts)
        for one in models:
            try:
                with self.shown(one) as network:
                    maps, shares = maps_of(network, inputs, labels, argument)
                pngs = [picture(i, heat) for i, heat in zip(inputs, maps, strict=True)]
            except MismatchError as error:
                return empty_panel(str(error))
            except Exception as error:  # a network may raise anything; a run needs no pictures
                return empty_panel(f"Grad-CAM failed: {type(error).__name__}: {error}")
            captions = [
                f"predicts {self.class_name(int(share.argmax()))}; {name}: {share[label]:.2f}"
                for name, share, label in zip(names, shares, labels, strict=True)
            ]
            about = [f"Grad-CAM of {one.title} on {alts[k]}: {c}" for k, c in enumerate(captions)]
            add(one.title, pngs, captions, about)
            advance(1)
        columns = [one.title for one in models]
        text = explanation(self.shown_classes, models)
        cells = [{"cells": row} for row in rows]
        return PanelContent({"text": text, "columns": columns, "rows": cells}, files)

    def class_name(self, label: int) -> str:
        """The name of a class; its number if names are not known."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    @property
    def shown_classes(self) -> tuple[str, ...]:
        """The classes whose images the panel shows; empty: images of the whole forget set."""
        return self.settings.gradcam.classes if isinstance(self.settings, ImageSettings) else ()

    def check_shown_classes(self) -> None:
        """Raise if the panel is to show a class that the forget set does not have."""
        for name in self.shown_classes:
            if name not in self.class_names:
                known = ", ".join(self.class_names[:5])
                raise OptionError(
                    f"gradcam.classes: got {quoted(name)}, wanted names of classes of the forget "
                    f"set, such as {known}{nearest(name, self.class_names)}"
                )

    def images_to_show(self, feed: Feed) -> Indices:
        """The positions of the images of the panel, evenly spaced in the set or in each class."""
        if not self.shown_classes:
            return spaced(len(feed), IMAGES)
        labels = np.concatenate([feed.test_batch(some)[1].numpy() for some in batches(len(feed))])
        share = max(IMAGES // len(self.shown_classes), 1)
        numbers = [list(self.class_names).index(name) for name in self.shown_classes]
        members = [np.flatnonzero(labels == number) for number in numbers]
        return np.concatenate([own[spaced(len(own), share)] for own in members])

    def loss(self, settings: HyperParameters) -> Objective:
        """Cross-entropy."""
        return cross_entropy_loss(settings)

    def observe(self, model: nn.Module, name: str, batch: Batch, columns: Sequence[str]) -> Columns:
        """The columns of each sample, from its logits."""
        inputs, targets = batch
        return classification_columns(self.logits(model, name, inputs), targets, columns)

    def mean_loss(
        self, model: nn.Module, name: str, feed: Feed, advance: Advance = lambda count: None
    ) -> float:
        """The cross-entropy on a set."""
        observe = partial(self.observe, columns=("confidence",))
        return cross_entropy(observe_set(observe, model, name, feed, advance))


# ----------------------------------------------------------------------------------------- Grad-CAM


def empty_panel(why: str) -> PanelContent:
    """A panel that shows the reason why it is empty."""
    return PanelContent({"missing": why})


def maps_of(
    network: nn.Module, inputs: Tensor, labels: Tensor, argument: str | None
) -> tuple[NDArray[np.float32], Tensor]:
    """Return the Grad-CAM map of each image for its true class, and its predicted probabilities.

    Args:
        network: the network with the weights of the model that is shown; it is changed.
        labels: the true classes of the images.
        argument: the name of the keyword argument that takes the images; None: the first argument.
    """
    if argument is not None:
        network.register_forward_pre_hook(
            lambda module, given, named: (given[1:], named | {argument: given[0]}), with_kwargs=True
        )
    network.register_forward_hook(lambda module, given, output: getattr(output, "logits", None))
    inputs = inputs.to(next(network.parameters()).device)
    maps = grad_cam(network, inputs, labels)
    with torch.inference_mode():
        return maps, network(inputs).float().softmax(1).cpu()


def explanation(classes: Sequence[str], models: Sequence[PanelModel]) -> str:
    """The text above the panel, with the classes that are shown; none: all."""
    of = f" of {' and '.join(classes)}" if classes else ""
    text = (
        f"Grad-CAM for the true class on evenly spaced images{of} of the reported forget set. Red "
        "marks the pixels that contribute most to the class; each map has its own scale."
    )
    scales = {one.title: f"{one.title} {one.scale:.4g}" for one in models if one.patch is not None}
    if "conflict" in scales:
        text += (
            " Conflict subtracts the elements whose signs disagree, consensus those whose signs "
            f"agree, each with its own λ: {', '.join(scales.values())}."
        )
    return text
