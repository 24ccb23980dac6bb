"""Bandwidth of the collectives in bytes per second, counted as nccl-tests counts them.

For S bytes in t seconds, the algorithm bandwidth is S / t. The bus bandwidth divides the bytes that each rank sends in
a ring by t, so it compares with the rate of a link for any N: (N - 1) / N of S / t for an all-gather and a
reduce-scatter, 2 (N - 1) / N for an all-reduce (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). S is the whole
tensor: all shards of a gather, the input of a reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psutil
import torch

from minifsdp import comm, device
from minifsdp.comm import Call
from minifsdp.instruments.launch import rank_device

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
KIB, MIB = 2**10, 2**20
CPU_SIZES = tuple(64 * KIB * 4**power for power in range(6))  # to 64 MiB
GPU_SIZES = (*CPU_SIZES, 256 * MIB, 1024 * MIB)
MOST, FEWEST = 10, 3  # repetitions
COPY = 64 * MIB  # bytes of the plain copy

Samples = dict[str, dict[int, list[float]]]  # operation -> bytes -> seconds of each repetition


def rates(operation: str, payload: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth, bytes per second."""
    call = Call(operation, operation, "", 0, payload, ranks)
    return payload / seconds, call.wire / seconds


def measure(seconds: float, tell: Callable[[str], Any] = lambda name: None) -> dict[str, Any]:
    """Time the collectives on this rank, the small sizes first, until time or memory runs out.

    A repetition begins when all ranks are ready and ends when this rank's device has finished. On a GPU it includes
    the host's time for one call, which matters for small messages.

    Args:
        seconds: time limit; the ranks agree on when to stop.
        tell: called with the name of each measurement before it starts.

    Returns:
        "samples", and "copy": seconds of plain copies of `COPY` bytes, on CPU.
    """
    where, end = rank_device(), time.perf_counter() + seconds
    copied = [] if where.type == "cuda" else _copy(where)
    samples: Samples = {operation: {} for operation in OPERATIONS}
    room = -_agreed(-_room(where))
    for size in GPU_SIZES if where.type == "cuda" else CPU_SIZES:
        ranks = comm.world().size()
        full = torch.zeros(max(size // 4 // ranks, 1) * ranks, device=where)
        for operation in OPERATIONS:
            tell(f"{operation}, {size / KIB:,.0f} KiB")
            once = max(_timed(operation, full), 1e-7)  # also connects
            time_left = -_agreed(time.perf_counter() - end)
            repetitions = int(min(MOST, time_left / (2 * len(OPERATIONS)) / _agreed(once)))
            if repetitions < FEWEST:
                return {"samples": samples, "copy": copied}
            samples[operation][4 * full.numel()] = [_timed(operation, full) for _ in range(repetitions)]
        if 4 * size > room:
            break
    return {"samples": samples, "copy": copied}


def results(ranks: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Per operation and size, the median repetition, each timed by its slowest rank.

    Args:
        ranks: the result of `measure` on each.
    """
    table: dict[str, list[dict[str, Any]]] = {}
    for operation in OPERATIONS:
        table[operation] = []
        for size in ranks[0]["samples"][operation]:
            slowest = [max(each) for each in zip(*(rank["samples"][operation][size] for rank in ranks), strict=True)]
            seconds = median(slowest)
            algorithm, bus = rates(operation, size, len(ranks), seconds)
            row = {"bytes": size, "seconds": seconds, "algorithm": algorithm, "bus": bus, "repetitions": len(slowest)}
            table[operation].append(row)
    return table


def copy_rate(ranks: Sequence[dict[str, Any]]) -> float | None:
    """Bytes per second that a plain copy moves on the slowest rank while all of them copy; None on GPUs."""
    return min(COPY / median(rank["copy"]) for rank in ranks) if ranks[0]["copy"] else None


def _timed(operation: str, full: torch.Tensor) -> float:
    """Seconds of one collective on this rank, once all ranks are ready."""
    group = comm.world()
    part = full.chunk(group.size())[group.rank()]
    _align(full.device)
    start = time.perf_counter()
    match operation:
        case "all_gather":
            handle = comm.all_gather(full, part, group)
        case "reduce_scatter":
            handle = comm.reduce_scatter(part, full, group)
        case _:
            handle = comm.all_reduce(full, group)
    handle.wait()
    device.synchronize(full.device)
    return time.perf_counter() - start


def _copy(where: torch.device) -> list[float]:
    source, target = (torch.zeros(COPY // 4, device=where) for _ in range(2))
    seconds = []
    for _ in range(6):
        _align(where)
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first one faults the pages in


def _room(where: torch.device) -> float:
    """Bytes that this rank's tensors may take: a part of the free memory, since ranks may share the device."""
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0] / 2 / comm.world().size()
    return float(psutil.virtual_memory().available / 4 / comm.world().size())


def _agreed(number: float) -> float:
    """The largest of the ranks' numbers."""
    tensor = torch.tensor([number], dtype=torch.float32, device=rank_device())
    comm.all_reduce(tensor, comm.world(), op=comm.MAX).wait()
    return float(tensor)


def _align(where: torch.device) -> None:
    comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()
    device.synchronize(where)
