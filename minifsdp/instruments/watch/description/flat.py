"""A description of FSDP1: one flat parameter per unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minifsdp.cost.data_parallel import Gradient, OptimizerState, gradients_peak, most_whole
from minifsdp.fsdp import FullyShardedDataParallel, OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import POST
from minifsdp.gloo import reduces_by_all_to_all
from minifsdp.instruments.watch.description.report import (
    Description,
    Prediction,
    UnitRow,
    dtype_name,
    padded,
    too_large,
)
from minifsdp.instruments.watch.tables import MIB
from minifsdp.private import backend_of
from minifsdp.wrapper_names import clean_name


def describe_flat(model: FullyShardedDataParallel, optimizer: OptimizerState) -> Description:
    """Describe a wrapped model."""
    rows = [_row(name, instance, optimizer) for name, instance in _instances(model)]
    root = model._unit is not None
    units = [instance._unit for _, instance in _instances(model) if instance._unit is not None]
    schedule = model._engine.schedule if model._engine else model._make_schedule(units) if units else SyncSchedule([])
    return Description(rows, _predict(rows, root, schedule), list(_warnings(rows)), model.world_size)


def _instances(model: FullyShardedDataParallel) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._unit is not None:
            yield clean_name(name) or "root", module


def _row(name: str, instance: FullyShardedDataParallel, optimizer: OptimizerState) -> UnitRow:
    unit = instance._unit
    assert isinstance(unit, FlatUnit)
    contents, shard = unit.contents, unit.contents.shard
    numels = [shape.numel() for shape in contents.shapes]
    trained = [p.requires_grad for p in unit.shards] * (1 if len(unit.shards) == len(numels) else len(numels))
    size, item = contents.padded, shard.element_size()
    held = [p.numel() for p in unit.shards if p.requires_grad and p.numel()]
    return UnitRow(
        name=f"{name} ({unit.name})",
        strategy=instance.sharding_strategy.name,
        parameters=len(numels),
        numel=sum(numels),
        padding=size - sum(numels),
        frozen=sum(numel for numel, wanted in zip(numels, trained, strict=True) if not wanted),
        whole=0 if unit.unsharded.is_shard else size * unit.unsharded.full.element_size(),
        rank=shard.numel() * item,
        gradient=_gradient(unit, instance.mixed_precision.keep_low_precision_grads) if any(trained) else _NONE,
        optimizer=optimizer.of_sizes(n * item for n in held),
        dtypes=(dtype_name(shard.dtype), dtype_name(unit.unsharded.full.dtype), dtype_name(unit.gradient_dtype)),
        resharded=unit.reshard_after_forward,
        offloaded=instance.cpu_offload.offload_params,
    )


_NONE = Gradient(0, 0, 0)


def _gradient(unit: FlatUnit, keeps_low: bool) -> Gradient:
    whole = unit.contents.padded * unit.gradient_dtype.itemsize
    kept_as = unit.gradient_dtype if keeps_low else unit.contents.shard.dtype
    kept = unit.contents.shard.numel() * kept_as.itemsize
    if unit.plan.inside is None:  # reduced in place, and kept without a cast if the dtypes match
        return Gradient(whole, 0 if kept_as is unit.gradient_dtype else kept, kept)
    by_all_to_all = reduces_by_all_to_all(backend_of(unit.group, unit.device), unit.contents.ranks)
    return Gradient(whole, whole if by_all_to_all else whole // unit.contents.ranks, kept)


def _predict(rows: list[UnitRow], has_root: bool, schedule: SyncSchedule) -> Prediction:
    first = rows[:1] if has_root else []
    blocks = rows[len(first) :]
    on_host = isinstance(schedule, HostSchedule)
    reductions = schedule.reductions if isinstance(schedule, OverlapSchedule) else 0
    if on_host:
        reductions = int(not all(row.resharded for row in blocks))
    prefetch: dict[str, Any] = {}
    if isinstance(schedule, PrefetchSchedule):
        backward = "none" if schedule.backward is None else "post" if schedule.backward is POST else "pre"
        backward = "host" if backward == "pre" and on_host else backward
        prefetch = {"backward": backward, "backward_depth": schedule.depth}
        prefetch["forward_depth"] = schedule.depth if schedule.forward else 0
    if isinstance(schedule, RateLimitedSchedule):
        prefetch["limit"] = schedule.limit
    kept_whole = sum(row.whole for row in first + [row for row in blocks if not row.resharded])
    unsharded = kept_whole + most_whole([row.whole for row in blocks if row.resharded], **prefetch)
    of_root = first[0].gradient if has_root else _NONE
    of_units = [of_root, *(row.gradient for row in blocks if row.gradient.unsharded)]
    gradients = gradients_peak(of_units, reductions, first_alone=on_host)
    on_device = sum(row.rank + row.optimizer for row in rows if not row.offloaded)
    return Prediction(
        sum(row.rank for row in rows),
        sum(row.gradient.kept for row in rows),
        sum(row.optimizer for row in rows),
        unsharded,
        gradients,
        on_device + unsharded + gradients,
    )


def _warnings(rows: list[UnitRow]) -> Iterator[str]:
    yield from too_large(rows, "Make its layers units of their own, by auto_wrap_policy.")
    for row in rows:
        if 0 < row.frozen < row.numel:
            wasted = row.gradient.unsharded * row.frozen // (row.numel + row.padding)
            yield (
                f"{row.name} flattens frozen parameters with trained ones: {wasted / MIB:.2f} MiB of its gradient are "
                "zeros for the frozen ones. Make modules that are frozen as a whole units of their own."
            )
    yield from padded(rows, "merge small units, or wrap larger modules.")
