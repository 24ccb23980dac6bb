"""A step over three axes next to torch's own classes: `python benchmarks/three_axes.py`.

What is timed: minifsdp/course/bench/three_axes.py. Exit code 1 if ours takes more than `LIMIT` times as long, by the
median of the runs' ratios, or if its loss is another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import three_axes
from minifsdp.course.bench.contest import exceeded, microseconds, ratio
from minifsdp.course.bench.three_axes import LIBRARIES, Found, ThreeAxesSettings
from minifsdp.course.cli.common import run_script
from tools import benchmark

LIMIT = 0.75


def missed(runs: Sequence[Found]) -> list[str]:
    """The limit, if it is exceeded, and losses that are not torch's, a line each."""
    different = [
        f"ours computes {run.losses['our']!r}, torch {run.losses['torch']!r}"
        for run in runs
        if not math.isclose(run.losses["our"], run.losses["torch"], rel_tol=1e-5)
    ]
    return exceeded("step", "our", "torch", ratio([run.costs for run in runs], "our", "torch"), LIMIT) + different


def measure(settings: ThreeAxesSettings, runs: int) -> benchmark.Result:
    found = [three_axes.measure(settings) for _ in range(runs)]
    times = {name: [microseconds(run.costs[name].median, 0) for run in found] for name in LIBRARIES}
    ours = ratio([run.costs for run in found], "our", "torch")
    cells = [(*(f"{median(times[name]) / 1000:.1f}" for name in LIBRARIES), f"{ours:.3f}")]
    shown = benchmark.table(f"a step on {three_axes.MESH.ranks} ranks", ("torch, ms", "ours, ms", "ratio"), cells)
    record = {"mesh": "pp=2,dp=2,tp=2", "limit": LIMIT, "microseconds": times, "ratio": ours}
    return {**settings._asdict(), **record}, [shown], missed(found)


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = benchmark.options(__doc__, "three_axes.json")
    benchmark.add_steps(parser, ThreeAxesSettings().steps)
    given = parser.parse_args()
    return benchmark.run("three_axes", given.out, lambda: measure(ThreeAxesSettings(steps=given.steps), given.runs))


if __name__ == "__main__":
    run_script(main)
