"""The models of a merge, checked before any work: same names, same shapes, formats that fit.

A member is a whole model, or an adapter that changes the base (`checkpoints/adapted.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.adapted import Adapted
from negmerge.checkpoints.adapter import Adapter, is_adapter_folder
from negmerge.checkpoints.checkpoint import ADAPTER_REFUSED, Checkpoint
from negmerge.checkpoints.dtypes import FLOATS, SIZES
from negmerge.checkpoints.fingerprint import fingerprint_of
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_adapter, is_statistic
from negmerge.checkpoints.remote import expand, local_models, resolved
from negmerge.checkpoints.state_dict import Model
from negmerge.errors import MismatchError, NegMergeError, OptionError, as_shown, quoted
from negmerge.merging.patterns import Patterns
from negmerge.merging.shared_start import different_starts
from negmerge.merging.tied import tie_heads
from negmerge.support.progress import Progress, Quiet
from negmerge.support.remote.hub import hub_source
from negmerge.support.remote.urls import is_url
from negmerge.vectors.task_vector import open_model

WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
"""Prefixes that wrappers of torch add to every name."""
Buffers = Literal["keep", "merge"]
"""Whether the running statistics of BatchNorm stay those of the base or are merged."""
SAME_AS_BASE = (
    "has the weights of the base in the tensors to merge, so that no change can be unanimous; "
    "remove this model"
)
EVERY = Patterns()


class Inputs(ExitStack):
    """A base and its fine-tuned models, open and checked.

    The models are sorted by their content: sums are the same bit for bit in whatever order the
    models were listed. The arguments are those of `merge`.

    Args:
        patterns: the tensors to merge.
        is_sorted: whether the models are listed in the order of `members`, because another process
            has sorted them.

    Attributes:
        chosen: the names of all tensors that the patterns choose.
        merged: the tensors to merge, sorted by name.
        kept: the tensors that keep the values of the base.
        tied: the names of tensors that the base stores twice, each with the name that is merged.
        untouched: the names of merged tensors that no member changes, because all are adapters.
        factors: the factor of the changes of each member, once it is known (`norms.py`); None if
            the members are not scaled.
    """

    def __init__(
        self,
        base: Model | Checkpoint,
        models: Sequence[Model | Checkpoint],
        buffers: Buffers = "keep",
        allow_duplicates: bool = False,
        progress: Progress | None = None,
        patterns: Patterns = EVERY,
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
        given = resolved([base, *models])
        base, *models = local = local_models(given, progress)
        pairs = zip(local, given, strict=True)
        self.urls = {Path(path).absolute(): url for path, url in pairs if is_url(url)}
        """The URLs of models that were fetched, by the path on this machine."""
        self.allow_duplicates, self.patterns = allow_duplicates, patterns
        self.factors: NDArray[np.float64] | None = None
        super().__init__()
        try:
            self.base = self.enter_context(open_model(base, "base"))
            found = [self.enter_context(self._member(k, one)) for k, one in enumerate(models)]
            if not allow_duplicates:
                _refuse_same_file([self.base, *found])
            named = [(model, _place(k, model)) for k, model in enumerate(found)]
            self.tied = tie_heads(self.base, named)
            for model, place in named:
                check_fits(self.base, model, place)
            names = self.base.tensors.keys() - self.tied.keys()
            self.members = found if is_sorted else _by_content(found, names)
            self._choose(buffers)
            if not is_sorted and (text := different_starts(found)):
                (progress or Quiet()).note(text)
        except BaseException:
            self.close()
            raise

    def _member(self, number: int, model: Any) -> Checkpoint:
        if is_adapter_folder(model):
            adapter = Adapter(model)
            return Adapted(adapter, self.base, _place(number, adapter))
        return open_model(model, f"models[{number}]")

    def _choose(self, buffers: Buffers) -> None:
        """Find the tensors to merge, and those that no member changes."""
        self.merged: list[TensorInfo] = []
        self.kept: list[TensorInfo] = []
        self.chosen = self.patterns.select(self.base.tensors, self.tied)
        for name, info in sorted(self.base.tensors.items()):
            if name not in self.tied:
                keep = info.dtype not in FLOATS or (buffers == "keep" and is_statistic(name))
                (self.kept if keep or name not in self.chosen else self.merged).append(info)
        if not self.merged:
            kind = "chosen float tensor" if self.patterns != EVERY else "float tensor"
            raise MismatchError(f"{self.base.path}: has no {kind}; there is nothing to merge")
        self.untouched = {info.name for info in self.merged}
        for member in self.members:
            changed = member.changed if isinstance(member, Adapted) else self.untouched
            self.untouched = self.untouched - changed

    @property
    def models(self) -> list[Checkpoint]:
        """The base, then the members."""
        return [self.base, *self.members]

    @property
    def nbytes(self) -> int:
        """The size of all models; an adapter counts like the model that it makes."""
        return sum(model.nbytes for model in self.models)

    @property
    def stored_bytes(self) -> int:
        """The size of all files with tensors."""
        return sum((m.adapter if isinstance(m, Adapted) else m).nbytes for m in self.models)

    def infos(self, name: str) -> list[TensorInfo]:
        """Describe one tensor in the base and in every member.

        Their names may differ from the given one: an adapter has names of its own, and a tied head
        the name of the embedding.
        """
        return [model.tensors[name] for model in self.models]

    def bytes_of(self, name: str, elements: int) -> int:
        """Return the bytes of a number of elements of one tensor in all models together."""
        return elements * sum(SIZES[info.dtype] for info in self.infos(name))

    def hub_sources(self) -> dict[str, str]:
        """The ids and commits of models from the Hub: `base`, and the positions of members."""
        named = {"base": self.base} | {str(k): member for k, member in enumerate(self.members)}
        urls = {name: self.urls.get(model.path.absolute(), "") for name, model in named.items()}
        return {name: source for name, url in urls.items() if (source := hub_source(url))}

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


def _place(number: int, model: Checkpoint) -> str:
    """Return the name of a member in errors."""
    return f"pool[{number}] {model.path}" if model.files else str(model.path)


def _by_content(models: list[Checkpoint], names: Collection[str]) -> list[Checkpoint]:
    """Sort by samples of the content, and by the fingerprint where these agree.

    The first sample is of the largest tensors; where they agree, because they were not trained, the
    second one is of all tensors. A single file that is listed several times is not read whole.
    """
    keys: list[tuple[bytes, ...]] = [()] * len(models)
    readers: list[Callable[[Checkpoint], bytes]] = [
        lambda model: _sample(model, names, 16),
        lambda model: _sample(model, names, None),
        lambda model: fingerprint_of(model).encode(),
    ]
    for read in readers:
        paths: dict[tuple[bytes, ...], set[Path]] = defaultdict(set)
        for model, key in zip(models, keys, strict=True):
            paths[key].add(model.path)
        keys = [
            (*key, read(model) if len(paths[key]) > 1 else b"")
            for model, key in zip(models, keys, strict=True)
        ]
    pairs = zip(models, keys, strict=True)
    return [model for model, _ in sorted(pairs, key=lambda p: (p[1], as_shown(str(p[0].path))))]


def _sample(model: Checkpoint, names: Iterable[str], most: int | None) -> bytes:
    """Return a digest of the first bytes of the largest tensors."""
    found = [(-model.tensors[name].nbytes, name) for name in names]
    digest = hashlib.blake2b(digest_size=16)
    for _, name in sorted(found)[:most]:
        info = model.tensors[name]
        digest.update(np.ascontiguousarray(model.read(info, 0, min(256, info.nbytes))).data)
    return digest.digest()
