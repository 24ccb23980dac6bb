"""One unit in a step: its forward, its backward so far, and what its backward still waits for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any
from weakref import WeakSet

from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.unit import Unit


class Phase(Enum):
    """A unit's place in the current backward, in which it has two turns: its begin and its end (backward_order.py)."""

    BEFORE = 0
    RUNNING = 1
    OVER = 2


BEFORE, RUNNING, OVER = Phase


@dataclass(eq=False)
class Call:
    """A call of a unit's module that a backward may come to; its graph keeps it alive.

    Attributes:
        place: the number of autograd nodes when it returned.
        forward: the number of the outermost forward.
        watched: of a unit with frozen leaves, the number by which `reading` knows the call; None: it need not.
    """

    place: int
    forward: int
    watched: int | None


class UnitPass:
    """The state of one unit in a step, and the two turns of its backward.

    Args:
        unit: the unit.
        schedule: decides what happens when the unit's backward begins and ends.

    Attributes:
        given: the inputs of the current call.
        nodes: the number of autograd nodes when the call began.
        trained: leaves that need a gradient in this step.
        hooked: leaves with a hook on their gradient.
        passed: handles of hooks on leaves among the unit's outputs, which outlive the step.
        missing: leaves without a gradient in this backward so far.
        watched: the current call's number, if the unit has frozen leaves and an input will get a gradient.
        reading: numbers of calls of a unit with frozen leaves whose inputs have not received their gradients yet.
        unreached: calls whose outputs have not received their gradients yet.
        reached: the place of the earliest call that this backward has come to.
        more_may_come: a leaf has a gradient of a reentrant checkpoint inside the unit. Another one inside may follow,
            with a further gradient of the same leaf, so the unit ends when the next one's turn comes.
        phase: before, between or after the two turns.
        unreduced: True if a backward has reached the unit since its last reduction.
    """

    def __init__(self, unit: Unit, schedule: SyncSchedule) -> None:
        self.unit, self.schedule = unit, schedule
        self.given: Any = None
        self.nodes = 0
        self.trained: list[int] = []
        self.hooked: set[int] = set()
        self.passed: list[Any] = []
        self.watched: int | None = None
        self.reading: set[int] = set()
        self.unreached: WeakSet[Call] = WeakSet()
        self.unreduced = False
        self.restart()

    def begin_forward(self) -> None:
        """A forward begins; the backward of an earlier one may still be to come."""
        self.missing = set(self.trained)
        self.phase, self.more_may_come = BEFORE, False

    def restart(self) -> None:
        self.begin_forward()
        self.reading.clear()
        self.reached = inf

    def reach(self, call: Call) -> None:
        """A gradient has come to an output of a call."""
        self.unreached.discard(call)
        self.reached = min(self.reached, call.place)
        if call.watched is not None:
            self.reading.add(call.watched)

    def forget_calls(self) -> None:
        """Forget the calls so far; a backward may still come to some of them."""
        self.unreached.clear()
        self.reading.clear()

    @property
    def is_complete(self) -> bool:
        """True if no gradient is still to come.

        Autograd comes to calls in reverse order. Those after the one that it has reached are in other graphs, such as
        those of other micro-batches, whose backward is another one.
        """
        may_follow = any(call.place < self.reached for call in self.unreached)
        return not (self.missing or self.reading or self.more_may_come or may_follow)

    @property
    def is_to_reduce(self) -> bool:
        """True if the end of this backward reduces the unit's gradients; inside `no_sync`, none are."""
        return self.unit.reduces and (self.unreduced or self.unit.has_gradient)

    @property
    def is_left(self) -> bool:
        """True if the end of the backward has to end the unit, whose turn has not done it."""
        is_late = len(self.missing) < len(self.trained)  # a leaf had its gradient after the unit's turn
        return self.phase is RUNNING or is_late or (self.phase is BEFORE and self.is_to_reduce)

    def begin_backward(self) -> None:
        """The unit's first turn: its parameters are needed."""
        self.phase, self.unit.keeps_values_when_freed = RUNNING, False
        self.unreduced = bool(self.trained)
        self.schedule.pre_backward(self.unit)

    def end_backward(self) -> None:
        """The unit's second turn: nothing is needed any longer, and its gradients are complete."""
        self.restart()
        self.phase = OVER
        if self.is_to_reduce:
            self.unreduced = False
            self.schedule.post_backward(self.unit)
        elif self.unit.freed_after_backward or not self.trained:
            self.schedule.free(self.unit)

    def leave_backward(self) -> None:
        """The backward of all units is over."""
        self.restart()
        while self.passed:
            self.passed.pop().remove()
