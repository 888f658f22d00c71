"""The fields of a recipe with `scenario: text`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from negmerge.errors import OptionError
from negmerge.evaluation.criteria import KEPT, Criterion, Reference, nearest_to_reference
from negmerge.evaluation.limits import Limit, Row
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.scenarios.settings import (
    Description,
    Panel,
    ScenarioSettings,
    Setup,
    check_reference,
    scenarios,
)
from negmerge.support.remote.hub import is_repo
from negmerge.support.settings import Count, NameOrPath, Positive, Strict
from negmerge.text.settings import TextData, TextSplit, Tokens
from negmerge.training.hyperparameters import HyperParameters

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario
    from negmerge.scenarios.workload import Workload


class LanguageModel(Strict):
    """The causal language model."""

    name: NameOrPath = "stories15m"
    """A folder as `transformers` writes it, a Hub id, or `stories15m`, the model of the package."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; a commit makes a run repeatable."""
    tokenizer: NameOrPath | None = None
    """The folder or Hub id of the tokenizer, if it is not beside the model."""
    knows: bool = False
    """Whether the model was trained on the records already; if not, the run trains it (`train`)."""


class Retrain(Strict):
    """The reference model, which never saw the forget set: trained from `model.name`, or given."""

    name: NameOrPath | None = None
    """The folder or Hub id of a model that was trained on the retain set only."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""


class Lora(Strict):
    """Members are trained by LoRA, and merged into the weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    alpha: Positive = 16.0
    """The product of the two matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The ends of the names of the layers; none: all linear layers but the output layer."""
    share: bool = True
    """Whether all members start from the same random matrix A. With different ones the signs of
    their changes agree by chance only."""


def as_name(text: str) -> str:
    """Return the name of a metric of lm_eval as it is in reports.

    >>> as_name("WMDP-bio_acc")
    'wmdp_bio_acc'
    """
    return "".join(c if c.isalnum() else "_" for c in text.lower())


class Harness(Strict):
    """Tasks of the LM Evaluation Harness (`lm_eval`), measured for every reported model."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tasks (`lm_eval ls tasks`); each result is a metric `TASK_METRIC`."""
    forget: tuple[str, ...] = ()
    """Those of them that are to be forgotten: lower results are better."""
    folder: NameOrPath | None = None
    """A folder with the files of further tasks. They may name Python functions: trust it."""
    limit: Count | None = None
    """The largest number of samples of each task."""


HALF = 50.0
"""The percentage of exact answers of the original below which the loss is kept instead."""


GROWTH = -log(KEPT)
"""How much the loss of documents may grow: as much as the perplexity by `keep_perplexity`."""
LOSS_LIMIT = Limit("loss_retain", lambda zero: zero["loss_retain"] + GROWTH, lower=True)


@dataclass(frozen=True)
class TextLimit(Limit):
    """The limit of exact answers; where the original answers few exactly, that of the loss.

    A model hardly writes whole documents exactly, and every λ would keep 95 % of nothing.
    """

    def used(self, zero: Row) -> Limit:
        """Return the limit for an original, from its row."""
        return self if zero[self.metric] >= HALF else LOSS_LIMIT

    def margin(self, row: Row, zero: Row) -> float:
        used = self.used(zero)
        return super().margin(row, zero) if used is self else used.margin(row, zero)

    def left(self, row: Row, zero: Row) -> float | None:
        used = self.used(zero)
        return super().left(row, zero) if used is self else used.left(row, zero)


def keep_loss_of_documents(exact: Criterion) -> Criterion:
    """Return `keep_retain` for texts: it keeps the loss where the original answers little exactly.

    Args:
        exact: the criterion for an original that answers at least half of the records exactly.
    """
    assert exact.limit is not None
    limit = TextLimit(exact.limit.metric, exact.limit.value)

    def loss(row: Row, zero: Row, reference: Reference) -> float | None:
        return row["probability_forget"] if limit.allows(row, zero) else None

    def aim(metric: str, zero: Row, reference: Reference) -> tuple[float, str] | None:
        if limit.used(zero) is limit:
            return exact.aim(metric, zero, reference)
        most = LOSS_LIMIT.value(zero)
        return (most, f"at most {most:.4g}") if metric == LOSS_LIMIT.metric else None

    summary = (
        f"{exact.summary}; if that is below {HALF:g} %, a loss_retain at most {GROWTH:.2g} higher"
    )
    reads = (*exact.reads, LOSS_LIMIT.metric)
    return replace(exact, summary=summary, loss=loss, aim=aim, reads=reads, limit=limit)


