"""The file with the results of one range of a merge: a zip file with arrays, and facts about them.

The zip file has two members. `arrays` has the bytes of all arrays, one after the other;
`facts.json` has the facts, and each result with its arrays replaced by their formats and shapes.
The checksums of the zip file show damage. Equal results give equal bytes.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.support.reading import open_regular, parse_json_value

ARRAYS, FACTS = "arrays", "facts.json"
_DAMAGE = (
    zipfile.BadZipFile, ArithmeticError, EOFError, LookupError, NotImplementedError, OSError,
    RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip
"""What reading a damaged file may raise."""


class CannotStore(TypeError):
    """A result has a part that is neither a number, a text nor a numpy array of numbers."""


class PartWriter(ExitStack):
    """Writes results one by one.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     with PartWriter(file.fileno()) as writer:
    ...         writer.add((3, np.arange(2)))
    ...         writer.finish({"key": "a"})

    Args:
        descriptor: an empty file, open for writing.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._results: list[Any] = []
        file = self.enter_context(os.fdopen(descriptor, "wb", closefd=False))
        self._zip = self.enter_context(zipfile.ZipFile(file, "w"))
        self._arrays = self.enter_context(self._zip.open(ARRAYS, "w", force_zip64=True))

    def add(self, result: Any) -> None:
        """Add a result: a number, a text, an array, or a tuple or list of results."""
        self._results.append(_packed(result, self._arrays))

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write the facts; nothing can be added afterwards."""
        self._arrays.close()
        text = json.dumps({"facts": facts, "results": self._results}, separators=(",", ":"))
        with self._zip.open(FACTS, "w") as file:
            file.write(text.encode())


class PartFile(ExitStack):
    """An open part; iterating over it reads its results in order.

    Attributes:
        facts: the facts.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        file = self.enter_context(os.fdopen(open_regular(path), "rb"))
        try:
            self._zip = self.enter_context(zipfile.ZipFile(file))
            if any(one.compress_type != zipfile.ZIP_STORED for one in self._zip.infolist()):
                raise zipfile.BadZipFile  # a small file could expand to a huge one
            found = parse_json_value(self._zip.read(FACTS), path, FACTS, infinite=True)
            self.facts: dict[str, Any] = dict(found["facts"])
            self._results: list[Any] = list(found["results"])
        except (*_DAMAGE, FileError) as error:
            self.close()
            raise _damaged(path) from error

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Any]:
        try:
            with self._zip.open(ARRAYS) as arrays:
                for result in self._results:
                    yield _unpacked(result, arrays)
        except _DAMAGE as error:
            raise _damaged(self.path) from error

    def is_intact(self) -> bool:
        """Read the whole file; return whether its checksums are right."""
        try:
            return self._zip.testzip() is None
        except _DAMAGE:
            return False


def _damaged(path: Path) -> FileError:
    return FileError(f"{path}: is damaged; run the same command again, it is computed again")


def _packed(result: Any, file: IO[bytes]) -> Any:
    """Write the arrays of a result; return the result without them, as JSON values."""
    kind = type(result).__name__
    if isinstance(result, tuple | list):
        some = cast("Sequence[Any]", result)
        return {"tuple" if isinstance(result, tuple) else "list": [_packed(x, file) for x in some]}
    if isinstance(result, np.ndarray | np.generic):
        array: NDArray[Any] = np.asarray(cast("Any", result))
        if array.dtype.kind not in "biuf":
            raise CannotStore(kind)
        file.write(array.tobytes())
        kind = "array" if isinstance(result, np.ndarray) else "number"
        return {kind: [array.dtype.str, *array.shape]}
    if result is None or isinstance(result, bool | int | float | str):
        return result
    raise CannotStore(kind)


def _unpacked(value: Any, file: IO[bytes]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(cast("dict[str, list[Any]]", value).items()))
    if kind in ("tuple", "list"):
        found = [_unpacked(one, file) for one in content]
        return tuple(found) if kind == "tuple" else found
    dtype, shape = np.dtype(str(content[0])), tuple(map(int, content[1:]))
    nbytes = dtype.itemsize * prod(shape)
    raw = file.read(nbytes)
    if len(raw) != nbytes:
        raise EOFError
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array if kind == "array" else array[()]
