"""Starting rank processes: what they are sent, and the server they are forked from."""

import contextlib
import linecache
import multiprocessing
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from minifsdp.course.launch.errors import Failure
from minifsdp.course.launch.rank import Task, run_rank

# What the fork server imports once, for all ranks. None of it may initialise CUDA, which does not survive a fork.
PRELOAD = ["torch", "torch.distributed.fsdp", "cloudpickle"]
_starting = threading.Lock()


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
        """What becomes ready when the rank has sent something or is dead."""
        return self.pipe, self.process.sentinel

    @property
    def running(self) -> bool:
        """Whether this rank still owes an answer."""
        return not self.done and self.failure is None


def start_rank(task: Task, ranks: list[RankProcess]) -> None:
    """Start one rank and append it to `ranks`, before the start: an interrupted start is ended like any other."""
    context: Any = multiprocessing.get_context(start_method())
    pipe, their_pipe = context.Pipe(duplex=False)
    their_lifeline, lifeline = context.Pipe(duplex=False)
    process = context.Process(target=run_rank, args=(task, their_pipe, their_lifeline), daemon=True)
    ranks.append(RankProcess(task, process, pipe, lifeline))
    start_server()
    with _starting, _without_main(), _without_interrupt():
        process.start()
    their_pipe.close()
    their_lifeline.close()


def start_server() -> None:
    """Start the fork server if this platform uses one and it does not run yet."""
    if start_method() == "forkserver":
        with _starting, _without_main(), _without_interrupt():
            multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
            forkserver.ensure_running()


def start_method() -> str:
    """Apple's frameworks do not survive a fork, so macOS starts every rank from nothing (and imports torch in each)."""
    return "spawn" if sys.platform == "darwin" else "forkserver"


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


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back, so that it neither ends the fork server nor finds a rank half started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