class TextSettings(ScenarioSettings):
    """The fields of a recipe with `scenario: text`.

    λ is chosen by the probability of the answers to forget: unlike the exact match, it falls with
    every step.
    """

    kind = "text"
    summary = "a language model forgets documents, or the answers to questions"
    forget_metric = "probability_forget"
    retain_metric = "exact_retain"
    order = (
        "exact_retain", "exact_forget", "auc_loss", "perplexity_general", "forget_quality",
        "utility", "exact_holdout", "auc_mink", "probability_forget", "loss_retain", "loss_forget",
        "loss_holdout", "perplexity_retain",
        "rouge_forget", "rouge_retain", "extraction_forget", "memorised_forget",
        "memorised_retain", "truth_ratio_forget", "truth_ratio_retain", "tpr_loss",
    )  # fmt: skip
    panels = (Panel("answers", "What the models answer"),)
    rivals = "texts"
    checks_losses = True
    reshapes = ("retain", "fisher", "groups")
    retrainable = True
    task = "text-generation"

    data: TextData
    split: TextSplit = TextSplit()
    tokens: Tokens = Tokens()
    model: LanguageModel = LanguageModel()
    train: HyperParameters = HyperParameters()
    retrain: Retrain | None = Retrain()
    embeddings: Literal["touched", "all", "none"] = "touched"
    """Which rows of the embeddings pool members may change: those of the tokens of the forget set,
    all, or none. AdamW moves the rows of other tokens, too, all members in the same direction."""
    lora: Lora | None = None
    """None: all weights of members are trained."""
    harness: Harness | None = None
    """Further metrics; they need the extra `harness`."""
    generate: Count = 100
    """The largest number of records of each set whose answers are generated and compared, and, but
    for the forget set, whose wrong answers are measured."""

    @classmethod
    def defaults(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Use AdamW without weight decay.

        Decay moves the embeddings of unused tokens of all members in the same direction.
        """
        found, own = dict(tree), {"optimizer": "adamw", "weight_decay": 0.0}
        if isinstance(train := tree.get("train", {}), dict):
            found["train"] = own | {"lr": 5e-4, "batch": 32, "epochs": 10} | train
        pool = tree.get("pool", {})
        if isinstance(pool, dict) and isinstance(pool.get("settings", {}), dict):
            settings = own | {"lr": 1e-4, "batch": 16, "epochs": 5} | pool.get("settings", {})
            found["pool"] = pool | {"settings": settings}
        return found

    def check_members(self, members: Sequence[HyperParameters]) -> None:
        """Raise if a member has an augmentation, which texts do not have."""
        for member in members:
            if member.augment.model_dump(exclude_none=True):
                raise OptionError("pool: augment: texts are not augmented; remove this field")

    def member_notes(self, members: Sequence[HyperParameters]) -> list[str]:
        """Warnings about label smoothing, weight decay, and LoRA with different matrices A."""
        found: list[str] = []
        if any(member.label_smoothing for member in members):
            found.append(
                "pool: label_smoothing raises the loss on records that the model knows by heart: "
                "members may unlearn them, and their task vectors point the wrong way"
            )
        if any(member.weight_decay for member in members) and self.lora is None:
            found.append(
                "pool: weight_decay moves weights toward zero without a gradient, all members in "
                "the same direction, which counts as agreement"
            )
        if self.lora is not None and not self.lora.share:
            found.append(
                "lora.share: false: members with different matrices A agree by chance only, and "
                "their consensus is noise"
            )
        return found

    def metric(self, name: str) -> Metric:
        """The metrics of texts; of the tasks to forget lower results are better."""
        tasks = () if self.harness is None else self.harness.forget
        starts = tuple(as_name(f"{task}_") for task in tasks)
        forgotten = name == self.forget_metric or name.startswith(starts)
        return metric_of(name, forgotten)

    def criterion(self, name: str) -> Criterion:
        """The criteria of all scenarios; `oracle` reads the metrics of texts in Avg. Gap."""
        if name == "oracle":
            return nearest_to_reference(("exact_retain", "exact_forget", "auc_loss"))
        found = super().criterion(name)
        return keep_loss_of_documents(found) if name == "keep_retain" else found

    def check_criterion(self, criterion: Criterion) -> None:
        """Raise if the criterion needs what the recipe does not have."""
        check_reference(criterion, self.retrain)
        if criterion.needs == "retrain" and self.model.knows and not self.reference_name:
            raise OptionError(
                f"search.criterion: {criterion.name} needs the retrained model, and a model that "
                "knows the records already cannot be retrained; give retrain.name, or use "
                f"{self.default_criterion}"
            )

    @property
    def reference_name(self) -> str | None:
        """The name of the retrained model, if it is given."""
        return None if self.retrain is None else self.retrain.name

    def forgotten(self, about: Description) -> str:
        """A description of the forget set."""
        count, kept = about.sizes["forget"], about.sizes["retain"]
        return f"{count:,} of {count + kept:,} records of {about.data}"

    def retraining(self, sizes: Mapping[str, int]) -> int | None:
        """The samples of the training of the recipe; None if the original is given."""
        if self.model.knows:
            return None
        return self.train.epochs * (sizes["retain"] + sizes.get("general_train", 0))

    def data_names(self) -> list[str]:
        """The names of the sets of texts."""
        data = self.data
        sources = (data.records, data.forget, data.retain, data.holdout, data.general)
        return [one.name for one in sources if one is not None]

    def network(self) -> str | None:
        """The name, folder or Hub id of the model."""
        return self.model.name

    def hub_data(self, name: str) -> str | None:
        """The id of the records of a set."""
        given = {"forget": self.data.forget, "retain": self.data.retain}
        given |= {"holdout": self.data.holdout, "general": self.data.general}
        source = given.get(name) or self.data.records
        known = source is not None and is_repo(source.name) and not Path(source.name).exists()
        return source.name if source is not None and known else None

    def workload(self, setup: Setup) -> Workload:
        """Opens the records and the tokenizer, which tell the numbers of samples and tokens."""
        from negmerge.scenarios.text.workload import workload

        return workload(self, setup)

    def scenario(self, setup: Setup) -> Scenario:
        """Imports torch."""
        from negmerge.scenarios.text.scenario import TextScenario

        return TextScenario(self, setup)


scenarios.register(TextSettings.kind, TextSettings)
