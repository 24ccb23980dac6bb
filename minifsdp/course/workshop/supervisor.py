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

PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux


def main(command: list[str]) -> None:
    """Run the command and say how it ended; stay until the other end of the lifeline closes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: by the signal it is seen who has ended this
    if sys.platform == "linux":  # orphans become children of this process: they are found, and waited for
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    check = subprocess.Popen(command, stdout=2, start_new_session=True)
    threading.Thread(target=wait_for_all, args=(check.pid,), daemon=True).start()
    os.read(0, 1)  # nothing is ever written
    os._exit(0)


def wait_for_all(check: int) -> None:
    """Wait for each child as it ends; of the check, report the exit code, which is negative for a signal."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == check:
                os.write(1, str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
