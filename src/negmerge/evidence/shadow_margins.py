"""What the shadow models of `evidence: full` record: margins of three models for each shadow.

A shadow repeats the run on a smaller scale: some of the forget set (the targets) is kept, some is
unlearned and some is left out, by chance. Its original model learns all but the left out targets,
its unlearned model is made from it by the first method of the recipe, its retrained model learns
only what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from negmerge.errors import FileError
from negmerge.evaluation.attacks.margins import Floats
from negmerge.evaluation.attacks.shadow_game import Role
from negmerge.support.reading import read_bytes

Kind = Literal["original", "unlearned", "retrained"]
KINDS: tuple[Kind, ...] = ("original", "unlearned", "retrained")
SETS = ("targets", "retain", "test")
MOST_BYTES = 1 << 30
"""The largest size of the file of a shadow."""
Columns = Mapping[str, Mapping[str, NDArray[np.generic]]]
"""The columns `margin` and `correct` of each set of `SETS`."""


def record(observed: Mapping[Kind, Columns], key: str, scale: float) -> bytes:
    """Return the file of one shadow: margins and right answers by model and set.

    Args:
        key: of the step that made the shadow.
        scale: λ of its unlearned model; 0 if a rival made it.
    """
    tensors: dict[str, NDArray[np.generic]] = {"scale": np.array([scale])}
    for kind, sets in observed.items():
        for name in SETS:
            tensors[f"{kind}.{name}.margin"] = sets[name]["margin"].astype(np.float64)
            tensors[f"{kind}.{name}.correct"] = sets[name]["correct"].astype(np.uint8)
    return save(tensors, {"id": key})  # several texts would have no fixed order


def recorded_id(path: Path) -> str | None:
    """Return the key of the step that made a file of a shadow; None if there is no such file."""
    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get("id")
    except (OSError, SafetensorError):
        return None


@dataclass(frozen=True)
class ShadowMargins:
    """The margins and the right answers of all shadows.

    Args:
        method: the title of the method that unlearned.
        roles: the role of each target (columns) in each shadow (rows).
        margins: by model and set, with a row of each shadow and a column of each sample.
        correct: of the same shape, whether the answer was right.
    """

    method: str
    roles: NDArray[np.int8]
    margins: Mapping[tuple[Kind, str], Floats]
    correct: Mapping[tuple[Kind, str], NDArray[np.bool_]]

    def of_role(self, kind: Kind, *roles: Role) -> Floats:
        """Return the margins of the targets in the shadows where they have one of some roles.

        Each target has each role in a third of the shadows, so that all columns are full.
        """
        chosen = np.isin(self.roles, roles)
        order = np.argsort(~chosen, axis=0, kind="stable")[: int(chosen[:, 0].sum())]
        return np.take_along_axis(self.margins[kind, "targets"], order, axis=0)

    def accuracy(self, kind: Kind, name: str) -> float:
        """Return the percentage of right answers of all shadows on a set."""
        return 100 * float(self.correct[kind, name].mean())


def read_shadows(method: str, roles: NDArray[np.int8], files: Sequence[Path]) -> ShadowMargins:
    """Read the files of all shadows, in the order of the rows of `roles`."""
    found: list[dict[str, NDArray[Any]]] = []
    for path in files:
        try:
            found.append(load(read_bytes(path, MOST_BYTES)))
        except (OSError, SafetensorError) as error:
            raise FileError(f"{path}: cannot be read: {error}; remove it and run again") from None
    margins: dict[tuple[Kind, str], Floats] = {}
    correct: dict[tuple[Kind, str], NDArray[np.bool_]] = {}
    for kind in KINDS:
        for name in SETS:
            margins[kind, name] = np.stack([one[f"{kind}.{name}.margin"] for one in found])
            answers = np.stack([one[f"{kind}.{name}.correct"] for one in found])
            correct[kind, name] = answers.astype(np.bool_)
    return ShadowMargins(method, roles, margins, correct)
