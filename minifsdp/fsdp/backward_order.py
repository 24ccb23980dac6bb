"""The order of a backward: the forward, reversed.

    forward     root(  a(  )a  b(  c(  )c  )b  )root      u(  unit u is called      )u  it returns
    backward    )root  )b  )c  c(  b(  )a  a(  root(      )u  gather                u(  free and reduce

A collective needs all ranks, in the same order. The parameters of a unit that get a gradient may depend on a rank's
data (experts, heads of tasks), and so may the moment at which the last gradient is complete. But all ranks call the
units in the same order. So autograd only decides *when* a turn is taken; the forward decides *in which order*:

- a unit ends when all of its gradients are complete and its turn has come;
- when a gradient reaches a unit, all turns before it are taken. Autograd runs the nodes of a graph in the reverse order
  of their creation (torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`), so no further gradients will arrive for
  those units: this rank uses only some of their parameters, or none.

In torch's FSDP1, the same order follows from splitting the flat parameter, one autograd node per unit and forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakSet

import torch
from torch import Tensor

from minifsdp.fsdp.unit import Unit
from minifsdp.fsdp.unit_pass import BEFORE, OVER, RUNNING, UnitPass
from minifsdp.private import at_end_of_backward, current_backward

_forwards = count()
_running: WeakSet[StepTurns] = WeakSet()


class Turns:
    """The turns of forwards that may be in one graph, and those taken in the current backward.

    Attributes:
        calls: first calls (False) and last returns (True) of units, in order.
        latest: the same of the latest forward.
        alike: the same of each of the forwards; None: they differ; empty: there is only the latest.
        expected: units whose turns are taken on every rank: trainable units that are called with grad, and frozen units
            through which gradients may pass.
        forward: `calls`, for the current backward.
        places: the positions of a unit's call and return in `forward`.
        left: turns of `forward` that the backward has not reached.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[UnitPass, bool], None] = {}
        self.latest: dict[tuple[UnitPass, bool], None] = {}
        self.alike: list[tuple[UnitPass, bool]] | None = []
        self.expected: set[UnitPass] = set()
        self.forward: list[tuple[UnitPass, bool]] = []
        self.places: dict[UnitPass, tuple[int, int]] = {}
        self.left = 0
        self.is_over = True
        self.is_running = False
        self.may_reach = False  # an expected unit has returned in this forward: gradients may come to the next

    def forget(self) -> None:
        """A new forward begins; forwards before it that no backward has followed may be in the same graph."""
        if self.is_over:
            for unit_pass, _ in self.calls:
                unit_pass.forget_calls()
            self.calls.clear()
            self.expected.clear()
            self.places.clear()
            self.alike = []
            self.is_over = False
        else:
            self._compare()
        self.latest.clear()
        self.may_reach = False

    def _compare(self) -> None:
        """The latest forward has ended."""
        if self.alike is not None:
            self.alike = [*self.latest] if self.alike in ([], [*self.latest]) else None

    def enter(self, unit_pass: UnitPass) -> None:
        """The unit is called."""
        if torch.is_grad_enabled() and unit_pass.trained:
            self.expected.add(unit_pass)
        for calls in (self.calls, self.latest):
            calls.setdefault((unit_pass, False))

    def leave(self, unit_pass: UnitPass, outputs: Sequence[Tensor]) -> bool:
        """The unit returns; `outputs` are those that require grad. Returns whether its turns are expected."""
        if torch.is_grad_enabled() and (outputs or self.may_reach):
            self.expected.add(unit_pass)
        self.may_reach |= unit_pass in self.expected
        for calls in (self.calls, self.latest):
            calls.pop((unit_pass, True), None)
            calls[unit_pass, True] = None
        return unit_pass in self.expected

    def restart(self, is_of_one: bool = False) -> None:
        """A backward begins, perhaps of one forward alone; a forward may have several."""
        self._compare()
        self.forward = self.alike if is_of_one and self.alike else [*self.calls]
        self.places.clear()
        self.left = len(self.forward)
        self.is_running = True
        for turn, (unit_pass, _) in enumerate(self.forward):
            self.places[unit_pass] = self.places.get(unit_pass, (turn, turn))[0], turn

    def returned(self) -> list[Unit]:
        """The units of `forward` whose turns are expected, in the order in which they have returned."""
        return [unit_pass.unit for unit_pass, returned in self.forward if returned and unit_pass in self.expected]

    def reach(self, unit_pass: UnitPass) -> None:
        """The first gradient has come to the unit."""
        self.pass_to(unit_pass)
        if unit_pass in self.places:
            self.left = max(self.left, self.places[unit_pass][0] + 1)  # its end may have been passed without it
        if unit_pass.phase is not RUNNING:
            unit_pass.begin_backward()

    def pass_to(self, unit_pass: UnitPass) -> None:
        """Take all turns before the unit's own."""
        if unit_pass in self.places:
            self._advance_to(self.places[unit_pass][1] + 1)

    def finish(self) -> None:
        """Take all turns that are left."""
        self._advance_to(0)
        self.is_over, self.is_running = True, False

    def complete(self, unit_pass: UnitPass) -> None:
        """The unit has all of its gradients: its turn is taken if it has come, and so are those that waited for it."""
        if unit_pass not in self.places:  # a backward of an older forward
            unit_pass.end_backward()
        while self.left and self._is_due(*self.forward[self.left - 1]):
            self._advance_to(self.left - 1)

    def _advance_to(self, until: int) -> None:
        while self.left > until:
            self.left -= 1
            unit_pass, returned = self.forward[self.left]
            if returned and unit_pass in self.expected and unit_pass.phase is BEFORE:
                unit_pass.begin_backward()
            elif not returned and unit_pass.phase is RUNNING:
                unit_pass.end_backward()

    def _is_due(self, unit_pass: UnitPass, returned: bool) -> bool:
        if returned:
            return unit_pass.phase is not BEFORE
        return unit_pass.phase is not RUNNING or unit_pass.is_complete


