"""Which kind of unit a wrapped module gets: one class per concern, and their combination."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from minifsdp import process_groups
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.accumulated import AccumulatedUnit
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.guard import GuardedUnit
from minifsdp.fsdp.hooks import HookedUnit
from minifsdp.fsdp.hybrid import HybridUnit
from minifsdp.fsdp.mixed_precision import MixedPrecisionUnit
from minifsdp.fsdp.offload import OffloadedUnit
from minifsdp.fsdp.order_check import CheckedUnit
from minifsdp.fsdp.orig_params import AlignedFlatParameter, OrigParamsUnit
from minifsdp.fsdp.recast import RecastUnit
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.fsdp.strided import StridedFlatParameter
from minifsdp.fsdp.torch_api.construct import errors_end_in, managed_parameters
from minifsdp.fsdp.torch_api.groups import Groups
from minifsdp.fsdp.torch_api.materialize import Fill, filler, run_param_init_fn
from minifsdp.fsdp.torch_api.options import ShardingStrategy
from minifsdp.fsdp.torch_api.wrap import take
from minifsdp.fsdp.whole import WholeUnit


def make_unit(
    instance: Any, param_init_fn: Callable[[nn.Module], None] | None, sync: Groups | None
) -> WholeUnit | None:
    """The unit of an instance: of the parameters that no inner unit has, if there are any. Buffers get values as well.

    Args:
        instance: a FullyShardedDataParallel, with its settings.
        param_init_fn: as there.
        sync: over which groups rank 0's values are to come; None: every rank has its own.
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
    with errors_end_in(f"names inside {type(instance.module).__name__}"):
        unit = flatten_and_shard(instance, params, fill)
    take(own, unit)
    return unit


def flatten_and_shard(instance: Any, params: ParamPlaces, fill: Fill) -> WholeUnit:
    """A unit of these parameters, of the kind that the instance's settings ask for."""
    strategy, groups, precision = instance.sharding_strategy, instance._groups, instance.mixed_precision
    replicated = strategy is ShardingStrategy.NO_SHARD
    group = groups.replicate if replicated and groups.replicate else groups.shard
    rank, ranks = (0, 1) if replicated else (group.rank(), group.size())
    flatten: Any = StridedFlatParameter
    if instance._use_orig_params:
        flatten = partial(AlignedFlatParameter, gathered_in=precision.param_dtype)
    concerns: list[type[FlatUnit]] = [CheckedUnit] if process_groups.wants_order_checked() else []
    arguments: dict[str, Any] = {}
    half = next(iter(params)).dtype is torch.float16  # its sums overflow as those of reduce_dtype=torch.float16 do
    if half or precision.param_dtype or precision.reduce_dtype:
        concerns.append(MixedPrecisionUnit)
        arguments |= {"precision": precision, "module": instance.module}
    if instance.cpu_offload.offload_params:
        concerns.append(OffloadedUnit)
    concerns.append(HookedUnit)
    if instance._use_orig_params:
        concerns += [OrigParamsUnit] if replicated else [GuardedUnit, OrigParamsUnit]
    if groups.replicate is not None and not replicated:
        concerns.append(HybridUnit)
        arguments |= {"replicas": groups.replicate}
    concerns += [AccumulatedUnit, RecastUnit, ReplicatedUnit if replicated else WholeUnit]
    unit: WholeUnit = combine(*concerns)(
        flatten(params, rank, ranks, fill, instance.compute_device),
        group,
        type(instance.module).__name__,
        reshard_after_forward=strategy.reshards_after_forward,
        **arguments,
    )
    return unit


@cache
def combine(*concerns: type[FlatUnit]) -> type[Any]:
    """A unit with all of these concerns. Gradients pass through them in this order, on their way to the shards."""
    return type("".join(concern.__name__.removesuffix("Unit") for concern in concerns) + "Unit", concerns, {})
