"""A training step beside torch's, in seconds and in bytes, held to limits: `python benchmarks/step.py`.

It runs `minifsdp bench` on CPU several times for each width, with one gloo connection between two ranks and with two,
measures memory in the first run, and writes a record.
Exit code 1 if a limit is missed; `--check` runs nothing and holds the record that is there to the limits of today.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `tools`, and so that a plain `python` does

from minifsdp.course.bench import report, start
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.course.cli.common import progress_bar, run_script
from minifsdp.instruments.system.resources import check_writable_file
from tools.cpu_records import about, cpu_records_folder, write_record

CONTEXTS = {512: 128, 256: 64, 32: 16}  # tokens by width; 8 layers, 8 heads, 2 sequences on each rank
LIMITS = (  # what, ours, the other's, and how many times it ours takes at most, at each of these widths; None: no limit
    ("seconds", "our-ddp", "torch-ddp-view", (1.00, 1.00, None)),
    ("seconds", "our-fsdp", "torch-fsdp1", (0.78, 0.78, None)),
    ("seconds", "our-fsdp", "torch-fsdp2", (0.68, 0.68, None)),
    ("seconds", "our-fsdp", "torch-ddp-view", (1.00, 1.12, None)),
    ("seconds", "our-fsdp-grad-op", "torch-ddp-view", (0.97, 1.02, None)),
    ("seconds", "our-fsdp-grad-op", "torch-fsdp1-grad-op", (0.82, 0.82, None)),
    ("seconds", "our-fsdp2", "torch-fsdp2", (0.75, 0.75, 1.00)),
    ("seconds", "our-fsdp2", "our-fsdp", (1.05, 1.05, None)),
    ("bytes", "our-fsdp", "torch-fsdp1", (1.0, 1.0, None)),
    ("bytes", "our-fsdp", "torch-fsdp2", (1.0, 1.0, None)),
    ("bytes", "our-fsdp-grad-op", "torch-fsdp1-grad-op", (1.0, 1.0, None)),
    ("bytes", "our-fsdp2", "torch-fsdp2", (1.0, 1.0, 1.0)),
    ("bytes", "our-fsdp2", "our-fsdp", (1.0, 1.0, None)),
)
ONLY = (
    *("plain", "torch-ddp", "torch-ddp-view", "torch-fsdp1", "torch-fsdp1-grad-op", "torch-fsdp2"),
    *("our-ddp", "our-fsdp", "our-fsdp-grad-op", "our-fsdp2"),
)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def measure(settings: BenchSettings, runs: int, connections: int) -> dict[str, Any]:
    """What the record has of one width; ends with exit code 1 if somebody computes something else.

    Args:
        settings: of each run.
        runs: how many; only the first measures memory.
        connections: between any two ranks of a process group: gloo opens one for each interface that it is given.

    Raises:
        ValueError: it cannot be had here.
    """
    records: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        requests = [start.check(replace(settings, memory=number == 0), "cpu", Path(folder)) for number in range(runs)]
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=f"{len(records) + 1}: {what}", completed=done, total=total)

            with patch.dict(os.environ, GLOO_SOCKET_IFNAME=",".join([LOOPBACK] * connections)):
                for request in requests:
                    records.append(start.run(request, show))
                    if wrong := report.disagreement(records[-1]):
                        sys.exit(wrong)
    rows = []
    for each in zip(*(record["contestants"] for record in records), strict=True):
        times = {"seconds": [row["median"] for row in each], "quartiles": [row["quartiles"] for row in each]}
        rows.append({"name": each[0]["name"], **times, "bytes": [each[0]["bytes"]["allocated_peak"]]})
    about_all = {key: records[0][key] for key in ("world", "threads", "model", "batch", "memory")}
    return {**about_all, "connections": connections, "rows": rows}


def verdicts(sizes: Sequence[Mapping[str, Any]], width: int, connections: int) -> list[dict[str, Any]]:
    """For each limit the runs' ratios, their median (None: not run), and whether that meets the limit."""
    found = []
    of_it = [size for size in sizes if (size["model"]["width"], size.get("connections")) == (width, connections)]
    rows = {row["name"]: row for size in of_it for row in size["rows"]}
    for what, ours, theirs, limits in LIMITS:
        limit = dict(zip(CONTEXTS, limits, strict=True))[width]
        if limit is None:
            continue
        pairs = zip(rows[ours][what], rows[theirs][what], strict=True) if {ours, theirs} <= rows.keys() else ()
        ratios = [round(a / b, 4) for a, b in pairs]
        ratio = round(median(ratios), 4) if ratios else None
        names = {"width": width, "connections": connections, "what": what, "ours": ours, "theirs": theirs}
        met = ratio is not None and ratio <= limit
        found.append({**names, "ratios": ratios, "ratio": ratio, "limit": limit, "met": met})
    return found


