"""What the ladder and `describe` say on the terminal."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from minifsdp.course.watch.description import Description

MIB = 2**20
COLUMNS = {
    "parameters": "para-\nmeters",
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "unsharded_peak": "unsharded\npeak",
    "gradients_peak": "gradients\npeak",
}


def ladder_table(record: dict[str, Any]) -> Group:
    """Bytes by tag, measured over predicted, and what each rung costs; `record` is the content of `ladder.json`."""
    return Group(_memory(record), _cost(record))


def _memory(record: dict[str, Any]) -> Table:
    table = _table(
        f"Memory on each of {record['ranks']} ranks, MiB: measured, and below it predicted",
        "the first three at the end of a step; = means equal to the byte on every rank",
    )
    for heading in (*COLUMNS.values(), "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rung in record["rungs"]:
        cells = [_cell([rank[key] for rank in rung["bytes"]], rung["predicted"][0][key]) for key in COLUMNS]
        table.add_row(rung["name"], *cells, f"{max(rank['peak'] for rank in rung['bytes']) / MIB:.3f}")
    return table


def _cell(measured: list[int], predicted: int) -> str:
    sign = "[green]=[/]" if set(measured) == {predicted} else "[red]≠[/]"
    return f"{max(measured) / MIB:.3f}\n[dim]{sign} {predicted / MIB:.3f}[/]"


def _cost(record: dict[str, Any]) -> Table:
    table = _table("Cost of a step", "bytes by the ring's formula; time is the median, nothing watching")
    operations = list(dict.fromkeys(op for rung in record["rungs"] for op in rung["collectives"]))
    headings = [op.replace("_", "-\n") for op in operations]
    for heading in (*headings, "MiB\nsent", "over-\nlap", "step\nms", "last\nloss", "off one\nprocess"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rung in record["rungs"]:
        calls = rung["collectives"]
        worst = max(abs(a - b) / abs(b) for a, b in zip(rung["losses"], record["reference_losses"], strict=True))
        table.add_row(
            rung["name"],
            *(str(calls[op]["calls"]) if op in calls else "" for op in operations),
            f"{sum(total['wire'] for total in calls.values()) / MIB:.2f}",
            "" if rung["overlap"] is None else f"{rung['overlap']:.0%}",
            f"{1e3 * median(rung['step_seconds']):.1f}",
            f"{rung['losses'][-1]:.4f}",
            f"{worst:.0e}",
        )
    return table


def units_table(description: Description) -> Group:
    """A row per unit, the bytes of a step, and what looks wrong."""
    unit, size = _fitting(description.predicted.peak)
    table = _table(f"Units of a model on {description.ranks} ranks", f"sizes in {unit}", first="unit")
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
    """A unit for sizes of this order: its name and its bytes."""
    return ("MiB", MIB) if nbytes >= MIB else ("KiB", 1024)


def _table(title: str, caption: str, first: str = "rung") -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table
