"""The server, which has one thread and no CUDA context, ever: neither survives a fork."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from minifsdp.course.system.housekeeping import SERVER, label, show_label
from minifsdp.course.system.lifeline import end_by_signal
from minifsdp.course.warm.request import Request, carry_out, close_all_but, receive, send

Work = Callable[[], None]


def main(channel: int, lifeline: int) -> None:
    """Serve until the program that started the server ends. In a forked process: do what it was forked for."""
    end_by_signal(lifeline)  # also in the middle of an import
    work = serve(socket.socket(fileno=channel))
    if work is None:
        os._exit(0)  # taking apart what was imported would take a second
    work()


def serve_in_fork(channel: socket.socket) -> NoReturn:
    """Let this fork be the server, and no longer what its parent is."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    close_all_but([channel.fileno()])
    os.environ.update(label(SERVER))
    show_label()
    code = 1
    try:
        if (work := serve(channel)) is not None:
            work()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(channel: socket.socket) -> Work | None:
    """Fork a process for each request, and tell its id, and later its exit code, over the pipe that came with it.

    Returns:
        None in the server, when the other end of the channel has closed. In a forked process, what it has to do: it
        leaves the server's frames first, and ends as any Python program does.
    """
    told: dict[int, int] = {}  # by process id, the pipe of who asked for it
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([channel.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1000)
            _tell_ends(told)
        if channel.fileno() in ready:
            if (received := receive(channel)) is None:
                return None
            if not received[0].call:
                import_all(received[0])
                continue
            request, (status, *fds) = received
            if (pid := _start(request, fds)) == 0:
                return lambda: carry_out(request, fds)
            told[pid] = status
            _tell(status, pid)
            for each in fds:
                os.close(each)


def _start(request: Request, fds: Sequence[int]) -> int:
    """The id of a new process; 0 in this process itself, if it is a fork."""
    if not request.forked:
        return _spawn(request, fds)
    import_all(request)
    return os.fork()


def import_all(request: Request) -> None:
    """Import what processes will need. What cannot be imported here cannot be imported there either, which says why."""
    sys.path[:] = request.path
    for name in request.needs:
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # a fork that looks through all this, as at its end, would get copies of its pages


def _spawn(request: Request, fds: Sequence[int]) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", "minifsdp.course.warm.request", str(theirs.fileno())]
        pid = os.posix_spawn(sys.executable, command, os.environ)
        send(ours, request, fds)
        return pid


def _tell_ends(told: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in told:
                _tell(told[pid], os.waitstatus_to_exitcode(status))
                os.close(told.pop(pid))


def _tell(status: int, number: int) -> None:
    with suppress(OSError):  # who asked is gone
        os.write(status, b"%d\n" % number)
