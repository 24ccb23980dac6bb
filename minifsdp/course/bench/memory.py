"""The memory of a contestant at the peak of a step, alone on the device, measured in the same way for all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from minifsdp import device
from minifsdp.batch import Batch
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.instruments.watch.cpu_memory import WINDOW, allocator_peaks
from minifsdp.instruments.watch.step import take_step
from minifsdp.instruments.watch.storages import storages_in
from minifsdp.private import memory_snapshot, record_memory_history

WARM_UP = 2  # steps before the measured ones: one creates the optimizer's state, one lets caches settle
WATCHDOG_SECONDS = 0.3  # NCCL's watchdog checks ten times a second which collectives have finished
MEASURED = 2  # steps over which the peak is taken on CUDA
WINDOWS = 6  # steps on CPU, each with a peak of its own; the lowest counts

ON_CUDA = "peaks of torch's caching allocator on the rank that holds most, without blocks older than its model"
ON_CPU = (
    "peaks of torch's CPU allocator from torch.profiler's events, on the rank that holds most; "
    f"the lowest of {WINDOWS} steps, because gloo's threads may release a buffer late"
)


def measure_memory(build: Callable[[], Trainer], batch: Batch, where: torch.device) -> dict[str, int]:
    """Measure the allocator's peaks in a step, in bytes, without what was allocated before the model was built.

    Args:
        build: makes a model to which nothing else refers, and wraps it.

    Returns:
        "allocated_peak"; on CUDA also "reserved_peak" and "alloc_retries", the number of times that memory ran out.
    """
    gc.collect()  # a wrapper and its module form a reference cycle
    return (_on_cuda if where.type == "cuda" else _on_cpu)(build, batch, where)


def _on_cpu(build: Callable[[], Trainer], batch: Batch, where: torch.device) -> dict[str, int]:
    with allocator_peaks() as peaks:
        trainer = build()
        for _ in range(WARM_UP):
            take_step(trainer, batch, where)
        for _ in range(WINDOWS):
            with record_function(WINDOW):
                take_step(trainer, batch, where)
    release(trainer)
    return {"allocated_peak": min(peaks)}


def _on_cuda(build: Callable[[], Trainer], batch: Batch, where: torch.device) -> dict[str, int]:
    _let_go_of_collectives(where)
    torch.cuda.empty_cache()
    empty = device.memory_stats(where)
    record_memory_history(True)
    try:
        trainer = build()
        for _ in range(WARM_UP):
            take_step(trainer, batch, where)
        _let_go_of_collectives(where)
        torch.cuda.reset_peak_memory_stats(where)
        warm, since = device.memory_stats(where), time.time_ns() // 1000
        for _ in range(MEASURED):
            take_step(trainer, batch, where)
        device.synchronize(where)
        full = device.memory_stats(where)
        traces = memory_snapshot()["device_traces"]
    finally:
        record_memory_history(False)
    release(trainer)
    return {
        "allocated_peak": own_peak(traces[torch.cuda.current_device()], since),
        "reserved_peak": full["reserved_peak"] - empty["reserved"],
        "alloc_retries": full["alloc_retries"] - warm["alloc_retries"],
    }


def _let_go_of_collectives(where: torch.device) -> None:
    """Free the tensors of finished collectives without a `Work.wait`.

    Torch's DDP waits for futures instead. NCCL's process group then keeps the tensors until its watchdog has noticed
    the end of the collective, and frees them in the next one (`shelvesToUnstash_` in torch's ProcessGroupNCCL.hpp).
    Among them are DDP's first buckets, which it replaces after one backward.
    """
    device.synchronize(where)
    time.sleep(WATCHDOG_SECONDS)
    dist.all_reduce(torch.zeros(1, device=where))
    device.synchronize(where)


def own_peak(trace: Sequence[Mapping[str, Any]], since: int) -> int:
    """The most bytes, as requested, of blocks allocated within the trace.

    Older blocks don't count: other contestants may have left them, to be freed at any time.

    Args:
        trace: a GPU's entries in the allocator's history.
        since: the time from which the peak is taken, in microseconds since 1970.
    """
    mine: dict[int, int] = {}
    held = peak = 0
    for entry in trace:
        if entry["action"] == "alloc":
            mine[entry["addr"]] = entry["size"]
            held += entry["size"]
        elif entry["action"] == "free_requested":
            held -= mine.pop(entry["addr"], 0)
        if entry["time_us"] >= since:
            peak = max(peak, held)
    return peak


def release(trainer: Trainer) -> None:
    """Free a model's memory, even if the model stays alive.

    Gradient hooks refer to the FSDP units that they serve, torch's (FSDP1) and ours, in cycles through autograd that
    Python's garbage collector cannot see.
    """
    trainer.optimizer.zero_grad()
    for p in trainer.model.parameters():
        for storage in storages_in(p):
            storage.resize_(0)
