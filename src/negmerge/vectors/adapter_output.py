"""A task vector as a LoRA adapter that peft loads, by truncated singular value decomposition.

For every matrix of the vector the adapter has the best approximation of the given rank. Its error,
which includes the tensors that an adapter cannot change, is measured and written beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.adapter import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from negmerge.checkpoints.dtypes import Float64
from negmerge.checkpoints.header import build_header
from negmerge.checkpoints.names import is_embedding
from negmerge.checkpoints.state_dict import PathLike
from negmerge.errors import OptionError, ValueRangeError, printable, quoted
from negmerge.support.files import atomic_folder
from negmerge.vectors.task_vector import TaskVector

Matrix = NDArray[Any]
ROWS = 1 << 12
"""The rows of a matrix that are widened to float64 at a time."""
STORED_TURNED = ("c_attn", "q_attn", "c_proj", "c_fc")
"""Modules of GPT-2 and models like it, which store a weight as inputs × outputs."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that was written.

    Args:
        error: the Euclidean norm of what is missing, relative to that of the whole vector.
        errors: the same for each tensor that is not zero; 1 for a tensor that is left out.
        left_out: names of tensors that are not zero and that an adapter cannot change.
    """

    out: Path
    rank: int
    nbytes: int
    error: float
    errors: dict[str, float]
    left_out: list[str]


def save_adapter(
    vector: TaskVector | PathLike, out: PathLike, rank: int, base_name: str = ""
) -> SavedAdapter:
    """Write a task vector as a LoRA adapter: `save_adapter(-0.5 * tau, folder, 16)` forgets.

    peft adds the adapter to the base, so that the base with the adapter is θ + s·τ up to the error,
    where s is the scale of the vector.

    >>> import tempfile
    >>> import negmerge as nm
    >>> base = {"q_proj.weight": np.zeros((4, 3), np.float32)}
    >>> model = {"q_proj.weight": np.outer([1, 2, 0, -1], [1, 0, 3]).astype(np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = nm.save_adapter(-0.5 * nm.merge(base, [model]), f"{folder}/adapter", rank=1)
    >>> done.error < 1e-6, done.left_out
    (True, [])

    Args:
        vector: a TaskVector or a patch file.
        out: the folder to write.
        rank: the rank of the change of every module.
        base_name: the name of the base for `adapter_config.json`, such as a Hub id.
    """
    tau = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    largest = max((min(e.shape) for e in tau.entries.values() if len(e.shape) == 2), default=1)
    if not 1 <= rank <= max(largest, 1):
        raise OptionError(
            f"rank: got {rank}, wanted a whole number from 1 to {max(largest, 1)}, the largest "
            "rank of a matrix of the patch"
        )
    turned = any(".c_attn." in f".{name}" for name in tau.entries)
    tensors: dict[str, NDArray[np.float32]] = {}
    modules: list[str] = []
    lost: dict[str, float] = {}
    whole: dict[str, float] = {}
    left_out: list[str] = []
    for name, entry in tau.entries.items():
        if not entry.nonzero or tau.scale == 0:
            continue
        norm = abs(tau.scale) * float(np.linalg.norm(entry.stored().astype(np.float64)))
        module, _, last = name.rpartition(".")
        whole[name] = norm**2
        if len(entry.shape) != 2 or last != "weight" or not module:
            left_out.append(name)
            lost[name] = norm**2
            continue
        matrix = entry.dense().reshape(entry.shape)
        embedding = is_embedding(name)
        if embedding or (turned and module.rpartition(".")[2] in STORED_TURNED):
            matrix = matrix.T
        b, a, lost[name] = factors(matrix, tau.scale, rank)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueRangeError(f"{quoted(name)}: {tau.scale}·τ does not fit float32")
        kind = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
        tensors |= {f"{PREFIX}{module}.lora_{k}": m for k, m in zip(kind, (a, b), strict=True)}
        modules.append(module)
    if not modules:
        raise OptionError("the task vector has no matrix that is not zero; wanted one for LoRA")
    done = SavedAdapter(
        out=Path(out),
        rank=rank,
        nbytes=sum(array.nbytes for array in tensors.values()),
        error=sqrt(sum(lost.values()) / sum(whole.values())),
        errors={name: sqrt(lost[name] / square) for name, square in whole.items()},
        left_out=left_out,
    )
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_name or None,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": modules,
        "fan_in_fan_out": turned,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "task_type": None,
    }
    with atomic_folder(Path(out)) as folder:
        stored = {name: ("F32", array.shape) for name, array in tensors.items()}
        header, _ = build_header(stored, {"format": "pt"})
        content = [header, *(np.ascontiguousarray(array).tobytes() for array in tensors.values())]
        (folder / WEIGHTS_FILE).write_bytes(b"".join(content))
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_card(tau, done), encoding="utf-8")
    return done


def factors(
    matrix: Matrix, scale: float, rank: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Approximate scale × matrix by B @ A; a matrix of a lower rank gets zeros.

    >>> b, a, lost = factors(np.diag([3.0, 1.0]), -1.0, 1)
    >>> (b @ a).round(6) + 0.0, round(lost, 6)
    (array([[-3.,  0.],
           [ 0.,  0.]], dtype=float32), 1.0)

    Returns:
        B, A, and the sum of the squares of what is missing.
    """
    if matrix.shape[0] < matrix.shape[1]:
        a, b, lost = factors(matrix.T, scale, rank)
        return b.T, a.T, lost
    # The right singular vectors are those of MᵀM, which needs no copy of M in float64.
    gram = np.zeros((matrix.shape[1], matrix.shape[1]))
    for _, rows in _rows(matrix, scale):
        gram += rows.T @ rows
    right = np.linalg.eigh(gram)[1][:, ::-1][:, :rank]
    right *= np.sign(right[np.abs(right).argmax(axis=0), np.arange(right.shape[1])] + 0.0)
    left = np.concatenate([rows @ right for _, rows in _rows(matrix, scale)])
    sizes = np.sqrt(np.linalg.norm(left, axis=0))
    b, a = np.zeros((len(left), rank), np.float32), np.zeros((rank, len(gram)), np.float32)
    b[:, : len(sizes)] = left / np.where(sizes > 0, sizes, 1)
    a[: len(sizes)] = (right * sizes).T
    lost = sum(
        float(np.square(rows - b[start : start + ROWS].astype(np.float64) @ a).sum())
        for start, rows in _rows(matrix, scale)
    )
    return b, a, lost


def _rows(matrix: Matrix, scale: float) -> Iterator[tuple[int, Float64]]:
    for start in range(0, len(matrix), ROWS):
        yield start, matrix[start : start + ROWS].astype(np.float64) * scale


def _card(tau: TaskVector, done: SavedAdapter) -> str:
    """A model card with the errors; without times or folders, so that it is always the same."""
    sign, value = ("−" if tau.scale < 0 else "+"), abs(tau.scale)
    lines = [
        f"# LoRA of rank {done.rank}",
        "",
        f"The change {sign} {value!r}·τ of a base model, where τ is `{printable(tau.origin.rule)}` "
        f"of {tau.origin.n} fine-tuned models, approximated by matrices of rank {done.rank}.",
        f"The fingerprint of the base is `{printable(tau.origin.base)}`.",
        "",
        f"Relative error of the whole change: {done.error:.3g}.",
        "",
        "| tensor | relative error |",
        "|---|---|",
        *(f"| `{printable(name)}` | {error:.3g} |" for name, error in done.errors.items()),
    ]
    return "\n".join(lines) + "\n"
