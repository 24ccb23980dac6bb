"""`summon_full_params`: whole parameters under their original names, outside forward and backward.

Collective: every rank has to enter and leave the `with` (torch/distributed/fsdp/_unshard_param_utils.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from minifsdp import device
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.fsdp.torch_api.state import gradients
from minifsdp.fsdp.torch_api.wrapped import Wrapped, instances_in
from minifsdp.optimizer_checks import note_taken
from minifsdp.private import in_backward
from minifsdp.wrapper_names import FLAT_PARAM

NO_SHARD = ShardingStrategy.NO_SHARD


@dataclass(frozen=True)
class Summon:
    """Options of `summon_full_params`.

    Attributes:
        writeback: store in the shards what is written to them.
        rank0_only: rank 0 of the process group alone has them; the others only take part in the gather.
        offload_to_cpu: they are in host memory.
        with_grads: their gradients are whole, too.
    """

    writeback: bool = False
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def is_for(self, rank: int) -> bool:
        return rank == 0 or not self.rank0_only

    def covers(self, other: Summon) -> bool:
        """True if `other` asks for nothing beyond this."""
        return (
            self.rank0_only <= other.rank0_only
            and self.writeback >= other.writeback
            and self.with_grads >= other.with_grads
        )


def check(how: Summon, instances: Iterable[Wrapped]) -> None:
    """Before anything starts, and alike on all ranks.

    Raises:
        NotImplementedError: with torch's texts, a combination that has no meaning.
    """
    if how.writeback and how.rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported yet: the other ranks would not have what rank 0 "
            "writes. Pass writeback=False, or write on all ranks."
        )
    for instance in instances:
        has_originals = instance._use_orig_params
        if how.with_grads and instance._unit is not None and (how.offload_to_cpu or not has_originals):
            raise NotImplementedError(
                f"with_grads={how.with_grads}, use_orig_params={has_originals}, offload_to_cpu={how.offload_to_cpu} "
                "is not supported yet: a parameter has a gradient of its own with use_orig_params=True, on the device"
            )
        if how.offload_to_cpu and instance.sharding_strategy is NO_SHARD and instance._unit is not None:
            raise NotImplementedError(
                "offload_to_cpu=True and NO_SHARD is not supported yet: the parameters are whole where they are"
            )
    if how.offload_to_cpu and not how.rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters being redundantly "
            "copied to CPU memory, once per rank of a host. We recommend rank0_only=True with offload_to_cpu=True.",
            stacklevel=5,
        )


def check_forward(instance: Wrapped) -> None:
    """Before a forward of a summoned module: no other rank takes part, so no unit inside may need to communicate.

    Raises:
        ValueError: with torch's text, it is called where the parameters are not, or has units inside that would gather.
    """
    how = instance._summoned
    inside = [m for m in instances_in(instance) if m._summoned is None]
    if how is not None and how.rank0_only and (inside or not how.is_for(instance.rank)):
        raise ValueError(
            "expected to be in states [<TrainingState.IDLE: 1>] but current state is TrainingState.SUMMON_FULL_PARAMS: "
            f"a forward of {type(instance.module).__name__} inside summon_full_params(rank0_only=True) is for rank 0 "
            "alone, and for recurse=True; pass rank0_only=False, or the ranks would wait for each other"
        )


def check_none_summoned(instances: Iterable[Wrapped]) -> None:
    """Before the forward of an outermost instance whose own parameters are not summoned.

    Raises:
        ValueError: those of an instance inside are: the forward would gather and free them as if they were not.
    """
    for inside in (m for m in instances if m._summoned is not None):
        raise ValueError(
            "expected to be in states [<TrainingState.IDLE: 1>] but current state is TrainingState.SUMMON_FULL_PARAMS: "
            f"the parameters of {type(inside.module).__name__} are summoned, those of the model around it are not; "
            "summon those of the whole model to run it"
        )


def runs(instance: Wrapped) -> bool:
    """True if a forward or a backward is under way; one that has raised is over."""
    in_forward = instance._engine is not None and instance._engine.forward_runs
    return in_forward or in_backward()


@contextmanager
def exposed(instance: Wrapped, how: Summon) -> Iterator[None]:
    """Have the whole values of an instance's unit among the parameters of their modules.

    Raises:
        AssertionError: inside forward or backward; or they are there already, but in another way.
    """
    unit, before = instance._unit, instance._summoned
    if runs(instance):
        raise AssertionError(
            "Cannot manually unshard parameters during forward/backward: "
            f"{type(instance.module).__name__} is used at present. Summon them before or after."
        )
    if before is not None and not before.covers(how):
        raise AssertionError(
            "Cannot manually unshard parameters when already unsharding parameters: "
            f"{how} inside {before}, which does not give it"
        )
    if before is not None:
        yield
        return
    with ExitStack() as stack:
        instance._summoned = how
        stack.callback(setattr, instance, "_summoned", None)
        if unit is not None:
            full, has_it = stack.enter_context(unit.gathered()), how.is_for(instance.rank)
            if has_it:
                shown = full.to("cpu", copy=True) if how.offload_to_cpu else full
                stack.enter_context(_in_modules(instance, unit, shown, how))
            if instance.sharding_strategy is not NO_SHARD and (how.offload_to_cpu or not has_it):
                device.free(full)
        yield


def _check_no_gradients(unit: FlatUnit) -> None:
    places = (users[0] for users in unit.view.places)
    found = [place.name for place in places if getattr(place.module, place.attribute).grad is not None]
    if found:
        raise RuntimeError(
            f"a backward inside summon_full_params has left gradients of whole parameters of {unit.title}: "
            f"{', '.join(found)}. Nothing would reduce them, and they go with the parameters: run it outside."
        )


@contextmanager
def _in_modules(instance: Wrapped, unit: FlatUnit, full: Tensor, how: Summon) -> Iterator[None]:
    """Parameters as views of `full` [P], instead of the flat parameter."""
    flat = instance.module._parameters.pop(FLAT_PARAM, None)
    unit.take_accumulated()  # it is neither whole nor a slice
    slices = gradients.pop(unit)
    with_grads = how.with_grads or unit.contents.ranks == 1  # where nothing is sharded they are whole at all times
    wholes: gradients.Gradients = gradients.gather(unit, slices) if with_grads else [None] * len(slices)
    unit.view.show_originals(full)
    gradients.assign(unit, wholes)
    try:
        yield
        if not (with_grads and instance._use_orig_params):
            _check_no_gradients(unit)
    finally:
        wholes = gradients.pop(unit)
        for users in () if instance._use_orig_params else unit.view.places:
            note_taken(getattr(users[0].module, users[0].attribute), users[0].name, unit, "inside summon_full_params")
        unit.view.hide_originals()
        if with_grads and how.writeback:
            slices = gradients.scatter(unit, wholes, slices)
        gradients.assign(unit, slices)
        if flat is not None:
            instance.module._parameters[FLAT_PARAM] = flat
        if how.writeback:
            unit.contents.store(full)
        unit.show_accumulated()
