"""A request to the server, and how a new process carries it out."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from minifsdp.instruments.system.housekeeping import show_label
from minifsdp.instruments.warm.inherited import Inherited

STDIO = 3  # the first of the file descriptors that travel with a request
MOST_FDS = 16
_LENGTH = 8  # bytes that tell a request's length


@dataclass(frozen=True)
class Request:
    """Modules to import, and a function to call in a new process.

    Attributes:
        needs: modules that the server imports before it forks.
        path: where they are; the process's `sys.path`.
        call: the pickled function and its arguments; the file descriptors that were sent follow them. Empty if no
            process is asked for.
        environ: the process's environment.
        folder: its working directory.
        argv: its `sys.argv`.
        inherited: its limits and the like; None if no process is asked for.
        forked: whether it is a fork of the server; otherwise a program of its own, which imports what it needs.
    """

    needs: tuple[str, ...]
    path: list[str]
    call: bytes = b""
    environ: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    argv: list[str] = field(default_factory=list)
    inherited: Inherited | None = None
    forked: bool = True


def send(channel: socket.socket, request: Request, fds: Sequence[int]) -> None:
    """Send a request and file descriptors. A failure half-way shuts the channel, which is of no more use.

    Raises:
        OSError: the other end is gone; or it does not read, and a blocked signal waits to be handled.
    """
    content = memoryview(pickle.dumps(request))
    try:
        _wait_for_room(channel)
        socket.send_fds(channel, [len(content).to_bytes(_LENGTH, "big")], list(fds))
        while content:
            _wait_for_room(channel)
            with suppress(BlockingIOError):
                content = content[channel.send(content, socket.MSG_DONTWAIT) :]
    except BaseException:
        with suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
        raise


def _wait_for_room(channel: socket.socket) -> None:
    """Wait until the other end has read enough, or a signal waits."""
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    while not poll.poll(100):
        if waiting := signal.sigpending():
            raise InterruptedError(f"signals {waiting} wait to be handled")


def receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """The next request with its file descriptors; None if the other end is gone."""
    with suppress(OSError):
        header, fds, _, _ = socket.recv_fds(channel, _LENGTH, MOST_FDS)
        if header:
            content = _read(channel, int.from_bytes(header + _read(channel, _LENGTH - len(header)), "big"))
            return pickle.loads(content), fds
    return None


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            raise ConnectionError("the request ends early")
        parts += part
    return bytes(parts)


def carry_out(request: Request, fds: Sequence[int]) -> None:
    """Lead a session of its own, become what is asked for, with no other file descriptors, and call the function."""
    stdio, others = fds[:STDIO], list(fds[STDIO:])
    os.setsid()
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    close_all_but(others)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.environ)
    show_label()
    os.chdir(request.folder)
    if request.inherited is not None:
        request.inherited.adopt()
    tempfile.tempdir = None  # found again in the new environment
    sys.path[:], sys.argv[:] = request.path, request.argv
    sys.stdin, sys.stdout, sys.stderr = _opened(0, "r"), _opened(1, "w"), _opened(2, "w")
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new program; Python's own generator sees to that itself
    function, args = pickle.loads(request.call)
    function(*args, *others)


def close_all_but(kept: Sequence[int]) -> None:
    """Close all file descriptors but these and those of the standard streams."""
    for fd in map(int, os.listdir("/dev/fd")):
        if fd >= STDIO and fd not in kept:
            with suppress(OSError):
                os.close(fd)


def _opened(fd: int, mode: str) -> Any:
    buffering = 1 if mode == "r" or fd == 2 or os.isatty(fd) else -1
    errors = "backslashreplace" if fd == 2 else None
    return open(fd, mode, buffering=buffering, errors=errors, closefd=False)


if __name__ == "__main__":  # where a fork does not go
    received = receive(socket.socket(fileno=int(sys.argv[1])))
    if received is not None:
        carry_out(*received)
