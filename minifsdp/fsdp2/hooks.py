"""Hooks of unwrapped modules, translated to the engine's events.

A group of parameters is gathered before the first forward of its modules and freed after the last. The root is the
outermost module. It is known when the first forward runs, and units, schedule and engine are put together then
(torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `FSDPState`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minifsdp.first_forward import FirstForward
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.schedules.overlap import OverlapSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.unit import SHARDED, Unit
from minifsdp.fsdp2.held import Held, Recorded
from minifsdp.fsdp2.prefetch import ListedHost, ListedPrefetch
from minifsdp.fsdp2.unit import ParamUnit
from minifsdp.local_parts import groups_on_meshes
from minifsdp.nesting import FSDP2, refuse_torchs_ddp
from minifsdp.tree import cast_inputs, map_tensors

_KEY = "_minifsdp_state"


class ModuleGroup:
    """One call of `fully_shard`: some modules, and a unit if they have parameters that no inner call has taken.

    Attributes:
        unit: the unit of their parameters; None if there are none.
        engine, root: those of the tree; None until its first run.
        make_schedule: creates the schedule of the tree under this group; None: `ListedPrefetch`, or `ListedHost` if the
            host computes.
        keeper: releases buffers in the tree under this group that another stream reads last.
        gathers: the one of the tree's gathers, if this is the root.
        reductions: the smallest limit for the number of reductions in progress in the tree; None: the schedule's own.
        forward_list, backward_list: the groups to gather before this one is computed; None: determined by the order.

    Args:
        modules: the modules that are gathered together.
        unit: the unit of their parameters.
        policy: dtypes of inputs and outputs.
        decides: `reshard_after_forward` was not given, so the root stays unsharded.
        device: device of the computation.
    """

    def __init__(
        self, modules: Sequence[nn.Module], unit: ParamUnit | None, policy: Any, decides: bool, device: torch.device
    ) -> None:
        self.modules, self.unit, self.policy, self.decides, self.device = modules, unit, policy, decides, device
        self.engine: Engine | None = None
        self.root: ModuleGroup | None = None
        self.make_schedule: Callable[[Sequence[Unit]], SyncSchedule] | None = None
        self.keeper: type[Held] | type[Recorded] = Held
        self.gathers: Held | Recorded = Held()
        self.reductions: int | None = None
        self.forward_list: list[ModuleGroup] | None = None
        self.backward_list: list[ModuleGroup] | None = None
        self._first = FirstForward(*modules)
        self._to_run = set(modules)
        self._groups: list[ModuleGroup] = []  # of the tree, those of several modules
        for module in modules:
            module.__dict__[_KEY] = self
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after, always_call=True)
            module.register_state_dict_pre_hook(self._shard)
            module.register_load_state_dict_pre_hook(self._shard)

    def _shard(self, *_: Any) -> None:
        """State dicts show the shards."""
        if self.unit is not None:
            self.unit.free()

    def tree(self) -> list[ModuleGroup]:
        """The groups of these modules and of all inside, this one first, each once."""
        found = dict.fromkeys(group for root in self.modules for group in module_groups_in(root))
        return [self, *(group for group in found if group is not self)]

    def start(self) -> Engine:
        """Put the tree under this one together, if that has not been done."""
        if self.engine is not None:
            return self.engine
        groups = self.tree()
        for inner in groups[1:]:
            if inner.engine is not None:
                name, outer = type(inner.modules[0]).__name__, type(self.modules[0]).__name__
                why = (
                    f"the outermost module runs first, and it ran by itself before {outer} around it"
                    if inner.is_root
                    else "it belongs to another model, which has run; a sharded module can be in one model only"
                )
                raise RuntimeError(f"FSDP state has already been lazily initialized for {name}: {why}")
        refuse_torchs_ddp(FSDP2, (p for unit in units_of(groups) for p in unit.shards))
        if self.decides and self.unit is not None:
            self.unit.reshard_after_forward = False
        self.gathers, reductions = self.keeper(), self.keeper()
        for group in groups:
            if group.unit is not None:
                group.unit.gathers, group.unit.gradients.keeper = self.gathers, reductions
        self._name(groups)
        self._groups = [group for group in groups if len(group.modules) > 1]
        self.engine = Engine(units_of(groups), self.schedule())
        for group in groups:
            group.engine, group.root = self.engine, self
        if self.unit is not None:
            self.unit.is_root = self.decides
        return self.engine

    def _name(self, groups: Sequence[ModuleGroup]) -> None:
        names = {m: name for root in self.modules for name, m in root.named_modules()}
        for group in groups:
            if group.unit is not None:
                group.unit.title = f"{names.get(group.modules[0]) or 'root'} ({group.unit.name})"

    def _check_values(self) -> None:
        groups = groups_on_meshes(p for unit in units_of(self.tree()) for p in unit.shards)
        self._first.check(self.modules, groups)

    @property
    def is_root(self) -> bool:
        """True if these are the outermost modules, known once they have run."""
        return self.root is self

    def schedule(self) -> SyncSchedule:
        """A schedule of the tree's units; where the host computes, on CPU, another than on a device with queues."""
        units = units_of(self.tree())
        if not units:
            return SyncSchedule(units)
        usual = ListedHost if units[0].device.type == "cpu" else ListedPrefetch
        schedule = (self.make_schedule or usual)(units)
        self.adjust(schedule)
        return schedule

    def adjust(self, schedule: SyncSchedule) -> None:
        """Apply the user's lists and limits to the tree's schedule, which may have communication in progress."""
        groups = self.tree()
        limits = [group.reductions for group in groups if group.reductions is not None]
        if isinstance(schedule, OverlapSchedule) and limits:
            schedule.reductions = max(limits)
        if isinstance(schedule, ListedPrefetch):
            of = [(group.unit, group.forward_list, group.backward_list) for group in groups if group.unit]
            schedule.forward_lists = {unit: units_of(ahead) for unit, ahead, _ in of if ahead is not None}
            schedule.backward_lists = {unit: units_of(ahead) for unit, _, ahead in of if ahead is not None}

    def restart(self) -> None:
        """Nothing of an earlier forward is left."""
        self._to_run = set(self.modules)
        if self.unit is not None and self.engine is not None:
            self.engine.schedule.free(self.unit)

    def _begin_anew(self) -> None:
        """An earlier forward may have left out some modules of a group."""
        for group in self._groups:
            group._to_run = set(group.modules)

    def reduce_accumulated(self) -> None:
        """Reduce what earlier backwards have left unsharded, where that is to be reduced, all at once."""
        if self.engine is not None:
            self.engine.reduce_now()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module is called."""
        if (self.root is None or self.root is self) and self._first.comes:
            self._check_values()
        engine = self.engine or self.start()
        if engine.backward_runs:  # a checkpoint runs one module again, by itself
            self._to_run = {module}
        is_first = engine.backward_runs or len(self._to_run) == len(self.modules)
        if self.is_root and is_first:
            if not engine.backward_runs:
                self._begin_anew()
            engine.begin()
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        if self.is_root or dtype is not None:
            args, kwargs = cast_inputs((args, kwargs), dtype, self.device)
        if self.unit is not None and is_first:
            engine.before(self.unit, (args, kwargs))
        self._to_run.discard(module)
        return args, kwargs

    def after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The module returns, or has raised."""
        engine = self.engine
        raised = output is None and sys.exc_info()[0] is not None
        if engine is None:  # `before` has raised
            return output
        if self.policy.output_dtype is not None:
            output = map_tensors(lambda t: t.to(self.policy.output_dtype) if t.is_floating_point() else t, output)
        if self._to_run and not raised:  # others of the group have yet to run
            if self.unit is not None:
                engine.after_part(self.unit, output)
            return output
        self._to_run = set(self.modules)
        if self.unit is not None and not raised:
            self.unit.keep()
            engine.after(self.unit, output)
        if self.is_root and not engine.backward_runs:  # a checkpoint's recomputation ends early, by an error of torch's
            self.gathers.clear()  # the buffer of the last gather: the loss, which may need much memory, comes next
            engine.end()
            if raised:  # modules show their shards again
                for unit in engine.passes:
                    if unit.state is not SHARDED:
                        engine.schedule.free(unit)
        return output


