"""A prestarted process is for its commands what a plain one is."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from running import python, start_python

SHOW = """
import json, multiprocessing, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "path": sys.path,
    "variables": dict(os.environ), "parent": str(multiprocessing.parent_process()),
    "interrupt": str(__import__("signal").getsignal(2)),
}))
print("told", file=sys.stderr)
"""
WORKERS = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
    parents = [pool.submit(os.getppid) for _ in range(6)]
    print({found.result() for found in parents} == {os.getpid()})
"""


@pytest.fixture(params=[False, True], ids=["prestarted", "plain"])
def plain(request) -> bool:
    return request.param


def test_arguments_folder_variables_and_output(tmp_path: Path):
    found = []
    for plain in (False, True):
        process = start_python(tmp_path, "-c", SHOW, "one", "two", plain=plain, NEGMERGE_X="3")
        out, err = process.communicate(timeout=60)
        assert err == "told\n"
        found.append(json.loads(out))
    assert found[0] == found[1]
    assert found[0]["variables"]["NEGMERGE_X"] == "3"


@pytest.mark.parametrize(
    ("code", "ended", "told"),
    [
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('a text')", 1, "a text\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'at the end')", 0, "at the end"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_how_it_ends(code: str, ended: int, told: str, plain: bool, tmp_path: Path):
    process = start_python(tmp_path, "-c", code, plain=plain)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (ended, "")
    assert err.endswith(told)


def test_a_signal_reaches_it(plain: bool, tmp_path: Path):
    code = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)"
    process = start_python(tmp_path, "-c", code, plain=plain)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("spares", [0, 2])
def test_workers_are_its_children(spares: int, tmp_path: Path):
    assert python(tmp_path, "-c", WORKERS, spares=spares) == ("True\n", "")


@pytest.mark.parametrize(
    ("variables", "prestarted"),
    [
        ({}, True),
        ({"NEGMERGE_X": "1"}, True),
        ({"NUMBA_CACHE_DIR": "cache"}, True),
        ({"KMP_INIT_AT_FORK": "FALSE"}, True),  # as scikit-learn sets it when it is imported
        ({"KMP_INIT_AT_FORK": "TRUE"}, False),
        ({"OMP_NUM_THREADS": "1"}, False),
        ({"PYTHONPATH": "lib"}, False),
    ],
)
def test_what_libraries_read_when_they_are_imported_needs_a_plain_process(
    variables: dict[str, str], prestarted: bool, tmp_path: Path
):
    code = "import sys; print('torch' in sys.modules)"
    assert python(tmp_path, "-c", code, **variables)[0] == f"{prestarted}\n"


def test_a_variable_that_is_gone_needs_a_plain_process(tmp_path: Path, monkeypatch):
    code = "import sys; print('torch' in sys.modules)"
    assert python(tmp_path, "-c", code)[0] == "True\n"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert python(tmp_path, "-c", code)[0] == "False\n"
