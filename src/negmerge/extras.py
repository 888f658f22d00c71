"""The error for a library that is not installed because it belongs to an extra.

A base install merges without torch, so any import in the package may fail, at the top of a module
or inside a function. `install` adds a finder to the end of `sys.meta_path`, which Python asks after
all others and which raises an error that names the extra.
"""

from __future__ import annotations

import sys

from negmerge.errors import NegMergeError

EXTRAS = {
    "unlearn": (
        "PIL", "datasets", "jinja2", "matplotlib", "pandas", "pyarrow", "pytorch_grad_cam", "scipy",
        "sklearn", "threadpoolctl", "torch", "torchvision",
    ),
    "clip": ("open_clip", "timm"),
    "text": ("peft", "rouge_score", "transformers"),
    "harness": ("lm_eval",),
    "ray": ("ray",),
    "remote": ("fsspec", "s3fs"),
    "hub": ("fsspec", "huggingface_hub"),
    "track": ("mlflow", "tensorboard", "trackio", "wandb"),
}  # fmt: skip
"""The extras of pyproject.toml, with the import names of their libraries."""
_IMPORTING = ("_frozen_importlib", "importlib", "importlib._bootstrap")


class MissingExtraError(NegMergeError, ModuleNotFoundError):
    """A library of an extra is not installed.

    >>> raise MissingExtraError(missing_message("open_clip", "clip"))
    Traceback (most recent call last):
    negmerge.extras.MissingExtraError: open_clip is not installed; it comes with the extra clip: ...
    """


def missing_message(library: str, extra: str) -> str:
    """Return the message for a library that is not installed.

    >>> missing_message("torch", "unlearn")
    "torch is not installed; it comes with the extra unlearn: pip install 'negmerge[unlearn]'"
    """
    return (
        f"{library} is not installed; it comes with the extra {extra}: "
        f"pip install 'negmerge[{extra}]'"
    )


class Finder:
    """A finder that finds nothing, and raises if this package imports a library of an extra."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise for a library of an extra; Python calls this after all other finders."""
        for extra, libraries in EXTRAS.items():
            if name in libraries and _importer() == "negmerge":
                raise MissingExtraError(missing_message(name, extra), name=name)


def _importer() -> str:
    """Return the top-level package of the module that imports.

    Other packages may try optional imports, which must fail with Python's usual error. So must
    `importlib.util.find_spec`, which does not import.
    """
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in _IMPORTING:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def install() -> None:
    """Add `Finder` to the end of `sys.meta_path`."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
