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

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import scaling  # noqa: E402
from minifsdp.course.bench.scaling import WAYS, Settings  # noqa: E402
from minifsdp.course.cli.common import run_script  # noqa: E402
from minifsdp.course.plots.scaling import scaling_figure  # noqa: E402
from minifsdp.course.system.resources import check_writable  # noqa: E402
from tools.cpu_records import about, cpu_records_folder, write_record  # noqa: E402

MIB = 2**20


def make_record(settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written: bytes, seconds, and the fits as seconds of a step without messages and of each message."""
    few = [row for row in rows if row["ranks"] == settings.few_ranks]
    return {
        **about("scaling"),
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
    shown = Table(
        title="a step: MiB held between steps, gathered at most, in all at most, sent",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("", "ranks", "units", "ms", "held", "whole", "peak", "sent", "calls", "law"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        found = row["found"][0]
        held = found["parameters"] + found["gradients"] + found["optimizer"]
        sizes = [held, found["unsharded_peak"], row["peak"], found["wire"]]
        shown.add_row(
            row["way"],
            *(str(row["ranks"]), str(row["units"]), f"{1e3 * row['seconds']:.0f}"),
            *(f"{size / MIB:.1f}" for size in sizes),
            str(found["messages"]),
            "differs" if scaling.against_law(row) else "ok",
        )
    return shown


def numbers(text: str) -> tuple[int, ...]:
    """An argument's type: whole numbers from 1 up, with commas between them."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers from 1 up, such as 1,2,4")
    return tuple(map(int, parts))


def main() -> int:
    """The exit code: 1 for a count that differs from the law, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=Settings.ranks, help="default: 1,2,4,8")
    parser.add_argument("--units", type=numbers, default=Settings.units, help="default: 4,8,16,32,64")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="of each, timed; default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder(), help="folder of the record and the figure")
    given = parser.parse_args()
    settings = Settings(given.ranks, given.units, steps=given.steps)
    try:
        settings.check()
        check_writable(given.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = []
    for ranks, units in settings.cases():
        print(f"{ranks} ranks, {', '.join(map(str, units))} units ...", file=sys.stderr)
        rows += scaling.measure(settings, ranks, units)
    record = make_record(settings, rows)
    write_record(record, given.out / "scaling.json")
    scaling_figure(record, given.out / "scaling.png")
    Console().print(table(rows))
    for line in record["differs"]:
        print(line, file=sys.stderr)
    return int(bool(record["differs"]))


if __name__ == "__main__":
    run_script(main)
