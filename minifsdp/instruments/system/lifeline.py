"""A pipe whose other end a process's parent holds: when it closes, whatever has ended the parent, the process ends."""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading

F_SETSIG = 10  # fcntl(2), Linux: which signal announces that a file descriptor became readable
PR_SET_PDEATHSIG = 1  # prctl(2), Linux: which signal a process gets when the thread that started it ends


def is_readable(fd: int, seconds: float | None) -> bool:
    """True if a file descriptor is readable, or its other end closed, within `seconds`."""
    poll = select.poll()  # `select` knows numbers below 1024 only
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def wait_for_end(lifeline: int) -> None:
    """Let a thread of this process kill its process group when the other end closes, unless C code holds the GIL."""

    def wait_and_end() -> None:
        os.read(lifeline, 1)  # nothing is ever written, so this returns when the other end closes
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_end, daemon=True).start()


def continue_without_parent() -> None:
    """On Linux, let this process, if it is stopped when its parent ends, go on; its lifeline then ends it.

    The kernel sends the signal when the parent's thread ends, which may be earlier: to one that runs, it is nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def end_by_signal(lifeline: int, number: signal.Signals = signal.SIGKILL, group: int | None = None) -> None:
    """Let the kernel send a process group, by default this one, a signal when the other end closes: only on Linux.

    It does so as long as any process has this end open.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may not support it
            fcntl.fcntl(lifeline, F_SETSIG, number)
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -(group or os.getpgrp()))
            fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
        if is_readable(lifeline, 0):  # it has closed before
            os.killpg(group or 0, number)
