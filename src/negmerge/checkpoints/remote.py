"""Models that are named by URLs or Hub ids: which files are fetched, and pools with a wildcard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from negmerge.checkpoints.adapter import CONFIG_FILE, WEIGHTS_FILE
from negmerge.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, read_index
from negmerge.errors import FileError
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Progress
from negmerge.support.remote.hub import hub_url, pinned
from negmerge.support.remote.ranges import STREAMS
from negmerge.support.remote.scratch import Wanted, fetch_all, local
from negmerge.support.remote.stores import Store
from negmerge.support.remote.urls import is_http, is_url, join, shown

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".index.json")
WEIGHTS = (".safetensors", *OTHER_WEIGHTS)
"""Endings of files with weights; all other files of a model's folder belong to the model."""


def resolved(models: Sequence[Any]) -> list[Any]:
    """Replace models of the Hub by URLs with their commits: ids without a local file, and URLs.

    >>> resolved(["base.safetensors", "s3://bucket/pool/a.safetensors"])
    ['base.safetensors', 's3://bucket/pool/a.safetensors']
    """
    urls = (hub_url(model) or model for model in models)
    return [pinned(url) if is_url(url) else url for url in urls]


def local_models(models: Sequence[Any], progress: Progress | None = None) -> list[Any]:
    """Fetch the models that are URLs or ids of the Hub; return paths on this machine instead.

    Other models are returned as they are given.

    >>> local_models(["base.safetensors", {"w": 1}])
    ['base.safetensors', {'w': 1}]
    """
    models = resolved(models)
    urls = {k: model for k, model in enumerate(models) if is_url(model)}
    if not urls:
        return models
    wanted = run_in_order(urls.values(), lambda _, url: _wanted(url), lambda: None, STREAMS)
    paths = dict(zip(urls, fetch_all([*wanted], progress), strict=True))
    return [paths.get(k, model) for k, model in enumerate(models)]


def local_model(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Return the path of a model on this machine, which is fetched if it is a URL."""
    return Path(local_models([model], progress)[0])


def expand(models: Sequence[Any]) -> list[Any]:
    """Replace each URL that has a `*` in its last part by the URLs that match, sorted.

    >>> import fsspec
    >>> for name in ("b.safetensors", "a.safetensors", "notes.txt"):
    ...     fsspec.filesystem("memory").pipe_file(f"/expanded/{name}", b"")
    >>> expand(["memory://expanded/*.safetensors", "c.safetensors"])
    ['memory://expanded/a.safetensors', 'memory://expanded/b.safetensors', 'c.safetensors']
    """
    found: list[Any] = []
    for model in models:
        if not is_url(model) or "*" not in (model.partition("?")[0] if is_http(model) else model):
            found.append(model)
            continue
        folder, _, pattern = model.rpartition("/")
        if "*" in folder:
            raise FileError(f"{shown(model)}: wanted a wildcard in the last part only")
        if not (names := Store(folder).names(pattern)):
            raise FileError(f"{shown(model)}: no file matches")
        found += [join(folder, name) for name in names]
    return found


def _wanted(url: str) -> Wanted:
    """Ask the store which files a model has."""
    store = Store(url)
    files = store.files(deep=False)
    if store.kind == "file":
        return Wanted(store, files, deep=False)
    names = {file.name for file in files}
    if INDEX_FILE in names:
        weights = {INDEX_FILE, *_shards(join(store.url, INDEX_FILE)).values()}
    elif SINGLE_FILE in names:
        weights = {SINGLE_FILE}
    elif {CONFIG_FILE, WEIGHTS_FILE} <= names:
        weights = {WEIGHTS_FILE}
    else:
        weights = set[str]()
        some = sorted(name for name in names if name.endswith(".safetensors"))
        if some and CONFIG_FILE not in names:
            raise FileError(
                f"{store.shown}: contains neither {SINGLE_FILE} nor {INDEX_FILE}; name a file "
                f"instead: {', '.join(some[:5])}"
            )
    chosen = [f for f in files if f.name in weights or not f.name.endswith(WEIGHTS)]
    return Wanted(store, chosen, deep=False)


def _shards(index: str) -> Mapping[str, str]:
    return read_index(local(index, deep=False))
