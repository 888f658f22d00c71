"""The cost of a run of the text scenario."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.scenarios.base import ToTrain
from negmerge.scenarios.settings import Setup
from negmerge.scenarios.text.models import ModelFolder
from negmerge.scenarios.text.scenario import TextScenario
from negmerge.scenarios.text.settings import TextSettings
from negmerge.scenarios.workload import Probe, Workload, model_cost


def workload(settings: TextSettings, setup: Setup) -> Workload:
    """Return the cost, from the numbers of samples and tokens of the sets, which are opened."""
    scenario = TextScenario(settings, setup)
    sizes = {name: len(scenario.train_set(name)) for name in ("forget", "retain")}
    sizes["all"] = sum(sizes.values())
    lengths = [len(one.ids) for own in scenario.encoded.values() for one in own]
    length = max(2, round(float(np.mean(lengths))))
    plans = (scenario.original(), scenario.reference())
    trained = sum(
        plan.settings.epochs * len(scenario.train_set(plan.on))
        for plan in plans
        if isinstance(plan, ToTrain)
    )
    network: Any = scenario.folder.empty_model()
    ids = torch.zeros(2, length, dtype=torch.int64, device="meta")
    vocabulary = int(network.config.vocab_size)
    return Workload(
        model_cost(network, ids),
        Probe(scenario.folder.name, partial(TextProbe, scenario.folder), (length,), vocabulary),
        sizes,
        trained=trained,
        choosing=scenario.size("choose"),
        reported=scenario.size("report"),
        batch=settings.train.batch,
    )


class TextProbe(nn.Module):
    """A language model as a classifier of the next token; numbers from 0 to 1 stand for ids."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__()
        self.model: Any = folder.model()

    def forward(self, inputs: Tensor) -> Tensor:
        vocabulary = self.model.config.vocab_size
        ids = (inputs * vocabulary).long().clamp(max=vocabulary - 1)
        return self.model(ids, use_cache=False).logits[:, -1]
