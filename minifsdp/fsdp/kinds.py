"""Which kind of unit a wrapped module gets: one class per concern, and their combination."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from minifsdp import comm
from minifsdp.flat_param import ParamPlaces
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.groups import Groups
from minifsdp.fsdp.guard import GuardedUnit
from minifsdp.fsdp.hybrid import HybridUnit
from minifsdp.fsdp.mixed_precision import MixedPrecisionUnit
from minifsdp.fsdp.offload import OffloadedUnit
from minifsdp.fsdp.options import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp.order_check import CheckedUnit
from minifsdp.fsdp.orig_params import AlignedFlatParameter, OrigParamsUnit
from minifsdp.fsdp.recast import RecastUnit
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.fsdp.strided import StridedFlatParameter


@dataclass(frozen=True)
class Kind:
    """What is asked of a unit."""

    strategy: ShardingStrategy
    groups: Groups
    precision: MixedPrecision
    offload: CPUOffload
    use_orig_params: bool

    def make_unit(self, params: ParamPlaces, module: nn.Module, device: torch.device, fill: Any) -> FlatUnit:
        """Flatten and shard `params`, those of `module` that no unit has yet."""
        replicated = self.strategy is ShardingStrategy.NO_SHARD
        group = self.groups.replicate if replicated and self.groups.replicate else self.groups.shard
        rank, ranks = (0, 1) if replicated else (group.rank(), group.size())
        flatten: Any = StridedFlatParameter
        if self.use_orig_params:
            flatten = partial(AlignedFlatParameter, gathered_in=self.precision.param_dtype)
        concerns: list[type[FlatUnit]] = [CheckedUnit] if comm.wants_order_checked() else []
        arguments: dict[str, Any] = {}
        if self.precision.param_dtype or self.precision.reduce_dtype:
            concerns.append(MixedPrecisionUnit)
            arguments |= {"precision": self.precision, "module": module}
        if self.offload.offload_params:
            concerns.append(OffloadedUnit)
        if self.use_orig_params:
            concerns += [GuardedUnit, OrigParamsUnit]
        if self.groups.replicate is not None and not replicated:
            concerns.append(HybridUnit)
            arguments |= {"replicas": self.groups.replicate}
        concerns += [RecastUnit, ReplicatedUnit if replicated else FlatUnit]
        return combine(*concerns)(
            flatten(params, rank, ranks, fill, device),
            group,
            type(module).__name__,
            reshard_after_forward=self.strategy.reshards_after_forward,
            **arguments,
        )


@cache
def combine(*concerns: type[FlatUnit]) -> type[FlatUnit]:
    """A unit with all of these concerns. Gradients pass through them in this order, on their way to the shards."""
    if len(concerns) == 1:
        return concerns[0]
    return type("".join(concern.__name__.removesuffix("Unit") for concern in concerns) + "Unit", concerns, {})