def module_groups_in(module: nn.Module) -> list[ModuleGroup]:
    """The groups of a module and of all modules inside it, each once."""
    return list(dict.fromkeys(m.__dict__[_KEY] for m in module.modules() if _KEY in m.__dict__))


def units_of(groups: Sequence[ModuleGroup]) -> list[Unit]:
    """The units of those groups that have one."""
    return [group.unit for group in groups if group.unit is not None]


def state_of(module: Any) -> ModuleGroup:
    """The group of the `fully_shard` that took this module, which torch calls its state."""
    return module.__dict__[_KEY]  # type: ignore[no-any-return]


def has_module_group(module: nn.Module) -> bool:
    """True if `fully_shard` has been applied to this very module."""
    return _KEY in module.__dict__


def use_schedule(
    module: nn.Module,
    schedule: Callable[[Sequence[Unit]], SyncSchedule],
    keeper: type[Held] | type[Recorded] = Held,
) -> None:
    """Set a different schedule for the outermost module's tree; those of FSDP1 also work with units of this kind.

    Args:
        module: the outermost module, before its first forward.
        schedule: creates the schedule of the tree's units, such as `RateLimitedSchedule`.
        keeper: with `Recorded`, buffers are released by `record_stream`, which needs a limiter on a device with queues.
    """
    group = state_of(module)
    group.make_schedule, group.keeper = schedule, keeper
