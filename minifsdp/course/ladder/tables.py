"""The tables of the ladder on the terminal."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from minifsdp.instruments.watch.tables import COLUMNS, MIB, plain_table

_HEADINGS = {**COLUMNS, "activations": "activa-\ntions"}
_NARROW = {"parameters": "para-\nmeters", "gradients": "gradi-\nents", "optimizer": "opti-\nmizer"}
_WIDEST = 15  # letters of a name: the longest rung's
_MANY = 5  # columns that fit with space between them
BUCKETS_STAY = (
    "ddp peaks above ddp-naive: its buckets outlive the step; plain gradients are allocated as activations are freed"
)


def ladder_table(record: dict[str, Any]) -> Group:
    """Bytes by tag compared with the prediction, and each rung's cost; `record` is the content of `ladder.json`."""
    return Group(_memory(record), "", _cost(record))


def _memory(record: dict[str, Any]) -> Table:
    caption = (
        "the first three columns: after step() and before zero_grad(); \N{CHECK MARK}: equal to the closed form, "
        "to the byte, on every rank"
    )
    if {"ddp", "ddp-naive"} <= {rung["name"] for rung in record["rungs"]}:
        caption += "\n" + BUCKETS_STAY
    differences = {rung["name"]: _differences(rung) for rung in record["rungs"]}
    caption += "".join(f"\n[red]{each}[/]" for found in differences.values() for each in found)
    table = plain_table(f"Memory of each of {record['ranks']} ranks, MiB", caption)
    columns = [key for key in _HEADINGS if key in COLUMNS or "axis" in record]  # the first ladder is about model state
    verdict = "closed\nform" if len(columns) <= _MANY else "\N{CHECK MARK}"
    headings = _HEADINGS if len(columns) <= _MANY else {**_HEADINGS, **_NARROW}
    for heading in (*(headings[key] for key in columns), "peak", verdict):
        table.add_column(heading, justify="right", no_wrap=True)
    if len(columns) > _MANY:
        table.padding = (0, 0, 0, 0)
    for rung in record["rungs"]:
        cells = [f"{max(rank[key] for rank in rung['bytes']) / MIB:.3f}" for key in columns]
        peak = f"{max(rank['peak'] for rank in rung['bytes']) / MIB:.3f}"
        mark = "[red]\N{NOT EQUAL TO}[/]" if differences[rung["name"]] else "[green]\N{CHECK MARK}[/]"
        table.add_row(_shown(rung["name"]), *cells, peak, mark)
    return table


def _shown(name: str) -> str:
    """A rung's name; a recipe on several lines, so that figures have room beside it."""
    lines = [""]
    for word in re.split("(?<=,)", name):
        lines = [*lines[:-1], lines[-1] + word] if len(lines[-1] + word) <= _WIDEST else [*lines, word]
    return "\n".join(filter(None, lines))


def _differences(rung: dict[str, Any]) -> list[str]:
    """Each amount that is not as predicted, on the rank where it is furthest off."""
    ranks = list(zip(rung["bytes"], rung["predicted"], strict=True))
    lines = []
    for key in ranks[0][1]:
        off = [measured[key] - predicted[key] for measured, predicted in ranks]
        if most := max(off, key=abs):
            lines.append(f"{rung['name']}: {key.replace('_', ' ')} {most:+,} bytes on rank {off.index(most)}")
    return lines


def _cost(record: dict[str, Any]) -> Table:
    caption = "bytes sent: by the ring's formula; time: the median of steps without instruments"
    caption += f"\nthe last loss of one process: {record['reference_losses'][-1]:.4f}"
    pipelines = any("bubble" in rung for rung in record["rungs"])
    if pipelines:
        caption += "\nbubble: idle share of the whole step, if every action took its median time"
    table = plain_table("Cost of a step", caption)
    operations = list(dict.fromkeys(op for rung in record["rungs"] for op in rung["collectives"] if op != "recv"))
    headings = [{"broadcast": "broad-\ncast"}.get(op, op.replace("_", "-\n")) for op in operations]
    hidden = "bubble,\nformula" if pipelines else "overlap"
    for heading in (*headings, "MiB\nsent", hidden, "step\nms", "difference\nfrom one\nprocess"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rung in record["rungs"]:
        calls = rung["collectives"]
        worst = max(abs(a - b) / abs(b) for a, b in zip(rung["losses"], record["reference_losses"], strict=True))
        table.add_row(
            _shown(rung["name"]),
            *(str(calls[op]["calls"]) if op in calls else "" for op in operations),
            f"{sum(total['wire'] for total in calls.values()) / MIB:.2f}",
            _bubble(rung) if pipelines else _hidden(rung),
            _milliseconds(median(rung["step_seconds"])),
            f"{worst:.0e}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    """In at most five characters, for which there is room, up to 99 seconds."""
    exact = f"{1e3 * seconds:.1f}"
    return exact if len(exact) <= 5 else f"{1e3 * seconds:.0f}"


def _hidden(rung: dict[str, Any]) -> str:
    return "" if rung["overlap"] is None else f"{rung['overlap']:.0%}"


def _bubble(rung: dict[str, Any]) -> str:
    return " ".join(f"{each:.0%}" for each in rung["bubble"]) if "bubble" in rung else ""
