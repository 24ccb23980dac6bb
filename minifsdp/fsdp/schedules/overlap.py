"""Communication concurrent with compute: separate streams on CUDA, and reductions that are not waited for at once.

             forward              backward
    link     g0   g1   g2   .     g2   g1 r2   g0 r1      r0
    compute     0    1    2          2       1       0

If the host runs ahead of its device, it has issued unit 1's gather while unit 0 is being computed, and on a separate
stream this gather starts at once. If the host itself computes (CPU), nothing is issued early in forward, and only
reductions overlap. Prefetching closes the remaining gaps (prefetch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from minifsdp.device import current_stream, new_stream, on_stream
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class OverlapSchedule(SyncSchedule):
    """Gathers and reductions run concurrently with the computation.

    A link carries one message at a time. When a unit's backward ends, its reduction and the next unit's gather both
    have to be issued. The computation that follows needs only the gather, so the gather is issued first, and the
    reduction is *due*.

    Attributes:
        reductions: the number of reductions that may be in progress before the host waits for the oldest one and
            releases its buffers; 0: each is waited for at once; None: any number, until the end of backward.
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
