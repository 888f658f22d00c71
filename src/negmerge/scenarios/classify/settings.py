"""The fields of a recipe with `scenario: classify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from negmerge.errors import OptionError
from negmerge.evaluation.criteria import Criterion
from negmerge.scenarios.image_settings import ImageSettings, hub_id_of
from negmerge.scenarios.settings import Description, Setup, check_reference, scenarios
from negmerge.support.settings import File, NameOrPath, Strict
from negmerge.training.hyperparameters import HyperParameters
from negmerge.vision.settings import Data, Split

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario
    from negmerge.scenarios.workload import Workload


class Network(Strict):
    """The network and its weights."""

    name: NameOrPath = "resnet_small"
    """The architecture (`negmerge list models`), or a classifier of timm or transformers: its
    folder, or its Hub id, such as timm/resnet18.a1_in1k."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; a commit makes a run repeatable."""
    knows: bool = False
    """Whether the classifier of a folder or Hub id was trained on the data already; if not, the run
    trains it from its weights (`train`), with a new last layer if the number of classes differs."""
    weights: File | None = None
    """The file of the original model, or its URL; if None, the run trains it."""
    init: File | None = None
    """Weights that training starts from; a final layer of another size starts at random."""

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the fields of folders if they are not used: older recipes do not have them."""
        unused = {"revision": None, "knows": False}
        return {k: v for k, v in dump(self).items() if k not in unused or v != unused[k]}


class Retrain(Strict):
    """The reference model, which never saw the forget set."""

    weights: File | None = None
    """The file of a retrained model; if None, the run trains it."""


class ClassifySettings(ImageSettings):
    """The fields of a recipe with `scenario: classify`."""

    kind = "classify"
    summary = "an image classifier forgets records or a class of its training data"
    rivals = "classes"
    retrainable = True
    has_shadows = True
    task = "image-classification"
    reshapes = ("retain", "fisher", "groups")

    data: Data = Data()
    split: Split = Split()
    model: Network = Network()
    train: HyperParameters = HyperParameters()
    retrain: Retrain | None = Retrain()

    @model_validator(mode="after")
    def _fits(self) -> ClassifySettings:
        if self.data.words is not None:
            raise ValueError("data.words: only CLIP models have prompts; remove this field")
        if self.model.knows and self.model.weights is not None:
            raise ValueError("model.knows: is for the weights of model.name; remove model.weights")
        return self

    @property
    def default_criterion(self) -> str:
        """`keep_retain` for a whole class, of which there are no held-out samples."""
        forget = self.split.forget
        whole = forget.class_ is not None and forget.count is None
        return "keep_retain" if whole else "match_holdout"

    def check_criterion(self, criterion: Criterion) -> None:
        """Raise if the criterion needs the retrained model and there is none."""
        check_reference(criterion, self.retrain)
        if criterion.needs == "retrain" and self.is_unrepeatable:
            raise OptionError(
                f"search.criterion: {criterion.name} needs the retrained model, and a model that "
                "knows the data already cannot be retrained; give retrain.weights or model.init, "
                f"or use {self.default_criterion}"
            )

    @property
    def is_unrepeatable(self) -> bool:
        """Whether the training of the original is not known, so that there is no retrained model.

        A model that knows the data was trained elsewhere; `model.init` says from what.
        """
        given = self.retrain is not None and self.retrain.weights is not None
        return self.model.knows and self.model.init is None and not given

    def forgotten(self, about: Description) -> str:
        """A description of the forget set.

        >>> sizes = {"forget": 100, "retain": 900}
        >>> ClassifySettings().forgotten(Description(data="cifar10", sizes=sizes, chosen_on={}))
        '100 of the 1,000 training records of cifar10 (10.0 %)'
        """
        count, data = about.sizes["forget"], about.data
        if about.forgotten_class is not None:
            return f"the class “{about.forgotten_class}” of {data}, {count:,} training records"
        if "retain" not in about.sizes:  # a run of nm.unlearn by version 1
            return super().forgotten(about)
        total = count + about.sizes["retain"]
        share = f"({100 * count / total:.1f} %)"
        return f"{count:,} of the {total:,} training records of {data} {share}"

    def retraining(self, sizes: Mapping[str, int]) -> int | None:
        """The samples of the training of the recipe; None if the original is a file."""
        given = self.model.weights is not None or self.model.knows
        return None if given else self.train.epochs * sizes["retain"]

    def data_names(self) -> list[str]:
        """The data set."""
        return [self.data.name]

    def network(self) -> str | None:
        """The name, folder or Hub id of the model."""
        return self.model.name

    def hub_data(self, name: str) -> str | None:
        """The id of the data set."""
        return hub_id_of(self.data.name)

    def facts(self) -> dict[str, str]:
        """The training of the original, the number of images, and whether some are held out."""
        train, limit = self.train, self.data.limit.train
        return {
            "images": "all" if limit is None else f"{limit:,}",
            "training": f"{train.epochs} epochs at {train.lr:g}, {train.schedule}",
            "validation": "it is" if self.split.validation else "it is not",
        }

    def workload(self, setup: Setup) -> Workload:
        """Imports torch."""
        from negmerge.scenarios.classify.workload import workload

        return workload(self, setup)

    def scenario(self, setup: Setup) -> Scenario:
        """Imports torch."""
        from negmerge.scenarios.classify.scenario import Classify

        return Classify(self, setup)


scenarios.register(ClassifySettings.kind, ClassifySettings)
