"""Plug-ins: modules of others that register rules, rivals, metrics and other entries.

A plug-in registers its entries when it is imported, as the modules of this package do. An installed
package lists its modules as entry points, in the group of the kind that they register
(`negmerge.rules`, `negmerge.datasets`; see `Registry.group`):

    [project.entry-points."negmerge.rules"]
    median = "my_package.rules:Median"

A user names a file or a module: `negmerge merge ... --plugin my_rules.py --rule median`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from negmerge.errors import OptionError, one_line, printable, quoted

_loaded: list[str] = []
"""The plug-ins that the user named; files by their absolute path."""
_registering: set[str] = set()
"""The files that registered entries and are not of this package."""
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that were installed."""
_IMPORTING = (__file__, "<frozen importlib", str(Path(importlib.__file__).parent))


def load(name: str) -> None:
    """Import a plug-in that the user names, unless it is imported already.

    >>> load("no_such_rules")
    Traceback (most recent call last):
    negmerge.errors.OptionError: --plugin 'no_such_rules': cannot be imported: ModuleNotFound...

    Args:
        name: a file that ends in `.py`, or a module that can be imported.
    """
    file = Path(name).resolve() if name.endswith(".py") else None
    key = name if file is None else str(file)
    if key in _loaded:
        return
    try:
        importlib.import_module(name) if file is None else _import_file(file)
    except (Exception, SystemExit) as error:
        lost = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        remedy = "; name an installed module, or a file that ends in .py" if lost else ""
        message = f"--plugin {quoted(name)}: cannot be imported: {_describe(error)}{remedy}"
        raise OptionError(message) from error
    _loaded.append(key)


def _import_file(path: Path) -> None:
    """Import a file as a module."""
    # The hash keeps apart files with the same name, or with the name of a library.
    name = f"{path.stem}_{hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def any_loaded() -> bool:
    """Return whether the user has named a plug-in.

    >>> any_loaded()
    False
    """
    return bool(_loaded)


class LoadedPlugins:
    """The plug-ins that the user named; a process that unpickles it imports them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_all, (tuple(_loaded),)


def _load_all(names: tuple[str, ...]) -> LoadedPlugins:
    for name in names:
        load(name)
    return LoadedPlugins()


def load_group(group: str) -> Iterator[EntryPoint]:
    """Import the entry points of a group; warn of those that fail and yield the others.

    Args:
        group: the name of the group, such as `negmerge.rules`.
    """
    failed: set[str] = set()
    for point in sorted(entry_points(group=group)):
        if point.module in failed:
            continue
        try:
            point.load()
        except (Exception, SystemExit) as error:
            failed.add(point.module)
            warn(point, f"cannot be imported: {_describe(error)}")
        else:
            yield point


def warn(point: EntryPoint, what: str) -> None:
    """Print a warning about an entry point, in the main process only."""
    from multiprocessing import parent_process

    if parent_process() is None:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        line = f"entry point {point.name} = {point.value}{package}: {what}"
        print(f"warning: {printable(line)}", file=sys.stderr)


def registering_file() -> str:
    """Return the file that calls `Registry.register`; "" for a file of this package.

    It is the file of the innermost module body that is running: a plug-in may be the first to
    import a module of this package, whose entries are not the plug-in's.
    """
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    file = frame.f_code.co_filename
    if Path(file).is_relative_to(Path(__file__).parent):
        return ""
    _registering.add(file)
    return file


def version(source: str) -> str:
    """Return a hash of a plug-in: its file, and the modules beside it that are imported.

    A plug-in in a package stands for the whole package. Code that was typed into an interpreter has
    no file; its name is returned.

    Args:
        source: the file of the plug-in.
    """
    path = Path(source)
    if not path.is_file():
        return source
    files = {path.resolve()}
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    if folder.name not in _INSTALLED:
        # Thousands of modules: paths as objects, and resolved for every plug-in, cost seconds.
        imported = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        beside = {_resolved(file) for file in imported if file}
        inside = os.path.join(folder, "")  # noqa: PTH118
        own = [Path(file) for file in beside if file.startswith(inside) and file.endswith(".py")]
        # An environment in the folder of the plug-in is not part of the plug-in.
        own = [file for file in own if not {*_INSTALLED} & {*file.relative_to(folder).parts}]
        files |= {file for file in own if file.is_file()}
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


@cache
def _resolved(file: str) -> str:
    return os.path.realpath(file)


def failure(error: BaseException) -> str | None:
    """Return one line about an error that the code of a plug-in raised; None for other errors."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename in _registering]
    if not own:
        return None
    return f"{own[-1].filename}, line {own[-1].lineno}: {one_line(error)}"


def _describe(error: BaseException) -> str:
    """Return an error of a plug-in with the file and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_IMPORTING)]
    place = f" ({Path(own[0].filename).name}, line {own[0].lineno})" if own else ""
    return one_line(error) + place
