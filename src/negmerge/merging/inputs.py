"""The models of a merge, checked before any work: same names, same shapes, formats that fit."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

import numpy as np

from negmerge.checkpoints.checkpoint import ADAPTER_REFUSED, Checkpoint
from negmerge.checkpoints.dtypes import FLOATS, SIZES
from negmerge.checkpoints.fingerprint import fingerprint_of
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_adapter, is_statistic
from negmerge.checkpoints.remote import expand, local_models
from negmerge.checkpoints.state_dict import Model
from negmerge.errors import MismatchError, NegMergeError, OptionError, as_shown, quoted
from negmerge.support.progress import Progress
from negmerge.support.remote.urls import is_url
from negmerge.vectors.task_vector import open_model

WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
"""Prefixes that wrappers of torch add to every name."""
Buffers = Literal["keep", "merge"]
"""Whether the running statistics of BatchNorm stay those of the base or are merged."""
SAME_AS_BASE = "has the weights of the base, so that no change can be unanimous; remove this model"


class Inputs(ExitStack):
    """A base and its fine-tuned models, open and checked.

    The models are sorted by their content: sums are the same bit for bit in whatever order the
    models were listed. The arguments are those of `merge`.

    Args:
        is_sorted: whether the models are listed in the order of `members`, because another process
            has sorted them.
    """

    def __init__(
        self,
        base: Model | Checkpoint,
        models: Sequence[Model | Checkpoint],
        buffers: Buffers = "keep",
        allow_duplicates: bool = False,
        progress: Progress | None = None,
        is_sorted: bool = False,
    ) -> None:
        if isinstance(models, str | os.PathLike | Mapping):
            raise OptionError("models: got one model, wanted a list of models; put it in brackets")
        if not isinstance(cast(Any, models), Collection):
            raise OptionError(
                f"models: got {type(models).__name__}, wanted a list of models; "
                "convert an iterator with list()"
            )
        if not models:
            raise NegMergeError("the pool is empty: name at least one fine-tuned model")
        models = expand(models)
        if len(models) > 32767:
            raise NegMergeError(f"models: got {len(models)}, wanted at most 32767")
        given = [base, *models]
        base, *models = local = local_models(given, progress)
        pairs = zip(local, given, strict=True)
        self.urls = {Path(path).absolute(): url for path, url in pairs if is_url(url)}
        """The URLs of models that were fetched, by the path on this machine."""
        self.allow_duplicates = allow_duplicates
        super().__init__()
        try:
            self.base = self.enter_context(open_model(base, "base"))
            named = ((model, f"models[{k}]") for k, model in enumerate(models))
            found = [self.enter_context(open_model(*one)) for one in named]
            if not allow_duplicates:
                _refuse_same_file([self.base, *found])
            for k, model in enumerate(found):
                place = f"pool[{k}] {model.path}" if model.files else str(model.path)
                check_fits(self.base, model, place)
            self.members = found if is_sorted else _by_content(found)
            self.merged: list[TensorInfo] = []
            """The tensors to merge, sorted by name."""
            self.kept: list[TensorInfo] = []
            """The tensors that keep the values of the base."""
            for _, info in sorted(self.base.tensors.items()):
                keep = info.dtype not in FLOATS or (buffers == "keep" and is_statistic(info.name))
                (self.kept if keep else self.merged).append(info)
            if not self.merged:
                raise MismatchError(
                    f"{self.base.path}: has no float tensor; there is nothing to merge"
                )
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
        """Describe one tensor in the base and in every member."""
        return [model.tensors[name] for model in self.models]

    def bytes_of(self, name: str, elements: int) -> int:
        """Return the bytes of a number of elements of one tensor in all models together."""
        return elements * sum(SIZES[info.dtype] for info in self.infos(name))

    def check_unchanged(self) -> None:
        for model in self.models:
            model.check_unchanged()


def check_fits(base: Checkpoint, model: Checkpoint, where: str) -> None:
    """Raise unless a model has the names and shapes of the base, and formats that compare."""
    missing = base.tensors.keys() - model.tensors.keys()
    extra = model.tensors.keys() - base.tensors.keys()
    if missing or extra:
        for place, one, other in ((where, model, base), (base.path, base, model)):
            if is_adapter(one.tensors) and not is_adapter(other.tensors):
                raise MismatchError(f"{place}: {ADAPTER_REFUSED}")
        raise MismatchError(f"{where}: {_names_differ(base, model, missing, extra)}")
    for name, info in base.tensors.items():
        other = model.tensors[name]
        if other.shape != info.shape:
            raise MismatchError(
                f"{where} {quoted(name)}: shape {other.shape}, base has {info.shape}; "
                "check that the model was fine-tuned from this base"
            )
        if info.dtype != other.dtype and not {info.dtype, other.dtype} <= FLOATS.keys():
            raise MismatchError(
                f"{where} {quoted(name)}: dtype {other.dtype}, base has {info.dtype}; "
                f"only {', '.join(FLOATS)} can be mixed"
            )


def _names_differ(base: Checkpoint, model: Checkpoint, missing: set[str], extra: set[str]) -> str:
    """Describe how the names of a model differ from those of the base, and the remedy."""
    for prefix in WRAPPERS:
        if {prefix + name for name in base.tensors} == model.tensors.keys():
            remedy = _without_prefix(model, prefix, "fixed.safetensors")
            return f"every name starts with {prefix!r}, the names of the base do not; {remedy}"
        if {prefix + name for name in model.tensors} == base.tensors.keys():
            remedy = _without_prefix(base, prefix, "base.safetensors")
            return f"the names of the base start with {prefix!r}, these names do not; {remedy}"
    parts: list[str] = []
    if missing:
        parts.append(
            f"{len(missing)} tensors of the base are missing, first {quoted(min(missing))}"
        )
    if extra:
        parts.append(f"{len(extra)} are not in the base, first {quoted(min(extra))}")
    return "; ".join(parts) + "; check that the model was fine-tuned from this base"


def _without_prefix(model: Checkpoint, prefix: str, out: str) -> str:
    """Return the command that removes a prefix from all names."""
    if not model.files:
        return f"remove it with: {{k.removeprefix({prefix!r}): v for k, v in state.items()}}"
    path = quote(str(model.path))
    return f"remove it with: negmerge convert {path} --strip-prefix {prefix} -o {out}"


def _refuse_same_file(models: Sequence[Checkpoint]) -> None:
    seen: dict[tuple[tuple[int, int], ...], Path] = {}
    for model in models:
        first = seen.setdefault(model.identity(), model.path)
        if first is model.path:
            continue
        if first is models[0].path:
            raise MismatchError(
                f"{model.path}: listed twice, as the base and as a model; list only models that "
                "were fine-tuned from the base"
            )
        raise MismatchError(
            f"{model.path}: listed twice (also as {first}); list each model once; "
            "`negmerge merge --allow-duplicates` accepts both"
        )


def _by_content(models: list[Checkpoint]) -> list[Checkpoint]:
    """Sort by a digest of a sample of the content, and by the fingerprint where samples agree."""
    samples = [_sample(model) for model in models]
    paths: dict[bytes, set[Path]] = defaultdict(set)
    for model, sample in zip(models, samples, strict=True):
        paths[sample].add(model.path)

    def key(pair: tuple[Checkpoint, bytes]) -> tuple[bytes, str, str]:
        model, sample = pair
        # A single file that is listed several times is not read whole.
        full = fingerprint_of(model) if len(paths[sample]) > 1 else ""
        return sample, full, as_shown(str(model.path))

    return [model for model, _ in sorted(zip(models, samples, strict=True), key=key)]


def _sample(model: Checkpoint) -> bytes:
    """Return a digest of the first bytes of the 16 largest tensors."""
    largest = sorted(model.tensors.values(), key=lambda t: (-t.nbytes, t.name))[:16]
    digest = hashlib.blake2b(digest_size=16)
    for info in largest:
        digest.update(np.ascontiguousarray(model.read(info, 0, min(256, info.nbytes))).data)
    return digest.digest()
