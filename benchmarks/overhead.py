"""Host time per unit and step with communication free, ours against torch's: `python benchmarks/overhead.py`.

What is timed, and what a step is: minifsdp/course/bench/overhead.py. Exit code 1 if ours costs more than the limits
allow, by the median of the runs' ratios. `--profile` shows where the time goes instead, of ours or of another.
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

from minifsdp.course.bench import overhead  # noqa: E402
from minifsdp.course.bench.overhead import Cost, Settings  # noqa: E402
from minifsdp.course.cli.common import run_script  # noqa: E402
from minifsdp.course.system.resources import check_writable_file  # noqa: E402
from tools.cpu_records import about, cpu_records_folder, write_record  # noqa: E402

LIMITS = {"torch-fsdp1": 0.25, "torch-fsdp2": 0.15}
"""At most so many times what this one costs, for FullyShardedDataParallel as it is by default."""

Runs = Sequence[Mapping[str, Cost]]


def make_record(settings: Settings, runs: Runs) -> dict[str, Any]:
    """What is written; times in microseconds per unit and step, beyond the plain module's."""
    rows = []
    for name in runs[0]:
        of_runs = [run[name] for run in runs]
        rows.append(
            {
                "name": name,
                "microseconds": _us(median(cost.median for cost in of_runs)),
                "runs": [
                    {"median": _us(cost.median), "quartiles": [_us(each) for each in cost.quartiles]}
                    for cost in of_runs
                ],
                "ratios": {theirs: round(overhead.ratio(runs, name, theirs), 4) for theirs in LIMITS},
                "messages": of_runs[0].messages,
            }
        )
    model = {"units": settings.units, "width": overhead.WIDTH, "ranks": settings.ranks, "steps": settings.steps}
    return {**about("overhead"), **model, "limits": LIMITS, "contestants": rows}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def missed(record: Mapping[str, Any]) -> list[str]:
    """The limits that are exceeded, a line each."""
    (ours,) = (row["ratios"] for row in record["contestants"] if row["name"] == "our-fsdp")
    over = [name for name, limit in record["limits"].items() if ours[name] > limit]
    return [f"our-fsdp costs {ours[name]:.3f} x {name}, more than {record['limits'][name]:g}" for name in over]


def table(record: Mapping[str, Any]) -> Table:
    """As the terminal shows it."""
    shown = Table(title="host time per unit and step beyond the plain module's", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "us", "quartiles", *(f"x {name}" for name in LIMITS), "calls"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in record["contestants"]:
        spread = "\n".join("{:.0f}-{:.0f}".format(*run["quartiles"]) for run in row["runs"])
        ratios = [f"{ratio:.3f}" for ratio in row["ratios"].values()]
        shown.add_row(row["name"], f"{row['microseconds']:.1f}", spread, *ratios, str(row["messages"] or ""))
    return shown


def at_least(least: int) -> Any:
    """An argument's type."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number from {least} up")
        return int(text)

    return number


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=at_least(1), default=48, help="default: %(default)s")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of the pretended world; default: %(default)s")
    parser.add_argument("--runs", type=at_least(1), default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), default=40, help="of each in a run; default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder() / "overhead.json", help="the record")
    parser.add_argument("--profile", nargs="?", const="our-fsdp", choices=list(overhead.CONTESTANTS), metavar="WHOSE")
    given = parser.parse_args()
    settings = Settings(given.units, given.ranks, given.steps)
    if given.profile:
        print(overhead.profile(settings, given.profile))
        return 0
    try:
        check_writable_file(given.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    record = make_record(settings, [overhead.measure(settings) for _ in range(given.runs)])
    write_record(record, given.out)
    Console().print(table(record))
    for line in (lines := missed(record)):
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    run_script(main)
