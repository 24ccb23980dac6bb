"""Run the launchers and write their record: `python -m tools.launchers`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.benchmark import at_least
from tools.cpu_records import about, write_record
from tools.launchers import manifest, restarts
from tools.launchers.places import environment, may_divide
from tools.launchers.running import Place, run
from tools.launchers.table import RECORD
from tools.launchers.ways import WAYS

RESTARTS, MANIFEST = "restarts", "trainjob"
ORDER = [*(way.name for way in WAYS), restarts.NAME, manifest.NAME]
"""Of the rows."""
VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def versions_in(bin_folder: Path) -> dict[str, str]:
    """The launchers' versions, by package; Slurm's is that of this machine."""
    names = sorted({way.package for way in WAYS} - {"slurm"})
    said = subprocess.run([bin_folder / "python", "-c", VERSIONS, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    try:
        slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return found
    return found | {"slurm": slurm.stdout.split()[-1]}


def main() -> int:
    """The exit code: 1 if a launcher could not be run, or a restarted job ended with other bits."""
    names = [way.name.replace("`", "") for way in WAYS] + [RESTARTS, MANIFEST]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--kills", type=at_least(1), default=10, help="of ranks under torchrun; default: %(default)s")
    parser.add_argument("--bin", type=Path, help="of an environment with the extra `launchers`; default: a new one")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record; rows that are not run again are kept")
    asked = parser.parse_args()
    chosen = asked.only or names
    rows: dict[str, dict[str, Any]] = {}
    if asked.out.exists() and asked.only:
        rows = {row["name"]: row for row in json.loads(asked.out.read_text())["launchers"]}
    with tempfile.TemporaryDirectory(prefix="ml") as folder:  # short: Ray makes sockets below it
        place = Place(Path(folder) / "run", asked.bin or environment(Path(folder) / "venv"), not may_divide())
        versions = versions_in(place.bin)
        for way, name in zip(WAYS, names, strict=False):
            if name in chosen:
                rows[way.name] = run(way, place, versions)
                print(name, rows[way.name], flush=True)
        if RESTARTS in chosen:
            row = restarts.restarted(asked.kills, place, versions)
            rows[row["name"]] = row
            print(RESTARTS, row, flush=True)
        if MANIFEST in chosen:
            row = manifest.compared(place.bin, Path(folder) / "schema")
            rows[row["name"]] = row
            print(MANIFEST, row, flush=True)
    command = {"command": "python -m tools.launchers"}
    ordered = sorted(rows.values(), key=lambda row: ORDER.index(row["name"]))
    write_record({**about("launchers"), **command, "launchers": ordered}, asked.out)
    failed = [row for row in rows.values() if row["state"] != "ran" or not row.get("bits_equal", True)]
    return int(any(row["name"] != manifest.NAME for row in failed))


if __name__ == "__main__":
    sys.exit(main())
