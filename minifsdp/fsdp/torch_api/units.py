"""The unit of a wrapped module: its plan and its view, from the module's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from minifsdp.flat_param import FlatParameter, ParamPlaces
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.torch_api.construct import errors_end_in, managed_parameters
from minifsdp.fsdp.torch_api.groups import Groups
from minifsdp.fsdp.torch_api.materialize import Fill, filler, run_param_init_fn
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.fsdp.torch_api.original_params import OriginalParams
from minifsdp.fsdp.torch_api.wrap import mark_taken
from minifsdp.fsdp.view import FlatView
from minifsdp.layout import Layout

ALIGNMENT = 16  # bytes between the starts of original parameters, a multiple of it: for vectorised kernels

MakeUnit = Callable[..., FlatUnit]
"""Makes a unit from what `FlatUnit` takes: a flat parameter, a plan, a name, `reshard_after_forward` and `view`."""


def make_unit(
    instance: Any, param_init_fn: Callable[[nn.Module], None] | None, sync: Groups | None, unit: MakeUnit
) -> FlatUnit | None:
    """The unit of an instance: of the parameters that no inner unit has, if there are any. Buffers get values as well.

    Args:
        instance: a FullyShardedDataParallel, with its settings.
        param_init_fn: as there.
        sync: over which groups rank 0's values are to come; None: every rank has its own.
        unit: makes it.
    """
    module, modules = instance._fsdp_wrapped_module, instance._managed
    params = own = managed_parameters(module, instance._ignored)
    if param_init_fn is not None:
        run_param_init_fn(modules, own, param_init_fn)
        params = managed_parameters(module, instance._ignored)
    fill = filler(module, modules, params, instance.compute_device, sync)
    if not params:
        fill([], [])
        return None
    plan = plan_of(instance)
    with errors_end_in(f"names inside {type(instance.module).__name__}"):
        flat, view = flatten(instance, plan, params, fill)
    name, reshard = type(instance.module).__name__, instance.sharding_strategy.reshards_after_forward
    made = unit(flat, plan, name, reshard_after_forward=reshard, view=view)
    mark_taken(own, made)
    return made


def plan_of(instance: Any) -> Plan:
    """The plan that an instance's settings ask for."""
    precision, inside, across = instance.mixed_precision, instance._groups.shard, instance._groups.replicate
    if instance.sharding_strategy is ShardingStrategy.NO_SHARD:
        inside, across = None, across or inside
    return Plan(
        inside,
        across,
        compute=precision.param_dtype,
        reduce=precision.reduce_dtype,
        keep_low=precision.keep_low_precision_grads,
        offload=instance.cpu_offload.offload_params,
    )


def flatten(
    instance: Any, plan: Plan, params: ParamPlaces, fill: Fill
) -> tuple[FlatParameter, Callable[[FlatParameter], FlatView]]:
    """The flat parameter of an instance, and what makes its view."""
    original, is_sharded = instance._use_orig_params, plan.inside is not None
    rank, ranks = (plan.inside.rank(), plan.inside.size()) if plan.inside is not None else (0, 1)
    gathered_in = plan.compute or next(iter(params)).dtype
    alignment = max(1, ALIGNMENT // gathered_in.itemsize) if original else 1
    lay_out = partial(Layout.of, alignment=alignment, keeps_strides=True)
    flat = FlatParameter(params, rank, ranks, fill, instance.compute_device, lay_out, same_requires_grad=not original)
    return flat, partial(OriginalParams, guarded=is_sharded) if original else FlatView
