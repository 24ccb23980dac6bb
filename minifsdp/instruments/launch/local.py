"""The parent's side of a launch on this machine: listen to the ranks, report failures, leave no process behind."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from minifsdp.instruments.launch.errors import Failure, Kind, RankError, name_cells, rank_error, stuck_stack
from minifsdp.instruments.launch.rank import Task
from minifsdp.instruments.launch.start import RankProcess, named_modules, pack, sources_in_memory, start_rank
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.warm.client import GONE, SERVER_OF_RANKS, server
from minifsdp.instruments.warm.needs import RANKS_NEED, RANKS_USE

_INTENDED = "Warning: An unbatched P2P op"  # NCCL's C++ prints it past Python's filters, on each rank, for each peer
_START_LIMIT = 120.0  # seconds until every rank must be ready
_GROUP_SLACK = 30.0  # seconds by which a collective outwaits the launch, so that stacks are taken before it raises
_GRACE_AFTER_RAISED = 0.3  # seconds in which other ranks may still report failures of their own ...
_GRACE_AFTER_LOST = 1.0  # ... and, after a death or a lost connection, in which cause and consequences must show
_PATIENCE = 5.0  # seconds in which a busy machine may take to tell how a rank has ended


def run_local(
    fn: Callable[..., Any],
    world: World,
    args: tuple[Any, ...],
    timeout: float,
    on_report: Callable[[int, Any], None] | None,
) -> list[Any]:
    """`launch` with processes that it starts; arguments, result and errors as there."""
    payload, environ, sources = pack(fn, args), dict(os.environ), sources_in_memory()
    server.prepare((*RANKS_NEED, *named_modules(payload)))
    with scratch_folder() as directory:
        ranks: list[RankProcess] = []
        try:
            for rank in range(world.processes):
                task = Task(
                    rank=rank,
                    directory=str(directory),
                    payload=payload,
                    environ=environ,
                    sources=sources,
                    group_timeout=timeout + _GROUP_SLACK,
                    world=world,
                    wants_reports=on_report is not None,
                    start_method=multiprocessing.get_start_method(allow_none=True),
                )
                start_rank(task, ranks)
            server.prepare(RANKS_USE)  # for the next launch
            late = _listen(ranks, timeout, on_report)
            failures = [rank.failure for rank in ranks if rank.failure]
            if failures:
                raise rank_error(failures)
            if late:
                raise _late_error(ranks, late, timeout)
        finally:
            _end(ranks)
            _replay(ranks)
        return [_result(rank.task) for rank in ranks]


def _listen(
    ranks: list[RankProcess], timeout: float, on_report: Callable[[int, Any], None] | None
) -> list[RankProcess]:
    """Listen until all ranks have answered, one has failed, or the time is up; return those still running."""
    started, deadline = False, time.monotonic() + _START_LIMIT
    while (running := [rank for rank in ranks if rank.running]) and (left := deadline - time.monotonic()) > 0:
        heard = set(connection.wait([source for rank in running for source in rank.sources], left))
        for rank in running:
            if not heard.isdisjoint(rank.sources):
                _hear(rank, on_report)
        if not started and all(rank.ready for rank in ranks):
            started, deadline = True, time.monotonic() + timeout
        for failure in (rank.failure for rank in ranks if rank.failure):
            grace = _GRACE_AFTER_RAISED if failure.kind is Kind.RAISED else _GRACE_AFTER_LOST
            deadline = min(deadline, failure.when + grace)
    return running


def _hear(rank: RankProcess, on_report: Callable[[int, Any], None] | None) -> None:
    """Take the next message of a rank, or, if there is none left, note its death."""
    kind: str = "death"
    content: Any = None
    with contextlib.suppress(EOFError, OSError):
        if rank.pipe.poll():
            kind, content = rank.pipe.recv()
    if kind == "ready":
        rank.ready = True
    elif kind == "report" and on_report is not None:
        on_report(rank.task.rank, pickle.loads(content))
    elif kind == "result":
        rank.done = True
    elif kind == "failure":
        rank.failure = content
    elif kind == "death":
        rank.failure = _death(rank)


def _death(rank: RankProcess) -> Failure:
    """The failure of a rank whose process ended without an answer."""
    code = rank.process.wait(_PATIENCE) if rank.process is not None else None
    if code is None:
        headline = "closed its connection to the launcher"
    elif code == GONE:
        headline = f"{SERVER_OF_RANKS} was killed before fn returned"
    elif code >= 0:
        headline = f"process ended with exit code {code} before fn returned"
    else:
        names = {number.value: number.name for number in signal.Signals}
        headline = f"killed by {names.get(-code, f'signal {-code}')} before fn returned"
    return Failure(rank.task.rank, Kind.DIED, headline, headline)


def _late_error(ranks: list[RankProcess], late: list[RankProcess], timeout: float) -> RankError:
    """The error for a time-out: it names the late ranks, each with its stack."""
    stacks = _stacks(late)
    names = ", ".join(map(str, stacks))
    finished = ", ".join(str(rank.task.rank) for rank in ranks if rank.done) or "none"
    if not all(rank.ready for rank in ranks):
        return RankError(f"rank(s) {names} did not start within {_START_LIMIT:g} s", stacks)
    return RankError(f"no answer from rank(s) {names} within {timeout:g} s; finished: {finished}", stacks)


def _stacks(late: list[RankProcess]) -> dict[int, str]:
    """Make these ranks write their stacks, wherever they are (in C code too), and read them."""
    files = {rank.task.rank: Path(rank.task.path("stack")) for rank in late}
    for rank in late:
        if files[rank.task.rank].exists():  # from then on the rank handles the signal
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(file.exists() and not file.stat().st_size for file in files.values()):
        time.sleep(0.02)
    time.sleep(0.1)  # they have begun; a stack is written in less than a millisecond
    return {rank.task.rank: _stack(rank, files[rank.task.rank]) for rank in late}


def _stack(rank: RankProcess, file: Path) -> str:
    dump = file.read_text(errors="replace") if file.exists() else ""
    if dump:
        return f"stuck here, innermost frame first:\n{stuck_stack(dump)}"
    if not file.exists():
        return "it gives no stack: it is still starting"
    with contextlib.suppress(psutil.Error):
        if psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED:
            return "it gives no stack: the process is stopped"
    return "it gives no stack: it does not answer SIGUSR1, which it may block or ignore"


def _end(ranks: list[RankProcess]) -> None:
    """Kill all ranks and their children (each rank leads a process group), then wait for them."""
    for rank in ranks:
        if rank.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.kill()  # it may not lead a group yet
        os.close(rank.lifeline)
        rank.pipe.close()
    for rank in ranks:
        if rank.process is not None:
            rank.process.wait(5.0)
            rank.process.close()


def _replay(ranks: list[RankProcess]) -> None:
    """Print what each rank wrote to stdout and stderr, as a terminal would show it (the last state of each line).

    If it cannot be printed, the ranks' results are not lost.
    """
    if sys.stdout is None:  # it was closed when Python started
        return
    for rank in ranks:
        with contextlib.suppress(OSError), open(rank.task.path("output"), "rb") as file:
            for line in file:
                shown = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                if _INTENDED not in shown:
                    print(f"[rank {rank.task.rank}]", name_cells(shown))
    with contextlib.suppress(OSError):
        sys.stdout.flush()


def _result(task: Task) -> Any:
    try:
        with open(task.path("result"), "rb") as file:
            return pickle.load(file)
    except Exception as error:
        headline = f"its result cannot be read here: {type(error).__name__}: {error}"
        raise RankError(f"rank {task.rank} failed: {headline}", {task.rank: headline}) from None
