"""Python processes that start quickly: a server has imported the large libraries, and forks.

A plain process imports torch and what belongs to it for about three seconds, and most of the tests
are not about that. The server itself runs nothing, so that no thread is lost in a fork. A process
gets its own arguments, folder, environment and output; it has the id and the exit code of a plain
one, and signals reach it. What libraries read from the environment when they are imported is the
server's: `start` returns None if that would make a difference.

A process can have spare children, forked before it runs anything. The first workers that
`multiprocessing` spawns are these, and import nothing either.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from select import POLLIN, poll
from types import ModuleType
from typing import NoReturn

LIBRARIES = (
    "torch", "torchvision.transforms.v2", "datasets", "sklearn.svm", "scipy.stats", "pandas",
    "matplotlib.pyplot", "pytorch_grad_cam", "open_clip", "numba", "cyclopts", "pydantic", "rich",
)  # fmt: skip
EARLY = (
    "CUDA_", "HF_", "HOME", "KMP_", "LD_", "MKL_", "MPL", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON",
    "TORCH_", "TRANSFORMERS_", "XDG_",
)  # fmt: skip
"""Variables that Python reads when it starts, or libraries when they are imported."""
LATE = ("NUMBA_CACHE_DIR",)
"""Those of them that a process reads again."""
BEFORE = dict(os.environ)
"""The variables of the server: those before any test changed one."""
NUMBER = struct.Struct("<q")
LARGEST = 1 << 17
"""Bytes of a request."""


class Process:
    """A process of the server, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, server: socket.socket, request: dict[str, object]) -> None:
        self.returncode: int | None = None
        self.output = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._answers, theirs = os.pipe()
        files = [file.fileno() for file in self.output]
        socket.send_fds(server, [json.dumps(request).encode()], [*files, theirs])
        os.close(theirs)
        self.pid = self._answer()

    def _answer(self) -> int:
        answer = os.read(self._answers, NUMBER.size)
        assert len(answer) == NUMBER.size, "the server has ended"
        return NUMBER.unpack(answer)[0]

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            answers = poll()  # `select` cannot wait for files with numbers from 1024 on
            answers.register(self._answers, POLLIN)
            if not answers.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._answer()
            os.close(self._answers)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        for file in self.output:
            file.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what the process wrote."""
        self.wait(timeout)
        texts = []
        for file in self.output:
            file.seek(0)
            texts.append(file.read())
            file.close()
        out, err = texts
        return out, err


def start(
    arguments: list[str], place: Path, environment: dict[str, str], spares: int = 0
) -> Process | None:
    """Start Python in a folder, if the server's libraries are right for the environment.

    Args:
        arguments: `-m` and the name of a module, or `-c` and code, and its arguments.
        place: the folder.
        environment: all variables.
        spares: the number of spare children.
    """
    server, after = _server()
    # Libraries set variables, too: in the server, and in this process.
    fixed = {name for name in BEFORE | environment if name.startswith(EARLY) and name not in LATE}
    if any(environment.get(name) not in (BEFORE.get(name), after.get(name)) for name in fixed):
        return None
    request = {"words": arguments, "place": str(place), "environment": environment}
    request["ignores"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return Process(server, request | {"spares": spares})


@cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """The server of this process, and its variables after the libraries set theirs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=BEFORE)
    theirs.close()
    for ending in (process.wait, process.kill, ours.close):  # the last comes first
        atexit.register(ending)
    return ours, json.loads(ours.recv(LARGEST))


def serve(channel: socket.socket) -> dict[str, object]:
    """Fork for each request; return it in the fork. The server ends with its client."""
    # An interrupt is for the processes, and for the tests, which decide what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in LIBRARIES:
        import_module(name)
    channel.send(json.dumps(dict(os.environ)).encode())
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets those that have waited
    while True:
        message, files, *_ = socket.recv_fds(channel, LARGEST, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            out, err, answers = files
            pid = os.fork()
            if pid == 0:
                os.dup2(out, 1)
                os.dup2(err, 2)
                channel.close()
                for file in files:
                    os.close(file)
                return json.loads(message)
            os.write(answers, NUMBER.pack(pid))
            _, status = os.waitpid(pid, 0)
            os.write(answers, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os._exit(0)
        for file in files:
            os.close(file)


def run(
    words: list[str], place: str, environment: dict[str, str], ignores: bool, spares: int
) -> None:
    """Do what Python does with its arguments; interrupts are ignored if its parent ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    import_module("numba").config.reload_config()
    tempfile.tempdir = None
    sys.modules.pop("__mp_main__", None)  # this module, which a plain process does not import
    if spares and (code := spare(spares)):
        words = ["-c", code, "--multiprocessing-fork"]
    option, what, *rest = words
    if option == "-m":
        sys.path[0] = place
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        sys.argv = [option, *rest]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(what, main.__dict__)  # noqa: S102


def spare(count: int) -> str:
    """Fork children that wait; return in a child the code of the worker that it has become."""
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for _, channel in [*waiting, (pid, ours)]:  # their ends are the parent's alone
                channel.close()
            return become(theirs)
        theirs.close()
        waiting.append((pid, ours))
    plain = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, arguments: list[str], files: list[int]) -> int:
        if "--multiprocessing-fork" not in arguments or not waiting:
            return plain(path, arguments, files)
        pid, channel = waiting.pop(0)
        code = arguments[arguments.index("-c") + 1]
        with channel:
            socket.send_fds(channel, [json.dumps([code, list(files)]).encode()], files)
        return pid

    multiprocessing.util.spawnv_passfds = spawn
    return ""


def become(channel: socket.socket) -> str:
    """Wait for the code of a worker and its files, which get the numbers that the code has."""
    message, files, *_ = socket.recv_fds(channel, LARGEST, 100)
    if not message:
        os._exit(0)
    code, numbers = json.loads(message)
    channel.close()
    free = 1 + max(*numbers, *files)
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return code


def end(code: object) -> NoReturn:
    """End as Python does, without taking apart the libraries, which takes half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        run(**request)
        end(0)
    except SystemExit as ending:
        end(ending.code)
    except BaseException:
        traceback.print_exc()
        end(1)
