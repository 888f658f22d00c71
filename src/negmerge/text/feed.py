"""The feed of samples of text: batches padded to their longest sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from negmerge.text.encoding import Sample
from negmerge.training.feeds import Batch, Indices
from negmerge.training.hyperparameters import Augmentation
from negmerge.training.outputs import IGNORED


class TextFeed:
    """Samples as batches of `input_ids` and `attention_mask`, with the answers as targets.

    >>> feed = TextFeed([Sample(np.array([5, 6, 7]), 1), Sample(np.array([5, 8]), 1)])
    >>> inputs, targets = feed.test_batch(np.array([0, 1]))
    >>> inputs["input_ids"].tolist(), targets.tolist()
    ([[5, 6, 7], [5, 8, 0]], [[-100, 6, 7], [-100, 8, -100]])
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self.lengths = np.array([len(sample.ids) for sample in self.samples])
        """The number of tokens of each sample; batches are made of samples of similar length."""

    def __len__(self) -> int:
        return len(self.samples)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.test_batch(picked)

    def test_batch(self, picked: Indices) -> Batch:
        longest = int(self.lengths[picked].max())
        ids = np.zeros((len(picked), longest), np.int64)
        seen, targets = np.zeros_like(ids), np.full_like(ids, IGNORED)
        for row, sample in enumerate(self.samples[i] for i in picked):
            size = len(sample.ids)
            ids[row, :size], seen[row, :size] = sample.ids, 1
            targets[row, sample.first : size] = sample.answer
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(seen)}
        return inputs, torch.from_numpy(targets)