def table(title: str, found: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]] = ()) -> Table:
    """As the terminal shows it; `beside`: the same on two ranks, if these are more."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("", "ours", "other", "met", "limit", "median", "runs", *(["at 2"] if beside else [])):
        shown.add_column(heading, justify="right" if heading in ("limit", "median", "runs", "at 2") else "left")
    for number, each in enumerate(found):
        met = "[green]yes[/]" if each["met"] else "[red]NO[/]"
        runs = " ".join(f"{ratio:.2f}" for ratio in each["ratios"])
        cells = [each["what"], each["ours"], each["theirs"], met, f"{each['limit']:.2f}", _text(each["ratio"]), runs]
        shown.add_row(*cells, *(_text(two["ratio"]) for two in beside[number : number + 1]))
    return shown


def _text(ratio: float | None) -> str:
    return "none" if ratio is None else f"{ratio:.3f}"


def main() -> int:
    """The exit code: 0, 1 for a limit that is missed or for wrong losses, 2 for what cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--width", type=int, nargs="+", choices=CONTEXTS, default=list(CONTEXTS), help="default: all")
    parser.add_argument(
        "--connections", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="between two ranks; default: both"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each width; default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="of each contestant in a run; default: %(default)s")
    parser.add_argument("--out", type=Path, help="the record; default: step-<ranks>-ranks.json among the records")
    parser.add_argument("--check", action="store_true", help="run nothing, hold the record to the limits")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs {given.runs}: must be at least 1")
    path, of_two = given.out or _path(given.ranks), _path(2)
    cases = [(width, connections) for width in given.width for connections in given.connections]
    try:
        if given.check:
            sizes = _read(path)
        else:
            check_writable_file(path)
            record = {**about("step"), "ranks": given.ranks, "runs": given.runs, "steps": given.steps}
            settings = BenchSettings(given.ranks, ONLY, steps=given.steps)
            of_width = {width: replace(settings, width=width, context=CONTEXTS[width]) for width in given.width}
            sizes = [measure(of_width[width], given.runs, connections) for width, connections in cases]
        two = _read(of_two) if given.ranks > 2 and of_two.exists() else []
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    found = {case: verdicts(sizes, *case) for case in cases}
    every = [each for of_case in found.values() for each in of_case]
    if not given.check:
        write_record({**record, "verdicts": every, "sizes": sizes}, path)
    for (width, connections), of_case in found.items():
        title = f"width {width}, {connections} connection{'s' * (connections > 1)}: ours over the other's"
        Console().print(table(title, of_case, verdicts(two, width, connections) if two else ()))
    return int(not all(each["met"] for each in every))


def _path(ranks: int) -> Path:
    return cpu_records_folder() / f"step-{ranks}-ranks.json"


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("benchmark") != "step":
        raise ValueError(f"{path} is no record of this benchmark")
    return list(content["sizes"])


if __name__ == "__main__":
    run_script(main)
