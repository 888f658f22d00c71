"""Parquet files, local or remote, of which only the needed row groups and columns are read.

A parquet file is a sequence of row groups, and its end says where each column of a row group lies.
A few thousand rows of a large split therefore need neither the other row groups nor, for the
labels, the pictures. Files are opened through fsspec, so that a file on the Hub is read by ranges.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Advance
from negmerge.support.reading import open_regular

ROWS_AT_ONCE = 64
PICKED_AT_ONCE = 16
"""How many picked rows are handed on together: few, because an interruption loses some of these."""
READERS = 8
"""Threads that read row groups: on the Hub each range takes the time of a request."""
READ_AHEAD = 1 << 30
"""The bytes of row groups that these threads may hold together."""

Indices = NDArray[np.int64]
Work = tuple[int, list[int], Indices]
"""The number of a file, row groups, and rows of these row groups together."""


class ParquetTable:
    """The rows of the parquet files of a split, in the order of the files.

    Args:
        urls: the files: paths, or addresses that fsspec understands.
        features: the `datasets` features of the columns.
    """

    embedded = True

    def __init__(self, urls: Sequence[str], features: Any) -> None:
        self.urls, self.features = tuple(urls), features

    @property
    def origin(self) -> str:
        """A hash of the addresses; on the Hub they contain the commit."""
        return hashlib.sha256("\n".join(self.urls).encode()).hexdigest()

    @cached_property
    def footers(self) -> list[pq.FileMetaData]:
        """The footer of each file: the sizes and places of its row groups."""

        def read(_: None, url: str) -> pq.FileMetaData:
            with _open(url) as file:
                return pq.read_metadata(file)

        return list(run_in_order(self.urls, read, lambda: None, READERS))

    def __len__(self) -> int:
        return sum(footer.num_rows for footer in self.footers)

    def column(
        self, name: str, picked: Indices | None = None, advance: Advance = lambda count: None
    ) -> pa.ChunkedArray:
        """Read the values of a column.

        Args:
            picked: sorted rows; None: all.
            advance: called with the numbers of rows that were read.
        """
        picked = np.arange(len(self)) if picked is None else picked
        chunks: list[pa.Array] = []
        for part in self._read(name, self._by_file(picked), READERS):
            chunks += part.chunks
            advance(len(part))
        return pa.chunked_array(chunks, type=None if chunks else pa.null())

    def cells(self, name: str, picked: Indices) -> Iterator[list[Any]]:
        """Read the values of sorted rows of a column of pictures, a few at once.

        If some rows are not wanted, the row groups of the others are read in threads.
        """
        if len(picked) == len(self):
            for url, footer in zip(self.urls, self.footers, strict=True):
                with _open(url) as source, pq.ParquetFile(source, metadata=footer) as file:
                    for batch in file.iter_batches(ROWS_AT_ONCE, columns=[name]):
                        yield self._cast(pa.Table.from_batches([batch]), name).to_pylist()
            return
        largest = max((self._bytes(*group, name) for group in self._places), default=1)
        readers = max(1, min(READERS, READ_AHEAD // max(largest, 1)))
        work = ((file, [group], rows) for file, group, rows in self._by_group(picked))
        waiting: list[Any] = []
        try:
            for part in self._read(name, work, readers):
                waiting += part.to_pylist()
                while len(waiting) >= PICKED_AT_ONCE:
                    yield waiting[:PICKED_AT_ONCE]
                    del waiting[:PICKED_AT_ONCE]
        except Exception:
            if waiting:
                yield waiting  # what was read before the failure need not be read again
            raise
        if waiting:
            yield waiting

    def _read(self, name: str, work: Iterable[Work], readers: int) -> Iterator[pa.ChunkedArray]:
        """Yield the wanted values of each piece of work, in order; read in threads."""

        def read(_: None, piece: Work) -> pa.ChunkedArray:
            number, groups, rows = piece
            footer = self.footers[number]
            with (
                _open(self.urls[number]) as source,
                pq.ParquetFile(source, metadata=footer, pre_buffer=True) as file,
            ):
                table = file.read_row_groups(groups, columns=[name], use_threads=False)
            return self._cast(table.take(pa.array(rows)), name)

        return run_in_order(work, read, lambda: None, readers)

    def _by_group(self, picked: Indices) -> Iterator[tuple[int, int, Indices]]:
        """Yield the file, the row group and the rows in it, for row groups with picked rows."""
        cuts = np.searchsorted(picked, self._firsts)
        for (file, group), first, low, high in zip(
            self._places, self._firsts[:-1], cuts[:-1], cuts[1:], strict=True
        ):
            if low < high:
                yield file, group, picked[low:high] - first

    def _by_file(self, picked: Indices) -> Iterator[Work]:
        """Yield the file, its row groups with picked rows, and the rows in these together."""
        for file, found in groupby(self._by_group(picked), lambda one: one[0]):
            groups: list[int] = []
            rows: list[Indices] = []
            before = 0
            for _, group, inside in found:
                groups.append(group)
                rows.append(inside + before)
                before += self.footers[file].row_group(group).num_rows
            yield file, groups, np.concatenate(rows)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """The number of the file and the number in the file of each row group."""
        found = enumerate(self.footers)
        return [(file, group) for file, footer in found for group in range(footer.num_row_groups)]

    @cached_property
    def _firsts(self) -> Indices:
        """The first row of each row group, and the number of rows."""
        sizes = [self.footers[file].row_group(group).num_rows for file, group in self._places]
        return np.cumsum([0, *sizes])

    def _bytes(self, file: int, group: int, name: str) -> int:
        """The size of a column in a row group; a picture has several parts, as image.bytes."""
        found = self.footers[file].row_group(group)
        parts = (found.column(k) for k in range(found.num_columns))
        return sum(
            part.total_uncompressed_size
            for part in parts
            if part.path_in_schema.partition(".")[0] == name
        )

    def _cast(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        from datasets import Features
        from datasets.table import table_cast

        wanted = Features({name: self.features[name]})
        return table_cast(table, wanted.arrow_schema)[name]


def _open(url: str) -> Any:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    files, path = url_to_fs(url)
    if type(files) is LocalFileSystem:
        return os.fdopen(open_regular(path), "rb")  # a pipe would block
    # A cache would read megabytes around each range.
    return files.open(path, "rb", cache_type="none")
