"""From autograd's hooks to the schedule's events.

    event          hook
    pre_forward    the module is called
    post_forward   the module returns
    end_forward    the outermost module returns, and no backward will follow
    pre_backward   a hook on each output: the first gradient that reaches the unit
    post_backward  a hook on each leaf, run once per backward when its gradient is complete, however often the
                   module was called; the last of the unit's leaves is the unit's end
    end_backward   a callback that the autograd engine runs when this backward is over

(torch/distributed/fsdp/_runtime_utils.py.)
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifsdp import private
from minifsdp.fsdp.hooks import call_post_hooks
from minifsdp.fsdp.sync import SyncSchedule
from minifsdp.fsdp.unit import SHARDED, Unit
from minifsdp.tree import tensors_in


class Progress:
    """Where one unit is in the backward under way."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.trained: list[int] = []  # leaves that want a gradient in this step
        self.hooked: set[int] = set()  # leaves that tell of theirs
        self.on_output: Callable[[Tensor], None]
        self.passed: list[Any] = []  # handles of hooks on leaves among its outputs, which outlive the step
        self.ended = False  # its post_backward has been, in the backward under way
        self.restart()

    def restart(self) -> None:
        self.missing = set(self.trained)  # leaves whose gradient is still to come
        self.calls = 0  # calls of a unit with frozen leaves whose inputs' gradients are still to come
        self.in_backward = False


