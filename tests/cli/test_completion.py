"""Completion in a real bash: verbs, flags, choices, recipes, rules and paths."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from select import select

import pytest

from running import negmerge_here

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
TRY = """
source ./script
try() {
  COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=(); _negmerge
  echo "${COMPREPLY[*]}"
}
"""
LINES = {
    ("unl",): ["unlearn"],
    ("in",): ["init", "inspect"],
    ("unlearn", "demo"): ["demo", "demo_text"],
    ("unlearn", "my"): ["my.yaml"],
    ("study", "demo_"): ["demo_text"],
    ("unlearn", "demo", "--d"): ["--dry-run"],
    ("merge", "a", "b", "--buffers", ""): ["keep", "merge"],
    ("merge", "a", "b", "--rule", "con"): ["conflict", "consensus"],
    ("list", "ru"): ["rules"],
    ("init", "pho"): ["photos"],
    ("inspect", "pho"): ["photos"],
    ("reproduce", "aut"): ["authors"],
}


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with the script, the command, a recipe and a folder of data."""
    (tmp_path / "script").write_text(negmerge_here(tmp_path, "completion", "bash")[0])
    command = tmp_path / "bin" / "negmerge"
    command.parent.mkdir()
    path = shlex.quote(os.pathsep.join(sys.path))
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} -m negmerge "$@"\n'
    )
    command.chmod(0o755)
    (tmp_path / "my.yaml").touch()
    (tmp_path / "photos").mkdir()
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb"}


def test_words_are_completed(place):
    lines = "\n".join(shlex.join(["try", "negmerge", *words]) for words in LINES)
    done = subprocess.run(
        ["bash", "--norc", "-c", TRY + lines],  # noqa: S607
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert dict(zip(LINES, found, strict=True)) == LINES


def test_the_tab_key_completes(place):
    parent, child = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "-i"],  # noqa: S607
        cwd=place,
        env=environment(place) | {"PS1": "$ "},
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        while text not in seen:
            ready, _, _ = select([parent], [], [], 30)
            assert ready, seen
            seen += os.read(parent, 4096).decode(errors="replace")

    try:
        wait_for("$ ")
        os.write(parent, b"source ./script && echo re''ady\n")
        wait_for("ready\r\n")
        os.write(parent, b"negmerge unl\t")
        wait_for("negmerge unlearn ")
        os.write(parent, b"my\t")
        wait_for("my.yaml ")
    finally:
        shell.kill()
        shell.wait()
        os.close(parent)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell, tmp_path):
    out, _ = negmerge_here(tmp_path, "completion", shell)
    assert "__complete" in out
    for word in ("unlearn", "dry-run", "rule"):
        assert word in out
