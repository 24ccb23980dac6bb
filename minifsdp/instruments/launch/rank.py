"""The life of one rank: a process that `local` started to run the user's function once."""

import ctypes
import datetime
import faulthandler
import linecache
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import set_start_method
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minifsdp.instruments.launch.errors import Failure
from minifsdp.instruments.launch.group import join_group, share_cores, use_loopback
from minifsdp.instruments.launch.inside import become_rank, call_user, pack_result, pickled
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.system.housekeeping import name_process
from minifsdp.instruments.system.lifeline import end_by_signal, wait_for_end

_START_LIMIT = datetime.timedelta(seconds=300)  # the parent gives up on a rank before this


@dataclass(frozen=True)
class Task:
    """The input of a rank. `payload` is the pickled `(fn, args)`, `sources` the lines of in-memory files."""

    rank: int
    directory: str
    payload: bytes
    environ: dict[str, str]
    sources: dict[str, list[str]]
    group_timeout: float
    world: World
    wants_reports: bool
    start_method: str | None

    def path(self, kind: str) -> str:
        """This rank's file in the launch's directory; kinds are output, stack and result."""
        return os.path.join(self.directory, f"{kind}{self.rank}")


def run_rank(task: Task, pipe_fd: int, lifeline: int) -> None:
    """Run the task, report the outcome to the parent over the pipe, then wait to be ended.

    Messages: `("ready", None)`, `("report", bytes)`, and one of `("result", None)`, `("failure", Failure)`.
    """
    name_process(f"rank {task.rank} of {task.world.ranks}")
    pipe: Connection[Any, Any] = Connection(pipe_fd, readable=False)
    wait_for_end(lifeline)
    end_by_signal(lifeline)
    _capture_output(task)
    _adopt_surroundings(task)
    lock = threading.Lock()

    def tell(kind: str, content: Any = None) -> None:
        with lock:
            pipe.send((kind, content))

    def deliver(obj: Any) -> None:
        if task.wants_reports:
            tell("report", pickled(obj))

    try:
        fn, args = _load_function(task.payload)
        _join(task)
        tell("ready")
        result = pack_result(call_user(fn, args, deliver))
        with open(task.path("result"), "wb") as file:  # over the pipe, the parent could wait on a half-sent message
            file.write(result)
        outcome: tuple[str, Failure | None] = ("result", None)
    except BaseException as error:
        outcome = ("failure", Failure.of(error, task.rank))
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # output of C and C++ code: this process ends by a signal, without any flush
    tell(*outcome)
    # A rank that left now would turn the others' deadlock into "connection closed", so it stays until the parent
    # has heard from all ranks and ends them.
    while True:
        signal.pause()


def _capture_output(task: Task) -> None:
    """Redirect stdout and stderr (of C++ code too) to one file; make SIGUSR1 write every thread's stack to another."""
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        output = os.open(task.path("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except FileNotFoundError:  # the launch was interrupted and its directory is gone: no one waits for this rank
        os._exit(1)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=os.open(task.path("stack"), os.O_WRONLY | os.O_CREAT), all_threads=True)


def _adopt_surroundings(task: Task) -> None:
    """Adopt the parent's environment, without this process's label, and cell sources as of the call."""
    os.environ.clear()
    os.environ.update(task.environ)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # the server was started with another environment
    rank, size = str(task.rank), str(task.world.ranks)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    for name, lines in task.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    set_start_method(task.start_method, force=True)  # of children, such as data loaders, as in the parent
    become_rank()


def _load_function(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    fn, args = pickle.loads(payload)
    if isinstance(fn, FunctionType) and fn.__module__ == "__main__":
        # Plain pickle then finds its classes and functions, as in torch.save and all_gather_object.
        vars(sys.modules["__main__"]).update(fn.__globals__)
    return fn, args


def _join(task: Task) -> None:
    ranks = task.world.processes
    share_cores(ranks)
    use_loopback()
    store = FileStore(os.path.join(task.directory, "store"), ranks)
    # Ranks may come up seconds apart; the group's own time-out must not count that.
    store.set(f"up{task.rank}", "")
    store.wait([f"up{rank}" for rank in range(ranks)], _START_LIMIT)
    join_group(store, task.rank, task.rank, task.world, task.group_timeout)
