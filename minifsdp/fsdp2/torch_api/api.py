"""`fully_shard`: a module's parameters become DTensors in place (torch/distributed/fsdp/_fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from minifsdp import comm, nesting, process_groups
from minifsdp.device import compute_device
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp2.api import params_of, shard
from minifsdp.fsdp2.hooks import has_module_group
from minifsdp.fsdp2.torch_api.extensions import extended_of
from minifsdp.fsdp2.torch_api.module import FSDPModule
from minifsdp.fsdp2.torch_api.policies import NO_POLICY, ON_DEVICE, policies
from minifsdp.fsdp2.torch_api.reduction import ChosenReduction
from minifsdp.fsdp2.unit import ParamUnit
from minifsdp.kinds import check_kind, check_mesh, is_named, refused, tensors_of
from minifsdp.local_parts import check_replicated, refuse_replaced, replaced
from minifsdp.mesh import all_ranks
from minifsdp.optimizer_checks import (
    check_not_stale,
    check_steps_after_backward,
    note_taken,
    noted_of,
)
from minifsdp.optimizer_steps import before_every_step
from minifsdp.partial_reads import refuse_partial_reads
from minifsdp.uncompiled import stay_out_of_graphs
from minifsdp.whole_tensors import check_step

_units: WeakSet[ParamUnit] = WeakSet()


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = NO_POLICY,
    offload_policy: Any = ON_DEVICE,
    ignored_params: Collection[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of `module` that no earlier call has taken, as one unit; call it for inner modules first.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: a 1-D mesh to shard over, or a 2-D mesh with named dimensions to replicate over the first and shard over
            the second; default: all ranks.
        reshard_after_forward: free parameters after forward. An integer k: keep a part of them on each of k ranks,
            among which backward gathers; 1: keep them unsharded. None: True, except for the outermost module.
        shard_placement_fn: returns the `Shard(dim)` for a parameter; None, or if it returns None: `Shard(0)`.
        mp_policy: the dtypes, as a `MixedPrecisionPolicy`, ours or torch's.
        offload_policy: the location of sharded parameters, as an `OffloadPolicy` or `CPUOffloadPolicy`, ours or
            torch's.
        ignored_params: parameters that are not sharded.

    Returns:
        `module`, whose class is now also an `FSDPModule`.

    Raises:
        RuntimeError: an optimizer of a parameter is to step in backward.
        TypeError: an argument is of another kind, such as a policy of FSDP1 or the name of a parameter.
        ValueError: a module, or a parameter of it, was sharded before, or is in another wrapper; a module has no
            forward; a parameter is a scalar; or the mesh has 3 dimensions.
        NotImplementedError: a parameter is not contiguous, or is split unevenly along a dimension other than 0.
    """
    stay_out_of_graphs()
    before_every_step(check_step)
    refuse_partial_reads()
    mp_policy, offload_policy = policies(mp_policy, offload_policy)
    ignored = tensors_of("ignored_params", ignored_params, "a set of parameters, not of names or modules")
    modules: list[nn.Module] = list(dict.fromkeys(module)) if isinstance(module, list | tuple) else [module]
    _check(modules, shard_placement_fn)
    for each in modules:
        nesting.refuse_nested(nesting.FSDP2, each, ignored)
    group = comm.world()
    params = params_of(modules, ignored)
    _check_params(params)
    device = compute_device(None, params, group)
    mesh = mesh if mesh is not None else all_ranks(device.type)
    _check_mesh(mesh)
    plan = _plan(mesh, mp_policy, offload_policy)
    for group, (p, places) in product(filter(None, (plan.inside, plan.across)), params.items()):
        check_replicated(p, places[0].name, group)
    _move(modules, params, device)
    smaller = _smaller(reshard_after_forward, mesh)
    reshard = reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):  # a number of ranks; one keeps all
        reshard = reshard != 1
    unsharded = partial(extended_of, mesh=mesh, policy=mp_policy)
    own = plan, device, mp_policy, reshard, smaller, shard_placement_fn, unsharded, ChosenReduction()
    _note(params, shard(modules, params, mesh, *own).unit)
    for each in modules:
        each.__class__ = _sharded(type(each))  # type: ignore[arg-type]
    return module


