"""Compiled functions with a safe cache on disk, checked before their first use.

numba caches compiled code on disk. Three measures make the cache safe for many processes, and for
functions that are composed of other functions (`merging/loop.py`):

- **Symbols.** numba names machine code by the qualified name of the function and a counter that
  starts at 1 in every process. Two functions with one qualified name, compiled by two processes,
  can therefore get one symbol, and a process that loads both runs the same code for both. Here the
  counter starts at a random number in every process.
- **Files.** The name of a cached function contains its `identity`: a hash of its source, of
  everything it refers to, and of the versions of the compiler. Code of another source or an older
  release has another name and is never loaded. A file begins with a checksum of its name and its
  content; a damaged file, or a file of another name, is compiled again and replaced.
- **Check.** Loaded or compiled code is run once on a small fixed input and compared with a plain
  form (numpy, or Python that runs the same lines) before any other call. Loaded code that fails is
  compiled again and replaced on disk, with a warning; compiled code that fails raises an error.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from itertools import count
from pathlib import Path
from platform import python_version
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import njit
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher, _FunctionCompiler  # pyright: ignore
from numba.core.errors import NumbaError
from numba.core.extending import _Intrinsic
from numba.core.types import Array, ExternalFunction

from negmerge.errors import NegMergeError

Function = Callable[..., Any]
Check = Callable[[Function, Sequence[Any]], bool]
"""A check of compiled code: gets the code and the dtype of each argument (None for arguments that
are not arrays), and returns whether the results are correct."""
Examples = Callable[[Sequence[Any]], Iterable[tuple[Any, ...]]]
"""Returns tuples of arguments for given dtypes of the arguments."""


def _randomise_symbols() -> None:
    FunctionIdentity._unique_ids = count(secrets.randbits(64))


_randomise_symbols()
os.register_at_fork(after_in_child=_randomise_symbols)


def compiled(proof: Check, **options: Any) -> Callable[[Function], Any]:
    """Compile a function at its first call, without Python's global lock; cache the code on disk.

    >>> proof = equals_reference(sum, lambda dtypes: [(np.arange(5, dtype=dtypes[0]),)])
    >>> @compiled(proof)
    ... def total(values):
    ...     found = 0
    ...     for value in values:
    ...         found += value
    ...     return found
    >>> total(np.array([1.5, 2.5]))
    4.0

    Args:
        proof: the check of the compiled code; see `equals_reference`.
        options: passed to numba's `njit`.
    """

    def decorate(function: Function) -> Any:
        function.__qualname__ += f"_{identity(function, options)}"
        dispatcher: Any = njit(nogil=True, **options)(function)
        dispatcher._compiler.__class__ = CheckedCompiler
        dispatcher._compiler.proof = proof
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # no writable folder: every process compiles the function
            return dispatcher
        dispatcher._cache.__class__ = CheckedCache
        dispatcher._cache.proof = proof
        dispatcher._cache._cache_file.__class__ = CacheFile
        return dispatcher

    return decorate


def equals_reference(plain: Function, examples: Examples) -> Check:
    """A check by examples: the code returns the same values as a plain form, and the same arrays.

    Args:
        plain: the same function, written in another way or run by Python.
        examples: the arguments.
    """

    def proof(code: Function, dtypes: Sequence[Any]) -> bool:
        for arguments in examples(dtypes):
            mine, theirs = deepcopy(arguments), deepcopy(arguments)
            with np.errstate(all="ignore"):
                returned, wanted = code(*mine), plain(*theirs)
            pairs = zip(mine, theirs, strict=True)
            arrays = [(one, two) for one, two in pairs if isinstance(one, np.ndarray)]
            if returned != wanted or any(one.tobytes() != two.tobytes() for one, two in arrays):
                return False
        return True

    return proof


def compiled_as_python(examples: Examples, **options: Any) -> Callable[[Function], Any]:
    """Compile a function; on examples it must give the same results as when Python runs it.

    >>> @compiled_as_python(lambda dtypes: [(np.arange(5, dtype=dtypes[0]),)])
    ... def largest(values):
    ...     return max(values)
    >>> largest(np.array([1.5, 2.5]))
    2.5

    Args:
        examples: as in `equals_reference`; a few hundred elements, which Python runs in a moment.
        options: passed to numba's `njit`.
    """
    return lambda function: compiled(equals_reference(function, examples), **options)(function)


# ---------------------------------------------------------------------------------------- identity


def identity(function: Function, options: object = ()) -> str:
    """A hash of everything that the machine code of a function depends on.

    >>> def make(k):
    ...     return lambda x: x + k
    >>> identity(make(1)) == identity(make(1)), identity(make(1)) == identity(make(2))
    (True, False)
    """
    versions = python_version(), numba.__version__, llvmlite.__version__, np.__version__
    digest = hashlib.blake2b(digest_size=12)
    digest.update(repr((versions, options)).encode())
    for part in _content(function, set()):
        digest.update(part + b"\0")
    return digest.hexdigest()


def _content(thing: Any, seen: set[int]) -> Iterator[bytes]:
    """The meaning of a value for compiled code; for functions code and everything they refer to."""
    if isinstance(thing, Dispatcher):
        yield repr(sorted(thing.targetoptions.items())).encode()
        thing = thing.py_func
    elif isinstance(thing, _Intrinsic):
        thing = thing._defn
    elif isinstance(thing, ExternalFunction):
        yield f"{thing.symbol} {thing.sig}".encode()
    if isinstance(thing, types.FunctionType):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        # The whole file: overloads that it registers cannot be found from the function.
        yield _file(thing.__code__.co_filename)
        for cell in thing.__closure__ or ():
            yield from _content(cell.cell_contents, seen)
        for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
            yield from _content(value, seen)
        yield from _code(thing.__code__, thing.__globals__, seen)
    elif isinstance(thing, types.ModuleType):
        yield thing.__name__.encode()
    elif isinstance(thing, type):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
    elif isinstance(thing, np.ndarray):
        yield repr((thing.dtype, thing.shape)).encode() + thing.tobytes()
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from _content(value, seen)
    else:
        yield repr(thing).encode()


def _code(code: types.CodeType, names: dict[str, Any], seen: set[int]) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant, names, seen)
        else:
            yield repr(constant).encode()
    for name in code.co_names:
        if name in names:
            yield from _content(names[name], seen)


@cache
def _file(path: str) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:  # a function of an interactive session
        return b""


# ------------------------------------------------------------------------------------------- check


def _passes(proof: Check, result: Any) -> bool:
    kinds = result.signature.args
    dtypes = [np.dtype(str(kind.dtype)) if isinstance(kind, Array) else None for kind in kinds]
    return proof(result.entry_point, dtypes)


class CheckedCache(FunctionCache):
    """Returns cached code only if the check succeeds; numba compiles and saves what is missing."""

    proof: Check

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
            if found is None or _passes(self.proof, found):
                return found
            reason = "gives wrong results"
        except Exception as error:  # unpickling a damaged file can raise any exception
            reason = f"cannot be loaded ({type(error).__name__}: {error})"
        warnings.warn(
            f"{self.cache_path}: the compiled code of {self._py_func.__qualname__} {reason}; "
            "the code is compiled again and replaced",
            stacklevel=2,
        )
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        # A full disk does not stop a merge: the next process compiles again.
        with suppress(OSError):
            super().save_overload(sig, data)


class CheckedCompiler(_FunctionCompiler):
    """Returns compiled code only if the check succeeds."""

    proof: Check

    def compile(self, args: Any, return_type: Any) -> Any:
        try:
            result = super().compile(args, return_type)
        except NumbaError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise NegMergeError(
                f"{self.py_func.__qualname__}: numba cannot compile the function "
                f"({' '.join(lines)[:300]}); write your own rules with operators and where "
                "(docs/extend.md)"
            ) from error
        if not _passes(self.proof, result):
            raise NegMergeError(
                f"{self.py_func.__qualname__}: the compiled code and its plain form give different "
                f"results (numba {numba.__version__}, llvmlite {llvmlite.__version__}, numpy "
                f"{np.__version__}); write your own rules with operators and where "
                "(docs/extend.md); for a rule of this package, install other versions and report it"
            )
        return result


CHECKSUM_SIZE = 32
"""Bytes of the checksum at the beginning of a cache file."""


class CacheFile(IndexDataCacheFile):
    """Cache files that are named by their key and begin with a checksum.

    numba numbers the files and keeps the numbers in an index. Two processes that fill an empty
    cache at the same time may give one number to two functions, and the index then returns the
    wrong one. Here a key gives the name of a file, without an index. Damaged code, or code of
    another file, is not even run for the check: it could write anywhere in memory.
    """

    def save(self, key: Any, data: Any) -> None:
        """Save compiled code under its signature, the processor, and hashes of the function."""
        name, content = self._name(key), self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(cache_checksum(name, content) + content)

    def load(self, key: Any) -> Any:
        """Load compiled code, or None if there is none; raises if the file is damaged."""
        name = self._name(key)
        try:
            raw = Path(self._data_path(name)).read_bytes()
        except FileNotFoundError:
            return None
        content = raw[CHECKSUM_SIZE:]
        if raw[:CHECKSUM_SIZE] != cache_checksum(name, content):
            raise ValueError("wrong checksum")
        return pickle.loads(content)  # noqa: S301 written by numba

    def _name(self, key: Any) -> str:
        content = repr((self._version, self._source_stamp, key)).encode()
        return self._data_name(int(hashlib.sha256(content).hexdigest()[:24], 16))


def cache_checksum(name: str, content: bytes) -> bytes:
    """The checksum of a cache file: of its name and of its content."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
