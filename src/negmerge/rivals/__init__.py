"""The methods that the merged task vectors are compared with. ◄ ADD A RIVAL METHOD: one file."""

from negmerge.rivals import (
    boundary_expand,
    boundary_shrink,
    finetune,
    gradient_ascent,
    influence,
    l1_sparse,
    random_label,
    retrain,
    salun,
)
from negmerge.rivals.registry import Rival, Task, rivals

__all__ = [
    "Rival",
    "Task",
    "boundary_expand",
    "boundary_shrink",
    "finetune",
    "gradient_ascent",
    "influence",
    "l1_sparse",
    "random_label",
    "retrain",
    "rivals",
    "salun",
]
