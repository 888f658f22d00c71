"""Folders of models as libraries of Hugging Face write them: on this machine, or on the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from negmerge.checkpoints.checkpoint import Checkpoint, read_within
from negmerge.checkpoints.dtypes import FLOATS
from negmerge.errors import FileError, OptionError, one_line, quoted
from negmerge.registry import nearest
from negmerge.support.reading import MAX_YAML, parse_yaml
from negmerge.support.remote.hub import hub_source, is_repo
from negmerge.support.remote.scratch import url_of

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor, by name."""
CARD = "README.md"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""The files of weights that are fetched: no pickles."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}")
"""The identifiers of licences on the Hub."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch_folder(
    field: str, name: str, files: Sequence[str], revision: str | None, shipped: Sequence[str] = ()
) -> Path:
    """Return the copy of a model of the Hub on this machine, with some of its files.

    Args:
        field, shipped: for the error: the field of the recipe, and the models of the package that
            it may also name.
        name, revision: the Hub id, and the branch, tag or commit.
        files: patterns of the names of the files.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except Exception as error:  # the libraries of the Hub raise errors of many kinds
        also = f"no model of the package ({', '.join(shipped)}), " if shipped else ""
        raise OptionError(
            f"{field} {quoted(name)}: no such folder, {also}and the Hub does not give it: "
            f"{one_line(error)}{nearest(name, shipped)}"
        ) from None


def commit_of(folder: Path) -> str | None:
    """Return the commit of a copy that `fetch_folder` made; None for other folders.

    >>> commit_of(Path("models--a--b/snapshots") / ("0" * 40)) == "0" * 40
    True
    """
    copied = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if copied else None


def licence_of(folder: Path) -> str | None:
    """Return the licence that the model card of a folder names; None if it names none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "README.md").write_text("---\\nlicense: mit\\n---\\n# A model")
    ...     licence_of(Path(folder))
    'mit'
    """
    with suppress(FileError):  # the card of others may be anything
        text = (read_within(folder, CARD, MAX_YAML) or b"").decode(errors="replace")
        block = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
        tree = parse_yaml(block[1], CARD) if block else None
        found = tree.get("license") if isinstance(tree, dict) else None
        return found if isinstance(found, str) and LICENCE.fullmatch(found) else None
    return None


def base_of(name: str, folder: Path, original: Shapes | None = None) -> dict[str, Any]:
    """Return what a run records of the model that is to forget: Hub id, commit and licence.

    Args:
        name: the folder or Hub id, as the recipe names it.
        folder: the folder on this machine.
        original: the shapes of the original's tensors, if its weights are those of the folder. If
            the files have the same tensors in float32, a patch of the run fits them.
    """
    repo, _, _ = name.partition("@")
    on_hub = is_repo(repo) and not Path(name).exists()
    _, _, fetched = (hub_source(url_of(folder) or "") or "").partition("@")
    found = {
        "base_model": repo if on_hub else None,
        "base_commit": (commit_of(folder) or fetched or None) if on_hub else None,
        "licence": licence_of(folder),
        "base_fits": True if on_hub and original is not None and _has(folder, original) else None,
    }
    return {field: value for field, value in found.items() if value is not None}


def _has(folder: Path, shapes: Shapes) -> bool:
    """Whether the files of a folder have exactly these tensors, the float ones in float32."""
    with Checkpoint(folder) as model:
        found = {name: info.shape for name, info in model.tensors.items()}
        kinds = {info.dtype for info in model.tensors.values()} & {*FLOATS}
    return found == dict(shapes) and kinds <= {"F32"}
