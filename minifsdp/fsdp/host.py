"""The default where the host is the compute, on CPU: what overlaps there takes memory, and hides little.

The backend's threads share the cores with the computation, so a reduction under way beside it ends no sooner than one
that is waited for, and holds a second unsharded gradient meanwhile. And backward begins when memory is fullest, with
all activations alive. See docs/speed.md.
"""

from __future__ import annotations

from typing import Any

from minifsdp.fsdp.prefetch import PRE, PrefetchSchedule
from minifsdp.fsdp.unit import SHARDED, Unit


class HostSchedule(PrefetchSchedule):
    """One unit ahead, but for the first of a backward; and each reduction is waited for at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reductions = 0
        self.first: Unit | None = None  # of this backward, among those that are gathered for it

    def begin_forward(self) -> None:
        super().begin_forward()
        self.first = None

    def issue_backward(self, unit: Unit) -> None:
        if self.first is None and unit.freed_after_forward:
            self.first = unit
        super().issue_backward(unit)

    def prefetch(self, units: list[Unit]) -> None:
        if self.first is None or self.first.state is SHARDED:
            super().prefetch(units)

    def post_backward(self, unit: Unit) -> None:
        if unit is self.first and self.backward is PRE:
            self.free(unit)
            self.prefetch([each for each in self.ahead[::-1] if each is not unit])
        super().post_backward(unit)
