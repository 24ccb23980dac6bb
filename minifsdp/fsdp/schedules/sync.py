"""The first schedule: gather, compute, free; gather, compute, free, reduce-scatter. One thing at a time.

             forward              backward
    link     g0   g1   g2   .     g2   .  r2 g1   .  r1 ...      g gather, r reduction
    compute     0    1    2          2          1

The link is idle while a unit is being computed, and no unit is computed while the link is busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifsdp.fsdp.unit import Unit


class SyncSchedule:
    """Decides when each unit gathers, frees and reduces.

    The engine calls the events; the later schedules override the steps of which these consist, one by one.

    Args:
        units: all units to be scheduled.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units

    # Events

    def begin_forward(self) -> None:
        """The outermost forward begins: the optimizer has finished with the shards."""

    def follow_optimizer(self) -> None:
        """Gathers from now on read what has been written to the shards."""

    def pre_forward(self, unit: Unit) -> None:
        self.issue_forward(unit)
        unit.wait_gather()

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        if unit.freed_after_forward or not backward_follows:
            self.free(unit)

    def end_forward(self) -> None:
        """The outermost forward has run without grad: no backward will use what was gathered for it."""
        for unit in self.units:
            self.free(unit)
        for unit in self.units:
            unit.release_shards()

    def pre_recompute(self, unit: Unit) -> None:
        """The unit's forward runs again inside backward (activation checkpointing)."""
        self.gather(unit)
        unit.wait_gather()

    def begin_backward(self, units: Sequence[Unit]) -> None:
        """A backward begins, of a forward in which `units` have returned in this order."""

    def pre_backward(self, unit: Unit) -> None:
        self.issue_backward(unit)
        unit.wait_gather()

    def post_backward(self, unit: Unit) -> None:
        """The unit's gradients are complete. Its parameters go first: the reduction does not read them."""
        if unit.freed_after_backward:
            self.free(unit)
        self.reduce(unit)

    def end_backward(self) -> None:
        """Every gradient is complete; after this the optimizer may run."""
        for unit in self.units:
            unit.finish_reduce()

    # What the events are made of

    def issue_forward(self, unit: Unit) -> None:
        """Issue communication before the wait for `unit` in forward."""
        self.gather(unit)

    def issue_backward(self, unit: Unit) -> None:
        """Issue communication before the wait for `unit` in backward."""
        self.gather(unit)

    def gather(self, unit: Unit) -> None:
        unit.start_gather()

    def free(self, unit: Unit) -> None:
        unit.free()

    def reduce(self, unit: Unit) -> None:
        unit.start_reduce()
        unit.wait_reduce()
