"""How time, bytes and messages of a step grow with the ranks and with the units: `python benchmarks/scaling.py`.

What is measured and which laws it is held against: minifsdp/course/bench/scaling.py. Writes `scaling.json` and
`scaling.png`. Exit code 1 if a number of bytes or of messages differs from its law.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import scaling
from minifsdp.course.bench.scaling import WAYS, ScalingSettings
from minifsdp.course.cli.common import run_script
from minifsdp.instruments.plots.scaling import scaling_figure
from tools import benchmark
from tools.cpu_records import about, cpu_records_folder

MIB = 2**20


def make_record(settings: ScalingSettings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written: bytes, seconds, and the fits as seconds of a step without messages and of each message."""
    few = [row for row in rows if row["ranks"] == settings.few_ranks]
    return {
        "ranks": sorted({*settings.ranks}),
        "units": sorted({*settings.units}),
        "some_units": settings.some_units,
        "few_ranks": settings.few_ranks,
        "model": {"blocks": settings.blocks, "width": settings.width, "context": settings.context},
        "parameters": sum(p.numel() for p in settings.model(settings.some_units).parameters()),
        "steps": settings.steps,
        "rows": rows,
        "fits": {way: scaling.fit([row for row in few if row["way"] == way]) for way in WAYS},
        "differs": [line for row in rows for line in scaling.against_law(row)],
    }


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """As the terminal shows it: rank 0's counts."""
    cells = []
    for row in rows:
        found = row["found"][0]
        held = found["parameters"] + found["gradients"] + found["optimizer"]
        sizes = [held, found["unsharded_peak"], row["peak"], found["wire"]]
        counts = [str(row["ranks"]), str(row["units"]), f"{1e3 * row['seconds']:.0f}"]
        verdict = "differs" if scaling.against_law(row) else "ok"
        cells.append([row["way"], *counts, *(f"{size / MIB:.1f}" for size in sizes), str(found["messages"]), verdict])
    title = "a step: MiB held between steps, gathered at most, in all at most, sent"
    headings = ("", "ranks", "units", "ms", "held", "gathered", "peak", "sent", "calls", "law")
    return benchmark.table(title, headings, cells)


def measure(settings: ScalingSettings, out: Path) -> benchmark.Result:
    rows = []
    for ranks, units in settings.cases():
        print(f"{ranks} ranks, {', '.join(map(str, units))} units ...", file=sys.stderr)
        rows += scaling.measure(settings, ranks, units)
    record = make_record(settings, rows)
    scaling_figure({**about("scaling"), **record}, out / "scaling.png")
    return record, [table(rows)], record["differs"]


def numbers(text: str) -> tuple[int, ...]:
    """An argument's type: whole numbers from 1 up, with commas between them."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers from 1 up, such as 1,2,4")
    return tuple(map(int, parts))


def main() -> int:
    """The exit code: 1 for a count that differs from the law, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=ScalingSettings.ranks, help="default: 1,2,4,8")
    parser.add_argument("--units", type=numbers, default=ScalingSettings.units, help="default: 4,8,16,32,64")
    parser.add_argument("--steps", type=int, default=ScalingSettings.steps, help="of each, timed; default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder(), help="folder of the record and the figure")
    given = parser.parse_args()
    settings = ScalingSettings(given.ranks, given.units, steps=given.steps)
    record = given.out / "scaling.json"
    return benchmark.run("scaling", record, lambda: measure(settings, given.out), settings.check)


if __name__ == "__main__":
    run_script(main)
