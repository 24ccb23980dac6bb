"""The result of the step benchmark: its record, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, median, quantiles
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from minifsdp.course.bench.contestants import BASELINES, Contestant
from minifsdp.course.bench.memory import ON_CPU, ON_CUDA
from minifsdp.course.bench.prediction import Prediction
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.watch.tables import plain_table

MIB = 2**20
TOLERANCE = 1e-4  # of a loss: rounding alone makes up to 2e-7 in 250 steps (2 layers of width 32 on CPU)

SHARED = "they compute on one GPU in turns and send over loopback, so seconds compare contestants and say nothing more"
NOT_MEASURED = "not measured"
_HELD = {"allocated_peak": "allocated, MiB", "reserved_peak": "reserved, MiB", "alloc_retries": "retries"}


def make_record(
    settings: BenchSettings,
    contestants: Mapping[str, Contestant],
    world: World,
    reference: list[list[float]],
    ranks: Sequence[Mapping[str, Any]],
    prediction: Prediction,
) -> dict[str, Any]:
    """The content of `bench.json`, from the results of `compete` and `train_alone`."""
    rows = {name: _row(name, contestants[name], reference, ranks) for name in settings.only}
    for row in rows.values():
        row["ratios"] = {name: row["median"] / rows[name]["median"] for name in BASELINES if name in rows}
        row["model_seconds"] = (prediction.seconds or {}).get(row["name"])
    return {
        "format": 1,
        "world": f"{world}; {SHARED}" if world.shares_gpu else str(world),
        "device": ranks[0]["device"],
        "backend": world.backend,
        "threads": ranks[0]["threads"],
        "torch": torch.__version__,
        "ranks": settings.ranks,
        "model": settings.shape(),
        "batch": settings.batch,
        "steps": settings.steps,
        "warm_up": settings.warm_up,
        "seed": settings.seed,
        "optimizer": "AdamW",
        "tolerance": TOLERANCE,
        "memory": (ON_CUDA if world.gpus else ON_CPU) if settings.memory else NOT_MEASURED,
        "model_says": prediction.says,
        "reference_losses": [fmean(each) for each in reference],
        "contestants": list(rows.values()),
    }


def disagreement(record: Mapping[str, Any]) -> str | None:
    """One line that names the contestants whose losses differ; None if all agree."""
    wrong = [
        f"{row['name']} by {'no number' if row['off'] is None else format(row['off'], '.1e')}"
        for row in record["contestants"]
        if not row["agrees"]
    ]
    if not wrong:
        return None
    return (
        f"losses differ from one process with the whole batch: {', '.join(wrong)}, and {record['tolerance']:.0e} is "
        "allowed; a wrong step's time is no result"
    )


def bench_table(record: Mapping[str, Any]) -> Group:
    """Seconds and ratios to the baselines, with the device model's prediction; then memory if measured."""
    memory: list[Any] = ["", _memory(record)] if record["contestants"][0]["bytes"] else []
    said = f"{record['world']}.\nModel: {record['model_says']}. Memory: {record['memory']}."
    return Group(_times(record), *memory, "", said)


def _times(record: Mapping[str, Any]) -> Table:
    model, rows = record["model"], record["contestants"]
    predicted = any(row["model_seconds"] is not None for row in rows)
    table = plain_table(
        f"A step of {model['parameters']:,} parameters on {record['ranks']} x {record['batch']} sequences",
        "ms: median, of the slowest rank; below the baselines' names, this median divided by theirs; "
        "off: from one process",
        first="",
    )
    ratios = [name.replace("-", "\n") for name in rows[0]["ratios"]]
    for heading in ("ms", "quartiles", *ratios, *["model,\nms"] * predicted, "loss\noff\nby"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [_ms(row["median"]), "-".join(map(_ms, row["quartiles"]))]
        cells += [f"{ratio:.2f}" for ratio in row["ratios"].values()]
        if predicted:
            cells += ["" if row["model_seconds"] is None else _ms(row["model_seconds"])]
        table.add_row(row["name"], *cells, _off(row))
    return table


def _memory(record: Mapping[str, Any]) -> Table:
    held = list(record["contestants"][0]["bytes"])
    table = plain_table("Memory at the peak of a step", "", first="")
    for kind in held:
        table.add_column(_HELD[kind], justify="right", no_wrap=True)
    for row in record["contestants"]:
        table.add_row(row["name"], *(_amount(kind, row["bytes"][kind]) for kind in held))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"


def _amount(kind: str, value: int) -> str:
    return str(value) if kind == "alloc_retries" else f"{value / MIB:.{kind == 'allocated_peak':d}f}"


def _off(row: Mapping[str, Any]) -> str:
    if row["compared"] < len(row["losses"]):
        return "alone"
    text = "?" if row["off"] is None else f"{row['off']:.0e}"
    return text if row["agrees"] else f"[red]{text}[/]"


def _row(
    name: str, contestant: Contestant, reference: list[list[float]], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One contestant's row over all ranks, still without ratios and prediction."""
    each = [rank["contestants"][name] for rank in ranks]
    losses = list(zip(*(rank["losses"] for rank in each), strict=True))  # by step, then by rank
    seconds = [max(times) for times in zip(*(rank["step_seconds"] for rank in each), strict=True)]
    # A rank that trains alone shares only its first loss with ranks that train together.
    compared = 1 if contestant.family == "plain" and len(ranks) > 1 else len(losses)
    offs = [
        abs(ours - theirs) / abs(theirs)
        for step, wanted in zip(losses[:compared], reference, strict=False)
        for ours, theirs in zip(step, wanted, strict=True)
    ]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {
        "name": name,
        "family": contestant.family,
        "what": contestant.what,
        "median": median(seconds),
        "quartiles": [low, high],
        "step_seconds": seconds,
        "losses": [fmean(step) if all(map(isfinite, step)) else None for step in losses],
        "compared": compared,
        "off": max(offs) if all(map(isfinite, offs)) else None,
        "agrees": all(off <= TOLERANCE for off in offs),
        "bytes": _heaviest([rank["bytes"] for rank in each]),
    }


def _heaviest(ranks: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    measured = [rank for rank in ranks if rank is not None]
    return {key: max(rank[key] for rank in measured) for key in measured[0]} if measured else None
