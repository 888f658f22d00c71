"""The models of a merge, checked before any work: same keys, same shapes, formats that fit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

import numpy as np

from negmerge.checkpoint import ADAPTER, Checkpoint
from negmerge.dtypes import FLOATS, INTEGERS, SIZES
from negmerge.errors import FileError, MismatchError, NegMergeError, OptionError, shown
from negmerge.files import same_file
from negmerge.fingerprint import fingerprint_of
from negmerge.header import TensorInfo
from negmerge.names import is_adapter, is_statistic
from negmerge.state_dict import Model, open_checkpoint
from negmerge.task_vector import TaskVector

WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
Buffers = Literal["keep", "merge"]


class Inputs:
    """A base and its fine-tuned models, open and fitting, the models in an order of their content.

    The order does not depend on how the models were listed: sums are then the same bit for bit.

    merged: names of the tensors to merge, sorted; kept: those that stay the base's.
    """

    def __init__(
        self,
        base: Model | Checkpoint,
        models: Sequence[Model | Checkpoint],
        buffers: Buffers = "keep",
        allow_duplicates: bool = False,
    ) -> None:
        if isinstance(models, str | os.PathLike | Mapping):
            raise OptionError("models: got one model, wanted a list of them; put it in brackets")
        if not isinstance(cast(Any, models), Collection):
            raise OptionError(
                f"models: got {type(models).__name__}, wanted a list of models; "
                "of an iterator make one with list()"
            )
        if not models:
            raise NegMergeError("the pool is empty: name at least one fine-tuned model")
        if len(models) > 32767:
            raise NegMergeError(f"{len(models)} models: at most 32767 can be merged")
        self._closing = ExitStack()
        try:
            self.base = self._open(base, "base")
            found = [self._open(model, f"models[{k}]") for k, model in enumerate(models)]
            if not allow_duplicates:
                _refuse_same_file([self.base, *found])
            for k, model in enumerate(found):
                place = f"pool[{k}] {model.path}" if model.files else str(model.path)
                check_fits(self.base, model, place)
            self.members = _by_content(found)
            self.merged: list[TensorInfo] = []
            self.kept: list[TensorInfo] = []
            for _, info in sorted(self.base.tensors.items()):
                keep = info.dtype not in FLOATS or (buffers == "keep" and is_statistic(info.name))
                (self.kept if keep else self.merged).append(info)
            if not self.merged:
                raise MismatchError(f"{self.base.path}: no float tensor that could be merged")
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> list[Checkpoint]:
        """The base, then the members."""
        return [self.base, *self.members]

    @property
    def nbytes(self) -> int:
        return sum(model.nbytes for model in self.models)

    def infos(self, name: str) -> list[TensorInfo]:
        """One tensor in the base and in every member."""
        return [model.tensors[name] for model in self.models]

    def bytes_of(self, name: str, elements: int) -> int:
        """Bytes of so many elements of one tensor in all models together."""
        return elements * sum(SIZES[info.dtype] for info in self.infos(name))

    def check_unchanged(self) -> None:
        for model in self.models:
            model.check_unchanged()

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, model: Model | Checkpoint, name: str) -> Checkpoint:
        return self._closing.enter_context(open_model(model, name))


def open_model(source: Model | Checkpoint, name: str) -> Checkpoint:
    """Open a checkpoint or state dict that must be a model, not a patch or task vector.

    name: what errors call a state dict.
    """
    if isinstance(source, TaskVector):
        raise OptionError(f"{name}: is a task vector, wanted a model")
    model = open_checkpoint(source, name)
    if model.metadata.get("format", "").startswith("negmerge-"):
        model.close()
        raise FileError(f"{model.path}: is a {model.metadata['format']} file, wanted a model")
    return model


def refuse_overwriting(out: Path, models: Sequence[Checkpoint]) -> None:
    """Raise if an output would replace one of the inputs."""
    for model in models:
        if any(same_file(out, path) for path in model.sources):
            raise FileError(f"{out}: is also an input; name another output")


def check_fits(base: Checkpoint, model: Checkpoint, where: str) -> None:
    """Raise unless a model has the base's keys and shapes, and formats that can be compared."""
    missing = base.tensors.keys() - model.tensors.keys()
    extra = model.tensors.keys() - base.tensors.keys()
    if missing or extra:
        for place, one, other in ((where, model, base), (base.path, base, model)):
            if is_adapter(one.tensors) and not is_adapter(other.tensors):
                raise MismatchError(f"{place}: {ADAPTER}")
        raise MismatchError(f"{where}: {_key_trouble(base, model, missing, extra)}")
    for name, info in base.tensors.items():
        other = model.tensors[name]
        if other.shape != info.shape:
            raise MismatchError(
                f"{where} {shown(name)}: shape {other.shape}, base has {info.shape}. "
                "Was it fine-tuned from this base?"
            )
        kinds = (info.dtype in FLOATS, other.dtype in FLOATS)
        if kinds[0] != kinds[1] or (info.dtype != other.dtype and info.dtype not in FLOATS):
            raise MismatchError(
                f"{where} {shown(name)}: dtype {other.dtype}, base has {info.dtype}; "
                f"only {', '.join(FLOATS)} can be mixed"
            )