class StepTurns:
    """The turns of a step: those of its forward, and those of the reentrant checkpoint that is being recomputed.

    A reentrant checkpoint runs a separate forward and backward inside the backward, and its units have run without grad
    before. A checkpoint that is not reentrant recomputes only activations.

    Attributes:
        number: of the first forward that may be in this graph, among those of all models.
        latest: the number of the latest forward.
        open: numbers of forwards to which no backward has come.
        reached: the largest number of a forward to which one has come.
    """

    def __init__(self) -> None:
        self.forward = Turns()
        self.segment = Turns()
        self.number = self.backward = self.latest = self.reached = -1
        self.open: set[int] = set()

    def begin_forward(self) -> None:
        self.latest = next(_forwards)
        if self.forward.is_over:
            self.number = self.latest
            self.open = {number for number in self.open if number > self.reached}
        if torch.is_grad_enabled():
            self.open.add(self.latest)
        self.forward.forget()

    def begin_backward(self, forward: int | None) -> None:
        """The first gradient comes to a call in this forward.

        Autograd comes to no later one, and to earlier ones only if they are in the same graph, which those with a
        backward behind them are not. So with micro-batches in the order of a pipeline, each backward is of one forward.

        Beside this model there may be others in the same graph: those called later end before this one begins.
        """
        self.backward = current_backward()
        later = [turns for turns in _running if turns.backward == self.backward and turns.number > self.number]
        for turns in sorted(later, key=lambda turns: turns.number, reverse=True):
            turns.forward.finish()
        _running.add(self)
        self.forward.restart(is_of_one=forward is not None and forward <= min(self.open, default=forward))

    def come_to(self, forward: int) -> None:
        """A gradient has come to a call in this forward."""
        self.open.discard(forward)
        self.reached = max(self.reached, forward)

    def end_backward(self) -> None:
        self.forward.finish()
        _running.discard(self)

    def recompute(self, unit_pass: UnitPass) -> None:
        """The unit is called inside the backward."""
        if unit_pass not in self.forward.expected:
            self.forward.pass_to(unit_pass)
            self.segment.forget()
            self.segment.enter(unit_pass)
            if unit_pass.phase is OVER:
                unit_pass.phase = BEFORE

    def recomputed(self, unit_pass: UnitPass, outputs: Sequence[Tensor]) -> bool:
        """The unit returns inside the backward; whether its own backward follows at once."""
        return unit_pass not in self.forward.expected and self.segment.leave(unit_pass, outputs)

    def reach(self, unit_pass: UnitPass) -> None:
        """A gradient has come to the unit: the first, unless it is running."""
        if unit_pass.phase is not RUNNING:
            self._of(unit_pass).reach(unit_pass)

    def complete(self, unit_pass: UnitPass) -> None:
        """The unit has one gradient more: perhaps the last."""
        if unit_pass.is_complete:
            self._of(unit_pass).complete(unit_pass)

    def _of(self, unit_pass: UnitPass) -> Turns:
        """The turns among which the unit's next one is."""
        if unit_pass not in self.segment.expected:
            return self.forward
        if not self.segment.is_running:
            self.segment.restart()
            at_end_of_backward(self._end_segment)
        return self.segment

    def note_more_may_come(self, unit_pass: UnitPass) -> None:
        """A leaf of the unit has a gradient of another backward than the outermost one: that of a checkpoint."""
        unit_pass.more_may_come |= unit_pass not in self.segment.expected

    def _end_segment(self) -> None:
        self.segment.finish()
        self.segment.forget()
