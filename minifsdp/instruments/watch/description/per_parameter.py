"""A description of FSDP2: parameters sharded one by one."""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from minifsdp.cost.data_parallel import Gradient, OptimizerState
from minifsdp.cost.fsdp2 import Buffers, gradient_moments
from minifsdp.device import runs_behind
from minifsdp.fsdp import PrefetchSchedule, RateLimitedSchedule
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.dtensors import local_of
from minifsdp.fsdp2.held import Held
from minifsdp.fsdp2.hooks import ModuleGroup, state_of
from minifsdp.fsdp2.unit import ParamUnit
from minifsdp.gloo import reduces_by_all_to_all
from minifsdp.instruments.watch.description.report import (
    Description,
    Prediction,
    UnitRow,
    dtype_name,
    padded,
    too_large,
)
from minifsdp.private import backend_of


def describe_per_parameter(model: nn.Module, optimizer: OptimizerState) -> Description:
    """Describe a module that `fully_shard` was applied to, and all sharded modules inside.

    Raises:
        ValueError: they have no parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    root = state_of(model)
    groups = [group for group in root.tree() if group.unit is not None]
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to describe")
    rows = [_row(names[group.modules[0]] or "root", group, root, optimizer) for group in groups]
    warnings = [
        *too_large(rows, "Apply fully_shard to its layers first."),
        *padded(rows, "dimension 0 of its parameters is short, or no multiple of the number of ranks."),
    ]
    return Description(rows, _predict(root, groups, rows), warnings, _unit(groups[0]).group.size())


def _row(name: str, group: ModuleGroup, model: ModuleGroup, optimizer: OptimizerState) -> UnitRow:
    unit = _unit(group)
    local = [local_of(p).numel() for p in unit.shards]
    numels = [prod(cut.shape) for cut in unit.cuts]
    buffers, (kept, computed, reduced) = _buffers(unit), _dtypes(unit)
    shares = [n * p.element_size() for n, p in zip(local, unit.shards, strict=True)]
    return UnitRow(
        name=f"{name} ({unit.name})",
        strategy=_strategy(group, model),
        parameters=len(numels),
        numel=sum(numels),
        padding=buffers.whole // computed.itemsize - sum(numels),
        frozen=sum(n for n, p in zip(numels, unit.shards, strict=True) if not p.requires_grad),
        whole=buffers.whole,
        rank=sum(shares),
        gradient=Gradient(buffers.packed, buffers.reducing, buffers.mean),
        optimizer=optimizer.of_sizes(n for n, p in zip(shares, unit.shards, strict=True) if p.requires_grad),
        dtypes=(dtype_name(kept), dtype_name(computed), dtype_name(reduced)),
        resharded=_is_resharded(group, model),
        offloaded=unit.plan.offload,
    )


def _unit(group: ModuleGroup) -> ParamUnit:
    assert group.unit is not None
    return group.unit


def _dtypes(unit: ParamUnit) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of the first parameter's shard, its computation and its reduction."""
    kept = unit.shards[0].dtype
    computed = (unit.plan.compute if kept.is_floating_point else None) or kept
    return kept, computed, unit.plan.reduce or computed


def _is_resharded(group: ModuleGroup, model: ModuleGroup) -> bool:
    is_root = (group.root or model) is group  # only a step decides which module is the root
    return _unit(group).reshard_after_forward and not (group.decides and is_root)


def _strategy(group: ModuleGroup, model: ModuleGroup) -> str:
    unit = _unit(group)
    if not _is_resharded(group, model):
        return "kept whole"
    return "resharded" if unit.smaller is None else f"resharded to {unit.smaller.size()}"


def _buffers(unit: ParamUnit) -> Buffers:
    """Bytes of a unit's buffers; those of gradients have no columns for frozen parameters."""
    ranks, (kept, computed, reduced) = unit.group.size(), _dtypes(unit)
    dtypes = [(unit.plan.compute if p.is_floating_point() else None) or p.dtype for p in unit.shards]
    whole = Rows(unit.cuts, ranks, dtypes)
    cuts = [cut for cut, p in zip(unit.cuts, unit.shards, strict=True) if p.requires_grad]
    if not cuts:
        return Buffers(whole.numel * whole.dtype.itemsize, 0, 0, 0, 0)
    packed = Rows(cuts, ranks, [reduced] * len(cuts))
    by_all_to_all = reduces_by_all_to_all(backend_of(unit.group, unit.device), ranks)
    cast = packed.row * kept.itemsize if kept is not reduced else 0
    return Buffers(
        whole=whole.numel * whole.dtype.itemsize,
        leaves=sum(prod(cut.shape) for cut in cuts) * computed.itemsize,
        packed=packed.numel * reduced.itemsize,
        reducing=(packed.numel if by_all_to_all else packed.row) * reduced.itemsize + cast,
        mean=packed.row * kept.itemsize,
    )


def _predict(model: ModuleGroup, groups: list[ModuleGroup], rows: list[UnitRow]) -> Prediction:
    buffers = [_buffers(_unit(group)) for group in groups]
    root, blocks = (buffers[0], buffers[1:]) if groups[0] is model else (Buffers(0, 0, 0, 0, 0), buffers)
    blocks_rows = rows[len(rows) - len(blocks) :]
    kept = sum(row.whole for row in blocks_rows if not row.resharded)
    resharded = [row.whole for row in blocks_rows if row.resharded]
    unsharded = root.whole + kept + max(resharded, default=0) + sum(_kept_among_fewer(_unit(group)) for group in groups)
    schedule = model.engine.schedule if model.engine else model.schedule()
    ahead, limited = 0, isinstance(schedule, RateLimitedSchedule)
    if isinstance(schedule, PrefetchSchedule):
        ahead = len(blocks) if schedule.depth is None else schedule.depth
    if isinstance(schedule, RateLimitedSchedule):
        ahead = min(ahead, schedule.limit - 1)
    holds = model.keeper is Held and runs_behind(model.device)
    gradients = max(each.bytes for each in gradient_moments(root, blocks, root.leaves, ahead, limited, holds))
    on_device = sum(row.rank + row.optimizer for row in rows if not row.offloaded)
    return Prediction(
        parameters=sum(row.rank for row in rows),
        gradients=sum(row.gradient.kept for row in rows),
        optimizer=sum(row.optimizer for row in rows),
        unsharded_peak=unsharded,
        gradients_peak=gradients,
        peak=on_device + unsharded + gradients,
    )


def _kept_among_fewer(unit: ParamUnit) -> int:
    """Bytes that a rank keeps between forward and backward where backward gathers among fewer ranks."""
    if unit.smaller is None:
        return 0
    fewer = [Cut(cut.shape, cut.dim, unit.smaller.size()) for cut in unit.cuts]
    return sum(prod(cut.local(unit.smaller.rank())) for cut in fewer) * _dtypes(unit)[1].itemsize
