"""The ladder on 2 and on 4 ranks, for the decks: `python slides/measure.py` runs it and writes measured.json.

Bytes and messages, which are the same in every run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`, which is not installed

from minifsdp.course.ladder import run as ladder  # noqa: E402
from minifsdp.course.ladder.measure import Settings  # noqa: E402
from tools.cpu_records import about, write_record  # noqa: E402

FILE = Path(__file__).parent / "measured.json"
RANKS = 2, 4


def main() -> None:
    write_record(
        about("ladder") | {"command": "python slides/measure.py", "runs": [run(ranks) for ranks in RANKS]}, FILE
    )


def run(ranks: int) -> dict[str, Any]:
    """Of each rung the bytes of the rank that holds most, measured and predicted, and what a rank sends in a step."""
    with tempfile.TemporaryDirectory() as folder:
        record: Any = ladder.run(ladder.check(Settings(ranks=ranks), "cpu", Path(folder)), lambda *_: None)
    rungs = [
        {
            "name": rung["name"],
            "bytes": {key: max(rank[key] for rank in rung["bytes"]) for key in rung["bytes"][0]},
            "predicted": {key: max(rank[key] for rank in rung["predicted"]) for key in rung["predicted"][0]},
            "sent": round(sum(total["wire"] for total in rung["collectives"].values())),
            "messages": {op: total["calls"] for op, total in rung["collectives"].items()},
        }
        for rung in record["rungs"]
    ]
    return {key: record[key] for key in ("ranks", "parameters", "units", "backend")} | {"rungs": rungs}


if __name__ == "__main__":
    main()
