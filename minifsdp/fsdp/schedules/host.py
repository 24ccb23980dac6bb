"""The default on CPU: the host computes, has no queue to run ahead of, and shares its cores with communication.

             forward       backward
    link     g0 g1 g2 .    g2 .  g1 r2 g0 r1 .  r0      FULL_SHARD
    compute     0  1  2       2        1     0
    link     g0 g1 g2 .       .  r2 .  r1 r0            SHARD_GRAD_OP
    compute     0  1  2       2     1  0

Forward always gathers one unit ahead, as a host that runs ahead of its device does. Backward begins when memory is
fullest, with all activations alive. So no other unit is gathered while the first one is being computed, and nothing is
computed during the reduction of the first unit. A later reduction may continue while the next unit is being computed,
which keeps a second unsharded gradient alive, only if more memory than that has just been freed, namely by a unit that
had stayed unsharded. See docs/speed.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifsdp.fsdp.schedules.prefetch import PRE, BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class HostSchedule(PrefetchSchedule):
    """Gathers one unit ahead, except at the first unit of a backward; overlaps reductions as memory allows.

    Args:
        backward: see `PrefetchSchedule`.
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
