"""Run command lines in one process, with what they open, run, ask and remove on record.

As a script it takes a file of JSON, a plan: `outside` (folders that nothing may touch), `commands`
(lists of arguments), `control` (Python that does touch them, to show that the record sees it) and
`marker` (a file that hostile code leaves).
It prints one line of JSON for each command and one for the control.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

FOLLOWED = ("open", "os.listdir", "os.scandir")
"""Events whose path is followed if it is a link."""
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
NEVER = (
    "builtins.input", "os.exec", "os.posix_spawn", "os.system", "socket.connect",
    "socket.getaddrinfo", "subprocess.Popen",
)  # fmt: skip
USUAL = "/sbin/ldconfig"
"""Python itself starts it to find shared libraries."""
CANARY = "canary_module"
"""No code of a module of this name may run."""

seen: list[str] = []
outside: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: note what a hostile folder must not bring about."""
    if event in NEVER and arguments[0] != USUAL:
        seen.append(f"{event} {arguments[0]!r}")
    elif event in FOLLOWED or event in CHANGES:
        for given in arguments[:2]:
            if isinstance(given, str | bytes) and _is_outside(os.fsdecode(given), event):
                seen.append(f"{event} {os.fsdecode(given)}")
    elif event in ("exec", "compile", "import"):
        what = arguments[0].co_filename if event == "exec" else f"{arguments[0]} {arguments[1]}"
        if CANARY in str(what):
            seen.append(f"{event} of {CANARY}")


def _is_outside(path: str, event: str) -> bool:
    # A link itself is renamed or removed, not what it leads to.
    place, name = os.path.split(path)
    real = f"{os.path.realpath(place)}/{name}" if event in CHANGES else os.path.realpath(path)
    return any(real == folder or real.startswith(folder + os.sep) for folder in outside)


def run(arguments: list[str]) -> dict[str, Any]:
    """One command in this process: its exit code, what it said, what was seen."""
    from negmerge.cli import main

    seen.clear()
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            code = -1
            traceback.print_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seen": sorted({*seen})}


def control(source: str, marker: str) -> dict[str, Any]:
    """Python that does what is forbidden; and how much the commands had read of standard input."""
    seen.clear()
    read, ran = os.lseek(0, 0, os.SEEK_CUR), Path(marker).exists()
    with redirect_stdout(io.StringIO()):
        exec(source, {})  # noqa: S102
    return {"seen": sorted({*seen}), "code": read, "err": "code has run" if ran else ""}


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    outside += [os.path.realpath(folder) for folder in plan["outside"]]
    sys.addaudithook(watch)
    assert "negmerge" not in sys.modules
    for command in plan["commands"]:
        print(json.dumps(run(command)), flush=True)
    print(json.dumps(control(plan["control"], plan["marker"])), flush=True)
