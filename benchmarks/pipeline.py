"""Host time that a pipeline adds to a step, ours against torch.distributed.pipelining's: `benchmarks/pipeline.py`.

What is timed, and what a step is: minifsdp/course/bench/pipeline.py. Exit code 1 if ours takes more than `LIMIT` times
as long with GPipe or 1F1B, by the median of the runs' ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import pipeline  # noqa: E402
from minifsdp.course.bench.pipeline import Cost, Settings  # noqa: E402
from minifsdp.course.cli.common import run_script  # noqa: E402
from minifsdp.course.system.resources import check_writable_file  # noqa: E402
from tools.cpu_records import about, cpu_records_folder, write_record  # noqa: E402

LIMIT = 0.8


def found_in(runs: Sequence[Mapping[str, Cost]]) -> list[dict[str, Any]]:
    """The rows of the record, with times in microseconds per step."""
    return [
        {
            "name": name,
            **{each: [round(1e6 * getattr(run[name], each), 1) for run in runs] for each in ("torch", "ours")},
            "ratio": round(median(run[name].ratio for run in runs), 4),
        }
        for name in runs[0]
    ]


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The limits that are exceeded, a line each."""
    return [
        f"{row['name']}: {row['ratio']:.3f} x torch's host time, more than {LIMIT:g}"
        for row in rows
        if row["ratio"] > LIMIT
    ]


def table(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"host time of a step beyond its computation, {settings.ranks} ranks, {settings.micros} micro-batches"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "torch, us", "ours, us", "ratio"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        shown.add_row(row["name"], f"{median(row['torch']):.0f}", f"{median(row['ours']):.0f}", f"{row['ratio']:.3f}")
    return shown


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micros", type=int, default=8, help="micro-batches, a multiple of 2; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of each in a run; default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder() / "pipeline.json", help="the record")
    given = parser.parse_args()
    try:
        if given.micros < 2 or given.micros % 2 or given.runs < 1 or given.steps < 1:
            raise ValueError("--micros: give a multiple of 2; --runs and --steps: give 1 or more")
        check_writable_file(given.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    settings = Settings(micros=given.micros, steps=given.steps)
    rows = found_in([pipeline.measure(settings) for _ in range(given.runs)])
    write_record({**about("pipeline"), **settings._asdict(), "limit": LIMIT, "schedules": rows}, given.out)
    Console().print(table(settings, rows))
    for line in (lines := missed(rows)):
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    run_script(main)
