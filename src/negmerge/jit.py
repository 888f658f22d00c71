"""Compiled functions that are named by what they compute, and prove it before they are used.

numba keeps compiled code on disk. Three things make that safe here for many processes, and for
functions that are put together from parts (`merge/loop.py`), which numba was not made for:

- **Symbols.** numba names machine code by the function's qualified name and a counter that starts
  at 1 in every process. Two parts with one qualified name, compiled by two processes, can so get
  one symbol, and a process that loads both runs the same code for both. Here the counter starts at
  a random number in every process.
- **Files.** A function is kept under a name that holds its `identity`: a hash of its source, of
  everything it refers to, and of the versions of the compiler. Code of another source, or of an
  older release, has another name and is never looked at. A file begins with a checksum of its name
  and its content: what is damaged or belongs to another name is compiled again and replaced.
- **Proof.** Code that was loaded or compiled is run once on a small fixed input and compared with a
  plain form before anything else may call it. Loaded code that fails is compiled again, which also
  replaces it on disk, and a warning says so; compiled code that fails is an error.
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
Proof = Callable[[Function, Sequence[Any]], bool]
"""Whether compiled code gives what it must; it also gets the dtype of each argument, None for those
that are not arrays."""


def _number_symbols_anew() -> None:
    FunctionIdentity._unique_ids = count(secrets.randbits(64))


_number_symbols_anew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_symbols_anew)


def compiled(proof: Proof, **options: Any) -> Callable[[Function], Any]:
    """Compile a function when it is first called, without Python's lock, and keep the code on disk.

    >>> proof = twin(sum, lambda dtypes: [(np.arange(5, dtype=dtypes[0]),)])
    >>> @compiled(proof)
    ... def total(values):
    ...     found = 0
    ...     for value in values:
    ...         found += value
    ...     return found
    >>> total(np.array([1.5, 2.5]))
    4.0

    proof: what shows that the code is the function's; see `twin`. options: for numba's `njit`.
    """

    def decorate(function: Function) -> Any:
        function.__qualname__ += f"_{identity(function, options)}"
        dispatcher: Any = njit(nogil=True, **options)(function)
        dispatcher._compiler.__class__ = ProvenCompiler
        dispatcher._compiler.proof = proof
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # no folder can be written: it is compiled in every process
            return dispatcher
        dispatcher._cache.__class__ = ProvenCache
        dispatcher._cache.proof = proof
        dispatcher._cache._cache_file.__class__ = CacheFile
        return dispatcher

    return decorate


def twin(plain: Function, examples: Callable[[Sequence[Any]], Iterable[tuple[Any, ...]]]) -> Proof:
    """A proof by examples: the code returns what a plain form returns, and leaves the same arrays.

    plain: the same function, written in another way. examples: from the dtypes of the arguments to
        some tuples of arguments.
    """

    def proof(code: Function, dtypes: Sequence[Any]) -> bool:
        for arguments in examples(dtypes):
            mine, theirs = deepcopy(arguments), deepcopy(arguments)
            with np.errstate(all="ignore"):
                returned, wanted = code(*mine), plain(*theirs)
            if returned != wanted or not all(map(same, mine, theirs)):
                return False
        return True

    return proof


def same(one: Any, two: Any) -> bool:
    """Whether two arguments are the same to the bit, if they are arrays; others are not changed."""
    return not isinstance(one, np.ndarray) or one.tobytes() == two.tobytes()


# ---------------------------------------------------------------------------------------- identity


def identity(function: Function, options: object = ()) -> str:
    """A hash of all that a function's machine code depends on.

    >>> def make(k):
    ...     return lambda x: x + k
    >>> identity(make(1)) == identity(make(1)), identity(make(1)) == identity(make(2))
    (True, False)

    options: how it is compiled.
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update(repr((_versions(), options)).encode())
    for word in _words(function, set()):
        digest.update(word + b"\0")
    return digest.hexdigest()


def _versions() -> tuple[str, ...]:
    return python_version(), numba.__version__, llvmlite.__version__, np.__version__


