"""The process between a check and the process that asked for it: `python supervisor.py COMMAND ...`.

What an answer does to its parent, it does to this process, in a session of its own. It needs nothing of the package
and little time to start. Its standard input is the lifeline; the exit code of the command goes to its standard output.
The command's own output, and any word of this process, go to standard error.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux
PATIENCE = 3.0  # seconds


def main(command: list[str]) -> None:
    """Run the command and say how it ended; stay until the other end of the lifeline closes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: by the signal it is seen who has ended this
    if sys.platform == "linux":  # orphans become children of this process: they are found, and waited for
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    check = subprocess.Popen(command, stdout=2, start_new_session=True)
    threading.Thread(target=wait_for_all, args=(check.pid,), daemon=True).start()
    os.read(0, 1)  # nothing is ever written
    end_all(time.monotonic() + PATIENCE)
    os._exit(0)


def end_all(deadline: float) -> None:
    """Kill all children, adopted ones too. Some fork and end: to meet them in between, this looks without a pause."""
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """The children of this process, where /proc tells; the threads that they came to are listed one by one."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def wait_for_all(check: int) -> None:
    """Wait for each child as it ends; of the check, report the exit code, which is negative for a signal."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == check:
                with contextlib.suppress(BrokenPipeError):  # the one who asked is gone
                    os.write(1, str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
