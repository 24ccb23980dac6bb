"""The methods added to a sharded module (torch/distributed/fsdp/_fully_shard/_fully_shard.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from minifsdp.comm import Group
from minifsdp.device import runs_behind
from minifsdp.fsdp.schedules.overlap import OverlapSchedule
from minifsdp.fsdp2.hooks import ModuleGroup, state_of
from minifsdp.fsdp2.torch_api import custom
from minifsdp.fsdp2.torch_api.reduction import ChosenReduction
from minifsdp.fsdp2.unit import ParamUnit
from minifsdp.process_groups import duplicate_group, global_ranks

_NO_MEMORY = "buffers come from torch's allocator alone; leave it out, or use torch's fully_shard"


class UnshardHandle:
    """A gather in progress."""

    def __init__(self, unit: ParamUnit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """After this the module's parameters are whole; on CUDA the current stream waits, not the host."""
        if self._unit is not None:
            self._unit.wait_gather()
            self._unit = None


class FSDPModule:
    """The first base of the class "FSDP..." that `fully_shard` gives a module; the module's own class is the second."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: indexing a container makes one of its own class."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`to`, `to_empty` and the like change shards."""
        self.reshard()
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, without those of sharded modules inside.

        They stay whole until `reshard`, or until the next forward or backward frees them.

        Args:
            async_op: return a handle instead of waiting.
        """
        group = state_of(self)
        handle = UnshardHandle(group.unit)
        if group.unit is not None:
            group.unit.refresh()
            if group.engine is None:  # the root has not run yet
                group.unit.start_gather()
            else:
                group.engine.schedule.follow_optimizer()
                group.engine.schedule.gather(group.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own parameters."""
        for unit in self._units(False):
            unit.free()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Let backward reduce gradients, or keep them unsharded for later ones to add to."""
        for unit in self._units(recurse):
            unit.reduces = unit.delivery.all_reduces = requires_gradient_sync

    def reduce_accumulated(self) -> None:
        """Reduce what earlier backwards have left unsharded, without another one; on all ranks."""
        state_of(self).reduce_accumulated()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh: let an all-reduce over the replicas follow, or keep the means inside for later ones."""
        for unit in self._units(recurse):
            unit.delivery.all_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free parameters after forward and gather them again from all ranks, or keep them whole until backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r}: give True or False")
        for group in self._module_groups(recurse):
            group.decides = False
            if (unit := group.unit) is not None:
                unit.reshard_after_forward, unit.smaller, unit.is_root = reshard_after_forward, None, False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free parameters after backward, or keep them whole for the next micro-batch."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give zero gradients to parameters that no rank has used, or none."""
        for unit in self._units(recurse):
            unit.reduces_unused = reduce_scatter_unused_params

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients by `factor` instead of the number of ranks."""
        for unit in self._units(False):
            _reduction_of(unit).factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Several backwards are to come: wait for reductions at the end of the last one only."""
        group = state_of(self)
        (group.engine or group.start()).is_last_backward = is_last_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather in backward, or not: for parameters whose values backward does not read, such as an embedding's."""
        for unit in self._units(False):
            unit.gathers_in_backward = unshard_in_backward

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this module's collectives add up, and divide ourselves."""
        for unit in self._units(False):
            _reduction_of(unit).sums = enable

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: Any = None) -> None:
        """Call `hook` with this module's reduced gradients [S'], one tensor per backward, before they are delivered.

        Args:
            hook: may change the tensor in place, such as by an all-reduce over replicas that are not on the mesh.
            stream: where to call it.

        Raises:
            ValueError: a stream is given, and the mesh has replicas, whose all-reduce has a stream already.
        """
        for unit in self._units(False):
            if stream is not None and unit.plan.across is not None:
                raise ValueError("stream cannot be set when using native HSDP")
            reduction = _reduction_of(unit)
            reduction.hook, reduction.stream = hook, stream

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's parameters by `comm`: its `allocate` and the object itself, as custom.py has it."""
        for unit in self._units(False):
            unit.all_gather = None if comm is None else partial(custom.all_gather, comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this module's gradients by `comm`: its `allocate` and the object itself, as custom.py has it."""
        for unit in self._units(False):
            _reduction_of(unit).custom = comm

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce through a communicator of its own, which need not wait for the gathers'; to be called on all ranks."""
        made: dict[tuple[int, ...], Group] = {}
        for unit in self._units(recurse):
            reduction, ranks = _reduction_of(unit), tuple(global_ranks(unit.group))
            if enable and ranks not in made:
                made[ranks] = reduction.group or duplicate_group(unit.group)
            reduction.group = made[ranks] if enable else None

    def set_allocate_memory_from_process_group_for_comm(self, enable: Any = None) -> NoReturn:
        """Absent, as is the next one: buffers come from torch's allocator alone."""
        raise NotImplementedError(f"set_allocate_memory_from_process_group_for_comm: {_NO_MEMORY}")

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> NoReturn:
        raise NotImplementedError(f"set_symm_mem_for_comm: {_NO_MEMORY}")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let so many reductions be under way, each with its packed gradient; the largest of a tree counts.

        Where the host computes, on CPU, memory alone decides (fsdp/schedules/host.py).

        Raises:
            TypeError: it is no integer.
            ValueError: it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for group in self._module_groups(recurse):
            group.reductions = max_input_buffers
        self._adjust()

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for this event instead of all that is queued by then.

        Args:
            event: recorded after the optimizer's step; good for one forward.
        """
        group = state_of(self)
        engine = group.engine or group.start()
        if isinstance(engine.schedule, OverlapSchedule) and runs_behind(group.device):
            engine.schedule.written = event

    def reset_iter_state(self) -> None:
        """A forward or backward has raised, on all ranks: end it, drop all gradients, and free what is whole.

        Raises:
            RuntimeError: this is not the outermost module, or it has not run.
        """
        root = state_of(self)
        if root.engine is None or not root.is_root:
            raise RuntimeError("reset_iter_state: call it on the root, the outermost module that has run")
        if root.engine.backward_runs:
            root.engine.abandon_backward()
        for group in root.tree():
            group.restart()

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Gather these before this module computes in forward."""
        state_of(self).forward_list = _module_groups_of(modules)
        self._adjust()

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Gather these before this module computes in backward, instead of the one that the order would have."""
        state_of(self).backward_list = _module_groups_of(modules)
        self._adjust()

    def _adjust(self) -> None:
        group = state_of(self)
        if group.engine is not None and group.root is not None:
            group.root.adjust(group.engine.schedule)

    def _module_groups(self, recurse: bool) -> list[ModuleGroup]:
        own = state_of(self)
        return own.tree() if recurse else [own]

    def _units(self, recurse: bool) -> list[ParamUnit]:
        return [group.unit for group in self._module_groups(recurse) if group.unit is not None]


def _reduction_of(unit: ParamUnit) -> ChosenReduction:
    reduction = unit.delivery.reduction
    assert isinstance(reduction, ChosenReduction), "fully_shard gives each unit one"
    return reduction


def _module_groups_of(modules: Iterable[Any]) -> list[ModuleGroup]:
    wrong = [type(module).__name__ for module in modules if not isinstance(module, FSDPModule)]
    if wrong:
        raise ValueError(f"Expects FSDPModule but got {', '.join(wrong)}: apply fully_shard to it first")
    return [state_of(module) for module in modules]
