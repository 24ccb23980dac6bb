"""Host time per unit and step with communication free, ours against torch's: `python benchmarks/overhead.py`.

What is timed, and what a step is: minifsdp/course/bench/overhead.py. Exit code 1 if ours costs more than the limits
allow, by the median of the runs' ratios. `--profile` shows where the time goes instead, of ours or of another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import overhead
from minifsdp.course.bench.contest import Runs, exceeded, microseconds, ratio
from minifsdp.course.bench.overhead import OverheadSettings
from minifsdp.course.cli.common import run_script
from tools import benchmark

UNITS = {8: 48, 32: 6, 256: 6}  # by width
LIMITS = {  # by width: ours, torch's, and how many times it ours costs at most
    8: (("our-fsdp", "torch-fsdp1", 0.25), ("our-fsdp", "torch-fsdp2", 0.15)),
    32: (("our-fsdp2", "torch-fsdp2", 0.35),),
    256: (("our-fsdp2", "torch-fsdp2", 0.50),),
}
TORCHS = ("torch-fsdp1", "torch-fsdp2")


def of_shape(settings: OverheadSettings, runs: Runs) -> dict[str, Any]:
    """What the record has of one shape; times in microseconds per unit and step, beyond the plain module's."""
    rows = [
        {
            "name": name,
            "microseconds": microseconds(median(run[name].median for run in runs)),
            "runs": [
                {"median": microseconds(run[name].median), "quartiles": [*map(microseconds, run[name].quartiles)]}
                for run in runs
            ],
            "ratios": {theirs: ratio(runs, name, theirs) for theirs in TORCHS},
            "messages": runs[0][name].messages,
        }
        for name in runs[0]
    ]
    return {**settings._asdict(), "limits": LIMITS[settings.width], "contestants": rows}


def missed(shape: Mapping[str, Any]) -> list[str]:
    """The limits that are exceeded, a line each."""
    ratios = {row["name"]: row["ratios"] for row in shape["contestants"]}
    what, lines = f"width {shape['width']}", list[str]()
    for ours, theirs, limit in shape["limits"]:
        lines += exceeded(what, ours, theirs, ratios[ours][theirs], limit)
    return lines


def table(shape: Mapping[str, Any]) -> Table:
    """As the terminal shows it."""
    title = f"host time per unit and step beyond the plain module's, {shape['units']} units of width {shape['width']}"
    rows = []
    for row in shape["contestants"]:
        spread = "\n".join("{:.0f}-{:.0f}".format(*run["quartiles"]) for run in row["runs"])
        ratios = [f"{ratio:.3f}" for ratio in row["ratios"].values()]
        rows.append([row["name"], f"{row['microseconds']:.1f}", spread, *ratios, str(row["messages"] or "")])
    return benchmark.table(title, ("", "us", "quartiles", *(f"x {name}" for name in TORCHS), "calls"), rows)


def measure(shapes: Sequence[OverheadSettings], runs: int) -> benchmark.Result:
    found = [of_shape(settings, [overhead.measure(settings) for _ in range(runs)]) for settings in shapes]
    return {"shapes": found}, map(table, found), [line for shape in found for line in missed(shape)]


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = benchmark.options(__doc__, "overhead.json")
    benchmark.add_steps(parser, 40)
    parser.add_argument("--width", type=int, nargs="+", choices=UNITS, default=list(UNITS), help="default: all")
    parser.add_argument("--units", type=benchmark.at_least(1), help="default: 48 of width 8, 6 of the others")
    parser.add_argument(
        "--ranks", type=benchmark.at_least(2), default=2, help="of the pretended world; default: %(default)s"
    )
    parser.add_argument("--profile", nargs="?", const="our-fsdp", choices=overhead.NAMES, metavar="WHOSE")
    given = parser.parse_args()
    shapes = [OverheadSettings(given.units or UNITS[width], given.ranks, given.steps, width) for width in given.width]
    if given.profile:
        print(overhead.profile(shapes[0], given.profile))
        return 0
    return benchmark.run("overhead", given.out, lambda: measure(shapes, given.runs))


if __name__ == "__main__":
    run_script(main)