class Engine:
    """Hooks one tree of units to one schedule.

    Args:
        units: all units; the outermost module's, if it has one, is marked as the root.
        schedule: decides what happens at each event.
    """

    def __init__(self, units: Sequence[Unit], schedule: SyncSchedule) -> None:
        self.schedule = schedule
        self.sync_gradients = True
        self.forward_runs = False
        self.trains = False  # the outermost forward is to be followed by a backward
        self.backward_runs = False
        self.kept = False  # parameters stay whole from one micro-batch to the next: SHARD_GRAD_OP inside no_sync
        self.progress = {unit: Progress(unit) for unit in units}
        for progress in self.progress.values():
            progress.on_output = partial(self._pre_backward, progress)
            self._follow(progress)

    def _follow(self, progress: Progress) -> None:
        """Leaves may have been frozen or thawed since the last step."""
        progress.unit.follow()
        if progress.unit.trained != progress.trained:
            progress.trained = progress.unit.trained
            self._hook(progress)
        progress.restart()

    def _hook(self, progress: Progress) -> None:
        engine, here = weakref.proxy(self), weakref.proxy(progress)  # a hook that held them would hold its own leaf
        for index in set(progress.trained) - progress.hooked:
            hook = partial(Engine._on_gradient, engine, here, index)
            progress.unit.leaves[index].register_post_accumulate_grad_hook(hook)
            progress.hooked.add(index)

    # Forward

    def begin(self) -> None:
        """The outermost forward begins. What a forward without backward has left whole is out of date."""
        if private.in_backward():  # an activation checkpoint around the outermost module
            return
        if self.backward_runs:
            self._abandon_backward()
        self.forward_runs = True
        self.trains = torch.is_grad_enabled()
        for progress in self.progress.values():
            self._follow(progress)  # before the gathers are told to wait for what has been written to the shards
        self.schedule.begin_forward()
        if not self.kept:
            for unit in self.progress:
                if unit.state is not SHARDED:
                    self.schedule.free(unit)

    def before(self, unit: Unit, inputs: Any) -> None:
        progress = self.progress[unit]
        if progress.in_backward:  # an activation checkpoint inside the unit
            return
        if self.backward_runs:  # an activation checkpoint around the unit
            self.schedule.pre_recompute(unit)
        else:
            self.schedule.pre_forward(unit)
        if len(progress.trained) < len(unit.leaves) and torch.is_grad_enabled():
            self._watch_inputs(progress, inputs)

    def after(self, unit: Unit, output: Any) -> None:
        progress = self.progress[unit]
        if progress.in_backward:
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if self.backward_runs:
            if unit.freed_after_forward or not outputs:
                self.schedule.free(unit)
        elif outputs or not self._may_need(unit, torch.is_grad_enabled()):
            self.schedule.post_forward(unit, bool(outputs))
        for t in outputs:
            if t.grad_fn is None:  # a leaf that the unit has passed on
                progress.passed.append(t.register_hook(progress.on_output))
                continue
            t.grad_fn.register_prehook(progress.on_output)  # costs less than a hook on the tensor
            base = private.base_of(t)
            if base is not None and base.grad_fn is not None:
                # Who changes a view in place puts another node in the place of `grad_fn`, and keeps that of its base.
                hook = partial(self._pre_backward_of_base, progress)
                base.grad_fn.register_prehook(hook)

    def _may_need(self, unit: Unit, with_grad: bool) -> bool:
        """Whether to keep a unit whole of whose backward no output will tell.

        With grad the output may be an object that hides tensors. Without it, in a model that trains, this may be a
        reentrant activation checkpoint, whose recomputation comes: a unit that waits for its backward waits for that.
        """
        return bool(self.progress[unit].trained) if with_grad else self.trains and not unit.freed_after_forward

    def end(self) -> None:
        """The outermost forward ends, or has raised."""
        self.forward_runs = False
        if not torch.is_grad_enabled():
            self.schedule.end_forward()

    # Backward

    def _begin_backward(self) -> None:
        if torch.is_grad_enabled():  # create_graph=True: the graph would read parameters that are freed by then
            raise RuntimeError("FSDP does not support gradients of gradients")
        self.backward_runs = True
        for unit in self.progress:
            unit.take_accumulated()
        private.at_end_of_backward(self._end_backward)

    def _pre_backward(self, progress: Progress, gradient: Tensor) -> None:
        if not self.backward_runs:
            self._begin_backward()
        if not progress.in_backward:
            progress.in_backward = True
            self.schedule.pre_backward(progress.unit)

    def _pre_backward_of_base(self, progress: Progress, gradient: Tensor) -> None:
        if not progress.ended:  # or it is one of the unit's inputs, of which the unit has returned a view
            self._pre_backward(progress, gradient)

    def _on_gradient(self, progress: Progress, index: int, leaf: Tensor) -> None:
        if not self.backward_runs:
            self._begin_backward()
        progress.unit.take_gradient(index)
        progress.missing.discard(index)
        if not progress.missing and not progress.calls:
            self._post_backward(progress)

    def _post_backward(self, progress: Progress) -> None:
        progress.restart()
        progress.ended = True
        unit = progress.unit
        if self.sync_gradients and unit.has_gradient:
            self.schedule.post_backward(unit)
        elif unit.reshard_after_forward or not progress.trained:
            self.schedule.free(unit)

    def _end_backward(self) -> None:
        """Ends what no hook has ended: units of which only some leaves, or none, got a gradient in this backward."""
        self.backward_runs = False
        for progress in self.progress.values():
            waits = self.sync_gradients and progress.unit.has_gradient  # perhaps since a backward inside no_sync
            if len(progress.missing) < len(progress.trained) or (waits and not progress.ended):
                self._post_backward(progress)
        self.schedule.end_backward()
        self.kept = not self.sync_gradients
        for progress in self.progress.values():
            progress.restart()
            progress.ended = False
            while progress.passed:
                progress.passed.pop().remove()
            if progress.unit.state is not SHARDED and (progress.unit.reshard_after_forward or not self.kept):
                self.schedule.free(progress.unit)
            if self.sync_gradients:
                call_post_hooks(progress.unit.shards)
            else:
                progress.unit.show_accumulated()

    def _abandon_backward(self) -> None:
        """The last backward raised. End it, and drop the gradients: they are of some leaves only."""
        warnings.warn("the last backward raised: all gradients are dropped, older ones as well", stacklevel=5)
        before, self.sync_gradients = self.sync_gradients, True
        self._end_backward()
        self.sync_gradients = before
        for unit in self.progress:
            for shard in unit.shards:
                shard.grad = None

    def _watch_inputs(self, progress: Progress, inputs: Any) -> None:
        """Frozen leaves have no hook, and are read until the inputs have their gradients."""
        watched = [t for t in tensors_in(inputs) if t.requires_grad]
        if not watched:
            return
        progress.calls += 1

        def done(gradients: Any) -> None:
            progress.calls -= 1
            if not progress.calls and not progress.missing:
                self._post_backward(progress)

        torch.autograd.graph.register_multi_grad_hook(watched, done)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay unsharded in their units; the first backward outside reduces them."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before
