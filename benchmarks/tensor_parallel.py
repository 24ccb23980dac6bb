"""Tensor parallelism next to torch's DTensor styles: `python benchmarks/tensor_parallel.py`.

Host time per block, and seconds per step on gloo; what exactly is timed: minifsdp/course/bench/tensor.py. Exit code 1
if ours costs more than the limits allow, by the median of the runs' ratios, or if its loss is another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import tensor
from minifsdp.course.bench.contest import exceeded, microseconds, ratio
from minifsdp.course.bench.tensor import Found, TensorSettings
from minifsdp.course.cli.common import run_script
from tools import benchmark

HOST = TensorSettings(width=32, tokens=8, blocks=6, steps=40)
STEPS = TensorSettings(width=512, tokens=128, blocks=4, steps=12)
LIMITS = {"host": 0.25, "step": 0.90}  # ours over torch's, at most
PAIRS = (("our-tp", "torch-tp"), ("our-tp-sp", "torch-tp-sp"))


def verdicts(what: str, settings: TensorSettings, runs: Sequence[Found]) -> dict[str, Any]:
    """Times in microseconds per block and step, of the host beyond the plain module's; and ratios with their limit."""
    costs = [run.costs for run in runs]
    rows = [
        {
            "name": name,
            "microseconds": [microseconds(run[name].median) for run in costs],
            "messages": costs[0][name].messages,
        }
        for name in tensor.CONTESTANTS
    ]
    ratios = [{"ours": ours, "theirs": theirs, "ratio": ratio(costs, ours, theirs)} for ours, theirs in PAIRS]
    return {"what": what, **settings._asdict(), "limit": LIMITS[what], "ratios": ratios, "contestants": rows}


def missed(shape: Mapping[str, Any]) -> list[str]:
    """The limits that are exceeded, a line each."""
    return [line for each in shape["ratios"] for line in exceeded(shape["what"], **each, limit=shape["limit"])]


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
    ratios = {each["ours"]: f"{each['ratio']:.3f}" for each in shape["ratios"]}
    rows = [
        (row["name"], f"{median(row['microseconds']):.0f}", ratios.get(row["name"], ""), str(row["messages"] or ""))
        for row in shape["contestants"]
    ]
    return benchmark.table(title, ("", "us", "x torch", "calls"), rows, min_width=len(title))


def measure(runs: int, steps: int | None) -> benchmark.Result:
    shapes, lines = [], []
    for what, settings, contest in (("host", HOST, tensor.host), ("step", STEPS, tensor.steps)):
        settings = settings._replace(steps=steps or settings.steps)
        found = [contest(settings) for _ in range(runs)]
        shapes.append(verdicts(what, settings, found))
        lines += missed(shapes[-1]) + (different(found) if what == "step" else [])
    return {"shapes": shapes}, map(table, shapes), lines


def main() -> int:
    """The exit code: 1 for a limit that is exceeded or other losses than torch's, 2 for a run that cannot be."""
    parser = benchmark.options(__doc__, "tensor_parallel.json")
    benchmark.add_steps(parser, None, "40 of the host, 12 on ranks")
    given = parser.parse_args()
    return benchmark.run("tensor_parallel", given.out, lambda: measure(given.runs, given.steps))


if __name__ == "__main__":
    run_script(main)
