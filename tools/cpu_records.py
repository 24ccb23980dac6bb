"""Records of benchmarks that ran on a CPU: their figures, and on what and with what these were measured.

They lie in `benchmarks/records/cpu`, one JSON file a benchmark. Those of GPUs, beside the folder, are another thing
(records.py).
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minifsdp.instruments.system.versions import versions
from tools import ROOT
from tools.gpu_check.machine import commit
from tools.records import RECORDS


def cpu_records_folder() -> Path:
    """`benchmarks/records/cpu`, in a checkout."""
    return RECORDS / "cpu"


def about(benchmark: str) -> dict[str, Any]:
    """What every such record begins with.

    Returns:
        "benchmark": its name; "command", "when" (UTC) and "commit": how to repeat it; "cpu", "cores" and "versions":
        of the machine that ran it.
    """
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", f"benchmarks/{benchmark}.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "versions": versions(),
    }


def cpu_name() -> str:
    """As the system calls it, or its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write it whole, or not at all.

    Raises:
        ValueError: a figure is not a number.
        OSError: there can be no such file.
    """
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
