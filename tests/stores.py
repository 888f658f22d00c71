"""Stores for tests: memory that counts what is read and can fail, and S3 on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Watched(MemoryFileSystem):
    """The file system `watched://`: memory of its own, whose reads are counted and can fail.

    Class attributes:
        reads: the path and the bytes of every range that was asked for.
        before: called with the path and the number of the read before each one; it may raise.
    """

    protocol = "watched"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec shares it, too)
    pseudo_dirs = [""]  # noqa: RUF012
    reads: list[tuple[str, int, int]] = []  # noqa: RUF012
    before: Callable[[str, int], None] = staticmethod(lambda path, number: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("watched://", "memory://", 1))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.reads.append((path, start, end))
        type(self).before(path, len(self.reads))
        return super().cat_file(path, start, end, **kwargs)


def empty() -> Watched:
    """An empty `watched://` without faults."""
    # Not when it is imported: the collection of doctests imports this file once more.
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.store.clear()
    Watched.pseudo_dirs[:] = [""]
    Watched.reads.clear()
    Watched.before = staticmethod(lambda path, number: None)
    return Watched()


def upload(path: Path, url: str) -> None:
    """Put a file, or all files of a folder, at a URL."""
    fs, place = fsspec.core.url_to_fs(url)
    if path.is_file():
        fs.pipe_file(place, path.read_bytes())
    for file in path.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{place}/{file.relative_to(path).as_posix()}", file.read_bytes())


class S3:
    """A server of moto in a thread, which counts ranges and can fail or wait.

    Attributes:
        ranges: the paths of the ranges that were asked for.
        heads: how often somebody asked what an object is.
        before: called with the number of the range; False: the server answers with an error.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *_: object) -> None: ...

        self.app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, True, request_handler=Silent)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.ranges: list[str] = []
        self.before: Callable[[int], bool] = lambda number: True
        self.heads = 0

    def __call__(self, environ: dict[str, Any], respond: Any) -> Any:
        with self.lock:
            self.heads += environ["REQUEST_METHOD"] == "HEAD"
        if environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ:
            with self.lock:
                self.ranges.append(environ["PATH_INFO"])
                number = len(self.ranges)
            if not self.before(number):
                respond("400 Bad Request", [("Content-Type", "application/xml")])
                return [b"<Error><Code>Fault</Code><Message>a fault</Message></Error>"]
        return self.app(environ, respond)

    @contextmanager
    def running(self) -> Iterator[S3]:
        thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()
