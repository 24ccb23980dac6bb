"""The host waits for the device nowhere in a step, but for the rate limiter, and there as often as its rule says.

Counted in a trace; and with `torch.cuda.set_sync_debug_mode("error")`, which makes torch's own copies and reads that
synchronize raise (not `synchronize()` itself, nor what torch.distributed does).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import ON_GPU, GpuChecks, Way
from small_model import LAYERS, batches, make_model, my_share, step
from torch.profiler import ProfilerActivity, profile, record_function
from trace_counts import ITEM, host_waits

from minifsdp import device
from minifsdp.batch import Batch
from minifsdp.course.ladder.rungs import RUNGS, Trainer
from minifsdp.instruments.launch import rank_device

pytestmark = ON_GPU
check = GpuChecks(__name__)

LIMITER = "cudaEventSynchronize"
WARM_UP = 3  # steps: the optimizer's state is made, communicators connect, the limiter's queue fills


def waits_of_the_limiter(rung: str) -> dict[str, int]:
    """Its rule: before a gather it waits for the oldest free as long as there are k, whatever k.

    Once its queue is full each free makes one wait due, and each block is freed twice a step: after its forward and
    after its backward. The root stays whole in between and does not count.
    """
    return {LIMITER: 2 * LAYERS} if rung in ("fsdp-limit", "fsdp2") else {}


def host_waits_in_a_step(trainer: Trainer, take: Callable[[Trainer, Batch], Any] = step) -> Counter[str]:
    """Of this rank, in one step after `WARM_UP`, with its batch on the device already."""
    *first, last = map(my_share, batches(WARM_UP + 1))
    for batch in first:
        step(trainer, batch)
    if rank_device().type == "cpu":
        with _counted() as found:
            take(trainer, last)
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            with record_function("the step"):
                take(trainer, last)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return host_waits(json.loads(path.read_text())["traceEvents"], "the step")


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """What the host of a device with queues would have waited for: on CPU every event has happened."""
    found: Counter[str] = Counter()

    def watch(command: device.Command) -> None:
        if command.verb == "synchronize":
            found[LIMITER if isinstance(command.subject, device.CpuEvent) else "cudaDeviceSynchronize"] += 1

    device.command_observers.append(watch)
    try:
        yield found
    finally:
        device.command_observers.remove(watch)


@check(rung=list(RUNGS))
def a_step_has_no_wait_but_the_limiters(rung: str) -> dict[str, float]:
    found = host_waits_in_a_step(RUNGS[rung].build(make_model(), 2))
    assert found == waits_of_the_limiter(rung)
    return {f"host_waits.{rung}.{name}": count for name, count in found.items()}


@check(rung=list(RUNGS))
def torch_reports_no_synchronization_in_a_step(rung: str) -> None:
    trainer = RUNGS[rung].build(make_model(), 2)
    *first, last = map(my_share, batches(WARM_UP + 1))
    for batch in first:
        step(trainer, batch)
    with errors_on_synchronization():
        step(trainer, last)


@contextmanager
def errors_on_synchronization() -> Iterator[None]:
    if rank_device().type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def nosy_step(trainer: Trainer, batch: Batch) -> None:
    """A step that looks at its loss."""
    step(trainer, batch).item()


@check()
def a_loss_that_is_looked_at_is_found() -> None:
    trainer = RUNGS["fsdp"].build(make_model(), 2)
    found = host_waits_in_a_step(trainer, nosy_step)
    assert found[ITEM] == 1
    assert found["cudaStreamSynchronize"] >= 1
    with errors_on_synchronization(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        nosy_step(trainer, my_share(batches(1)[0]))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str, world: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, world, record_property)
