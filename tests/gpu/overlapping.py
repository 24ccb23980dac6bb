"""How long a step takes whose messages take a time that is known, beside its computation and its messages alone.

An `EmulatedLink` delays each message on a stream of its own, by a kernel that does nothing. The delay is chosen so that
all messages take about as long as all computation does here: then a step in which nothing overlaps takes their sum, and
one in which all does about half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from heavy_model import Layers, Size, Stack
from torch import Tensor, nn
from torch.optim import SGD

from minifsdp import comm, device
from minifsdp.comm import Call
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.link.emulated import EmulatedLink

REPEATS = 5
UNBOUNDED = 1e15  # bytes per second: of a message only its latency counts


class Times(NamedTuple):
    """Milliseconds of the device, medians."""

    compute: float
    communication: float
    both: float

    @property
    def gain(self) -> float:
        """From 1, where nothing overlaps, up to 2."""
        return (self.compute + self.communication) / self.both

    def figures(self, title: str) -> dict[str, float]:
        """For the record, under names such as "overlap.both_ms"."""
        return {f"{title}.{name}_ms": value for name, value in self._asdict().items()}


def measure(schedule: Any, size: Size) -> Times:
    """Of FSDP on this schedule."""
    x, where = size.batch(), rank_device()
    compute = _milliseconds(_steps(Stack(size).to(where), x))
    fsdp = FullyShardedDataParallel(Stack(size).to(where), auto_wrap_policy={Layers}, schedule=schedule)
    take_step = _steps(fsdp, x)
    take_step()
    with comm.record() as calls:
        take_step()
    with EmulatedLink(compute / 1e3 / len(calls), UNBOUNDED):
        both = _milliseconds(take_step)
        communication = _milliseconds(_messages(calls))
    return Times(compute, communication, both)


def _steps(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = SGD(model.parameters(), 0.01)

    def take_step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return take_step


def _messages(calls: list[Call]) -> Callable[[], None]:
    """The collectives of a step, with nothing to compute in between."""
    group, where = comm.world(), rank_device()
    full = torch.zeros(max(call.payload for call in calls) // 4, device=where)
    shard = torch.zeros(full.numel() // group.size(), device=where)

    def send() -> None:
        for call in calls:
            whole, part = full[: call.payload // 4], shard[: call.payload // 4 // group.size()]
            if call.op == "all_gather":
                comm.all_gather(whole, part, group).wait()
            else:
                comm.reduce_scatter(part, whole, group).wait()

    return send


def _milliseconds(run: Callable[[], None]) -> float:
    """Between two events of the compute stream around `run`, the median of several after one that does not count."""
    where, times = rank_device(), []
    for _ in range(1 + REPEATS):
        device.synchronize(where)
        start, end = device.new_event(where), device.new_event(where)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:])
