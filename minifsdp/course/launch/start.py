"""Rank processes: their start and their input."""

import dis
import linecache
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from minifsdp.course.launch.errors import Failure
from minifsdp.course.launch.rank import Task, run_rank
from minifsdp.course.launch.rank_server import start_method, start_server, undisturbed

# cloudpickle sends the globals that a function loads; the body of a class inside it loads them by another instruction.
cloudpickle.cloudpickle.GLOBAL_OPS += (dis.opmap["LOAD_NAME"],)


@dataclass
class RankProcess:
    """The parent's view of one rank. The rank ends when the parent's end of `lifeline` closes."""

    task: Task
    process: BaseProcess
    pipe: "connection.Connection[Any, Any]"
    lifeline: "connection.Connection[Any, Any]"
    ready: bool = False
    done: bool = False
    failure: Failure | None = None

    @property
    def sources(self) -> "tuple[connection.Connection[Any, Any], int]":
        """The objects that become ready when the rank has sent something or is dead."""
        return self.pipe, self.process.sentinel

    @property
    def running(self) -> bool:
        """True if this rank still owes an answer."""
        return not self.done and self.failure is None


def start_rank(task: Task, ranks: list[RankProcess]) -> None:
    """Append one rank to `ranks` and start it, in this order, so that an interrupted start is cleaned up too."""
    context: Any = multiprocessing.get_context(start_method())
    pipe, their_pipe = context.Pipe(duplex=False)
    their_lifeline, lifeline = context.Pipe(duplex=False)
    process = context.Process(target=run_rank, args=(task, their_pipe, their_lifeline), daemon=True)
    ranks.append(RankProcess(task, process, pipe, lifeline))
    start(process, f"rank {task.rank} of {task.world.ranks}")
    their_pipe.close()
    their_lifeline.close()


def start(process: BaseProcess, what: str, patience: float = 5.0) -> None:
    """Start a process from the ranks' server, or from a new one if that is being ended, as by `minifsdp clean`."""
    deadline = time.monotonic() + patience
    while True:
        start_server()
        try:
            with undisturbed(what):
                process.start()
            return
        except (EOFError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


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


def sources_in_memory() -> dict[str, list[str]]:
    """Lines of the files that exist only in this process: notebook cells, known to linecache without a date."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _is_importable(package: str) -> bool:
    return package == "__main__" or any(finder.find_spec(package, None) for finder in sys.meta_path)
