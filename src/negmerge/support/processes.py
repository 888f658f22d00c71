"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the system end this process when its parent ends, also by SIGKILL; ignore interrupts.

    Args:
        parent: the id of the parent; if it has ended already, this process ends here.
        by: the signal that the system sends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the interrupt and decides
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        libc.prctl(death_signal, by)
    if os.getppid() != parent:
        os._exit(1)
