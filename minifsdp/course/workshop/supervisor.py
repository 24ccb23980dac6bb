"""The process between a check and the process that requested it.

Anything that an answer does to its parent, it does to this process, which has its own session. Its standard input is
the lifeline; the check's exit code goes to its standard output. The check's own output, and any output of this process,
go to standard error.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from minifsdp.course.workshop import child

PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux
PATIENCE = 3.0  # seconds


def supervise(folder: str) -> None:
    """Run the check in `folder` and report its exit code; stay until the other end of the lifeline closes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the parent reads the signal from the exit code
    if sys.platform == "linux":  # adopt orphans, so that they are found and waited for
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if (check := os.fork()) == 0:
        os.setsid()
        os.dup2(2, 1)
        child.main(Path(folder))
    threading.Thread(target=wait_for_all, args=(check,), daemon=True).start()
    os.read(0, 1)  # nothing is ever written
    end_all(time.monotonic() + PATIENCE)
    os._exit(0)


def end_all(deadline: float) -> None:
    """Kill all children, adopted ones included. Poll without a pause, to catch those that fork and exit at once."""
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """Process ids of this process's children, from /proc, which lists them by thread; empty without /proc."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def wait_for_all(check: int) -> None:
    """Reap every child as it ends; report the check's exit code, which is negative for a signal."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == check:
                with contextlib.suppress(BrokenPipeError):  # the requesting process is gone
                    os.write(1, str(os.waitstatus_to_exitcode(status)).encode())
