"""What the card of a data folder may say of its files: `README.md` with YAML on top.

`datasets` reads the files that a card names wherever they are, on this machine or in the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from negmerge.checkpoint import inside, read_inside
from negmerge.errors import FileError, shown
from negmerge.reading import parse_yaml

CARDS = ("README.md", ".huggingface.yaml")
FIELDS = (
    "config_name", "data_files", "data_dir", "default", "description", "drop_labels",
    "drop_metadata", "features", "version",
)  # fmt: skip
"""What `datasets` may be told of a part of the set."""


def check_card(folder: Path) -> None:
    """Raise unless the card of a folder, if it has one, names only files of that folder.

    >>> folder = getfixture("tmp_path")
    >>> text = "---\\nconfigs: [{config_name: a, data_files: ../b.parquet}]\\n---\\n"
    >>> _ = (folder / "README.md").write_text(text)
    >>> check_card(folder)
    Traceback (most recent call last):
    negmerge.errors.FileError: .../README.md: configs.0.data_files: names '../b.parquet', ...
    """
    inside(folder, "dataset_infos.json")
    for name in CARDS:
        path, raw = folder / name, read_inside(folder, name)
        said = None if raw is None else _parsed(name, raw, path)
        parts = said.get("configs") or [] if isinstance(said, dict) else []
        if not isinstance(parts, list):
            raise FileError(f"{path}: configs: wanted a list")
        for number, part in enumerate(parts):
            where = f"{path}: configs.{number}"
            if not isinstance(part, dict):
                raise FileError(f"{where}: wanted a mapping")
            for field in part:
                if field not in FIELDS:
                    wanted = ", ".join(FIELDS)
                    raise FileError(f"{where}.{shown(field)[1:-1]}: wanted one of {wanted}")
            for field in ("data_files", "data_dir"):
                for place, text in _texts(part.get(field), field):
                    _need_relative(text, f"{where}.{place}")


def _parsed(name: str, raw: bytes, path: Path) -> Any:
    from huggingface_hub import DatasetCard

    try:
        text = raw.decode("utf-8")
        if name.endswith(".yaml"):
            return parse_yaml(text, str(path))
        return DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: its YAML cannot be read: {why}") from None


def _texts(tree: Any, place: str) -> Iterator[tuple[str, str]]:
    """All names of files, and where they stand; the names of splits are none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key != "split":
                yield from _texts(value, f"{place}.{key}")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _texts(value, f"{place}.{number}")
    elif tree is not None:
        yield place, str(tree)


def _need_relative(text: str, where: str) -> None:
    parts = PurePosixPath(text).parts
    if text.startswith(("/", "~")) or ".." in parts or "://" in text or "::" in text:
        raise FileError(
            f"{where}: names {shown(text)}, which is not in the folder; wanted a path within it"
        )
