"""At most `limit` units whole at a time, however deep the prefetch and however far ahead the host (FSDP paper 3.4).

Two things let units pile up. A deep prefetch gathers many: over the cap it is put off until a unit is freed. And on
CUDA the host runs ahead: it has freed unit i and gathers unit i + 2 long before the device is done with unit i, whose
memory the allocator therefore cannot hand out yet; it takes new memory instead, or stalls everything to find some. So
before a gather the host waits until an older free has happened on the device
(torch/distributed/fsdp/_limiter_utils.py). Where the host is the compute a free has happened once it is issued: there
is nothing to wait for, and waiting for one to come would be for ever.

What holds memory back until the device is done with it is `record_stream` (device.py): the host may free at once, and
need not say when the memory can be used. A held reference would serve as well, and need no limiter: keep the buffer
until the stream that allocated it has been told to wait for its last reader, and free it then. The allocator hands it
on in that stream's order, without a host that waits. That is FSDP2's way (torch/distributed/fsdp/_fully_shard/
_fsdp_param_group.py, `AllGatherState` and `ReduceScatterState`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from minifsdp.device import current_stream
from minifsdp.fsdp.schedules.prefetch import PRE, BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, Unit


class RateLimitedSchedule(PrefetchSchedule):
    """Prefetching under a cap.

    Units that stay whole from forward to backward (the root, SHARD_GRAD_OP) do not count: no free is to be expected
    of them.

        Args:
        forward, backward, depth: as for `PrefetchSchedule`.
        limit: units gathered and not yet freed, at most, the one that computes included: `depth` units ahead need a
            limit of depth + 1, or the last of them are put off. Nested units that compute at the same time may exceed
            it.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        forward: bool = True,
        backward: BackwardPrefetch | None = PRE,
        depth: int | None = 1,
        limit: int = 2,
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: at least the unit that computes has to be whole, so 1 is the least")
        super().__init__(units, forward, backward, depth)
        # Two unsharded gradients at most, one reduced, one computed: in the host's order. On a device the host does not
        # wait for a reduction, and the allocator may hold on to more of them, until their frees have happened.
        self.reductions = 1
        self.limit = limit
        self.whole: list[Unit] = []  # gathered and not freed
        self.deferred: list[Unit] = []  # to be gathered when one is freed
        self.frees: deque[Any] = deque()  # one event per free that the device may not have come to

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED and unit.freed_after_forward:
            self.make_room()
            self.whole.append(unit)
            while len(self.frees) >= self.limit:
                self.frees.popleft().synchronize()  # the host waits: this is the limiter
        super().gather(unit)

    def make_room(self) -> None:
        """A unit is needed that the order did not foresee: one that was prefetched and that nobody uses goes."""
        for unit in [u for u in self.whole if u.state is GATHERING]:
            if len(self.whole) >= self.limit:
                self.release(unit)

    def free(self, unit: Unit) -> None:
        self.release(unit)
        self.prefetch(self.deferred)

    def release(self, unit: Unit) -> None:
        super().free(unit)
        if unit in self.whole:
            self.whole.remove(unit)
            self.frees.append(current_stream(self.device).record_event())

    def prefetch(self, units: list[Unit]) -> None:
        self.deferred = [unit for unit in units[: self.depth] if unit.state is SHARDED]
        while self.deferred and len(self.whole) < self.limit:
            self.gather(self.deferred.pop(0))

    def begin_forward(self) -> None:
        self.deferred = []
        super().begin_forward()

    def end_forward(self) -> None:
        self.deferred = []
        super().end_forward()

    def end_backward(self) -> None:
        self.deferred = []
        super().end_backward()
