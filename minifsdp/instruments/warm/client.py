"""Processes from the server, as the program that asks for them sees them."""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from minifsdp.instruments.system.housekeeping import SERVER, label, padded_label
from minifsdp.instruments.system.lifeline import end_by_signal, is_readable
from minifsdp.instruments.system.resources import check_shell
from minifsdp.instruments.warm.inherited import Inherited
from minifsdp.instruments.warm.needs import RANKS_NEED
from minifsdp.instruments.warm.request import STDIO, Request, send
from minifsdp.instruments.warm.server import serve_in_fork

LONGEST_START = 120.0  # seconds
PATIENCE = 5.0  # seconds in which a server that is ended is replaced by another
SERVER_OF_RANKS = "the server of the ranks"
GONE = 255  # the exit code of a process whose server has ended before it
_PER_PROCESS = "TORCH_DISTRIBUTED_DEBUG"  # torch reads it when it is imported; each process has its caller's level
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_BY_NVML = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_NVML_BASED_CUDA_CHECK")  # or torch and Triton call cuInit
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def forks() -> bool:
    """True if a process can be a fork: Apple's frameworks do not survive one, and on macOS each imports torch."""
    return sys.platform != "darwin"


class Process:
    """A process from the server. It leads a session and a process group of its own.

    Attributes:
        sentinel: a file descriptor that becomes readable when the process has started, and again when it has ended.
        pid: its id; 0 until it has started.
        returncode: None while it runs; negative for a signal.
    """

    def __init__(self, sentinel: int) -> None:
        self.sentinel, self.pid = sentinel, 0
        self.returncode: int | None = None
        self._said = b""

    def started(self, seconds: float | None = None) -> bool:
        """True if the process has started within `seconds`: the server may have modules to import first.

        Raises:
            ConnectionError: the server ended before that.
        """
        if self.pid == 0 and self._hears(seconds):
            if (said := self._number()) is None:
                raise ConnectionError("the server has ended")
            self.pid = said
        return self.pid != 0

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, when the process has ended; None if it runs on after `seconds`."""
        with suppress(ConnectionError):
            if self.returncode is not None or not self.started(seconds) or not self._hears(seconds):
                return self.returncode
            if (said := self._number()) is not None:
                self.returncode = said
                return said
        self.returncode = GONE
        return GONE

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.wait(0.0)

    def kill(self) -> None:
        """Kill the process, if it has started and runs."""
        if self.poll() is None and self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget the process, ended or not."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def _hears(self, seconds: float | None) -> bool:
        return b"\n" in self._said or is_readable(self.sentinel, seconds)

    def _number(self) -> int | None:
        """The next number that the server says about this process; None if it has ended."""
        while b"\n" not in self._said:
            part = os.read(self.sentinel, 100)
            if not part:
                return None
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return int(line)


@dataclass
class _Connection:
    """To a server. One that is a program of its own, no fork, ends when the lifeline closes, whatever it is doing.

    Attributes:
        prepared: modules that the server was told to import ahead.
        has_served: whether a process was asked for.
    """

    channel: socket.socket
    lifeline: IO[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None
    prepared: set[str] = field(default_factory=set)
    has_served: bool = False

    @property
    def is_fork(self) -> bool:
        return self.process is None

    def close(self) -> None:
        with suppress(OSError):  # a program may have closed all its file descriptors
            self.channel.close()
        with suppress(OSError):
            if self.lifeline is not None:
                self.lifeline.close()


class Server:
    """The server of this program, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The server's process, if it was started and is no fork of this one."""
        return self._connection.process if self._connection is not None else None

    @property
    def runs(self) -> bool:
        """True once a server has been started; one that has ended since is replaced at the next request."""
        return self._connection is not None

    @property
    def has_served(self) -> bool:
        """True once the server that runs was asked for a process: the first waits for its imports."""
        return self._connection is not None and self._connection.has_served

    def start(self, what: str, function: Callable[..., None], *args: Any, **settings: Any) -> Process:
        """`ask`, and wait until the process has started, from a new server if this one is being ended meanwhile.

        Raises:
            OSError: there is no server, none can be started, or it has not started the process within two minutes.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            process = self.ask(what, function, *args, **settings)
            try:
                if process.started(LONGEST_START):
                    return process
                process.close()
                self.end()
                raise TimeoutError(f"the server did not start {what} within {LONGEST_START:.0f} s: try again")
            except ConnectionError:
                process.close()
                if time.monotonic() > deadline:
                    raise

    def ask(
        self,
        what: str,
        function: Callable[..., None],
        *args: Any,
        fds: Sequence[int] = (),
        stdio: Sequence[int] | None = None,
        environ: Mapping[str, str] | None = None,
        folder: str | None = None,
        argv: Sequence[str] | None = None,
        needs: Sequence[str] = RANKS_NEED,
    ) -> Process:
        """Ask for a new process that calls `function(*args, *fds)`; it has not started yet.

        Args:
            what: the process's name in `minifsdp ps`.
            function: of a module that the process can import; it gets copies of `fds` as its last arguments.
            *args: its arguments, which are pickled.
            fds: file descriptors.
            stdio: those of its standard streams; by default nothing, this process's errors, this process's errors.
            environ: its environment; by default this process's.
            folder: its working directory; by default this process's.
            argv: its `sys.argv`; by default this process's.
            needs: modules that the server imports before it forks.

        Raises:
            OSError: there is no server, and none can be started.
        """
        request = Request(
            needs=tuple(needs),
            path=_path(),
            call=pickle.dumps((function, args)),
            environ={**(os.environ if environ is None else environ), **label(what)},
            folder=folder or os.getcwd(),
            argv=sys.argv if argv is None else list(argv),
            inherited=Inherited.here(),
            forked=forks(),
        )
        sentinel, status = os.pipe()
        try:
            with open(os.devnull, "rb+", buffering=0) as null:
                errors = _if_open(2, null.fileno())
                self._send(request, [status, *(stdio or (null.fileno(), errors, errors)), *fds]).has_served = True
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            os.close(status)
        return Process(sentinel)

    def prepare(self, needs: Sequence[str] = RANKS_NEED) -> None:
        """Import these modules in the server, if it was not told to before, ahead of a request for a process.

        Raises:
            OSError: there is no server, and none can be started.
        """
        if forks() and (self._connection is None or not self._connection.prepared.issuperset(needs)):
            self._send(Request(needs=tuple(needs), path=_path()), []).prepared.update(needs)

    def end(self) -> None:
        """End a server that does not answer, as one that is stopped (SIGSTOP): the next request starts another."""
        with self._lock:
            self._end()

    def let_go_on(self) -> None:
        """At the program's end: a server that is stopped would not end by itself."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def fork_here(self) -> None:
        """Let a fork of this process be the server, for it has imported torch. Only where there is one thread."""
        channel, theirs = socket.socketpair()
        self._connection = _Connection(channel)
        program = os.getpid()
        with theirs:
            if os.fork() == 0:
                serve_in_fork(theirs, program)

    def _send(self, request: Request, fds: Sequence[int]) -> _Connection:
        """To the server, or to a new one if there is none or it has ended; which one."""
        with self._lock:
            if self._connection is not None:
                with suppress(OSError), _undisturbed():  # it may have been ended, as by `minifsdp clean`
                    send(self._connection.channel, request, fds)
                    return self._connection
                if self._connection.is_fork:  # this process may have threads by now, and another server starts slowly
                    raise ConnectionError(f"{SERVER_OF_RANKS} was killed")
            self._end()
            self._connection = _connect()
            with _undisturbed():
                send(self._connection.channel, request, fds)
            return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            self._connection = None

    def _after_fork(self) -> None:
        """A fork of this program has no server: both would talk to it at once."""
        if self._connection is not None:
            self._connection.close()
        if self.process is not None:
            self.process.returncode = 0  # it is not this process's child
        self._lock, self._connection = threading.Lock(), None


