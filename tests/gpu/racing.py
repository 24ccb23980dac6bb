"""A training step for the CUDA stream sanitizer to watch, with all its waits or without one of them.

What it sees (torch/cuda/_sanitizer.py): each operator that torch dispatches, with the stream that is current and the
addresses that it reads and writes; each event that is recorded and waited for; each block that the caching allocator
hands out or takes back. So:

* NCCL's kernels run on a stream that is never current; of a collective it sees what torch dispatches, on the stream
  that issues it, which is the wrong one. Here a `WitnessLink` carries the collectives: on a stream of its own it lets
  operators read what the collective reads and write what it writes. Values stay as they are.
* A tensor is the address of its first element. Of a flat buffer's views only the first is seen to be that buffer; that
  is enough to see each gather, use, gradient and reduction of each unit.
* A block that is given back is forgotten, with who has read it. A buffer that is freed under a running kernel, what
  `record_stream` protects from, is invisible here: that is what the comparison of values is for.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from small_model import RATE, batches, make_model, my_share, step
from torch.optim import SGD

from minifsdp import comm, device
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.fsdp import (
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    SyncSchedule,
)
from minifsdp.gpt import Block
from minifsdp.instruments.launch import rank_device

SCHEDULES: dict[str, Any] = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "prefetch": PrefetchSchedule,
    "limit": RateLimitedSchedule,
}


class WitnessLink:
    """Carries collectives on a stream of its own, first in, first out, in the sight of who watches operators."""

    def __init__(self) -> None:
        self.device = rank_device()
        self.stream = device.new_stream(self.device)

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> Arrival:
        written, *read = (arg for arg in collective.args if isinstance(arg, torch.Tensor))  # type: ignore[attr-defined]
        self.stream.wait_event(record(self.device))  # what it reads is written by then
        with device.on_stream(self.stream):
            if dist.get_backend() != "fake":  # whose copies would be seen at addresses inside the buffers
                collective().wait()
            for tensor in read:
                tensor.clone()
            written.mul_(1)
            return Arrival(call.op, self.device)


class Arrival:
    """After `wait` the current stream sees what the link's stream had done when this was made."""

    def __init__(self, op: str, where: torch.device) -> None:
        self.op, self.device, self.event = op, where, record(where)

    def wait(self) -> None:
        device.current_stream(self.device).wait_event(self.event)


def record(where: torch.device) -> Any:
    """A new event on the current stream."""
    event = device.new_event(where)
    event.record()
    return event


# Waits that can be forgotten


@contextmanager
def forget_none(schedule: Any) -> Iterator[None]:
    yield


@contextmanager
def forget(schedule: Any, is_it: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Leave out those calls of `Stream.wait_stream` of which `is_it(stream, other)`.

    Raises:
        AssertionError: there was none: the schedule waits in another way than this test knows.
    """
    kind = type(schedule.gather_stream)
    really, forgotten = kind.wait_stream, 0

    def wait_stream(stream: Any, other: Any) -> None:
        nonlocal forgotten
        if is_it(stream, other):
            forgotten += 1
        else:
            really(stream, other)

    with patch.object(kind, "wait_stream", wait_stream):
        yield
    assert forgotten, "no wait was forgotten"


def gathers_for_the_optimizer(schedule: Any) -> Any:
    return forget(schedule, lambda stream, other: stream == schedule.gather_stream)


@contextmanager
def compute_for_gathers(schedule: Any) -> Iterator[None]:
    really, forgotten = Arrival.wait, 0

    def wait(arrival: Arrival) -> None:
        nonlocal forgotten
        if arrival.op == "all_gather":
            forgotten += 1
        else:
            really(arrival)

    with patch.object(Arrival, "wait", wait):
        yield
    assert forgotten, "no wait was forgotten"


def reductions_for_compute(schedule: Any) -> Any:
    return forget(schedule, lambda stream, other: stream == schedule.reduce_stream)


def the_optimizer_for_reductions(schedule: Any) -> Any:
    return forget(schedule, lambda stream, other: other == schedule.reduce_stream)


FORGETTING: dict[str, Any] = {
    "gathers for the optimizer": gathers_for_the_optimizer,
    "compute for gathers": compute_for_gathers,
    "reductions for compute": reductions_for_compute,
    "the optimizer for reductions": the_optimizer_for_reductions,
}

BEFORE = {  # what the operator that comes too early should have waited for
    "gathers for the optimizer": "aten::add_",  # of the update to a shard
    "compute for gathers": "aten::mul_",  # the link's, into the gathered parameters
    "reductions for compute": "aten::copy_",  # of a gradient into the buffer that is reduced
    "the optimizer for reductions": "aten::mul_",  # the link's, into a shard's gradient
}


def find_races(schedule: Any, forgetting: Callable[[Any], Any], watched: Callable[[], Any]) -> list[tuple[str, str]]:
    """Three steps on a `WitnessLink`: the first learns the order of the units, the others meet the optimizer's writes.

    Args:
        schedule: of FSDP.
        forgetting: takes the schedule once it is there; surrounds the last two steps.
        watched: the sanitizer, on while everything from the first allocation runs.

    Returns:
        nothing, or of the first operator that comes too early its name, and that of the one before which it should not
        run, for each tensor.
    """
    from torch.cuda._sanitizer import CUDASanitizerErrors  # to import it is to have torch tell of all events

    with redirect_stderr(io.StringIO()), watched():  # what it prints are the stacks of both, some hundred lines
        try:
            train(schedule, forgetting)
        except CUDASanitizerErrors as found:
            errors: list[Any] = found.errors
            return [(each.current_access.operator.name, each.previous_access.operator.name) for each in errors]
    return []


def train(schedule: Any, forgetting: Callable[[Any], Any]) -> None:
    model = FullyShardedDataParallel(make_model(), auto_wrap_policy={Block}, schedule=schedule)
    trainer = Trainer(model, SGD(model.parameters(), RATE, foreach=False))
    first, *others = map(my_share, batches(3))
    comm.link = WitnessLink()
    try:
        step(trainer, first)
        with forgetting(model._engine.schedule):  # type: ignore[union-attr]
            for batch in others:
                step(trainer, batch)
    finally:
        comm.link = None
