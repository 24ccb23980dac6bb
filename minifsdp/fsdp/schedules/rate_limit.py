"""At most `limit` unsharded units, whatever the depth of prefetching and the lead of the host (FSDP paper 3.4).

Units can accumulate for two reasons. First, a deep prefetch gathers many units; gathers above the limit are postponed
until a unit is freed. Second, on CUDA the host runs ahead: it has freed unit i and gathers unit i + 2 long before the
device has finished with unit i. The allocator cannot reuse the memory of unit i yet, so it takes new memory, or stalls
everything to find some. So before a gather, the host waits until an earlier free has happened on the device
(torch/distributed/fsdp/_limiter_utils.py). If the host itself computes, a free has happened as soon as it is issued, so
there is nothing to wait for, and waiting for a future free would never end.

`record_stream` (device.py) holds back memory until the device has finished with it. The host may free the memory at
once, and need not know when it can be used. The alternative, which needs no limiter, is to hold a reference: keep the
buffer until the stream that allocated it has waited for its last reader, and free it then. The allocator reuses it in
the order of that stream, and the host does not wait. FSDP2 does this
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `AllGatherState` and `ReduceScatterState`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from minifsdp.device import current_stream
from minifsdp.fsdp.schedules.prefetch import PRE, BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, Unit


class RateLimitedSchedule(PrefetchSchedule):
    """Prefetching with a limit on the number of unsharded units.

    Units that stay unsharded from forward to backward (the root, SHARD_GRAD_OP) do not count: they are not freed.

        Args:
        forward, backward, depth: as for `PrefetchSchedule`.
        limit: the largest number of units gathered and not yet freed, including the one being computed. Gathering
            `depth` units ahead needs a limit of depth + 1; otherwise the last of these gathers are postponed. Nested
            units that are computed at the same time may exceed the limit.
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
            raise ValueError(f"limit={limit}: at least the unit that computes has to be unsharded, so 1 is the least")
        super().__init__(units, forward, backward, depth)
        # Two unsharded gradients at most, one reduced, one computed: in the host's order. On a device the host does not
        # wait for a reduction, and the allocator may hold on to more of them, until their frees have happened.
        self.reductions = 1
        self.limit = limit
        self.unsharded: list[Unit] = []  # gathered and not freed
        self.deferred: list[Unit] = []  # to be gathered when one is freed
        self.frees: deque[Any] = deque()  # one event per free that the device may not have come to

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED and unit.freed_after_forward:
            self.make_room()
            self.unsharded.append(unit)
            while len(self.frees) >= self.limit:
                self.frees.popleft().synchronize()  # the host waits: this is the limiter
        super().gather(unit)

    def make_room(self) -> None:
        """A unit is needed that the order did not foresee: free prefetched units that no module is using."""
        for unit in [u for u in self.unsharded if u.state is GATHERING]:
            if len(self.unsharded) >= self.limit:
                self.release(unit)

    def free(self, unit: Unit) -> None:
        self.release(unit)
        self.prefetch(self.deferred)

    def release(self, unit: Unit) -> None:
        super().free(unit)
        if unit in self.unsharded:
            self.unsharded.remove(unit)
            self.frees.append(current_stream(self.device).record_event())

    def prefetch(self, units: list[Unit]) -> None:
        self.deferred = [unit for unit in units[: self.depth] if unit.state is SHARDED]
        while self.deferred and len(self.unsharded) < self.limit:
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
