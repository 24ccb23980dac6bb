"""Rank processes: their start and their input."""

from __future__ import annotations

import dis
import linecache
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from minifsdp.instruments.launch.errors import Failure
from minifsdp.instruments.launch.rank import Task, run_rank
from minifsdp.instruments.warm.client import Process, server

# cloudpickle sends the globals that a function loads; the body of a class inside it loads them by another instruction.
cloudpickle.cloudpickle.GLOBAL_OPS += (dis.opmap["LOAD_NAME"],)


@dataclass
class RankProcess:
    """The parent's view of one rank. The rank ends when the parent's end of `lifeline` closes."""

    task: Task
    pipe: Connection[Any, Any]
    lifeline: int
    process: Process | None = None
    ready: bool = False
    done: bool = False
    failure: Failure | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 until it has started."""
        return self.process.pid if self.process is not None else 0

    @property
    def sources(self) -> tuple[Connection[Any, Any], int]:
        """The objects that become ready when the rank has sent something or is dead."""
        assert self.process is not None
        return self.pipe, self.process.sentinel

    @property
    def running(self) -> bool:
        """True if this rank still owes an answer."""
        return not self.done and self.failure is None


def start_rank(task: Task, ranks: list[RankProcess]) -> None:
    """Append one rank to `ranks` and start it, in this order, so that an interrupted start is cleaned up too."""
    pipe, their_pipe = Pipe(duplex=False)
    their_lifeline, lifeline = os.pipe()
    rank = RankProcess(task, pipe, lifeline)
    ranks.append(rank)
    with their_pipe:
        try:
            rank.process = server.start(
                f"rank {task.rank} of {task.world.ranks}",
                run_rank,
                task,
                fds=(their_pipe.fileno(), their_lifeline),
            )
        finally:
            os.close(their_lifeline)


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle `(fn, args)`.

    Functions of the main module travel by value, others by the name of their module, unless only this process can
    import it (a test module under pytest's importlib mode).

    Raises:
        TypeError: something in it cannot be pickled.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    by_value = module is not None and not _is_importable(module.__name__.partition(".")[0])
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"launch cannot send {name} and its arguments to the ranks ({error}); create that inside fn"
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def named_modules(payload: bytes) -> list[str]:
    """This package's modules that a pickle names: each rank would import them, so the server does.

    Not the user's: they may start threads, and they may have changed since the last launch.
    """
    names = {name.decode() for name in re.findall(rb"minifsdp(?:\.\w+)+", payload)}
    return sorted(names & sys.modules.keys())


def sources_in_memory() -> dict[str, list[str]]:
    """Lines of the files that exist only in this process: notebook cells, known to linecache without a date."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _is_importable(package: str) -> bool:
    return package == "__main__" or any(finder.find_spec(package, None) for finder in sys.meta_path)
