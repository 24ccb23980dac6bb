"""Gathers of the next units, issued before they are needed, in the order of the last forward, reversed for backward.

             forward               backward, PRE             backward, POST
    link     g0 g1 g2 .            g2 g1 r2 g0 r1 r0         g2   . g1 r2  . g0 r1  . r0
    compute     0  1  2               2     1     0             2        1        0
    whole    two at once           two at once               one at once

A host that runs ahead in backward does not stop for reductions either. As many reductions may be in progress as units
have been gathered ahead, each with its unsharded gradient. So with depth, both the memory of gathered parameters and
that of gradients grow.

(FSDP paper 3.3.2 and 3.3.3; torch/distributed/fsdp/_exec_order_utils.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from minifsdp.fsdp.schedules.overlap import OverlapSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class BackwardPrefetch(Enum):
    """The moment at which backward gathers the next unit: before or after computing the current unit's gradients."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


PRE, POST = BackwardPrefetch


class PrefetchSchedule(OverlapSchedule):
    """Gathers ahead of the computation.

    Args:
        forward: prefetch in forward. The first forward has no order to follow.
        backward: when to prefetch in backward; None: not at all.
        depth: the number of units ahead: 1 as in torch; None: all units, as if the host ran ahead of its device
        without bound.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        forward: bool = True,
        backward: BackwardPrefetch | None = PRE,
        depth: int | None = 1,
    ) -> None:
        super().__init__(units)
        self.forward, self.backward, self.depth = forward, backward, depth
        self.reductions = depth
        self.order: list[Unit] = []  # as the last forward used them
        self.seen: list[Unit] = []  # as this forward has used them so far
        self.ahead: list[Unit] = []  # those whose backward is to come, the next one last

    def begin_forward(self) -> None:
        super().begin_forward()
        self.order, self.seen = self.seen, []

    def issue_forward(self, unit: Unit) -> None:
        super().issue_forward(unit)
        self.seen.append(unit)
        here = len(self.seen)
        if self.forward and self.order[here - 1 : here] == [unit]:
            self.prefetch(self.order[here:])

    def begin_backward(self, units: Sequence[Unit]) -> None:
        super().begin_backward(units)
        self.ahead = [*units]

    def issue_backward(self, unit: Unit) -> None:
        super().issue_backward(unit)
        if unit in self.ahead:
            while self.ahead.pop() is not unit:
                pass
        if self.backward is PRE:
            self.prefetch(self.ahead[::-1])

    def post_backward(self, unit: Unit) -> None:
        if unit.freed_after_backward:
            self.free(unit)
        if self.backward is POST:
            self.prefetch(self.ahead[::-1])
        self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        if not self.ahead or self.ahead[-1].state is not SHARDED:  # the next gather is on the link already
            self.issue_reduction()

    def prefetch(self, units: list[Unit]) -> None:
        """Gather what comes next, as far ahead as `depth` goes."""
        for unit in units[: self.depth]:
            self.gather(unit)
