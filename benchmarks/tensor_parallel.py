"""Tensor parallelism next to torch's DTensor styles: `python benchmarks/tensor_parallel.py`.

Host time per block, and seconds per step on gloo; what exactly is timed: minifsdp/course/bench/tensor.py. Exit code 1
if ours costs more than the limits allow, by the median of the runs' ratios, or if its loss is another.
"""

from __future__ import annotations

import argparse
import math
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

from minifsdp.course.bench import tensor  # noqa: E402
from minifsdp.course.bench.tensor import Found, Settings  # noqa: E402
from minifsdp.course.cli.common import run_script  # noqa: E402
from minifsdp.course.system.resources import check_writable_file  # noqa: E402
from tools.cpu_records import about, cpu_records_folder, write_record  # noqa: E402

HOST = Settings(width=32, tokens=8, blocks=6, steps=40)
STEPS = Settings(width=512, tokens=128, blocks=4, steps=12)
LIMITS = {"host": 0.25, "step": 0.90}  # ours over torch's, at most
PAIRS = (("our-tp", "torch-tp"), ("our-tp-sp", "torch-tp-sp"))


def verdicts(what: str, settings: Settings, runs: Sequence[Found]) -> dict[str, Any]:
    """Times in microseconds per block and step, of the host beyond the plain module's; and ratios with their limit."""
    times = [
        {
            name: (median(each) - median(run.seconds.get("plain", [0.0]))) / settings.blocks
            for name, each in run.seconds.items()
            if name != "plain"
        }
        for run in runs
    ]
    rows = [
        {
            "name": name,
            "microseconds": [round(1e6 * run[name], 2) for run in times],
            "messages": runs[0].messages[name],
        }
        for name in tensor.CONTESTANTS
    ]
    ratios = [
        {"ours": ours, "theirs": theirs, "ratio": round(median(run[ours] / run[theirs] for run in times), 4)}
        for ours, theirs in PAIRS
    ]
    return {"what": what, **settings._asdict(), "limit": LIMITS[what], "ratios": ratios, "contestants": rows}


def missed(shape: Mapping[str, Any]) -> list[str]:
    """The limits that are exceeded, a line each."""
    return [
        f"{shape['what']}: {each['ours']} costs {each['ratio']:.3f} x {each['theirs']}, more than {shape['limit']:g}"
        for each in shape["ratios"]
        if each["ratio"] > shape["limit"]
    ]


def different(runs: Sequence[Found]) -> list[str]:
    """The contestants whose first loss is not torch's."""
    return [
        f"{ours} computes {run.losses[ours]!r}, {theirs} {run.losses[theirs]!r}"
        for run in runs
        for ours, theirs in PAIRS
        if not math.isclose(run.losses[ours], run.losses[theirs], rel_tol=1e-5)
    ]


def table(shape: Mapping[str, Any]) -> Table:
    """As the terminal shows it."""
    beyond = "beyond the plain module's, " if shape["what"] == "host" else ""
    title = f"{shape['what']}: time per block and step {beyond}width {shape['width']}, {shape['ranks']} ranks"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, min_width=len(title))
    for heading in ("", "us", "x torch", "calls"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    ratios = {each["ours"]: f"{each['ratio']:.3f}" for each in shape["ratios"]}
    for row in shape["contestants"]:
        cells = f"{median(row['microseconds']):.0f}", ratios.get(row["name"], ""), str(row["messages"] or "")
        shown.add_row(row["name"], *cells)
    return shown


def main() -> int:
    """The exit code: 1 for a limit that is exceeded or other losses than torch's, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="of each in a run; default: 40 of the host, 12 on ranks")
    parser.add_argument("--out", type=Path, default=cpu_records_folder() / "tensor_parallel.json", help="the record")
    given = parser.parse_args()
    if given.runs < 1 or (given.steps is not None and given.steps < 1):
        parser.error("--runs and --steps: give whole numbers from 1 up")
    try:
        check_writable_file(given.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    shapes, lines = [], []
    for what, settings, measure in (("host", HOST, tensor.host), ("step", STEPS, tensor.steps)):
        settings = settings._replace(steps=given.steps or settings.steps)
        runs = [measure(settings) for _ in range(given.runs)]
        shapes.append(verdicts(what, settings, runs))
        lines += missed(shapes[-1]) + (different(runs) if what == "step" else [])
    write_record({**about("tensor_parallel"), "shapes": shapes}, given.out)
    for shape in shapes:
        Console().print(table(shape))
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    run_script(main)