def check_identical(models: Sequence[Checkpoint], info: TensorInfo, equal: Sequence[bool]) -> None:
    """Refuse a tensor of a format that cannot be merged unless it is the same everywhere."""
    if info.dtype in INTEGERS or info.dtype in FLOATS or all(equal):
        return
    culprit = models[1 + list(equal).index(False)]
    raise MismatchError(
        f"{culprit.path} {shown(info.name)}: {info.dtype} cannot be merged and differs from the "
        f"base; convert the models to {', '.join(FLOATS)} first"
    )


def _key_trouble(base: Checkpoint, model: Checkpoint, missing: set[str], extra: set[str]) -> str:
    for prefix in WRAPPERS:
        if {prefix + name for name in base.tensors} == model.tensors.keys():
            remedy = _without_prefix(model, prefix, "fixed.safetensors")
            return f"every name starts with {prefix!r}, the base's do not; {remedy}"
        if {prefix + name for name in model.tensors} == base.tensors.keys():
            remedy = _without_prefix(base, prefix, "base.safetensors")
            return f"the base's names start with {prefix!r}, these do not; {remedy}"
    parts: list[str] = []
    if missing:
        parts.append(f"{len(missing)} tensors of the base are missing, first {shown(min(missing))}")
    if extra:
        parts.append(f"{len(extra)} are not in the base, first {shown(min(extra))}")
    return "; ".join(parts) + ". Was it fine-tuned from this base?"


def _without_prefix(model: Checkpoint, prefix: str, out: str) -> str:
    if not model.files:
        return f"remove it with: {{k.removeprefix({prefix!r}): v for k, v in state.items()}}"
    path = quote(str(model.path))
    return f"remove it with: negmerge convert {path} --strip-prefix {prefix} -o {out}"


def _refuse_same_file(models: Sequence[Checkpoint]) -> None:
    seen: dict[tuple[tuple[int, int], ...], Path] = {}
    for model in models:
        first = seen.setdefault(model.identity(), model.path)
        if first is not model.path and first is models[0].path:
            raise MismatchError(
                f"{model.path}: listed twice, as the base and as a model; list only models that "
                "were fine-tuned from the base"
            )
        if first is not model.path:
            raise MismatchError(
                f"{model.path}: listed twice (also as {first}); list each model once, "
                "or allow duplicates"
            )


def _by_content(models: list[Checkpoint]) -> list[Checkpoint]:
    """Sort by a digest of a sample of the content, and by all of it where samples are equal."""
    keys = [_sample(model) for model in models]
    full: dict[Path, str] = {}
    for model, key in zip(models, keys, strict=True):
        # One file listed several times needs no closer look.
        twins = {m.path for m, k in zip(models, keys, strict=True) if k == key}
        full[model.path] = fingerprint_of(model) if len(twins) > 1 else ""
    order = sorted(
        range(len(models)),
        key=lambda i: (keys[i], full[models[i].path], str(models[i].path)),
    )
    return [models[i] for i in order]


def _sample(model: Checkpoint) -> bytes:
    """A digest of the first bytes of up to 16 tensors, the largest first."""
    largest = sorted(model.tensors.values(), key=lambda t: (-t.nbytes, t.name))[:16]
    digest = hashlib.blake2b(digest_size=16)
    for info in largest:
        digest.update(np.ascontiguousarray(model.read(info, 0, min(256, info.nbytes))).data)
    return digest.digest()