def _words(thing: Any, seen: set[int]) -> Iterator[bytes]:
    """What a value means to compiled code: of functions their code and all that they refer to."""
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
        # The whole file too: what is registered there for a function cannot be seen from it.
        yield _file(thing.__code__.co_filename)
        for cell in thing.__closure__ or ():
            yield from _words(cell.cell_contents, seen)
        for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
            yield from _words(value, seen)
        yield from _code(thing.__code__, thing.__globals__, seen)
    elif isinstance(thing, types.ModuleType):
        yield thing.__name__.encode()
    elif isinstance(thing, type):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
    elif isinstance(thing, np.ndarray):
        yield repr((thing.dtype, thing.shape)).encode() + thing.tobytes()
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from _words(value, seen)
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
            yield from _words(names[name], seen)


@cache
def _file(path: str) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:  # typed at a prompt
        return b""


# ------------------------------------------------------------------------------------------- proof


def _proves(proof: Proof, result: Any) -> bool:
    kinds = result.signature.args
    dtypes = [np.dtype(str(kind.dtype)) if isinstance(kind, Array) else None for kind in kinds]
    return proof(result.entry_point, dtypes)


class ProvenCache(FunctionCache):
    """Hands out code only if it proves itself; numba compiles what is not there, and keeps it."""

    proof: Proof

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
            if found is None or _proves(self.proof, found):
                return found
            reason = "computes something else"
        except Exception as error:  # whatever a damaged file makes of unpickling
            reason = f"cannot be loaded ({type(error).__name__}: {error})"
        warnings.warn(
            f"{self.cache_path}: the compiled code of {self._py_func.__qualname__} {reason}; "
            "it is compiled again and replaced",
            stacklevel=2,
        )
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        # A full disk is no reason to stop a merge: the next process compiles again.
        with suppress(OSError):
            super().save_overload(sig, data)


class ProvenCompiler(_FunctionCompiler):
    """Hands out code only if it proves itself."""

    proof: Proof

    def compile(self, args: Any, return_type: Any) -> Any:
        try:
            result = super().compile(args, return_type)
        except NumbaError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise NegMergeError(
                f"{self.py_func.__qualname__}: numba cannot compile it ({' '.join(lines)[:300]}); "
                "if it is a rule of your own, write its finish with operators only (docs/extend.md)"
            ) from error
        if not _proves(self.proof, result):
            raise NegMergeError(
                f"{self.py_func.__qualname__}: the compiled code and its plain form give different "
                f"results (numba {numba.__version__}, llvmlite {llvmlite.__version__}, numpy "
                f"{np.__version__}); if it is a rule of your own, write its finish with operators "
                "only (docs/extend.md), otherwise install other versions and report it"
            )
        return result


SEAL = 32
"""Bytes of the checksum at the beginning of a file."""


class CacheFile(IndexDataCacheFile):
    """Compiled code in files that are named by their key and begin with a checksum.

    numba numbers the files, and keeps the numbers in an index. Two processes that fill an empty
    cache together may so give one number to two pieces of code, and the index then hands out the
    wrong one. Here a key leads to one name, without an index. Code that is damaged, or is of
    another file, is not run, not even to prove itself: it could write anywhere in the memory.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keep compiled code.

        key: signature, processor, and hashes of the function and what it closes over.
        """
        name, content = self._name(key), self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(seal_of(name, content) + content)

    def load(self, key: Any) -> Any:
        """Compiled code that was kept, or None; raises if the file is not what was written."""
        name = self._name(key)
        try:
            raw = Path(self._data_path(name)).read_bytes()
        except FileNotFoundError:
            return None
        seal, content = raw[:SEAL], raw[SEAL:]
        if seal != seal_of(name, content):
            raise ValueError("wrong checksum")
        return pickle.loads(content)  # noqa: S301 numba's own

    def _name(self, key: Any) -> str:
        content = repr((self._version, self._source_stamp, key)).encode()
        return self._data_name(int(hashlib.sha256(content).hexdigest()[:24], 16))


def seal_of(name: str, content: bytes) -> bytes:
    """The checksum of a file of the cache: of its name and of what follows."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