server = Server()
os.register_at_fork(after_in_child=server._after_fork)
atexit.register(server.let_go_on)


def _connect() -> _Connection:
    """Start a server; raises OSError if a limit of this shell is too low for that."""
    check_shell()
    channel, theirs = (socket.socket(fileno=_above_the_standard(each.detach())) for each in socket.socketpair())
    their_lifeline, lifeline = map(_above_the_standard, os.pipe())
    with theirs, open(their_lifeline, "rb"):
        fds = [theirs.fileno(), their_lifeline]
        run = f"from minifsdp.instruments.warm.server import main; main(*{fds}, {os.getpid()})"
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {_path()}; {run}"],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_neutral() | padded_label(SERVER),
        )
        end_by_signal(their_lifeline, signal.SIGCONT, process.pid)  # it may be stopped before it sees to that itself
    return _Connection(channel, open(lifeline, "wb"), process)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No handler of a signal raises in the middle of a request."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _path() -> list[str]:
    """This program's `sys.path`, to be used from another folder."""
    return [each and os.path.abspath(each) for each in sys.path if isinstance(each, str)]  # "" is the working directory


def _neutral() -> dict[str, str]:
    """An environment in which the server finds GPUs without initializing the driver, and knows no debug level.

    torch._dynamo makes a folder for its cache when it is imported. The server, which has nothing to cache, names one
    that exists; its forks have their callers' environments.
    """
    environ = dict.fromkeys(_BY_NVML, "1") | {_CACHE: tempfile.gettempdir()} | os.environ
    environ.pop(_PER_PROCESS, None)
    return environ


def _above_the_standard(fd: int) -> int:
    """Move a file descriptor above the standard streams, which may be closed; return its number."""
    if fd >= STDIO:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STDIO)
    os.close(fd)
    return moved


def _if_open(fd: int, otherwise: int) -> int:
    try:
        os.fstat(fd)
    except OSError:
        return otherwise
    return fd
