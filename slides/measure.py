"""The ladder, for the decks that show its seconds: `python slides/measure.py` runs it and writes measured.json.

Bytes and messages are the same in every run; seconds are of the machine that the file names.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`, which is not installed

from minifsdp.course.ladder import run as ladder  # noqa: E402
from minifsdp.course.ladder.measure import Settings  # noqa: E402
from tools.cpu_records import about, write_record  # noqa: E402

FILE = Path(__file__).parent / "measured.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record: Any = ladder.run(ladder.plan(Settings(), "cpu", Path(folder)), lambda *_: None)
    rungs = [
        {
            "name": rung["name"],
            "milliseconds": 1e3 * median(rung["step_seconds"]),
            "bytes": {key: max(rank[key] for rank in rung["bytes"]) for key in rung["bytes"][0]},
            "predicted": {key: max(rank[key] for rank in rung["predicted"]) for key in rung["predicted"][0]},
            "sent": round(sum(total["wire"] for total in rung["collectives"].values())),
            "messages": {op: total["calls"] for op, total in rung["collectives"].items()},
            "overlap": rung["overlap"],
        }
        for rung in record["rungs"]
    ]
    told = about("ladder") | {"command": "python slides/measure.py"}
    shape = {key: record[key] for key in ("ranks", "parameters", "units", "backend")}
    write_record(told | shape | {"rungs": rungs}, FILE)


if __name__ == "__main__":
    main()
