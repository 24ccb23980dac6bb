"""Write the table of docs/launchers.md anew, from its record: `python -m tools.launchers.table`, or `--check` it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from tools import ROOT
from tools.cpu_records import cpu_records_folder
from tools.gpu_table import filled
from tools.launchers.running import NAMES
from tools.worlds_table import markdown

PAGE = ROOT / "docs" / "launchers.md"
RECORD = cpu_records_folder() / "launchers.json"


def launchers_table(record: Mapping[str, Any]) -> str:
    """Markdown: the variables of the ranks by launcher, then what else was seen, then what was not run."""
    rows = record["launchers"]
    ran = [row for row in rows if row["state"] == "ran"]
    notes = [f"* {row['name']}: not run, {row['reason']}." for row in rows if row["state"] != "ran"]
    variables = [
        [row["name"], row["version"], *(_value(row, name) for name in NAMES)] for row in ran if "kills" not in row
    ]
    first = markdown(["launcher", "version", *(f"`{name}`" for name in NAMES)], variables)
    second = markdown(
        ["launcher", "processes", "folder", "Ctrl-C", "SIGTERM to the launcher", "last line"],
        [
            [
                *(row["name"], str(row["processes"]), row["folder"]),
                *(_end(row.get(name)) for name in ("ctrl_c", "sigterm")),
                f"`{row['last_line']}`",
            ]
            for row in ran
        ],
    )
    commands = [f"* {row['name']}: `{row['command']}`" + _kills(row) for row in ran]
    return "\n\n".join([first, second, "\n".join(commands + notes)])


def _kills(row: Mapping[str, Any]) -> str:
    """What came of the jobs whose ranks were killed."""
    if "kills" not in row:
        return ""
    same = "the same bits as" if row["bits_equal"] else "other bits than"
    jobs = "1 job" if row["jobs"] == 1 else f"{row['jobs']} jobs"
    begun = ", ".join(map(str, row["begun_at"]))
    return (
        f"; {row['kills']} kills in {jobs} of {row['steps']:,} steps, whose last attempt began at step {begun}: {same}"
        " without kills"
    )


def _value(row: Mapping[str, Any], name: str) -> str:
    """The values of the ranks, once if they are the same; a port is any."""
    values = row["variables"].get(name)
    if values is None:
        return "–"
    if name == "MASTER_PORT":
        return "set"
    return ", ".join(dict.fromkeys(value or "–" for value in values))


def _end(seen: Mapping[str, Any] | None) -> str:
    """What came of a signal."""
    if seen is None:
        return "not tried"
    if seen["seconds"] is None:
        return "no end within 90 s"
    ended = f"exit code {seen['code']}" if seen["code"] >= 0 else f"ended by signal {-seen['code']}"
    return f"{ended}, {seen['left']} left" if seen["left"] else ended


def main() -> int:
    """The exit code: 0, or 1 for a stale table under `--check`."""
    page = PAGE.read_text()
    wanted = filled(page, launchers_table(json.loads(RECORD.read_text())), "launchers")
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print(f"{PAGE}: the table is stale: python -m tools.launchers.table", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
