"""What a Dataset may hold: samples of a classifier, checked one by one and put into batches.

A sample is a pair (input, label), or a dictionary with the label under `labels` or `label`, as
Hugging Face data sets give; all other entries are then inputs by name. A label is one integer.
Whatever else a Dataset does is refused with one line that says where, what was found and what is
wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from negmerge.errors import NegMergeError, OptionError, shown, told

Inputs = Tensor | dict[str, Tensor]
"""Of a batch: one tensor, or several by the names of the model's arguments."""

LABELS = ("labels", "label")


def size_of(dataset: Any, where: str) -> int:
    """How many samples a map-style Dataset has.

    >>> size_of(iter([]), "splits: forget")
    Traceback (most recent call last):
    negmerge.errors.OptionError: splits: forget: a list_iterator cannot be read by position; ...

    Args:
        dataset: anything with `len()` and `[position]`.
        where: what an error begins with.
    """
    readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not readable or isinstance(dataset, IterableDataset):
        remedy = "give its .dataset" if isinstance(dataset, DataLoader) else "a list will do"
        raise OptionError(
            f"{where}: a {type(dataset).__name__} cannot be read by position; wanted a map-style "
            f"Dataset, with len() and [position]; {remedy}"
        )
    try:
        return len(dataset)
    except Exception as error:
        raise OptionError(f"{where}: its size cannot be read: {told(error)}") from error


def read_sample(dataset: Any, index: int, where: str) -> tuple[Any, int]:
    """The input and the class of one sample.

    >>> read_sample([{"ids": [5, 7], "label": 1}], 0, "splits: forget")
    ({'ids': [5, 7]}, 1)
    """
    try:
        sample = dataset[index]
    except NegMergeError:
        raise
    except Exception as error:
        raise OptionError(
            f"{where}: sample {index} cannot be read: {told(error)}; mend the Dataset"
        ) from error
    if isinstance(sample, Mapping):
        return _named(sample, index, where)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        count = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise OptionError(
            f"{where}: sample {index} is a {type(sample).__name__}{count}; wanted (input, label), "
            "or a dictionary with 'labels' or 'label' and the inputs by name"
        )
    return sample[0], class_of(sample[1], index, where)


def _named(sample: Mapping[str, Any], index: int, where: str) -> tuple[dict[str, Any], int]:
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
    """A label as the number of a class; anything but one integer is refused.

    >>> class_of(torch.tensor(3), 0, "splits: forget")
    3
    >>> class_of(0.7, 0, "splits: forget")
    Traceback (most recent call last):
    negmerge.errors.OptionError: splits: forget: sample 0 has the label float; wanted one integer...
    """
    if isinstance(label, int):
        return int(label)
    found, whole, single = type(label).__name__, False, False
    if isinstance(label, Tensor | np.ndarray | np.generic):
        shape = tuple(label.shape)
        found, single = f"{label.dtype} of shape {shape}", shape in ((), (1,))
        if isinstance(label, Tensor):
            whole = not (label.is_floating_point() or label.is_complex())
        else:
            whole = label.dtype.kind in "iub"
    if whole and single:
        return int(label.item())
    raise OptionError(
        f"{where}: sample {index} has the label {found}; wanted one integer, the number of the "
        "class (regression, one-hot, multi-label and segmentation labels are not supported); "
        "convert the labels in the Dataset if they name classes"
    )


def check_range(labels: Tensor, first: int, classes: int, where: str) -> None:
    """Refuse labels that are not classes of the model.

    Args:
        labels: of a batch.
        first: the position of its first sample.
        classes: how many outputs the model has.
        where: what an error begins with.
    """
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        raise OptionError(
            f"{where}: sample {first + wrong[0]} has label {int(labels[wrong[0]])}; wanted 0 to "
            f"{classes - 1}, the model has {classes} outputs; number the classes from 0"
        )


def collate(inputs: Sequence[Any], where: str) -> Inputs:
    """The inputs of samples as one batch.

    >>> collate([{"ids": [5, 7]}, {"ids": [6, 8]}], "splits: forget")["ids"].tolist()
    [[5, 7], [6, 8]]
    """
    try:
        if not isinstance(inputs[0], Mapping):
            return torch.stack([torch.as_tensor(one) for one in inputs])
        # Rows of a data set without a tensor format have lists, which torch would take for tuples.
        rows = [
            {k: torch.as_tensor(v) if isinstance(v, list) else v for k, v in one.items()}
            for one in inputs
        ]
        batch = default_collate(rows)
    except Exception as error:
        raise OptionError(
            f"{where}: the inputs cannot be put into one batch: {told(error)}; wanted tensors of "
            "one shape; transform or pad them in the Dataset"
        ) from error
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise OptionError(
                f"{where}: the input {shown(name)} is {type(value).__name__}; wanted tensors or "
                "numbers; encode it, or remove it from the samples"
            )
    return batch


# ------------------------------------------------------------------------------ inputs of a batch


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors of a batch's inputs, in the order of their names."""
    return [inputs] if isinstance(inputs, Tensor) else [inputs[name] for name in sorted(inputs)]


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs on a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def joined_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Several batches' inputs as one batch's."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    named = [part for part in parts if isinstance(part, dict)]
    return {name: torch.cat([part[name] for part in named]) for name in parts[0]}


def only_tensor(inputs: Inputs, where: str) -> Tensor:
    """The inputs where only one tensor will do."""
    if isinstance(inputs, Tensor):
        return inputs
    raise OptionError(
        f"{where}: the inputs are a dictionary of {', '.join(inputs)}; wanted one tensor"
    )
