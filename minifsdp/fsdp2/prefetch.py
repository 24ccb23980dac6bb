"""Schedules for units that stay in their modules: prefetching, by lists of the user's own where there are any.

No limiter: what a gather has left behind serves again in the order of its stream (held.py), so a host that runs ahead
piles nothing up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import PrefetchSchedule
from minifsdp.fsdp.unit import Unit

Lists = Mapping[Unit, list[Unit]]
"""For a unit the ones to gather before it computes, instead of those that the order would have."""


class ListedPrefetch(PrefetchSchedule):
    """Prefetching on a device with queues: backward one unit ahead; forward as lists say, the host runs ahead anyway.

    Args:
        units: all of them.
        forward_lists: of forward.
        backward_lists: of backward.
    """

    def __init__(self, units: Sequence[Unit], forward_lists: Lists, backward_lists: Lists) -> None:
        super().__init__(units)
        self.forward = False
        self.forward_lists, self.backward_lists = forward_lists, backward_lists

    def issue_forward(self, unit: Unit) -> None:
        super().issue_forward(unit)
        for each in self.forward_lists.get(unit, []):
            self.gather(each)

    def issue_backward(self, unit: Unit) -> None:
        if unit in self.backward_lists:
            ahead, self.ahead = self.ahead, [*self.backward_lists[unit][::-1], unit]
            depth, self.depth = self.depth, None
            super().issue_backward(unit)
            self.ahead, self.depth = [each for each in ahead if each is not unit], depth
        else:
            super().issue_backward(unit)


class ListedHost(ListedPrefetch, HostSchedule):
    """The same where the host is the compute: forward is gathered one unit ahead as well."""

    def __init__(self, units: Sequence[Unit], forward_lists: Lists, backward_lists: Lists) -> None:
        super().__init__(units, forward_lists, backward_lists)
        self.forward = True
