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

UNITS = {8: 48, 32: 6, 256: 6}  # by width
LIMITS = {  # by width: ours, torch's, and how many times it ours costs at most
    8: (("our-fsdp", "torch-fsdp1", 0.25), ("our-fsdp", "torch-fsdp2", 0.15)),
    32: (("our-fsdp2", "torch-fsdp2", 0.35),),
    256: (("our-fsdp2", "torch-fsdp2", 0.50),),
}
TORCHS = ("torch-fsdp1", "torch-fsdp2")

Runs = Sequence[Mapping[str, Cost]]


def of_shape(settings: Settings, runs: Runs) -> dict[str, Any]:
    """What the record has of one shape; times in microseconds per unit and step, beyond the plain module's."""
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
                "ratios": {theirs: round(overhead.ratio(runs, name, theirs), 4) for theirs in TORCHS},
                "messages": of_runs[0].messages,
            }
        )
    return {**settings._asdict(), "limits": LIMITS[settings.width], "contestants": rows}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def missed(shape: Mapping[str, Any]) -> list[str]:
    """The limits that are exceeded, a line each."""
    ratios = {row["name"]: row["ratios"] for row in shape["contestants"]}
    return [
        f"width {shape['width']}: {ours} costs {ratios[ours][theirs]:.3f} x {theirs}, more than {limit:g}"
        for ours, theirs, limit in shape["limits"]
        if ratios[ours][theirs] > limit
    ]


def table(shape: Mapping[str, Any]) -> Table:
    """As the terminal shows it."""
    title = f"host time per unit and step beyond the plain module's, {shape['units']} units of width {shape['width']}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "us", "quartiles", *(f"x {name}" for name in TORCHS), "calls"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in shape["contestants"]:
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
    parser.add_argument("--width", type=int, nargs="+", choices=UNITS, default=list(UNITS), help="default: all")
    parser.add_argument("--units", type=at_least(1), help="default: 48 of width 8, 6 of the others")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of the pretended world; default: %(default)s")
    parser.add_argument("--runs", type=at_least(1), default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=at_least(1), default=40, help="of each in a run; default: %(default)s")
    parser.add_argument("--out", type=Path, default=cpu_records_folder() / "overhead.json", help="the record")
    parser.add_argument("--profile", nargs="?", const="our-fsdp", choices=list(overhead.CONTESTANTS), metavar="WHOSE")
    given = parser.parse_args()
    shapes = [Settings(given.units or UNITS[width], given.ranks, given.steps, width) for width in given.width]
    if given.profile:
        print(overhead.profile(shapes[0], given.profile))
        return 0
    try:
        check_writable_file(given.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found = [of_shape(settings, [overhead.measure(settings) for _ in range(given.runs)]) for settings in shapes]
    write_record({**about("overhead"), "shapes": found}, given.out)
    for shape in found:
        Console().print(table(shape))
    for line in (lines := [line for shape in found for line in missed(shape)]):
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    run_script(main)
