"""The schedules that are compared, and two that do what none should."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from minifsdp.device import current_stream
from minifsdp.fsdp import OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.schedules.prefetch import POST
from minifsdp.fsdp.unit import Unit
from minifsdp.instruments.machine.shapes import ReductionFirst, with_limiter, without_limiter


class LateWait(OverlapSchedule):
    """Block 2 of forward computes first and waits then."""

    def pre_forward(self, unit: Any) -> None:
        self.issue_forward(unit)
        if unit is self.units[3]:  # the root is the first
            self.handle, unit._gathering = unit._gathering, SimpleNamespace(wait=lambda: None)
        unit.wait_gather()

    def post_forward(self, unit: Any, backward_follows: bool) -> None:
        if unit is self.units[3]:
            self.handle.wait()
        super().post_forward(unit, backward_follows)


class HeldUp(PrefetchSchedule):
    """A host that needs a value of the device in every unit's forward."""

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        current_stream(self.device).record_event().synchronize()
        super().post_forward(unit, backward_follows)


SCHEDULES: dict[str, Any] = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "late wait": LateWait,
    "no prefetch": ReductionFirst,
    "BACKWARD_POST": partial(PrefetchSchedule, forward=False, backward=POST),
    "BACKWARD_PRE": without_limiter(),
    "both ways": PrefetchSchedule,
    "held up": partial(HeldUp, forward=False),
    "held up, both ways": HeldUp,
    "all ahead": partial(PrefetchSchedule, depth=None),
    "all, limited": partial(RateLimitedSchedule, depth=None),
    **{f"k = {k}": with_limiter(k) for k in (1, 2, 3)},
}
