"""The doctor's ranks: start them, check and time their collectives, and explain a failure."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from minifsdp import comm
from minifsdp.course.doctor.bandwidth import CPU_SIZES, GPU_SIZES, OPERATIONS, measure
from minifsdp.course.doctor.collectives import CASES, DTYPES, check_collectives
from minifsdp.course.doctor.machine import Finding
from minifsdp.instruments.launch import RankError, launch, report
from minifsdp.instruments.launch.world import World, in_words

CHECKS = "ranks and collectives"
SHARE_OF_TIME, SHARE_OF_MEASURING = 0.6, 0.25  # of the time: for all the work of the ranks, and for measuring


@dataclass
class Ranks:
    """The result of all ranks.

    Attributes:
        findings: of all machines and of the ranks.
        measured: the result of `bandwidth.measure` on each rank; empty if it was not reached.
    """

    findings: list[Finding] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)


def ask_ranks(
    world: World,
    findings: list[Finding],
    seconds: float,
    progress: Callable[[str, int, int], None],
    replaced: Mapping[str, Callable[..., Any]] | None = None,
) -> Ranks:
    """Start the world's ranks, check their collectives, then time them.

    Args:
        world: of the ranks.
        findings: this machine's; those of other machines and of the ranks are added.
        seconds: time limit, starting included.
        progress: called with the current step, the number of steps done, and their total.
        replaced: collectives to check instead of those of `minifsdp.comm`.
    """
    steps = [""]
    total = len(CASES) * len(DTYPES) + len(OPERATIONS) * len(GPU_SIZES if world.gpus else CPU_SIZES)

    def hear(rank: int, step: str) -> None:
        if step not in steps:
            steps.append(step)
        progress(step, len(steps) - 1, total)

    progress("starting the ranks", 0, total)
    own = [finding for finding in findings if not finding.ok]
    try:
        with _within(seconds):
            ranks = launch(
                examine,
                world.ranks,
                own,
                SHARE_OF_MEASURING * seconds,
                replaced,
                timeout=SHARE_OF_TIME * seconds,
                backend=world.backend,
                share_gpu=world.shares_gpu,
                on_report=hear,
            )
    except (RankError, RuntimeError, OSError) as error:
        return Ranks([*findings, _failure(world, error, steps)])
    measured = [rank["measured"] for rank in ranks if rank["measured"]]
    return Ranks([*findings, *_from_others(ranks), _verdict(world, ranks)], measured)


def examine(
    own: Sequence[Finding], seconds: float, replaced: Mapping[str, Callable[..., Any]] | None
) -> dict[str, Any]:
    """Check and time the collectives on one rank.

    Args:
        own: failed checks of the machine on which this rank's process was started.
        seconds: time limit for measuring.
        replaced: collectives to check instead of those of `minifsdp.comm`.

    Returns:
        "host"; "own"; "wrong", a line for each wrong collective; "measured", from `bandwidth.measure`.
    """
    wrong = list(check_collectives(replaced, report))
    everyones = comm.gather_objects(bool(wrong), comm.world())
    measured = {} if any(everyones) or dist.get_world_size() == 1 else measure(seconds, report)
    return {"host": socket.gethostname(), "own": list(own), "wrong": wrong, "measured": measured}


def _failure(world: World, error: Exception, steps: Sequence[str]) -> Finding:
    """The finding for ranks that raised, died, or gave no answer."""
    last = f" (last: {steps[-1]})" if steps[-1] else " (before the first collective)"
    said = str(error).splitlines()[0]
    if "busy or unavailable" in said:
        cure = (
            "if the GPU is in exclusive mode (nvidia-smi -q -d COMPUTE), end the process that has it, or let an "
            "administrator run `nvidia-smi -c DEFAULT`; if several MPS daemons serve the GPU, leave one"
        )
        return Finding(CHECKS, False, f"{said}{last}", cure)
    cures = [
        "every rank must reach the others: check its interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and firewall"
    ]
    if world.gpus:
        cures.append("NCCL_DEBUG=INFO shows each step of NCCL")
    return Finding(CHECKS, False, f"{said}{last}", "; ".join(cures))


def _from_others(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """The faults of other machines than rank 0's, each once."""
    found = {(rank["host"], each.name): each for rank in ranks for each in rank["own"]}
    first = ranks[0]["host"]
    return [
        Finding(f"{name} of {host}", False, each.what, each.cure)
        for (host, name), each in found.items()
        if host != first
    ]


def _verdict(world: World, ranks: Sequence[dict[str, Any]]) -> Finding:
    """The finding for the collectives' results."""
    wrong = [each for rank in ranks for each in rank["wrong"]]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        cure = "torch's installation is at fault: reinstall it, or try another version"
        return Finding(CHECKS, False, f"{wrong[0]}{more}", cure)
    names = sorted({str(dtype).removeprefix("torch.") for dtype in DTYPES}, reverse=True)
    what = f"{in_words(world.ranks)}, {len(CASES)} operations in {' and '.join(names)}: all results are correct"
    return Finding(CHECKS, True, what)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the time is up, if this is the main thread; `launch` waits longer for ranks to start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError(f"the ranks have not answered within {seconds:.0f} s")

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, end)
    left, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # the caller's own alarm
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 0.01))
