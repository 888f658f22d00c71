"""Compiled functions whose cache on disk may be filled by many processes at once.

numba numbers the files of its cache by what the index says when it looks. Two processes that fill
an empty cache together may so give one number to two kernels, and the index then hands out the
wrong one, for good. Here a file's name says whose code it holds; the worst that processes can do to
each other is to lose an entry, which is compiled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import IndexDataCacheFile


class CacheFile(IndexDataCacheFile):
    """An index of compiled code, in files that are named by their key."""

    def save(self, key: Any, data: Any) -> None:
        """Keep compiled code; the index is written last, so that it never names what is not there.

        key: signature, processor, and hashes of the function and what it closes over.
        """
        content = repr((self._version, self._source_stamp, key)).encode()
        number = int(hashlib.sha256(content).hexdigest()[:24], 16)
        name = self._data_name(number)
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function when it is first called, without Python's lock, and keep the code on disk.

    >>> from colorsys import rgb_to_yiq
    >>> compiled()(rgb_to_yiq).py_func is rgb_to_yiq
    True

    options: for numba's `njit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, cache=True, **options)(function)
        dispatcher._cache._cache_file.__class__ = CacheFile
        return dispatcher

    return decorate
