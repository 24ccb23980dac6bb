"""Plain SPMD: torchrun or srun started the ranks, and all of them call `launch` in the same order.

Nothing is started. The ranks exchange results and failures over the rendezvous store (`answers`): a process group is
no help once one rank has left the others alone in a collective.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from minifsdp.instruments.launch.answers import await_count, pack, put_failure, put_result, take_answers
from minifsdp.instruments.launch.errors import Failure, Kind, RankError
from minifsdp.instruments.launch.group import join_group, prepare_to_share, share_cores, use_loopback
from minifsdp.instruments.launch.inside import call_user
from minifsdp.instruments.launch.job import check_job
from minifsdp.instruments.launch.meeting import meet
from minifsdp.instruments.launch.world import Backend, World, choose_world, local_ranks, tell_if_chosen

_ANSWER_SLACK = 5.0  # seconds after the time-out in which a rank whose collective timed out can still report it
_EXIT_SLACK = 10.0  # seconds after the time-out at which a rank that is stuck elsewhere ends its process
_GROUP_LIMIT = 600.0  # the most seconds that a collective may wait, torch's default: a run may take a day


@dataclasses.dataclass
class _Job:
    """State between launches.

    `group` is the world and time-out of the default process group (None: not made here), `sockets` its connections.
    """

    store: Store
    rank: int
    size: int
    local_rank: int
    local_size: int
    launches: int = 0
    group: tuple[World, float] | None = None
    sockets: set[tuple[int, int]] = dataclasses.field(default_factory=set)


_job: _Job | None = None


def run_spmd(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    backend: Backend | None,
    share_gpu: bool | None,
    on_report: Callable[[int, Any], None] | None,
) -> list[Any]:
    """`launch` in a process that is a rank already; arguments, result and errors as there.

    The first `world_size` ranks run `fn`, the surplus ranks wait; all of them return the same list or raise the same
    error. A rank stuck outside any collective writes its stack to stderr and exits, `_EXIT_SLACK` after the time-out.
    """
    if backend == "fake":
        raise ValueError("backend='fake' is for rank 0 alone: start this script without torchrun")
    job = _connect(world_size)
    world = choose_world(world_size, share_gpu=share_gpu, backend=backend, here=job.local_size)
    tell_if_chosen(world)
    prepare_to_share(job.rank, job.local_size, job.local_size == job.size, share_gpu)
    if dist.is_initialized() and job.group is None and dist.get_world_size() != world_size:
        raise ValueError(
            f"launch asks for {world_size} ranks, but this script initialized a process group of"
            f" {dist.get_world_size()}: leave that to launch"
        )
    job.launches += 1
    store = PrefixStore(f"minifsdp/launch{job.launches}", job.store)
    deadline = time.monotonic() + timeout + _ANSWER_SLACK
    stays = job.rank == 0  # it may be the one that serves the store
    try:
        if job.rank < world_size:
            deliver = (lambda obj: on_report(0, obj)) if on_report and job.rank == 0 else (lambda obj: None)
            _take_part(job, store, fn, args, world, timeout, deliver)
        else:
            _leave_group(job)
        return take_answers(store, world_size, deadline)
    except RankError:
        _leave_group(job)  # on every rank: the next launch must not meet ranks that still use the broken group
        raise
    except KeyboardInterrupt:
        stays = False  # another rank may wait for this one in a collective, and hear no signal there: this end wakes it
        raise
    finally:
        store.add("left", 1)
        if stays:
            await_count(store, "left", job.size, deadline)


def _connect(world_size: int) -> _Job:
    """Meet the other ranks at MASTER_ADDR, once per process."""
    global _job
    if _job is None:
        check_job()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < world_size:
        script = os.path.basename(sys.argv[0]) or "script.py"
        raise ValueError(
            f"launch asks for {world_size} ranks, but this job has {size}:"
            f" start it with torchrun --nproc-per-node {world_size} {script}"
        )
    if _job is None:
        local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank)
        local_size = local_ranks(size)
        if local_size == size:
            use_loopback()
        share_cores(local_size, os.environ.get("SLURM_CPUS_PER_TASK", ""))
        _job = _Job(meet(rank, size), rank, size, local_rank, local_size)
        atexit.register(_leave_group, _job)
    return _job


def _take_part(
    job: _Job,
    store: Store,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world: World,
    timeout: float,
    deliver: Callable[[Any], None],
) -> None:
    """Run `fn` as one of the first ranks and put its result, or its failure, into the store."""
    before = _sockets()
    faulthandler.dump_traceback_later(timeout + _EXIT_SLACK, exit=True, file=2)
    try:
        _join_group(job, store, (world, min(timeout, _GROUP_LIMIT)))
        result = pack(call_user(fn, args, deliver))
    except (Exception, SystemExit) as error:
        order = store.add("failed", 1)  # the first to count is the cause
        failure = dataclasses.replace(Failure.of(error, job.rank), when=float(order))
    else:
        put_result(store, job.rank, result)
        return
    finally:
        faulthandler.cancel_dump_traceback_later()
    if failure.kind is Kind.RAISED:  # at once: the others may be stuck, and end this job before it raises
        print(f"[rank {job.rank}] {failure.text}", file=sys.stderr, flush=True)
    # The others may be waiting for this rank in a collective: closing the connections wakes them. Destroying the group
    # is not enough while anything refers to it or a collective is pending.
    _hang_up(job.sockets | (_sockets() - before))
    _leave_group(job)
    put_failure(store, failure)


def _join_group(job: _Job, store: Store, group: tuple[World, float]) -> None:
    """Make the default process group the one asked for: reuse it, or destroy it and make the new one."""
    if dist.is_initialized() and job.group in (None, group):
        return
    _leave_group(job)
    job.group = group
    world, timeout = group
    _agree(job, store, world)
    before = _sockets()
    try:
        join_group(PrefixStore("group", store), job.rank, job.local_rank, world, timeout)
    finally:
        job.sockets = _sockets() - before
    # No rank goes on, perhaps to fail and hang up, while others are still connecting.
    store.add("joined", 1)
    await_count(store, "joined", world.ranks, time.monotonic() + timeout)


def _agree(job: _Job, store: Store, world: World) -> None:
    """Check that all ranks, each by its own machine's hardware, have chosen the same backend.

    Raises:
        ValueError: they have not; on every rank, in the same words.
    """
    store.set(f"world{job.rank}", f"{world.backend} on {socket.gethostname()} ({world.why})")
    chosen = [store.get(f"world{rank}").decode() for rank in range(world.ranks)]
    for rank, choice in enumerate(chosen):
        if choice.split()[0] != chosen[0].split()[0]:
            raise ValueError(f"rank 0 chose {chosen[0]}, rank {rank} chose {choice}: ask for one, as by --device cpu")


def _leave_group(job: _Job) -> None:
    """Destroy the default process group, if there is one."""
    job.group = None
    if dist.is_initialized():
        gc.collect()
        # In a thread, because gloo first waits for collectives that are pending and may never end.
        destroying = threading.Thread(target=dist.destroy_process_group, daemon=True)
        destroying.start()
        destroying.join(2.0)


def _sockets() -> set[tuple[int, int]]:
    """The sockets that this process has open, as (file descriptor, inode)."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _hang_up(sockets: set[tuple[int, int]]) -> None:
    """Shut down those TCP connections that are still open; to the peers it looks as if this process had died."""
    for descriptor, _ in sockets & _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():  # not a listener
                connection.shutdown(socket.SHUT_RDWR)
