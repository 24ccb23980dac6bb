"""Communication beside compute: streams of its own on CUDA, and reductions that nobody waits for at once.

             forward              backward
    link     g0   g1   g2   .     g2   g1 r2   g0 r1      r0
    compute     0    1    2          2       1       0

Where the host runs ahead of its device it has issued unit 1's gather while unit 0 computes, and on another stream that
gather starts at once. Where the host is the compute (CPU) nothing is issued early in forward, and only reductions
overlap: the bubbles that remain are what prefetching closes (prefetch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from minifsdp.device import current_stream, new_stream, on_stream
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class OverlapSchedule(SyncSchedule):
    """Gathers and reductions run beside the computation.

    A link carries one message at a time. When a unit's backward ends, its reduction and the next unit's gather are
    both to be issued, and the computation that follows needs the gather only: so that goes first, and the reduction
    is *due*.

    Attributes:
        reductions: how many may be under way before the host waits for the oldest and gives its buffers back; 0: each
            is waited for at once; None: any number, until the end of backward.
    """

    reductions: int | None = 1

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units)
        self.device = units[0].device
        self.gather_stream = new_stream(self.device, priority=-1)
        self.reduce_stream = new_stream(self.device, priority=-1)
        self.written: Any = None  # an event after what the optimizer queues; None: there is more to wait for
        self.due: Unit | None = None  # its gradient is complete, its reduction not issued
        self.reducing: deque[Unit] = deque()  # issued and not waited for, the oldest first

    def begin_forward(self) -> None:
        super().begin_forward()
        self.follow_optimizer()

    def follow_optimizer(self) -> None:
        """Gathers from now on come after what is queued so far, such as the optimizer's writes to the shards."""
        if self.written is None:
            self.gather_stream.wait_stream(current_stream(self.device))
        else:
            self.gather_stream.wait_event(self.written)
            self.written = None

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED:
            with on_stream(self.gather_stream):
                super().gather(unit)

    def issue_backward(self, unit: Unit) -> None:
        super().issue_backward(unit)
        self.issue_reduction()

    def reduce(self, unit: Unit) -> None:
        self.issue_reduction()
        self.due = unit

    def issue_reduction(self) -> None:
        """Start the reduction that is due."""
        if self.due is None:
            return
        while self.reducing and self.reductions is not None and len(self.reducing) >= self.reductions:
            self.finish_reduction()
        unit, self.due = self.due, None
        unit.pack_gradient()
        self.reduce_stream.wait_stream(current_stream(self.device))  # the gradient is computed first
        with on_stream(self.reduce_stream):
            unit.start_reduce()
            if self.reductions == 0:
                unit.wait_reduce()
                return
        self.reducing.append(unit)

    def finish_reduction(self) -> None:
        """Wait for the oldest reduction; on CUDA its stream does, and the host runs on."""
        with on_stream(self.reduce_stream):
            self.reducing.popleft().wait_reduce()

    def end_backward(self) -> None:
        self.issue_reduction()
        while self.reducing:
            self.finish_reduction()
        current_stream(self.device).wait_stream(self.reduce_stream)  # the optimizer reads the shards' gradients
        super().end_backward()
