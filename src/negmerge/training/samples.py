"""Samples of a Dataset for a classifier: reading, checking and batching.

A sample is a pair (input, label), or a dictionary with the label under `labels` or `label`, as in
Hugging Face data sets; all other entries are then inputs by name. A label is one integer. Other
samples raise an error of one line that says where, what was found and what is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from negmerge.errors import NegMergeError, OptionError, one_line, quoted

Inputs = Tensor | dict[str, Tensor]
"""Inputs of a batch: one tensor, or several by the names of the model's arguments."""

LABELS = ("labels", "label")


def dataset_size(dataset: Any, where: str) -> int:
    """Return the number of samples of a map-style Dataset.

    >>> dataset_size(iter([]), "splits: forget")
    Traceback (most recent call last):
    negmerge.errors.OptionError: splits: forget: a list_iterator cannot be read by position; ...

    Args:
        dataset: anything with `len()` and `[position]`.
        where: the beginning of an error message.
    """
    readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not readable or isinstance(dataset, IterableDataset):
        remedy = "pass its .dataset" if isinstance(dataset, DataLoader) else "pass a list"
        raise OptionError(
            f"{where}: a {type(dataset).__name__} cannot be read by position; wanted a map-style "
            f"Dataset, with len() and [position]; {remedy}"
        )
    try:
        return len(dataset)
    except Exception as error:
        raise OptionError(f"{where}: len() of the Dataset fails: {one_line(error)}") from error


def read_sample(dataset: Any, index: int, where: str) -> tuple[Any, int]:
    """Return the input and the class of a sample.

    >>> read_sample([{"ids": [5, 7], "label": 1}], 0, "splits: forget")
    ({'ids': [5, 7]}, 1)
    """
    try:
        sample = dataset[index]
    except NegMergeError:
        raise
    except Exception as error:
        raise OptionError(
            f"{where}: sample {index} cannot be read: {one_line(error)}; correct the Dataset"
        ) from error
    if isinstance(sample, Mapping):
        return _split_named(sample, index, where)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        count = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise OptionError(
            f"{where}: sample {index} is a {type(sample).__name__}{count}; wanted (input, label), "
            "or a dictionary with 'labels' or 'label' and the inputs by name"
        )
    return sample[0], class_of(sample[1], index, where)


def _split_named(sample: Mapping[str, Any], index: int, where: str) -> tuple[dict[str, Any], int]:
    labels = [name for name in LABELS if name in sample]
    inputs = {name: value for name, value in sample.items() if name not in LABELS}
    if not labels or not inputs:
        got = ", ".join(map(str, sample)) or "nothing"
        lacks = "inputs" if labels else "a label"
        raise OptionError(
            f"{where}: sample {index} is a dictionary without {lacks}; got {got}; wanted 'labels' "
            "or 'label', and the inputs by the names of the model's arguments"
        )
    if len(labels) > 1:
        raise OptionError(
            f"{where}: sample {index} has both 'labels' and 'label'; wanted one; remove the other"
        )
    return inputs, class_of(sample[labels[0]], index, where)


def class_of(label: Any, index: int, where: str) -> int:
    """Return a label as the number of a class; refuse everything but a single integer.

    >>> class_of(torch.tensor(3), 0, "splits: forget")
    3
    >>> class_of(0.7, 0, "splits: forget")
    Traceback (most recent call last):
    negmerge.errors.OptionError: splits: forget: sample 0 has the label float; wanted one integer...
    """
    value, found = label, type(label).__name__
    if isinstance(label, Tensor | np.ndarray | np.generic):
        shape = tuple(label.shape)
        found = f"{label.dtype} of shape {shape}"
        value = label.item() if shape in ((), (1,)) else None
    if isinstance(value, int):
        return int(value)
    raise OptionError(
        f"{where}: sample {index} has the label {found}; wanted one integer, the number of the "
        "class (regression, one-hot, multi-label and segmentation labels are not supported); "
        "convert the labels in the Dataset if they name classes"
    )


def check_range(labels: Tensor, first: int, classes: int, where: str) -> None:
    """Raise an error if a label is not a class of the model.

    Args:
        first: the position of the first sample of the batch.
        where: the beginning of an error message.
    """
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        raise OptionError(
            f"{where}: sample {first + wrong[0]} has label {int(labels[wrong[0]])}; wanted 0 to "
            f"{classes - 1}, the model has {classes} outputs; number the classes from 0"
        )


def collate(inputs: Sequence[Any], where: str) -> Inputs:
    """Return the inputs of samples as one batch.

    >>> collate([{"ids": [5, 7]}, {"ids": [6, 8]}], "splits: forget")["ids"].tolist()
    [[5, 7], [6, 8]]
    """
    try:
        if not isinstance(inputs[0], Mapping):
            return torch.stack([torch.as_tensor(one) for one in inputs])
        # Hugging Face data sets without a format have lists, which torch would collate by element.
        rows = [
            {k: torch.as_tensor(v) if isinstance(v, list) else v for k, v in one.items()}
            for one in inputs
        ]
        batch = default_collate(rows)
    except Exception as error:
        raise OptionError(
            f"{where}: the inputs cannot be put into one batch: {one_line(error)}; wanted tensors "
            "of one shape; transform or pad them in the Dataset"
        ) from error
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise OptionError(
                f"{where}: the input {quoted(name)} is {type(value).__name__}; wanted tensors or "
                "numbers; encode it, or remove it from the samples"
            )
    return batch


# ------------------------------------------------------------------------------ inputs of a batch


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of the inputs of a batch, in the order of their names."""
    return [inputs] if isinstance(inputs, Tensor) else [inputs[name] for name in sorted(inputs)]


def to_device(inputs: Inputs, device: torch.device, non_blocking: bool = False) -> Inputs:
    """Return the inputs on a device; pinned memory can be copied without blocking."""
    return tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), inputs)


def parts_of(
    batch: tuple[Inputs, Tensor], count: int, least: int = 1
) -> list[tuple[tuple[Inputs, Tensor], float]]:
    """Cut a batch into parts of nearly equal size; return each with its share of the samples.

    >>> batch = torch.zeros(4), torch.arange(4)
    >>> [(part[1].tolist(), share) for part, share in parts_of(batch, 2)]
    [([0, 1], 0.5), ([2, 3], 0.5)]

    Args:
        count: the number of parts.
        least: the least number of samples of a part; a small batch has fewer parts.
    """
    inputs, targets = batch
    size = len(targets)
    if count == 1:
        return [(batch, 1.0)]
    cuts = torch.arange(size).tensor_split(max(min(count, size // least), 1))
    rows = [slice(int(cut[0]), int(cut[-1]) + 1) for cut in cuts]
    parts = [tree_map(itemgetter(own), (inputs, targets)) for own in rows]
    return [(part, len(part[1]) / size) for part in parts]


def joined_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate the inputs of several batches."""
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def only_tensor(inputs: Inputs, where: str) -> Tensor:
    """Return the inputs if they are a single tensor; otherwise raise an error."""
    if isinstance(inputs, Tensor):
        return inputs
    raise OptionError(
        f"{where}: the inputs are a dictionary of {', '.join(inputs)}; wanted one tensor"
    )
