"""From autograd's hooks to the schedule's events.

event          hook
pre_forward    the module is called
post_forward   the module returns
end_forward    the outermost module returns, and no backward will follow
pre_backward   a hook on each output, and on each loss that the module leaves on itself: the unit's first gradient
post_backward  a hook on each leaf, run once per backward when its gradient is complete, however often the
               module was called; the last of the unit's leaves is the unit's end, in its turn (backward_order.py)
end_backward   a callback that the autograd engine runs when this backward is over (torch: _runtime_utils.py)
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import private
from minifsdp.autograd_hooks import BackwardEnd, after_backward_to, before_backward_of, left_on, made_here
from minifsdp.fsdp.backward_order import StepTurns
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.unit import SHARDED, Unit, reducing
from minifsdp.fsdp.unit_pass import BEFORE, OVER, RUNNING, Call, UnitPass
from minifsdp.fsdp.view import call_post_hooks
from minifsdp.tree import tensors_in


class Engine:
    """Hooks one tree of units to one schedule.

    Args:
        units: all units; the outermost module's, if it has one, is marked as the root.
        schedule: decides what happens at each event.
    """

    def __init__(self, units: Sequence[Unit], schedule: SyncSchedule) -> None:
        self.schedule = schedule
        self.backward_end, self.forward_runs, self.backward_runs = BackwardEnd(), False, False
        self.trains = False  # the outermost forward is to be followed by a backward
        self.is_last_backward = True  # if not, it leaves reductions under way
        self.accumulating: set[Unit] = set()  # the last backward has not reduced them: more micro-batches follow
        self.turns = StepTurns()
        self.passes = {unit: UnitPass(unit, schedule) for unit in units}
        for unit_pass in self.passes.values():
            self._refresh(unit_pass)

    def _refresh(self, unit_pass: UnitPass) -> None:
        """Leaves may have been frozen or thawed since the last step."""
        unit_pass.unit.refresh()
        if unit_pass.unit.trained != unit_pass.trained:
            unit_pass.trained = unit_pass.unit.trained
            self._hook(unit_pass)
        unit_pass.begin_forward()

    def _hook(self, unit_pass: UnitPass) -> None:
        engine, here = weakref.proxy(self), weakref.ref(unit_pass)  # a hook that held them would hold its own leaf
        for index in set(unit_pass.trained) - unit_pass.hooked:
            hook = partial(Engine._on_gradient, engine, here, index)
            unit_pass.unit.leaves[index].register_post_accumulate_grad_hook(hook)
            unit_pass.hooked.add(index)

    # Forward

    def begin(self) -> None:
        """The outermost forward begins. What an earlier one has left unsharded may be out of date."""
        if private.in_backward():  # an activation checkpoint around the outermost module
            return
        if self.backward_runs:
            self.abandon_backward()
        self.turns.begin_forward()
        self.forward_runs, self.trains = True, torch.is_grad_enabled()
        for unit_pass in self.passes.values():
            self._refresh(unit_pass)  # before the gathers are told to wait for what has been written to the shards
        self.schedule.begin_forward()
        for unit in self.passes:
            unit.view.run(True)
            unit.keeps_values_when_freed &= unit in self.accumulating
            if unit.state is not SHARDED and unit.is_stale:
                self.schedule.free(unit)

    def before(self, unit: Unit, inputs: Any) -> None:
        unit_pass = self.passes[unit]
        if unit_pass.phase is RUNNING:  # an activation checkpoint inside the unit
            return
        if self.backward_runs:  # an activation checkpoint around the unit
            self.turns.recompute(unit_pass)
            self.schedule.pre_recompute(unit)
        else:
            self.schedule.pre_forward(unit)
            self.turns.forward.enter(unit_pass)
        unit_pass.given, unit_pass.nodes, unit_pass.watched = inputs, private.nodes_so_far(), None
        if len(unit_pass.trained) < len(unit.leaves) and torch.is_grad_enabled():
            # Frozen leaves have no hook, and are read until the inputs have their gradients.
            number = unit_pass.nodes
            if after_backward_to(tensors_in(inputs), partial(self._on_inputs, unit_pass, number)):
                unit_pass.watched = number

    def after(self, unit: Unit, output: Any, modules: Sequence[nn.Module] = ()) -> None:
        unit_pass = self.passes[unit]
        if unit_pass.phase is RUNNING:
            return
        outputs = made_here(output, unit_pass.given, unit_pass.nodes)
        if torch.is_grad_enabled():
            outputs += left_on(modules, unit_pass.nodes)
        unit_pass.given = None
        if self.backward_runs:
            follows = self.turns.recomputed(unit_pass, outputs)
            if unit.freed_after_forward or not (outputs or follows):
                self.schedule.free(unit)
        else:
            follows = self.turns.forward.leave(unit_pass, outputs)
            # An object may hide tensors, whose backward no hook announces.
            unit.keeps_values_when_freed |= follows and not outputs
            if follows or not self._may_be_recomputed(unit):
                self.schedule.post_forward(unit, follows)
        self._await(unit_pass, outputs)

    def after_part(self, unit: Unit, output: Any) -> None:
        """One of the unit's modules returns, others are still to run."""
        unit_pass = self.passes[unit]
        self._await(unit_pass, made_here(output, unit_pass.given, unit_pass.nodes))

    def _await(self, unit_pass: UnitPass, outputs: list[Tensor]) -> None:
        """The first gradient that reaches one of these begins the unit's backward."""
        if outputs:
            call = Call(private.nodes_so_far(), self.turns.latest, unit_pass.watched)
            unit_pass.unreached.add(call)
            hooks = (partial(hook, unit_pass, call) for hook in (self._pre_backward, self._pre_backward_of_base))
            unit_pass.passed += before_backward_of(outputs, *hooks)
        elif unit_pass.watched is not None:  # an object may hide outputs
            unit_pass.reading.add(unit_pass.watched)

    def _may_be_recomputed(self, unit: Unit) -> bool:
        """True if a forward without grad may be a reentrant checkpoint's: the unit waits for the recomputation."""
        return self.trains and not torch.is_grad_enabled() and not unit.freed_after_forward

    def leave(self, unit: Unit) -> None:
        """The unit's forward ends, or has raised: inside the outermost one, what stays unsharded stays visible."""
        if unit.state is SHARDED or not self.forward_runs:
            unit.view.after_forward()

    def end(self) -> None:
        """The outermost forward ends, or has raised."""
        self.forward_runs = False
        for unit in self.passes:
            unit.view.run(False)
        if not torch.is_grad_enabled():
            self.schedule.end_forward()

    # Backward

    def _begin_backward(self, forward: int | None = None) -> None:
        """A gradient has come, the first to a call of this forward; None: it is unknown to which."""
        if self.backward_runs:
            self.backward_end.check()
            return
        if torch.is_grad_enabled():  # create_graph=True would read parameters that are freed by then
            raise RuntimeError("FSDP does not support gradients of gradients")
        for unit in self.passes:
            unit.check_unchanged()
        self.backward_runs = True
        self.turns.begin_backward(forward)
        self.schedule.begin_backward(self.turns.forward.returned())
        for unit in self.passes:
            unit.take_accumulated()
        self.backward_end.schedule(self._end_backward)

    def _pre_backward(self, unit_pass: UnitPass, call: Call, gradient: Tensor) -> None:
        self._begin_backward(call.forward)
        self.turns.come_to(call.forward)
        unit_pass.reach(call)
        self.turns.reach(unit_pass)

    def _pre_backward_of_base(self, unit_pass: UnitPass, call: Call, gradient: Tensor) -> None:
        if unit_pass.phase is not OVER:  # or it is one of the unit's inputs, of which the unit has returned a view
            self._pre_backward(unit_pass, call, gradient)

    def _on_gradient(self, here: weakref.ref[UnitPass], index: int, leaf: Tensor) -> None:
        unit_pass = here()
        assert unit_pass is not None, "the hook has outlived its unit"
        if unit_pass.phase is not RUNNING:
            self._begin_backward()
            if unit_pass.phase is BEFORE:
                self.turns.reach(unit_pass)  # no output has announced it
        if private.current_backward() != self.turns.backward:
            self.turns.note_more_may_come(unit_pass)
        unit_pass.unit.take_gradient(index)
        unit_pass.missing.discard(index)
        if not unit_pass.missing:
            self.turns.complete(unit_pass)

    def _on_inputs(self, unit_pass: UnitPass, number: int) -> None:
        unit_pass.reading.discard(number)
        self.turns.complete(unit_pass)

    def _end_backward(self) -> None:
        """Ends what is left, in one order on all ranks: units without a turn last, by their order in the model."""
        self.turns.end_backward()
        self.backward_runs = False
        for unit_pass in self.passes.values():
            if unit_pass.is_left:
                unit_pass.end_backward()
        if self.is_last_backward:
            self.schedule.end_backward()
        self.accumulating = {unit for unit in self.passes if not unit.reduces}
        for unit, unit_pass in self.passes.items():
            unit_pass.leave_backward()
            if unit.state is not SHARDED and unit.freed_after_backward:
                self.schedule.free(unit)
            call_post_hooks(unit.view.take_delivered())
            unit.show_gradients(unit_pass.unreduced)

    def abandon_backward(self) -> None:
        """The last backward raised. End it, and drop the gradients: they are of some leaves only."""
        warnings.warn("the last backward raised: all gradients are dropped, older ones as well", stacklevel=5)
        with reducing(self.passes, True):
            self._end_backward()
        for shard in (p for unit in self.passes for p in unit.shards):
            shard.grad = None

    def reduce_now(self) -> None:
        """Reduce what earlier backwards have left unsharded, where that is to be reduced, all at once; on all ranks."""
        for unit, unit_pass in self.passes.items():
            unit.take_accumulated()
            unit_pass.unreduced = bool(unit_pass.trained)  # another rank may have gradients that this one lacks
        self._end_backward()

    def drop(self) -> None:
        """Forget what earlier backwards have left unsharded, even one that has raised; without communication."""
        if self.backward_runs:
            with self.no_sync():
                self._end_backward()
        for unit in self.passes:
            unit.take_accumulated()
            unit.drop_gradient()
            self.schedule.free(unit)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients stay unsharded in their units; the first backward outside reduces them."""
        return reducing(self.passes, False)
