"""The text scenario: a language model forgets documents, or the answers to questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.checkpoints.model_folder import base_of
from negmerge.errors import OptionError, quoted
from negmerge.evaluation.metrics import Metric, metrics
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import evaluating
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Advance
from negmerge.evaluation.text_columns import Floats, rouge_recall, truth_ratio
from negmerge.scenarios.base import (
    Given,
    PanelContent,
    PanelModel,
    ToTrain,
    TrainingOptions,
    TrainingSet,
    Use,
    identity,
)
from negmerge.scenarios.data import DataScenario
from negmerge.scenarios.settings import Description, Setup
from negmerge.scenarios.text.harness import check_tasks, evaluate, version_of
from negmerge.scenarios.text.models import ModelFolder, embeddings_of, logits, merging, with_lora
from negmerge.scenarios.text.observing import answers_of, before, greedy
from negmerge.scenarios.text.settings import TextSettings
from negmerge.text.documents import Record
from negmerge.text.encoding import Encoder, Sample
from negmerge.text.feed import TextFeed
from negmerge.text.sets import TextSets, make_sets
from negmerge.training.feeds import Batch, Feed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Objective, Trained, train
from negmerge.training.outputs import IGNORED
from negmerge.training.seeds import seed_of, set_apart
from negmerge.training.weights import load_model
from negmerge.vectors.task_vector import TaskVector

SLOW = ("rouge", "truth_ratio")
"""Columns that need more than one pass over the right answers."""
SHOWN = 3
"""How many records of each set the panel shows."""


class TextScenario(DataScenario):
    """A causal language model and its records, which are opened on first use."""

    reported_columns = SLOW
    columns = ("loss", "probability", "tokens", "right", "matched_from", "mink", *SLOW)

    def __init__(self, settings: TextSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.settings = settings
        self._wrong: dict[str, Mapping[bytes, list[Sample]]] = {}
        own = settings.model
        self.folder = ModelFolder(own.name, own.revision, own.tokenizer)

    @cached_property
    def retrained(self) -> ModelFolder | None:
        """The retrained model, if the recipe gives one."""
        found = self.settings.retrain
        if found is None or found.name is None:
            return None
        return ModelFolder(found.name, found.revision, field="retrain.name")

    def check(self) -> None:
        self.encoded  # noqa: B018 (opens the data and the tokenizer)
        if self.settings.harness is not None:
            check_tasks(self.settings.harness)
        network = self.model()
        for name, weight in network.named_parameters():
            if not weight.isfinite().all():
                raise OptionError(
                    f"model.name {quoted(self.folder.name)}: tensor {quoted(name)} has NaN or "
                    "infinite values; wanted numbers"
                )
        length = getattr(network.config, "max_position_embeddings", None)
        if length is not None and self.settings.tokens.length > length:
            raise OptionError(
                f"tokens.length: got {self.settings.tokens.length}, but "
                f"{quoted(self.folder.name)} takes at most {length} tokens"
            )
        measured = [self.wrong_answers(name).values() for name in self.parts["report"]]
        wrong = [answers for own in measured for answers in own]
        samples = [one for own in (*self.encoded.values(), *wrong) for one in own]
        largest = max(int(one.ids.max()) for one in samples)
        rows = min(len(weight) for weight in embeddings_of(network).values())
        if largest >= rows:
            raise OptionError(
                f"model.name {quoted(self.folder.name)}: its tokenizer has token {largest}, its "
                f"embeddings have {rows} rows; the tokenizer is that of another model"
            )
        if self.settings.lora is not None:
            with_lora(network, self.settings.lora, 0)
        del network  # there may be no memory for two
        if self.retrained is not None:
            own, other = (shapes(one.empty_model()) for one in (self.folder, self.retrained))
            if own != other:
                name = min(n for n in {*own, *other} if own.get(n) != other.get(n))
                raise OptionError(
                    f"retrain.name {quoted(self.retrained.name)}: tensor {quoted(name)} has shape "
                    f"{other.get(name)}, that of model.name has {own.get(name)}; wanted the same "
                    "architecture"
                )
            self.retrained.model()  # raises for weights that cannot be opened

    # ----------------------------------------------------------------------------------------- data

    @cached_property
    def sets(self) -> TextSets:
        """The records of each set."""
        return make_sets(self.settings.data, self.settings.split, self.seed)

    @cached_property
    def encoder(self) -> Encoder:
        """Makes samples of records."""
        return Encoder(self.folder.tokenizer(), self.settings.tokens, self.folder.name)

    @cached_property
    def encoded(self) -> dict[str, list[Sample]]:
        """The samples of each set; a set without records has none."""
        names = ("forget", "retain", "holdout", "general", "general_train")
        return {name: self.encoder.samples(getattr(self.sets, name), name) for name in names}

    def train_set(self, name: TrainingSet) -> Feed:
        """The records of a set; originals are trained on general texts, too."""
        found, own = self.encoded, ("forget",) if name == "forget" else ("retain", "general_train")
        if name == "train":
            own = ("forget", *own)
        return TextFeed([sample for part in own for sample in found[part]])

    def eval_sets(self, use: Use) -> Mapping[str, Feed]:
        """Retain, forget, holdout and general texts: at least half of each set is reported."""
        return {name: TextFeed(own) for name, own in self.parts[use].items()}

    def unseen_set(self) -> Feed | None:
        """The reported records of the holdout set, if there is one."""
        return self.eval_sets("report").get("holdout")

    @cached_property
    def parts(self) -> dict[Use, dict[str, list[Sample]]]:
        """The samples that choose λ, those that are reported and those that tune, by set."""
        found: dict[Use, dict[str, list[Sample]]] = {"choose": {}, "report": {}, "tune": {}}
        for name, samples in self.encoded.items():
            if name == "general_train" or not samples:
                continue
            order = np.random.default_rng(seed_of("choice", name, self.seed)).permutation(
                len(samples)
            )
            cut = min(self.samples, len(samples) // 2)
            both = len(samples) == 1 or self.uses_reported_data
            chosen, reported = (order, order) if both else (order[:cut], order[cut:])
            if self.tunes:
                own, rest = set_apart(len(chosen), name, self.seed)
                found["tune"][name] = [samples[i] for i in sorted(chosen[own])]
                chosen = chosen[rest]
            found["choose"][name] = [samples[i] for i in sorted(chosen)]
            found["report"][name] = [samples[i] for i in sorted(reported)]
        return found

    # --------------------------------------------------------------------------------------- models

    def model(self, weights: Path | None = None, seed: int = 0) -> Any:
        if weights is not None and weights.is_dir():  # the retrained model, if it is given
            network = ModelFolder(str(weights)).model()
        else:
            network = self.folder.model()
            if weights is not None:
                load_model(weights, network)
        return network.to("cuda" if torch.cuda.is_available() else "cpu")

    def original(self) -> ToTrain | Given:
        """The model itself, or the model trained on retain ∪ forget."""
        if self.settings.model.knows:
            return Given(content=self.folder.fingerprint, on="train")
        return ToTrain("train", self.settings.train)

    def reference(self) -> ToTrain | Given | None:
        """A model trained on the retain set, or given; None if the recipe turns it off.

        There is none either if the model knows the records already and none is given: it cannot be
        retrained.
        """
        if (given := self.retrained) is not None:
            return Given(given.path, on="retain", sha256=given.fingerprint)
        if self.settings.retrain is None or self.settings.model.knows:
            return None
        return ToTrain("retain", self.settings.train)

    @property
    def training(self) -> HyperParameters:
        return self.settings.train

    @property
    def identity(self) -> list[Any]:
        tokens = self.settings.tokens.model_dump(mode="json", exclude_none=True)
        found = [self.folder.fingerprint, self.sets.fingerprint, tokens]
        if self.settings.tokens.template == "chat":  # a template may write the date of today
            found.append(identity([one.ids.tolist() for one in self.encoded["forget"]]))
        return found

    def start_key(self, base: Path) -> str:
        """The original, and how members are trained from it: originals do not depend on that."""
        members = self.settings.model_dump(mode="json", include={"embeddings", "lora"})
        return identity(super().start_key(base), members)

    @property
    def scored_on(self) -> list[Any]:
        return [*super().scored_on, *version_of(self.settings.harness)]

    def describe(self) -> Description:
        found = {name: len(samples) for name, samples in self.encoded.items() if samples}
        chosen = {name: len(own) for name, own in self.parts["choose"].items()}
        data = self.settings.data
        source = data.records or data.forget
        assert source is not None
        notes: list[str] = []
        if self.settings.embeddings == "all":
            notes.append(
                "embeddings: all: AdamW moves the rows of tokens that the forget set does not "
                "have, all members in the same direction; their agreement means nothing"
            )
        return Description(
            data=source.name,
            sizes=found,
            chosen_on="the reported data" if self.uses_reported_data else chosen,
            looked=self.uses_reported_data or 1 in found.values(),
            fingerprint=self.sets.fingerprint,
            notes=notes,
            scenario="text",
            model={"name": self.folder.name, "embeddings": self.settings.embeddings},
            **self._base,
        )

    @cached_property
    def _base(self) -> dict[str, Any]:
        knows = self.settings.model.knows
        original = shapes(self.folder.empty_model()) if knows else None
        return base_of(self.folder.name, self.folder.path, original)

    def export(self, weights: Path) -> list[Path]:
        """Copy configuration and tokenizer, so that `from_pretrained` opens the folder."""
        return self.folder.copy_side_files(weights.parent)

    def details(self, tau: TaskVector) -> dict[str, Any]:
        """The percentages of elements that are zero, apart for the embeddings and for the rest."""
        names = {*embeddings_of(self.folder.empty_model())}
        parts = {"embeddings": names & {*tau}, "body": {*tau} - names}
        found = {
            part: 100 - 100 * sum(tau.entries[n].nonzero for n in own) / count
            for part, own in parts.items()
            if (count := sum(tau.entries[n].elements for n in own))
        }
        return {"sparsity_parts": found}

    # -------------------------------------------------------------------- training and measurements

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the tables, and those of plug-ins; others repeat them for other sets."""
        own = self.settings.order
        return [m for m in super().metrics if m.name in own or metrics.source(m.name)]

    def measure(self, model: nn.Module, use: Use, advance: Advance = lambda count: None) -> Scores:
        """The metrics, and for reports the results of the tasks of `lm_eval`."""
        found = super().measure(model, use, advance)
        if use == "choose" or self.settings.harness is None:
            return found
        with evaluating(model):
            more = evaluate(model, self.encoder.tokenizer, self.settings.harness)
        return replace(
            found, values=found.values | more.values, intervals=found.intervals | more.intervals
        )

    def loss(self, settings: HyperParameters) -> Objective:
        """The mean over samples of the mean cross-entropy of their answer tokens."""

        def objective(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
            scores, wanted = self.predictions(model, batch)
            losses = nn.functional.cross_entropy(
                scores.float().transpose(1, 2),
                wanted,
                reduction="none",
                ignore_index=IGNORED,
                label_smoothing=settings.label_smoothing,
            )
            return (losses.sum(1) / (wanted != IGNORED).sum(1)).mean()

        return objective

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits of the tokens from the first answer token of a batch on, and the tokens."""
        inputs, targets = batch
        assert isinstance(inputs, dict)
        first = int((targets != IGNORED).any(0).nonzero()[0])
        return logits(model, inputs, first - 1)[:, :-1], targets[:, first:]

    def train(
        self,
        model: nn.Module,
        on: TrainingSet,
        settings: HyperParameters,
        seed: int,
        **options: Unpack[TrainingOptions],
    ) -> Trained:
        feed, objective = self.train_set(on), self.loss(settings)
        lora = self.settings.lora
        if on != "forget":
            return train(model, feed, settings, seed, objective=objective, **options)
        if lora is not None:
            adapted = with_lora(model, lora, seed_of("lora", self.seed if lora.share else seed))
            if (checkpoints := options.get("checkpoints")) is not None:
                merged = {epoch: merging(write) for epoch, write in checkpoints.items()}
                options["checkpoints"] = merged
            found = train(adapted, feed, settings, seed, objective=objective, **options)
            adapted.merge_and_unload()
            return found
        mask = self.mask(model)
        return train(model, feed, settings, seed, objective=objective, mask=mask, **options)

    def mask(self, model: nn.Module) -> dict[str, Tensor]:
        """The elements of the embeddings that members may change; empty if all may."""
        policy = self.settings.embeddings
        if policy == "all":
            return {}
        tokens = np.unique(np.concatenate([sample.ids for sample in self.encoded["forget"]]))
        found: dict[str, Tensor] = {}
        for name, weight in embeddings_of(model).items():
            found[name] = torch.zeros_like(weight, dtype=torch.bool)
            if policy == "touched":
                found[name][torch.from_numpy(tokens).to(weight.device)] = True
        return found

    def observe(self, model: nn.Module, name: str, batch: Batch, columns: Sequence[str]) -> Columns:
        """The columns of each sample, from the probabilities of its answer tokens.

        The truth ratio needs the wrong answers of its record, ROUGE what the model writes.
        """
        inputs, targets = batch
        assert isinstance(inputs, dict)
        samples = samples_of(inputs, targets)
        found = answers_of(model, samples)
        if "truth_ratio" in columns:
            found["truth_ratio"] = self.truth_ratios(model, name, samples, found["loss"])
        if "rouge" in columns:
            found["rouge"] = self.rouge(model, name, samples)
        return {column: found[column] for column in columns}

    def truth_ratios(
        self, model: nn.Module, name: str, samples: Sequence[Sample], losses: Floats
    ) -> Floats:
        """The truth ratio of each sample; NaN for records without wrong answers."""
        known = self.wrong_answers(name)
        if name != "forget":
            known = {key: known[key] for key in self.compared(name) & known.keys()}
        wrong = [known.get(one.ids.tobytes(), []) for one in samples]
        flat = [one for own in wrong for one in own]
        found = iter(answers_of(model, flat)["loss"] if flat else [])
        width = max(1, *map(len, wrong))
        table = np.full((len(samples), width), np.nan)
        for row, own in enumerate(wrong):
            table[row, : len(own)] = [next(found) for _ in own]
        return truth_ratio(losses, table)

    def compared(self, name: str) -> set[bytes]:
        """The tokens of the reported samples whose answers are generated."""
        return {one.ids.tobytes() for one in self.parts["report"][name][: self.settings.generate]}

    def wrong_answers(self, name: str) -> Mapping[bytes, list[Sample]]:
        """By the tokens of a sample, the samples with its wrong answers."""
        if name not in self._wrong:
            records: list[Record] = getattr(self.sets, name)
            self._wrong[name] = {
                one.ids.tobytes(): [
                    self.encoder.sample(replace(record, answer=text), f"{name}, a wrong answer")
                    for text in record.wrong
                ]
                for one in self.encoded[name]
                if (record := records[one.record]).wrong
            }
        return self._wrong[name]

    def rouge(self, model: nn.Module, name: str, samples: Sequence[Sample]) -> Floats:
        """ROUGE-L recall of what the model writes; NaN for records that it does not answer."""
        asked = self.compared(name)
        rows = [row for row, one in enumerate(samples) if one.ids.tobytes() in asked]
        some, found = [samples[row] for row in rows], np.full(len(samples), np.nan)
        decode = partial(self.encoder.tokenizer.decode, skip_special_tokens=True)
        written = greedy(model, some, self.encoder.tokenizer.eos_token_id)
        found[rows] = rouge_recall([decode(one.answer) for one in some], [*map(decode, written)])
        return found

    def draw(self, panel: str, models: Sequence[PanelModel], advance: Advance) -> PanelContent:
        """Show what the models answer to some prompts of each set."""
        chosen: list[tuple[str, Sample, Record]] = []
        for name in ("forget", "retain", "holdout"):
            records = getattr(self.sets, name)
            own = [one for one in self.encoded[name] if records[one.record].prompt is not None]
            chosen += [(name, one, records[one.record]) for one in own[:SHOWN]]
        if not chosen:
            return PanelContent({"missing": "the records have no prompts"})
        cells = [
            [{"caption": f"{name}: {record.prompt}\n→ {record.answer}"}]
            for name, _, record in chosen
        ]
        samples, end = [one for _, one, _ in chosen], self.encoder.tokenizer.eos_token_id
        for one in models:
            with ExitStack() as stack:
                network = stack.enter_context(self.shown(one))
                stack.enter_context(evaluating(network))
                stack.enter_context(torch.inference_mode())
                told = greedy(network, samples, end)
            for row, (_, sample, _), ids in zip(cells, chosen, told, strict=True):
                text = self.encoder.tokenizer.decode(ids, skip_special_tokens=True).strip()
                same = list(ids) == list(before(sample.answer, end))
                row.append({"caption": f"{text or '(nothing)'}{' ✓' if same else ''}"})
            advance(1)
        text = (
            "The first records of each set with their right answers, and what each model answers "
            "by taking the most likely token each time; ✓ marks the right answer."
        )
        columns = [one.title for one in models]
        return PanelContent(
            {"text": text, "columns": columns, "rows": [{"cells": c} for c in cells]}
        )


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight."""
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def samples_of(inputs: Mapping[str, Tensor], targets: Tensor) -> list[Sample]:
    """Return the samples of a batch."""
    found: list[Sample] = []
    for ids, seen, wanted in zip(
        inputs["input_ids"].cpu().numpy(),
        inputs["attention_mask"].cpu().numpy(),
        targets.cpu().numpy(),
        strict=True,
    ):
        size = int(seen.sum())
        first = int(np.flatnonzero(wanted != IGNORED)[0])
        found.append(Sample(ids[:size], first))
    return found
