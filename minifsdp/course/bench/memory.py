"""The memory of a contestant at the peak of a step, alone on the device, measured in the same way for all."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import record_function

from minifsdp import device
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.measure import take_step
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.course.watch.cpu_memory import WINDOW, allocator_peaks
from minifsdp.course.watch.storages import storages_in

WARM_UP = 2  # steps before the peak is taken: one makes the optimizer's state, one settles caches
MEASURED = 2  # steps of which it is taken on CUDA
WINDOWS = 6  # on CPU: steps of which each has a peak; the least counts

ON_CUDA = "peaks of torch's caching allocator, the rank that holds most"
ON_CPU = (
    "peaks of torch's CPU allocator by torch.profiler's events, the rank that holds most; "
    f"of {WINDOWS} steps the least, for gloo's threads may let go of a buffer late"
)


def measure_memory(build: Callable[[], Trainer], batch: Batch, where: torch.device) -> dict[str, int]:
    """Peaks of the allocator in a step, in bytes, less what was there before the model, which is the libraries'.

    Args:
        build: makes the model, which nobody else has seen, and puts the contestant on it.

    Returns:
        "allocated_peak"; and on CUDA "reserved_peak" and "alloc_retries", how often memory had run out.
    """
    gc.collect()  # a wrapper and its module refer to each other
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
    torch.cuda.empty_cache()
    empty = device.memory_stats(where)
    trainer = build()
    for _ in range(WARM_UP):
        take_step(trainer, batch, where)
    device.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    warm = device.memory_stats(where)
    for _ in range(MEASURED):
        take_step(trainer, batch, where)
    device.synchronize(where)
    full = device.memory_stats(where)
    release(trainer)
    return {
        "allocated_peak": full["allocated_peak"] - empty["allocated"],
        "reserved_peak": full["reserved_peak"] - empty["reserved"],
        "alloc_retries": full["alloc_retries"] - warm["alloc_retries"],
    }


def release(trainer: Trainer) -> None:
    """Give a model's memory back, even if it lives on.

    Hooks on gradients refer to the FSDP units that they serve, torch's (FSDP1) and ours, in cycles through autograd
    that Python's collector does not see.
    """
    trainer.optimizer.zero_grad()
    for p in trainer.model.parameters():
        for storage in storages_in(p):
            storage.resize_(0)
