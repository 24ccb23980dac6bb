"""The server, which has one thread and no CUDA context, ever: neither survives a fork."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from minifsdp.instruments.system.housekeeping import SERVER, label, show_label
from minifsdp.instruments.system.lifeline import continue_without_parent, end_by_signal, is_readable
from minifsdp.instruments.system.scratch import remove_abandoned
from minifsdp.instruments.warm.request import Request, carry_out, close_all_but, receive, send

Work = Callable[[], None]
PATIENCE = 5.0  # seconds in which processes end whose program has ended
FOR_PROGRAM = 1.0  # seconds in which a program ends whose channel has closed


def main(channel: int, lifeline: int, program: int) -> None:
    """Serve until the program that started the server ends. In a forked process: do what it was forked for."""
    signal.signal(signal.SIGIO, lambda *_: sys.exit())  # also in the middle of an import
    continue_without_parent()
    service, work = _Service(socket.socket(fileno=channel), program), None
    with suppress(SystemExit):
        is_readable(channel, None)  # by its first request, the program has given the lifeline another signal
        end_by_signal(lifeline, signal.SIGIO)
        work = service.fork_for_each_request()
    if work is None:
        service.leave_nothing()
        os._exit(0)  # taking apart what was imported would take a second
    work()


def serve_in_fork(channel: socket.socket, program: int) -> NoReturn:
    """Let this fork be the server, and no longer what its parent, `program`, is."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    close_all_but([channel.fileno()])
    os.environ.update(label(SERVER))
    show_label()
    continue_without_parent()
    service, code = _Service(channel, program), 1
    try:
        if (work := service.fork_for_each_request()) is not None:
            work()
        else:
            service.leave_nothing()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Service:
    """For the program at the other end of the channel.

    Args:
        channel: to the program.
        program: its process id.
    """

    def __init__(self, channel: socket.socket, program: int) -> None:
        self._channel, self._program = channel, program
        self._told: dict[int, int] = {}  # by process id, the pipe of who asked for it

    def fork_for_each_request(self) -> Work | None:
        """Tell each process's id, and later its exit code, over the pipe that came with the request.

        Returns:
            None in the server, when the other end of the channel has closed. In a forked process, what it has to do:
            it leaves the server's frames first, and ends as any Python program does.
        """
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        poll = select.poll()
        for each in (self._channel.fileno(), woken):
            poll.register(each, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if woken in ready:
                os.read(woken, 1000)
                self._tell_ends()
            if self._channel.fileno() in ready:
                if (received := receive(self._channel)) is None:
                    return None
                request, fds = received
                if not request.call:
                    import_all(request)
                    continue
                status, *fds = fds
                if (pid := _start(request, fds)) == 0:
                    return lambda: carry_out(request, fds)
                self._told[pid] = status
                _tell(status, pid)
                for each in fds:
                    os.close(each)

    def leave_nothing(self) -> None:
        """Wait for the processes and the program to end, then remove the folders that it leaves if it is killed."""
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        _outlive(self._told)
        deadline = time.monotonic() + FOR_PROGRAM
        while os.getppid() == self._program and time.monotonic() < deadline:  # until then it holds its locks
            time.sleep(0.01)
        remove_abandoned()

    def _tell_ends(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._told:
                    _tell(self._told[pid], os.waitstatus_to_exitcode(status))
                    os.close(self._told.pop(pid))


def _start(request: Request, fds: Sequence[int]) -> int:
    """The id of a new process; 0 in this process itself, if it is a fork."""
    if not request.forked:
        return _spawn(request, fds)
    import_all(request)
    return os.fork()


def import_all(request: Request) -> None:
    """Import what processes will need. What cannot be imported here cannot be imported there either, which says why."""
    sys.path[:] = request.path
    gc.disable()  # looking for cycles takes a quarter of the time that torch's import does, and finds few
    for name in request.needs:
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # a fork that looks through all this, as at its end, would get copies of its pages
    gc.enable()


def _spawn(request: Request, fds: Sequence[int]) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", "minifsdp.instruments.warm.request", str(theirs.fileno())]
        pid = os.posix_spawn(sys.executable, command, os.environ)
        send(ours, request, fds)
        return pid


def _outlive(processes: Collection[int]) -> None:
    """Wait for processes that end because their program has ended; kill those that do not."""
    deadline = time.monotonic() + PATIENCE
    left = set(processes)
    while left:
        for pid in list(left):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() < deadline:
                        continue
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            left.remove(pid)
        time.sleep(0.01 if left else 0)


def _tell(status: int, number: int) -> None:
    with suppress(OSError):  # who asked is gone
        os.write(status, b"%d\n" % number)
