"""The data of the classify scenario, prepared as its model wants the images."""

from __future__ import annotations

from negmerge.scenarios.classify.settings import ClassifySettings
from negmerge.vision.datasets import Source, resolve
from negmerge.vision.networks import is_registered
from negmerge.vision.pretrained import ImageModel, image_model


def folder_of(settings: ClassifySettings) -> ImageModel | None:
    """Return the classifier of a folder or Hub id; None for a registered network."""
    model = settings.model
    return None if is_registered(model.name) else image_model(model.name, model.revision)


def source_of(settings: ClassifySettings) -> Source:
    """Return where the data is, and the size, mean and deviation of the images.

    They are those of the recipe, then those of the classifier's folder, then those of the data.
    """
    model, data = folder_of(settings), settings.data
    own = {} if model is None else model.preparation.fields()
    return resolve(data.name, **own | data.given())
