"""Schedules for units that stay in their modules: prefetching, according to the user's lists if there are any.

There is no limiter: the memory of a gather is reused in the order of its stream (held.py), so a host that runs ahead
accumulates no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

Lists = Mapping[Unit, list[Unit]]
"""For a unit the ones to gather before it computes, instead of those that the order would have."""


class ListedPrefetch(PrefetchSchedule):
    """Prefetching on a device with queues: one unit ahead in backward, and according to lists in forward.

    In forward the host runs ahead anyway.

    Attributes:
        forward_lists: the lists for forward.
        backward_lists: the lists for backward.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units)
        self.forward = False
        self.forward_lists: Lists = {}
        self.backward_lists: Lists = {}

    def issue_forward(self, unit: Unit) -> None:
        super().issue_forward(unit)
        for each in self.forward_lists.get(unit, []):
            self.gather(each)

    def pre_backward(self, unit: Unit) -> None:
        """The unit is copied out before the next one is gathered, as in torch: that gather reuses the buffer."""
        self.gather(unit)
        self.issue_reduction()
        unit.wait_gather()
        super().pre_backward(unit)

    def issue_backward(self, unit: Unit) -> None:
        if unit in self.backward_lists:
            ahead, self.ahead = self.ahead, [*self.backward_lists[unit][::-1], unit]
            depth, self.depth = self.depth, None
            super().issue_backward(unit)
            self.ahead, self.depth = [each for each in ahead if each is not unit], depth
        else:
            super().issue_backward(unit)


class ListedHost(ListedPrefetch, HostSchedule):
    """The same if the host computes: forward also gathers one unit ahead."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units)
        self.forward = True
