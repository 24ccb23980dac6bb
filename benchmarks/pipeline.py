"""Host time that a pipeline adds to a step, ours against torch.distributed.pipelining's: `benchmarks/pipeline.py`.

What is timed, and what a step is: minifsdp/course/bench/pipeline.py. Exit code 1 if ours takes more than `LIMIT` times
as long with GPipe or 1F1B, by the median of the runs' ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import pipeline
from minifsdp.course.bench.contest import Cost, microseconds, ratio
from minifsdp.course.bench.pipeline import LIBRARIES, PipelineSettings
from minifsdp.course.cli.common import run_script
from tools import benchmark

LIMIT = 0.8


def found_in(runs: Sequence[Mapping[str, Mapping[str, Cost]]]) -> list[dict[str, Any]]:
    """The rows of the record, with times in microseconds per step."""
    return [
        {
            "name": name,
            **{each: [microseconds(run[name][each].median, 1) for run in runs] for each in LIBRARIES},
            "ratio": ratio([run[name] for run in runs], "ours", "torch"),
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


def measure(settings: PipelineSettings, runs: int) -> benchmark.Result:
    rows = found_in([pipeline.measure(settings) for _ in range(runs)])
    title = f"host time of a step beyond its computation, {settings.ranks} ranks, {settings.micros} micro-batches"
    times = [(f"{median(row[each]):.0f}" for each in LIBRARIES) for row in rows]
    cells = [(row["name"], *of_row, f"{row['ratio']:.3f}") for row, of_row in zip(rows, times, strict=True)]
    shown = benchmark.table(title, ("", "torch, us", "ours, us", "ratio"), cells)
    return {**settings._asdict(), "limit": LIMIT, "schedules": rows}, [shown], missed(rows)


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = benchmark.options(__doc__, "pipeline.json")
    benchmark.add_steps(parser, 100)
    parser.add_argument("--micros", type=int, default=8, help="micro-batches, a multiple of 2; default: %(default)s")
    given = parser.parse_args()
    settings = PipelineSettings(micros=given.micros, steps=given.steps)
    return benchmark.run("pipeline", given.out, lambda: measure(settings, given.runs), settings.check)


if __name__ == "__main__":
    run_script(main)
