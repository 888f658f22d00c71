"""Fields and class attributes that all scenarios with a classifier share."""

from __future__ import annotations

from pathlib import Path

from negmerge.scenarios.settings import Panel, ScenarioSettings
from negmerge.support.remote.hub import is_repo
from negmerge.support.settings import Strict


class GradCam(Strict):
    """The images of the Grad-CAM panel."""

    classes: tuple[str, ...] = ()
    """Classes of the forget set whose images are shown; none: images of the whole set."""


class ImageSettings(ScenarioSettings):
    """Settings of a scenario with accuracies, membership inference and Grad-CAM."""

    forget_metric = "acc_forget"
    retain_metric = "acc_retain"
    order = ("acc_retain", "acc_forget", "acc_test", "acc_holdout", "mia")
    panels = (Panel("gradcam", "Where the models look"),)

    gradcam: GradCam = GradCam()


def hub_id_of(data: str) -> str | None:
    """Return the Hub id of a data set by its name in a recipe; None for files of the user.

    >>> hub_id_of("cifar10"), hub_id_of("someone/birds"), hub_id_of("/data/birds")
    ('uoft-cs/cifar10', 'someone/birds', None)
    """
    from negmerge.vision.datasets import datasets  # it imports numpy

    if data in datasets:
        return datasets.get(data).hub
    return data if is_repo(data) and not Path(data).exists() else None