def _check(modules: Sequence[Any], shard_placement_fn: Any) -> None:
    if not (shard_placement_fn is None or callable(shard_placement_fn)):
        raise refused("shard_placement_fn", shard_placement_fn, "a function of a parameter that returns Shard(dim)")
    if not modules:
        raise ValueError("fully_shard of an empty list: give it a module, or several")
    for module in modules:
        check_kind("module", module, nn.Module, "a module, or a list of modules")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
        if has_module_group(module):
            name = type(module).__name__
            raise ValueError(f"fully_shard was applied to this {name} before: apply it once to a module")


def _check_mesh(mesh: Any) -> None:
    check_mesh("mesh", mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


def _plan(mesh: Any, mp_policy: Any, offload_policy: Any) -> Plan:
    inside = process_groups.mesh_group(mesh, mesh.ndim - 1)
    across = process_groups.mesh_group(mesh, 0) if mesh.ndim == 2 else None
    offload = is_named(offload_policy, "CPUOffloadPolicy")
    pin = offload and offload_policy.pin_memory
    return Plan(inside, across, mp_policy.param_dtype, mp_policy.reduce_dtype, offload=offload, pin=pin)


def _check_params(params: ParamPlaces) -> None:
    shards = {p: (name, unit) for unit in _units for name, p in zip(unit.names, unit.shards, strict=True)}
    for p, places in params.items():
        name = places[0].name
        check_steps_after_backward(name, p)
        if (before := noted_of(p)) is not None:
            _refuse(name, before.name, before.unit())
        if p in shards:
            _refuse(name, *shards[p])
        if p in replaced and p.requires_grad:
            refuse_replaced(p)
        if p.ndim == 0:
            raise ValueError(
                f"fully_shard does not support scalar parameters. Change {name} to a 1D tensor with numel 1."
            )
        if getattr(p, "grad_dtype", p.dtype) not in (p.dtype, None):
            raise NotImplementedError(f"{name} has grad_dtype {p.grad_dtype}: leave it unset, and give a reduce_dtype")
        if not p.is_contiguous():
            raise NotImplementedError(f"fully_shard does not support non-contiguous parameters: {name} is {p.stride()}")


def _refuse(name: str, before: str, unit: Any) -> NoReturn:
    raise ValueError(
        f"{name} is {before} of {unit.title}, which was sharded before: shard inner modules before outer ones, and "
        "modules that share a parameter together, fully_shard([module_a, module_b])"
    )


def _move(modules: Sequence[nn.Module], params: ParamPlaces, device: torch.device) -> None:
    """Buffers come to the device; what is on meta stays there. Parameters come when they are cut."""
    for module in {inner for outer in modules for inner in outer.modules()}:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def _note(params: ParamPlaces, unit: ParamUnit | None) -> None:
    """Let later wrappers and optimizers know whose these parameters are."""
    if unit is not None:
        for p, places in params.items():
            note_taken(p, places[0].name, unit)
        before_every_step(check_not_stale)
        _units.add(unit)
    nesting.keep((place.module for places in params.values() for place in places), nesting.FSDP2)


def _smaller(reshard_after_forward: Any, mesh: Any) -> Any:
    """The ranks among which backward gathers; None: those of forward."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    ranks = mesh.shape[-1]
    if not isinstance(reshard_after_forward, int):
        raise refused("reshard_after_forward", reshard_after_forward, "True, False, None or a number of ranks")
    if reshard_after_forward < 1 or ranks % reshard_after_forward:
        raise ValueError(
            f"If reshard_after_forward is an int, it should be a factor of {ranks}, not {reshard_after_forward}"
        )
    if reshard_after_forward in (1, ranks):
        return None
    return process_groups.part_of_mesh(mesh, reshard_after_forward)


@cache
def _sharded(cls: Any) -> type[Any]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
