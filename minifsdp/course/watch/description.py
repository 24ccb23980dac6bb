"""Describe a wrapped model: a table of its units, the predicted bytes of a step, and warnings.

Three common disappointments with FSDP come from the units: one unit that holds everything, frozen parameters flattened
with trained ones, and padding. All are known before the first step.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from torch import nn

from minifsdp.course.ladder.closed_form import ADAM, Gradient, OptimizerState, gradients_peak, most_whole
from minifsdp.course.ladder.tables import COLUMNS, MIB, plain_table
from minifsdp.fsdp import FullyShardedDataParallel, OverlapSchedule, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import POST
from minifsdp.fsdp.torch_api.state.names import clean_name
from minifsdp.gloo import reduces_by_all_to_all
from minifsdp.private import backend_of

_NEARLY_ALL, _MUCH_PADDING = 0.9, 0.01


@dataclass(frozen=True)
class UnitRow:
    """One unit in numbers.

    Attributes:
        name: its path in the model, and its class.
        strategy: its sharding strategy.
        parameters: number of parameters, tied ones counted once.
        numel: elements of the parameters, without padding.
        padding: elements added to make shards equal and, with `use_orig_params`, to align parameters.
        frozen: elements without gradient.
        whole: bytes of the gathered parameters; 0 if never sharded (NO_SHARD).
        rank: bytes of this rank's shard.
        gradient: bytes of its gradient: unsharded, extra during the reduction, and kept for the optimizer.
        optimizer: bytes of this rank's optimizer state.
        dtypes: of the shards, the computation and the reduction.
        resharded: True if freed between forward and backward.
        offloaded: True if shards, kept gradients and optimizer state are in host memory.
    """

    name: str
    strategy: str
    parameters: int
    numel: int
    padding: int
    frozen: int
    whole: int
    rank: int
    gradient: Gradient
    optimizer: int
    dtypes: tuple[str, str, str]
    resharded: bool
    offloaded: bool


@dataclass(frozen=True)
class Prediction:
    """Bytes that one rank holds in a step, without activations and buffers.

    Attributes:
        parameters, gradients, optimizer: between `step()` and `zero_grad()`.
        unsharded_peak: peak bytes of gathered parameters.
        gradients_peak: peak bytes of gradients.
        peak: an upper bound: parameters, optimizer state and the two peaks, which may occur at different times.
            Offloaded memory is not included.
    """

    parameters: int
    gradients: int
    optimizer: int
    unsharded_peak: int
    gradients_peak: int
    peak: int


@dataclass(frozen=True, repr=False)
class Description:
    """A table of units that displays itself, and its numbers.

    Attributes:
        rows: the units, outermost module first.
        predicted: bytes of a step, if the units are used in the order of `rows`.
        warnings: likely mistakes, one line each.
        ranks: number of ranks that share a unit.
    """

    rows: list[UnitRow]
    predicted: Prediction
    warnings: list[str]
    ranks: int

    def __rich__(self) -> RenderableType:
        return units_table(self)

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self)
        return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=120, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def describe(model: nn.Module, optimizer: OptimizerState = ADAM) -> Description:
    """Describe the units of a wrapped model, and the memory of a training step.

    Args:
        model: a FullyShardedDataParallel; it need not have run.
        optimizer: bytes of state per element (of a float32 parameter) and per parameter.

    Raises:
        ValueError: `model` is not wrapped.
    """
    if not isinstance(model, FullyShardedDataParallel):
        modules = model.named_modules() if isinstance(model, nn.Module) else []
        inside = [clean_name(name) for name, m in modules if isinstance(m, FullyShardedDataParallel)]
        where = f"describe its {inside[0]}" if inside else "wrap it in FullyShardedDataParallel first"
        raise ValueError(f"{type(model).__name__} is no FullyShardedDataParallel: {where}")
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
        optimizer=sum(optimizer.per_element * n * item // 4 + optimizer.per_tensor for n in held),
        dtypes=(_dtype(shard), _dtype(unit.unsharded.full), str(unit.gradient_dtype).removeprefix("torch.")),
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


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
    total = sum(row.numel for row in rows)
    for row in rows:
        if row.strategy != "NO_SHARD" and row.numel > _NEARLY_ALL * total:
            yield (
                f"{row.name} holds {row.numel / total:.0%} of all parameters: once it is gathered, nothing is sharded. "
                "Make its layers units of their own, by auto_wrap_policy."
            )
        if 0 < row.frozen < row.numel:
            wasted = row.gradient.unsharded * row.frozen // (row.numel + row.padding)
            yield (
                f"{row.name} flattens frozen parameters with trained ones: {wasted / MIB:.2f} MiB of its gradient are "
                "zeros for the frozen ones. Make modules that are frozen as a whole units of their own."
            )
        if row.padding > _MUCH_PADDING * row.numel:
            yield f"{row.name} is padded by {row.padding / row.numel:.1%}: merge small units, or wrap larger modules."


# On the terminal


def units_table(description: Description) -> Group:
    """A table with a row per unit, the bytes of a step, and warnings."""
    unit, size = _fitting(description.predicted.peak)
    table = plain_table(f"Units of a model on {description.ranks} ranks", f"sizes in {unit}", first="unit")
    for heading in ("para-\nmeters", "elements", "whole", "on a\nrank", "padding", "frozen"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kept, computed\nand reduced as")
    table.add_column("strategy", no_wrap=True)
    for row in description.rows:
        whole = f"{row.whole / size:,.3f}" if row.whole else "always"
        dtypes = ", ".join(row.dtypes if len(set(row.dtypes)) > 1 else row.dtypes[:1])
        counts = (str(row.parameters), f"{row.numel:,}", whole, f"{row.rank / size:,.3f}")
        table.add_row(row.name, *counts, str(row.padding), f"{row.frozen:,}", dtypes, row.strategy)
    return Group(table, _step(description), *(f"[yellow]! {line}[/]" for line in description.warnings))


def _step(description: Description) -> str:
    predicted = description.predicted
    unit, size = _fitting(predicted.peak)
    parts = [f"{key.replace('_', ' ')} {getattr(predicted, key) / size:,.3f}" for key in COLUMNS]
    offloaded = any(row.offloaded for row in description.rows)
    host = "; what is offloaded is in host memory and not in the peak" if offloaded else ""
    return (
        f"A step on each rank, {unit}: {', '.join(parts)}. Peak at most [bold]{predicted.peak / size:,.3f}[/] and "
        f"activations{host}."
    )


def _fitting(nbytes: int) -> tuple[str, int]:
    """A unit for sizes of this order: its name and its size in bytes."""
    return ("MiB", MIB) if nbytes >= MIB else ("KiB", 1024)
