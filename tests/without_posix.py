"""Run the command line as Windows would: `python without_posix.py JSON`, a list of commands.

What Windows lacks is taken away before negmerge is imported: modules, functions and flags of files,
the library of C, anonymous memory with flags; folders cannot be opened, and open files can be
neither renamed nor removed. Libraries that are not ours are imported before.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
from pathlib import Path

import cyclopts
import numba
import numpy as np  # noqa: F401
import pydantic  # noqa: F401
import rich.console  # noqa: F401
import safetensors.numpy  # noqa: F401
import yaml  # noqa: F401

assert cyclopts, numba

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty")
FUNCTIONS = (
    "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "pread", "preadv", "pwrite", "pwritev",
    "posix_fallocate", "posix_fadvise", "sched_getaffinity", "geteuid", "getuid", "fork", "mkfifo",
    "sysconf",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGHUP", "SIGVTALRM", "SIGALRM", "setitimer", "ITIMER_VIRTUAL")
FLAGS = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_FREE")


def take_away() -> None:
    """Make this process like one on Windows."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, FUNCTIONS), (signal, SIGNALS), (mmap, FLAGS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    opened: dict[int, str] = {}
    real_open, real_close, real_replace, real_cdll = os.open, os.close, os.replace, ctypes.CDLL

    def open_file(path, flags, mode=0o777, **more):
        if os.path.isdir(path):  # noqa: PTH112
            raise PermissionError(13, "Permission denied", str(path))
        descriptor = real_open(path, flags, mode, **more)
        opened[descriptor] = os.path.realpath(path)
        return descriptor

    def close(descriptor):
        opened.pop(descriptor, None)
        real_close(descriptor)

    def refuse_open(path) -> None:
        if os.path.realpath(path) in opened.values():
            raise PermissionError(32, "The file is used by another process", str(path))

    def replace(source, target, **more):
        refuse_open(source)
        if os.path.isdir(target):  # noqa: PTH112
            raise PermissionError(5, "Access is denied", str(target))
        real_replace(source, target, **more)

    def library(name, *more, **options):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return real_cdll(name, *more, **options)

    real_unlink = Path.unlink

    def unlink(self, missing_ok=False):
        refuse_open(self)
        real_unlink(self, missing_ok)

    os.open, os.close, os.replace, ctypes.CDLL = open_file, close, replace, library
    Path.unlink = unlink  # type: ignore[method-assign]
    Path.replace = lambda self, target: replace(self, target) or Path(target)  # type: ignore


def main() -> None:
    """Run the commands, and print exit code and messages of each as JSON."""
    tempfile.gettempdir()
    take_away()
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from negmerge.cli import main as command_line

    found = []
    for command in json.loads(sys.argv[1]):
        out, err, code = StringIO(), StringIO(), 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                command_line(command)
            except SystemExit as ended:
                code = int(ended.code or 0)
        found.append([code, out.getvalue(), err.getvalue()])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
