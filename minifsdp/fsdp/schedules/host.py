"""The default where the host is the compute, on CPU: no queue runs ahead there, and the link's work takes its cores.

             forward       backward
    link     g0 g1 g2 .    g2 .  g1 r2 g0 r1 .  r0      FULL_SHARD
    compute     0  1  2       2        1     0
    link     g0 g1 g2 .       .  r2 .  r1 r0            SHARD_GRAD_OP
    compute     0  1  2       2     1  0

Forward gathers a unit ahead without being told to, as a host that runs ahead of its device does. Backward begins when
memory is fullest, with all activations alive: nothing is gathered beside its first unit, and nothing computes beside
that unit's reduction. A later reduction may be under way beside the next unit, which holds a second unsharded gradient,
only where more than that has just been freed: a unit that had stayed whole. See docs/speed.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifsdp.fsdp.schedules.prefetch import PRE, BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class HostSchedule(PrefetchSchedule):
    """One unit ahead, but for the first of a backward; reductions as memory allows.

    Args:
        backward: as for `PrefetchSchedule`.
    """

    def __init__(self, units: Sequence[Unit], backward: BackwardPrefetch | None = PRE) -> None:
        super().__init__(units, backward=backward)
        self.first: Unit | None = None  # of this backward, after the root

    def begin_backward(self, units: Sequence[Unit]) -> None:
        super().begin_backward(units)
        self.first = None

    def issue_backward(self, unit: Unit) -> None:
        if self.first is None and not unit.is_root:
            self.first = unit
        super().issue_backward(unit)

    def prefetch(self, units: list[Unit]) -> None:
        if self.first is None or self.first.state is SHARDED:
            super().prefetch(units)

    def post_backward(self, unit: Unit) -> None:
        self.reductions = 0 if unit is self.first or unit.freed_after_forward else 1
        if unit is self.first and self.backward is PRE and unit.freed_after_backward:
            self.free(unit)
            self.prefetch([each for each in self.ahead[::-1] if each is not unit])
        super().post_backward(unit)
