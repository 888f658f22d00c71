"""Checks of the card of a data folder: `README.md` with YAML at the top.

`datasets` would read the files that a card names anywhere on this machine or in the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from negmerge.checkpoints.checkpoint import path_within, read_within
from negmerge.errors import FileError, quoted
from negmerge.support.reading import parse_yaml

CARDS = ("README.md", ".huggingface.yaml")
FIELDS = (
    "config_name", "data_files", "data_dir", "default", "description", "drop_labels",
    "drop_metadata", "features", "version",
)  # fmt: skip
"""The fields that a configuration in a card may have."""


def check_card(folder: Path) -> None:
    """Raise an error if the card of a folder names files outside of the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = "---\\nconfigs: [{config_name: a, data_files: ../b.parquet}]\\n---\\n"
    ...     _ = Path(folder, "README.md").write_text(card)
    ...     check_card(Path(folder))
    Traceback (most recent call last):
    negmerge.errors.FileError: .../README.md: configs.0.data_files: names '../b.parquet', ...
    """
    path_within(folder, "dataset_infos.json")
    for name in CARDS:
        path, raw = folder / name, read_within(folder, name)
        tree = None if raw is None else _parse(raw, path)
        configs = tree.get("configs") or [] if isinstance(tree, dict) else []
        if not isinstance(configs, list):
            raise FileError(f"{path}: configs: wanted a list")
        for number, config in enumerate(configs):
            where = f"{path}: configs.{number}"
            if not isinstance(config, dict):
                raise FileError(f"{where}: wanted a mapping")
            for field in config:
                if field not in FIELDS:
                    wanted = ", ".join(FIELDS)
                    raise FileError(f"{where}.{quoted(field)[1:-1]}: wanted one of {wanted}")
            for field in ("data_files", "data_dir"):
                for key, text in _texts(config.get(field), field):
                    parts = PurePosixPath(text).parts
                    if text.startswith(("/", "~")) or ".." in parts or re.search("://|::", text):
                        raise FileError(
                            f"{where}.{key}: names {quoted(text)}, which is not in the folder; "
                            "wanted a path within the folder"
                        )


def _parse(raw: bytes, path: Path) -> Any:
    from huggingface_hub import DatasetCard

    try:
        text = raw.decode("utf-8")
        if path.suffix == ".yaml":
            return parse_yaml(text, str(path))
        return DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: the YAML cannot be read: {why}") from None


def _texts(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and text of all values, except names of splits."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name != "split":
                yield from _texts(value, f"{key}.{name}")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _texts(value, f"{key}.{number}")
    elif tree is not None:
        yield key, str(tree)
