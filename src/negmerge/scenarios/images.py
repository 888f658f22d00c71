"""Scenarios whose model is a classifier, and the Grad-CAM panel of their page."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.errors import MismatchError, OptionError, quoted
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import batches, classification_columns, observe_set
from negmerge.evaluation.scores import cross_entropy
from negmerge.evaluation.search import Advance
from negmerge.scenarios.base import PanelContent, PanelModel
from negmerge.scenarios.data import DataScenario
from negmerge.scenarios.image_settings import ImageSettings
from negmerge.training.feeds import Batch, Feed, Indices
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective
from negmerge.training.loop import cross_entropy as cross_entropy_loss
from negmerge.training.outputs import logits_of
from negmerge.training.samples import Inputs
from negmerge.vectors.task_vector import TaskVector
from negmerge.vision.gradcam import grad_cam, picture

IMAGES = 4
"""How many forget images Grad-CAM shows."""

EXPLANATION = (
    "Grad-CAM for the true class on {images} of the reported forget set. Red marks the pixels that "
    "contribute most to the class; each map has its own scale."
)
CONFLICT = (
    " Conflict subtracts the elements whose signs disagree, consensus those whose signs agree, "
    "each with its own λ: {scales}."
)


class ClassifierScenario(DataScenario):
    """A scenario whose model returns one logit for each class."""

    columns = ("correct", "confidence", "loss", "label", "logits")

    @property
    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """The class names in the order of the labels; empty if they are not known."""

    def logits(self, model: nn.Module, name: str, inputs: Inputs) -> Tensor:
        """The logits of a batch of a set."""
        return logits_of(model, inputs)

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
        images = [Cell(picture(i), int(k)) for i, k in zip(inputs, labels, strict=True)]
        seen = {"image": images}
        for one in models:
            try:
                seen[one.title] = cells_of(self, one, inputs, labels, argument)
            except MismatchError as error:
                return empty_panel(str(error))
            except Exception as error:  # a network may raise anything; a run needs no pictures
                return empty_panel(f"Grad-CAM failed: {type(error).__name__}: {error}")
            advance(1)
        return table_of(seen, self.class_names, explanation(self.shown_classes, models))

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
                    f"set, such as {known}"
                )

    def images_to_show(self, feed: Feed) -> Indices:
        """The positions of the images of the panel, evenly spaced in the set or in each class."""
        if not self.shown_classes:
            return spaced(len(feed))
        labels = np.concatenate([feed.test_batch(some)[1].numpy() for some in batches(len(feed))])
        share = max(IMAGES // len(self.shown_classes), 1)
        picked = [np.zeros(0, np.int64)]
        for name in self.shown_classes:
            own = np.flatnonzero(labels == list(self.class_names).index(name))
            picked.append(own[spaced(len(own), share)])
        return np.concatenate(picked)

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


@dataclass(frozen=True)
class Cell:
    """A picture, the true class of its image, and the prediction of a model."""

    png: bytes
    label: int
    predicted: int | None = None
    confidence: float | None = None


def empty_panel(why: str) -> PanelContent:
    """A panel that shows the reason why it is empty."""
    return PanelContent({"missing": why})


def cells_of(
    scenario: ClassifierScenario,
    shown: PanelModel,
    inputs: Tensor,
    labels: Tensor,
    argument: str | None,
) -> list[Cell]:
    """The Grad-CAM maps and predictions of one model.

    Args:
        scenario: loads the model.
        shown: the model.
        inputs: the images.
        labels: their true classes.
        argument: the name of the keyword argument that takes the images; None: the first argument.
    """
    network = scenario.model(shown.model)
    if argument is not None:
        network.register_forward_pre_hook(
            lambda module, given, named: (given[1:], named | {argument: given[0]}), with_kwargs=True
        )
    network.register_forward_hook(lambda module, given, output: getattr(output, "logits", None))
    with ExitStack() as stack:
        if shown.patch is not None:
            tau = TaskVector.load(shown.patch)
            stack.enter_context(tau.applied(network, -shown.scale))
        device = next(network.parameters()).device
        maps = grad_cam(network, inputs.to(device), labels)
        with torch.inference_mode():
            shares = network(inputs.to(device)).float().softmax(1).cpu()
    return [
        Cell(picture(pixels, heat), int(label), int(share.argmax()), float(share[label]))
        for pixels, heat, label, share in zip(inputs, maps, labels, shares, strict=True)
    ]


def spaced(size: int, count: int = IMAGES) -> Indices:
    """Return at most `count` evenly spaced positions.

    >>> spaced(100), spaced(2)
    (array([ 0, 33, 66, 99]), array([0, 1]))
    """
    return np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64))


def explanation(classes: Sequence[str], models: Sequence[PanelModel]) -> str:
    """The text above the panel.

    Args:
        classes: the classes that are shown; empty: all.
        models: the models that are shown.
    """
    of = f" of {' and '.join(classes)}" if classes else ""
    text = EXPLANATION.format(images=f"evenly spaced images{of}")
    scales = {one.title: one.scale for one in models if one.patch is not None}
    if "conflict" not in scales:
        return text
    return text + CONFLICT.format(scales=", ".join(f"{k} {v:.4g}" for k, v in scales.items()))


def table_of(seen: dict[str, list[Cell]], names: Sequence[str], text: str) -> PanelContent:
    """Arrange pictures in a table with a row for each image and a column for each model.

    Args:
        seen: the pictures by title; the title `image` has the images themselves.
        names: the class names; empty if they are not known.
        text: the text above the table.
    """

    def name(label: int) -> str:
        return names[label] if label < len(names) else f"class {label}"

    rows: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for k in range(len(seen["image"])):
        cells: list[dict[str, Any]] = []
        for title, found in seen.items():
            one, file = found[k], f"gradcam-{k + 1}-{title}.png"
            files[file] = one.png
            caption, alt = name(one.label), f"forget image {k + 1}, {name(one.label)}"
            if one.predicted is not None:
                caption = f"predicts {name(one.predicted)}; {name(one.label)}: {one.confidence:.2f}"
                alt = f"Grad-CAM of {title} on {alt}: {caption}"
            cells.append({"file": file, "caption": caption, "alt": alt})
        rows.append({"cells": cells})
    columns = [title for title in seen if title != "image"]
    return PanelContent({"text": text, "columns": columns, "rows": rows}, files)
