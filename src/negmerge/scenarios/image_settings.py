"""Fields and class attributes that all scenarios with a classifier share."""

from __future__ import annotations

from negmerge.scenarios.settings import Panel, ScenarioSettings
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
