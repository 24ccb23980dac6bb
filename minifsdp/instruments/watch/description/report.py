"""The contents of a description: a row per unit, the bytes of a step, warnings; and its table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console, Group, RenderableType

from minifsdp.cost.data_parallel import Gradient
from minifsdp.instruments.watch.tables import COLUMNS, MIB, plain_table

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
        gradients_peak: peak bytes of gradients; at most, where parameters are sharded one by one.
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
        kind: what a row is.
    """

    rows: list[UnitRow]
    predicted: Prediction
    warnings: list[str]
    ranks: int
    kind: str = "unit"

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


def too_large(rows: list[UnitRow], cure: str) -> Iterator[str]:
    """A warning for each sharded unit that holds nearly all parameters."""
    total = sum(row.numel for row in rows)
    for row in rows:
        if row.whole and row.numel > _NEARLY_ALL * total:
            held = f"{row.numel / total:.0%} of all parameters"
            yield f"{row.name} holds {held}: once it is gathered, nothing is sharded. {cure}"


def padded(rows: list[UnitRow], cure: str) -> Iterator[str]:
    """A warning for each unit that is more padding than it should be."""
    for row in rows:
        if row.padding > _MUCH_PADDING * row.numel:
            yield f"{row.name} is padded by {row.padding / row.numel:.1%}: {cure}"


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module."""
    return str(dtype).removeprefix("torch.")


# On the terminal


def units_table(description: Description) -> Group:
    """A table with a row per unit, the bytes of a step, and warnings."""
    unit, size = _fitting(description.predicted.peak)
    table = plain_table(
        f"{description.kind.capitalize()}s of a model on {description.ranks} ranks",
        f"sizes in {unit}",
        first=description.kind,
    )
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
