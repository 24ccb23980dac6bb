"""Are all ladders as in another checkout: `python -m tools.compare_ladders BASE`.

Both checkouts climb each axis's ladder on 1 to 4 ranks. Of every rung that BASE's `ladder.json` has, losses, bytes,
predictions, collectives and moments must be the same: floating-point numbers to the last bit, orders included. Times
are not compared, and what BASE does not record yet may be there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from tools import benchmark

ROOT = Path(__file__).parent.parent
AXES = ("data", "tensor", "pipeline")
TIMED = ("step_seconds", "overlap", "traced_seconds", "bubble")


def climb(checkout: Path, axis: str, ranks: int, folder: Path) -> dict[str, Any] | str:
    """The `ladder.json` of a short run; why there is none, if a checkout refuses."""
    out = folder / f"{checkout.name}-{axis}-{ranks}"
    words = ["--axis", axis, "--ranks", str(ranks), "--device", "cpu", "--steps", "3", "--out", str(out)]
    environ = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "minifsdp", "ladder", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode == 2:
        return " ".join(done.stderr.split())
    if done.returncode:
        raise RuntimeError(f"{checkout}: minifsdp ladder {' '.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads((out / "ladder.json").read_text())
    return found


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Paths at which two values differ; keys that only `after` has are no difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            if key not in TIMED:
                yield from differences(before[key], after.get(key), f"{where}.{key}" if where else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {shown(before)}, now {shown(after)}"


def shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 100 else f"{words[:97]}..."


def compared(before: dict[str, Any] | str, after: dict[str, Any] | str) -> tuple[list[str], list[str]]:
    """A row of the table without its first two cells, and the differences."""
    if isinstance(before, str) or isinstance(after, str):
        same = isinstance(before, str) and isinstance(after, str)
        return ["refused", "", "", "" if same else "1"], [] if same else [f"{shown(before)}, now {shown(after)}"]
    rungs = before["rungs"]
    found = list(differences(before, after))
    losses = sum(len(rung["losses"]) for rung in rungs)
    numbers = sum(len(rank) for rung in rungs for rank in rung["bytes"])
    return [str(len(rungs)), str(losses), str(numbers), str(len(found))], found


def main() -> int:
    """The exit code: 1 for a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path, help="another checkout, to compare with")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    given = parser.parse_args()
    rows, code = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for axis in given.axes:
            for ranks in given.ranks:
                both = [climb(each, axis, ranks, Path(folder)) for each in (given.base.resolve(), ROOT)]
                row, found = compared(*both)
                rows.append([axis, str(ranks), *row])
                code = 1 if found else code
                print(f"{axis}, {ranks} ranks: {len(found)} differences", *found[:10], sep="\n    ", flush=True)
    Console().print(benchmark.table("", ("", "ranks", "rungs", "losses", "bytes", "different"), rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
