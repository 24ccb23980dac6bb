"""Steps on links of two speeds with all orders of a mesh's axes, measured and predicted: `python benchmarks/orders.py`.

What is measured and predicted: minifsdp/course/bench/orders.py. Writes `orders.json` and `orders.png`. Exit code 1 if
an order's time differs from its prediction by more than `LIMIT`, or an order is not as much faster than another as
predicted. A machine that does other work at the same time exceeds the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import orders
from minifsdp.course.bench.orders import OrdersSettings
from minifsdp.course.cli.common import run_script
from minifsdp.instruments.plots.orders import orders_figure
from tools import benchmark
from tools.cpu_records import cpu_records_folder

LIMIT = 0.1  # share of the prediction


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """As the terminal shows it."""
    cells = [
        [
            str(row["host"]),
            row["axes"],
            ", ".join(row["across"]),
            f"{row['seconds']:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['seconds'] / row['predicted']:.3f}",
        ]
        for row in rows
    ]
    headings = ("hosts of", "axes", "across", "measured, s", "predicted, s", "ratio")
    return benchmark.table("a step on links of two speeds", headings, cells)


def measure(settings: OrdersSettings, out: Path) -> benchmark.Result:
    load = os.getloadavg()[0]
    found = orders.measure(settings)
    orders_figure(found["rows"], out / "orders.png")
    lines = orders.missed(found["rows"], LIMIT) + orders.misranked(found["rows"])
    return {"load": round(load, 2), **asdict(settings), "limit": LIMIT, **found}, [table(found["rows"])], lines


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    benchmark.add_steps(parser, OrdersSettings.steps)
    parser.add_argument("--out", type=Path, default=cpu_records_folder(), help="folder of the record and the figure")
    given = parser.parse_args()
    settings = OrdersSettings(steps=given.steps)
    return benchmark.run("orders", given.out / "orders.json", lambda: measure(settings, given.out))


if __name__ == "__main__":
    run_script(main)
